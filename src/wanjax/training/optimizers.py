# SPDX-License-Identifier: Apache-2.0
"""Optimizers by name, with warm-up, a learning-rate schedule and gradient clipping."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
import optax
from optax import contrib

from wanjax.errors import WanjaxError
from wanjax.training.settings_check import check_types

OptimizerName = Literal["adamw", "adafactor", "muon"]
LrScheduler = Literal["constant", "cosine", "linear"]
# the range of float32, the dtype on devices
MIN_FLOAT, MAX_FLOAT = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer, with warm-up, a learning-rate schedule and gradient clipping.

    Args:
        name: `adamw`, `adafactor` or `muon`.
        learning_rate: The peak learning rate.
        warmup_steps: The number of steps in which the learning rate increases linearly to its peak.
        lr_scheduler: The learning rate after the warm-up: `constant`, or a decay to 0, `cosine` or `linear`.
        max_grad_norm: The maximum norm of gradients. Larger gradients are clipped to it; 0 does not clip.
        weight_decay: Coefficient of decoupled weight decay, which is multiplied by the learning rate.
        beta1: AdamW's decay of the first moment.
        beta2: AdamW's decay of the second moment.

    Raises:
        WanjaxError: A value is out of its range.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    lr_scheduler: LrScheduler = "constant"
    max_grad_norm: float = 1.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self):
        check_types(self)
        if not MIN_FLOAT <= self.learning_rate <= MAX_FLOAT:
            raise WanjaxError(
                f"the learning rate is {self.learning_rate}: give a number above 0 that fits float32, such as 1e-4"
            )
        if not 0 <= self.max_grad_norm <= MAX_FLOAT:
            raise WanjaxError(
                f"max_grad_norm is {self.max_grad_norm}: give a number above 0, such as 1, or 0 for no clipping"
            )
        if not 0 <= self.weight_decay <= MAX_FLOAT:
            raise WanjaxError(f"the weight decay is {self.weight_decay}: give 0 or more, such as 0.01")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise WanjaxError(f"the optimizer's {name} is {getattr(self, name)}: give a number from 0 to below 1")
        if self.warmup_steps < 0:
            raise WanjaxError(f"warmup_steps is {self.warmup_steps}: give 0 or more")


def learning_rates(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step: a linear warm-up, then a constant or a decay to 0."""
    decay_steps = max(1, steps - config.warmup_steps)
    main_schedule = {
        "constant": lambda: optax.constant_schedule(config.learning_rate),
        "cosine": lambda: optax.cosine_decay_schedule(config.learning_rate, decay_steps),
        "linear": lambda: optax.linear_schedule(config.learning_rate, 0.0, decay_steps),
    }[config.lr_scheduler]()
    if not config.warmup_steps:
        return main_schedule
    warmup = optax.linear_schedule(
        config.learning_rate / config.warmup_steps, config.learning_rate, config.warmup_steps - 1 or 1
    )
    return optax.join_schedules([warmup, main_schedule], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Build the optimizer for a training run of `steps` steps."""
    rate, decay = learning_rates(config, steps), config.weight_decay
    match config.name:
        case "adamw":
            optimizer = optax.adamw(rate, b1=config.beta1, b2=config.beta2, weight_decay=decay)
        case "adafactor":
            optimizer = optax.adafactor(rate, multiply_by_parameter_scale=False, weight_decay_rate=decay or None)
        case "muon":
            optimizer = contrib.muon(
                rate, weight_decay=decay, consistent_rms=0.2, muon_weight_dimension_numbers=muon_dimensions
            )
    if not config.max_grad_norm:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optimizer)


def muon_dimensions(weights: Any) -> Any:
    """Return the axes of each weight that Muon treats as a matrix (Jordan, 2024).

    For a kernel, these are the last two axes. For other weights, the result is None.
    """

    def axes(path: Any, weight: Any) -> Any:
        is_kernel = "kernel" in jax.tree_util.keystr(path)
        return contrib.MuonDimensionNumbers(weight.ndim - 2, weight.ndim - 1) if is_kernel else None

    return jax.tree_util.tree_map_with_path(axes, weights)
