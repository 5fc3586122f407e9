# SPDX-License-Identifier: Apache-2.0
"""Schedulers, and the one that a checkpoint's scheduler_config.json asks for."""

from collections.abc import Mapping
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.schedulers.base import TRAIN_STEPS, Scheduler, one_step
from wanjax.schedulers.flow_euler import FlowEuler
from wanjax.schedulers.unipc import UniPC

__all__ = ["FlowEuler", "Scheduler", "UniPC", "from_config", "one_step"]

# Entry: what an absent one means to the reference, and the values under which these schedulers are what is asked for.
_BOTH = {
    "num_train_timesteps": (TRAIN_STEPS, [TRAIN_STEPS]),
    "use_dynamic_shifting": (False, [False, None]),
    "use_karras_sigmas": (False, [False, None]),
    "use_exponential_sigmas": (False, [False, None]),
    "use_beta_sigmas": (False, [False, None]),
    "shift_terminal": (None, [None]),
}
_UNIPC = _BOTH | {
    "prediction_type": ("epsilon", ["flow_prediction"]),
    "use_flow_sigmas": (False, [True]),
    "predict_x0": (True, [True]),
    "solver_type": ("bh2", ["bh2", "midpoint", "heun", "logrho"]),  # the reference takes all four for the first
    "lower_order_final": (True, [True]),
    "final_sigmas_type": ("zero", ["zero"]),
    "thresholding": (False, [False, None]),
    "disable_corrector": ([], [[], None]),
    "solver_p": (None, [None]),
}
_FLOW_EULER = _BOTH | {"invert_sigmas": (False, [False, None]), "stochastic_sampling": (False, [False, None])}


def from_config(config: Mapping[str, Any]) -> Scheduler:
    """The scheduler of a scheduler_config.json, with the official noise levels.

    Raises WanjaxError for a class that is not known and for an entry that asks for what is not offered.
    """
    match config.get("_class_name"):
        case "UniPCMultistepScheduler":
            _check(config, _UNIPC)
            return UniPC(config.get("flow_shift", 1.0), order=config.get("solver_order", 2))
        case "FlowMatchEulerDiscreteScheduler":
            _check(config, _FLOW_EULER)
            return FlowEuler(config.get("shift", 1.0))
        case name:
            known = "UniPCMultistepScheduler or FlowMatchEulerDiscreteScheduler"
            raise WanjaxError(f"the scheduler {name!r} is not known: {known} would do")


def _check(config: Mapping[str, Any], entries: Mapping[str, tuple[Any, list[Any]]]) -> None:
    for entry, (absent, offered) in entries.items():
        value = config.get(entry, absent)
        if value not in offered:
            raise WanjaxError(
                f"the scheduler's {entry} {value!r} is not offered: {' or '.join(map(repr, offered))} would do"
            )
