# SPDX-License-Identifier: Apache-2.0
"""Optimisers by name, with warm-up, a schedule of the learning rate, and clipped gradients."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np
import optax
from optax import contrib

from wanjax.errors import WanjaxError

Name = Literal["adamw", "adafactor", "muon"]
LrScheduler = Literal["constant", "cosine", "linear"]
MIN_FLOAT, MAX_FLOAT = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # of what devices compute with


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimiser, with warm-up, a schedule of the learning rate, and clipped gradients.

    Args:
        name: `adamw`, `adafactor` or `muon`.
        learning_rate: The peak learning rate.
        warmup_steps: Steps in which the learning rate rises linearly to its peak.
        lr_scheduler: The learning rate after the warm-up: `constant`, or `cosine` or `linear` down to 0.
        max_grad_norm: The norm to which gradients are clipped; 0 does not clip.
        weight_decay: Part of the weights that a step takes off, times the learning rate.
        beta1: Decay of the first moment, of AdamW.
        beta2: Decay of the second moment, of AdamW.

    Raises:
        WanjaxError: A value is out of its range.
    """

    name: Name = "adamw"
    learning_rate: float = 1e-4
    warmup_steps: int = 0
    lr_scheduler: LrScheduler = "constant"
    max_grad_norm: float = 1.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self):
        for value, kinds, kind in ((self.name, Name, "optimiser"), (self.lr_scheduler, LrScheduler, "schedule")):
            if value not in get_args(kinds):
                raise WanjaxError(f"no {kind} is named {value!r}: there are {', '.join(get_args(kinds))}")
        if not MIN_FLOAT <= self.learning_rate <= MAX_FLOAT:
            raise WanjaxError(
                f"the learning rate {self.learning_rate} is not a number above 0 of float32: 1e-4 is usual"
            )
        if not 0 <= self.max_grad_norm <= MAX_FLOAT:
            raise WanjaxError(f"gradients cannot be clipped to the norm {self.max_grad_norm}: give 0 for none, or 1")
        if not 0 <= self.weight_decay <= MAX_FLOAT:
            raise WanjaxError(f"the weight decay {self.weight_decay} is not a number from 0 on: 0.01 is usual")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise WanjaxError(f"the optimiser's {name} is {getattr(self, name)}: give a number from 0 to below 1")
        if self.warmup_steps < 0:
            raise WanjaxError(f"warmup_steps is {self.warmup_steps}: give 0 or more")


def learning_rates(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the rate of each step: it rises linearly in the warm-up, and then stays, or falls to 0 at the end."""
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
    """Return the optimiser of a training of so many steps."""
    rate, decay = learning_rates(config, steps), config.weight_decay
    match config.name:
        case "adamw":
            optimizer = optax.adamw(rate, b1=config.beta1, b2=config.beta2, weight_decay=decay)
        case "adafactor":
            optimizer = optax.adafactor(rate, multiply_by_parameter_scale=False, weight_decay_rate=decay or None)
        case "muon":
            optimizer = contrib.muon(
                rate, weight_decay=decay, consistent_rms=0.2, muon_weight_dimension_numbers=matrices
            )
    if not config.max_grad_norm:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optimizer)


def matrices(weights: Any) -> Any:
    """Return the axes of each weight that form Muon's matrix (Jordan, 2024): the last two of every kernel."""

    def axes(path: Any, weight: Any) -> Any:
        is_kernel = "kernel" in jax.tree_util.keystr(path)
        return contrib.MuonDimensionNumbers(weight.ndim - 2, weight.ndim - 1) if is_kernel else None

    return jax.tree_util.tree_map_with_path(axes, weights)
