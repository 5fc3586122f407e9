# SPDX-License-Identifier: Apache-2.0
"""Optimisers by name, with warm-up, a schedule of the rate, and clipped gradients."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np
import optax
from optax import contrib

from wanjax.errors import WanjaxError

Name = Literal["adamw", "adafactor", "muon"]
Schedule = Literal["constant", "cosine", "linear"]
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # of what devices compute with


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimiser, its peak rate, the steps of warm-up, the schedule after them, and the largest gradient norm.

    `clip` 0 does not clip.
    """

    name: Name = "adamw"
    rate: float = 1e-4
    warm_up: int = 0
    schedule: Schedule = "constant"
    clip: float = 1.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self):
        for value, kinds, what in ((self.name, Name, "optimiser"), (self.schedule, Schedule, "schedule")):
            if value not in get_args(kinds):
                raise WanjaxError(f"no {what} is named {value!r}: there are {', '.join(get_args(kinds))}")
        if not SMALLEST <= self.rate <= LARGEST:
            raise WanjaxError(f"the learning rate {self.rate} is not a number above 0 of float32: 1e-4 is usual")
        if not 0 <= self.clip <= LARGEST:
            raise WanjaxError(f"gradients cannot be clipped to the norm {self.clip}: give 0 for none, or 1")
        if not 0 <= self.weight_decay <= LARGEST:
            raise WanjaxError(f"the weight decay {self.weight_decay} is not a number from 0 on: 0.01 is usual")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise WanjaxError(f"the optimiser's {name} is {getattr(self, name)}: give a number from 0 to below 1")
        if self.warm_up < 0:
            raise WanjaxError(f"the rate cannot warm up in {self.warm_up} steps: give 0 or more")


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the rate of each step: it rises linearly in the warm-up, and then stays, or falls to 0 at the end."""
    left = max(1, steps - config.warm_up)
    after = {
        "constant": lambda: optax.constant_schedule(config.rate),
        "cosine": lambda: optax.cosine_decay_schedule(config.rate, left),
        "linear": lambda: optax.linear_schedule(config.rate, 0.0, left),
    }[config.schedule]()
    if not config.warm_up:
        return after
    rise = optax.linear_schedule(config.rate / config.warm_up, config.rate, config.warm_up - 1 or 1)
    return optax.join_schedules([rise, after], [config.warm_up])


def optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Return the optimiser of a training of so many steps."""
    rate, decay = schedule(config, steps), config.weight_decay
    match config.name:
        case "adamw":
            made = optax.adamw(rate, b1=config.beta1, b2=config.beta2, weight_decay=decay)
        case "adafactor":
            made = optax.adafactor(rate, multiply_by_parameter_scale=False, weight_decay_rate=decay or None)
        case "muon":
            made = contrib.muon(rate, weight_decay=decay, consistent_rms=0.2, muon_weight_dimension_numbers=matrices)
    return optax.chain(optax.clip_by_global_norm(config.clip), made) if config.clip else made


def matrices(weights: Any) -> Any:
    """Return the axes of each weight that form Muon's matrix (Jordan, 2024): the last two of every kernel."""

    def axes(path: Any, weight: Any) -> Any:
        is_kernel = "kernel" in jax.tree_util.keystr(path)
        return contrib.MuonDimensionNumbers(weight.ndim - 2, weight.ndim - 1) if is_kernel else None

    return jax.tree_util.tree_map_with_path(axes, weights)
