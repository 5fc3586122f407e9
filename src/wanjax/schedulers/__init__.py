# SPDX-License-Identifier: Apache-2.0
"""The schedulers, and the reader of a checkpoint's scheduler_config.json."""

from collections.abc import Mapping
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.schedulers.base import TRAIN_STEPS, Scheduler, check_flow, one_step
from wanjax.schedulers.flow_euler import FlowEuler
from wanjax.schedulers.unipc import UniPC

__all__ = ["FlowEuler", "Scheduler", "UniPC", "from_config", "one_step"]

# By entry: the reference's default, and the values that these schedulers implement.
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
    "solver_type": ("bh2", ["bh2", "midpoint", "heun", "logrho"]),  # the reference treats all four as the first
    "lower_order_final": (True, [True]),
    "final_sigmas_type": ("zero", ["zero"]),
    "thresholding": (False, [False, None]),
    "disable_corrector": ([], [[], None]),
    "solver_p": (None, [None]),
}
_FLOW_EULER = _BOTH | {"invert_sigmas": (False, [False, None]), "stochastic_sampling": (False, [False, None])}


def from_config(config: Mapping[str, Any]) -> Scheduler:
    """Returns the scheduler that a scheduler_config.json describes.

    Raises WanjaxError for an unknown class, and for an entry with an unsupported value.
    """
    match config.get("_class_name"):
        case "UniPCMultistepScheduler":
            _check(config, _UNIPC)
            check_flow(config.get("flow_shift", 1.0), "official")
            return UniPC(order=config.get("solver_order", 2))
        case "FlowMatchEulerDiscreteScheduler":
            _check(config, _FLOW_EULER)
            check_flow(config.get("shift", 1.0), "official")
            return FlowEuler()
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
