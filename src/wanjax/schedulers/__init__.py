# SPDX-License-Identifier: Apache-2.0
"""The schedulers: by name, from a checkpoint's scheduler_config.json, and in place of another."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

from wanjax.errors import WanjaxError, near_names, repr_short
from wanjax.schedulers.base import TRAIN_STEPS, Scheduler, check_flow, one_step
from wanjax.schedulers.consistency import RCM, Consistency, RCMEuler
from wanjax.schedulers.ddim import DDIM
from wanjax.schedulers.diffusion import BETAS, Diffusion
from wanjax.schedulers.dpm import DPM
from wanjax.schedulers.flow_dpm import FlowDPM
from wanjax.schedulers.flow_euler import FlowEuler
from wanjax.schedulers.unipc import UniPC

__all__ = [
    "DDIM",
    "DPM",
    "NAMED",
    "RCM",
    "UNIPC_SHIFT",
    "Consistency",
    "FlowDPM",
    "FlowEuler",
    "RCMEuler",
    "Scheduler",
    "UniPC",
    "from_config",
    "name_of",
    "one_step",
    "parse",
    "resolve",
    "shift_of",
]

NAMED: Mapping[str, Scheduler] = {
    "unipc": UniPC(),
    "euler": FlowEuler(),
    "dpm++": FlowDPM(),
    "ddim": DDIM(),
    "dpm": DPM(),
    "consistency": Consistency(),
    "rcm": RCM(),
    "rcm-ode": RCMEuler(),
}
UNIPC_SHIFT = "flow_shift"  # in the config of UniPC, where other flows have `shift`
_WITH_OPTIONS = "unipc:order=1", "consistency:timesteps=1000,757,522", "rcm:sigma_max=200"

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
_DIFFUSION = {
    "num_train_timesteps": (TRAIN_STEPS, [TRAIN_STEPS]),
    "beta_start": (BETAS[0], BETAS[:1]),
    "beta_end": (BETAS[1], BETAS[1:]),
    "beta_schedule": ("scaled_linear", ["scaled_linear"]),
    "trained_betas": (None, [None]),
    "prediction_type": ("epsilon", ["v_prediction"]),
    "rescale_betas_zero_snr": (False, [True]),
    "set_alpha_to_one": (True, [True]),
    "steps_offset": (0, [0]),
}
_FLOW = _BOTH | {"invert_sigmas": (False, [False, None]), "scale_factors": (None, [None])}
_SELF_FORCING = {
    "num_inference_steps": (TRAIN_STEPS, [TRAIN_STEPS]),
    "num_train_timesteps": (TRAIN_STEPS, [TRAIN_STEPS]),
    "sigma_max": (1.0, [1.0]),
    "sigma_min": (0.0, [0.0]),
    "extra_one_step": (True, [True]),
    "inverse_timesteps": (False, [False]),
    "reverse_sigmas": (False, [False]),
}


def _diffusion(kind: type[Diffusion], config: Mapping[str, Any]) -> Diffusion:
    """Read a diffusion. Some entries that are not checked, such as clip_sample, have no effect in the reference."""
    return kind(snr_shift=config.get("snr_shift_scale", 3.0), spacing=config.get("timestep_spacing", "leading"))


class _Reader(NamedTuple):
    """A reader of configs: a function that makes the scheduler, the entries to check, and that of a flow's shift."""

    make: Callable[[Mapping[str, Any]], Scheduler]
    entries: Mapping[str, tuple[Any, Sequence[Any]]]
    shift: str = ""


_READERS = {
    "UniPCMultistepScheduler": _Reader(lambda config: UniPC(order=config.get("solver_order", 2)), _UNIPC, UNIPC_SHIFT),
    "FlowMatchEulerDiscreteScheduler": _Reader(
        lambda config: Consistency() if config.get("stochastic_sampling") else FlowEuler(), _FLOW, "shift"
    ),
    "FlowMatchLCMScheduler": _Reader(lambda config: Consistency(), _FLOW, "shift"),
    "SelfForcingFlowMatchScheduler": _Reader(lambda config: Consistency(), _SELF_FORCING, "shift"),
    "CogVideoXDDIMScheduler": _Reader(partial(_diffusion, DDIM), _DIFFUSION),
    "CogVideoXDPMScheduler": _Reader(partial(_diffusion, DPM), _DIFFUSION),
}


def from_config(config: Mapping[str, Any]) -> Scheduler:
    """Return the scheduler that a scheduler_config.json describes.

    Raises WanjaxError for an unknown class, and for an entry with an unsupported value.
    """
    name = config.get("_class_name")
    if not isinstance(name, str) or name not in _READERS:
        raise WanjaxError(f"the scheduler {name!r} is not known: give {' or '.join(_READERS)}")
    read = _READERS[name]
    for entry, (absent, offered) in read.entries.items():
        value = config.get(entry, absent)
        if value not in offered:
            raise WanjaxError(
                f"the scheduler's {entry} {value!r} is not offered: give {' or '.join(map(repr, offered))}"
            )
    if read.shift in config:
        check_flow(config[read.shift], "official")
    return read.make(config)


def shift_of(config: Mapping[str, Any]) -> Any:
    """Return the flow shift that a scheduler_config.json gives, None where it gives none."""
    return config.get(UNIPC_SHIFT, config.get("shift"))


def parse(text: object) -> Scheduler:
    """Return the scheduler of a name in `NAMED`, perhaps with its option: `unipc`, `unipc:order=1`.

    Raises WanjaxError for any other text, and for an impossible value of the option.
    """
    name, colon, option = str(text).partition(":")
    field, _, number = option.partition("=")
    scheduler = NAMED.get(name)
    value = (
        _value(number, getattr(scheduler, field))
        if scheduler and colon and field and field == scheduler.option
        else None
    )
    if scheduler is None or (colon and value is None):
        near, options = near_names(name, NAMED, 1), ", ".join(_WITH_OPTIONS)
        every = f"give {', '.join(NAMED)}, or with options {options}"
        right = f"did you mean {near[0]}?" if near and not colon else every
        raise WanjaxError(f"no scheduler is named {repr_short(text)}: {right}")
    return replace(scheduler, **{field: value}) if colon else scheduler


def name_of(scheduler: Scheduler) -> str:
    """Return the text of which `parse` makes the scheduler, but for the checkpoint's values; else a description."""
    for name, usual in NAMED.items():
        if type(scheduler) is type(usual):
            options = (field.name for field in fields(usual) if field.name not in usual.checkpoint_fields)
            differs = [field for field in options if getattr(scheduler, field) != getattr(usual, field)]
            if set(differs) <= {usual.option}:
                return name + "".join(f":{field}={_text(getattr(scheduler, field))}" for field in differs)
    return repr(scheduler)


def _value(text: str, usual: int | float | tuple[float, ...]) -> int | float | tuple[float, ...] | None:
    """Return an option's value of the kind of its usual one: a whole number, a number, or numbers; None for others."""
    if isinstance(usual, int):
        return int(text) if text.isdecimal() else None
    try:
        return tuple(map(float, text.split(","))) if isinstance(usual, tuple) else float(text)
    except ValueError:
        return None


def _text(value: int | float | tuple[float, ...]) -> str:
    """Return the text of which `_value` makes an option's value."""
    numbers = value if isinstance(value, tuple) else (value,)
    return ",".join(str(int(number)) if number == int(number) else repr(number) for number in numbers)


def resolve(scheduler: str | Scheduler, before: Scheduler) -> Scheduler:
    """Return a scheduler, named or as a value, to sample a model in place of the one of its checkpoint.

    A named scheduler keeps the checkpoint's values (`checkpoint_fields`) of the one before.

    Raises:
        WanjaxError: The two predict different quantities, or their schedules have different options.
    """
    new = scheduler if isinstance(scheduler, Scheduler) else parse(scheduler)
    if new.prediction != before.prediction:
        predicts = f"predictions of {new.prediction}, and the model predicts {before.prediction}"
        raise WanjaxError(f"the scheduler {name_of(new)} takes {predicts}: choose one like {name_of(before)}")
    if new is not scheduler:
        shared = set(new.checkpoint_fields) & set(before.checkpoint_fields)
        new = replace(new, **{field: getattr(before, field) for field in shared})
    options, expected = (set(inspect.signature(value.schedule).parameters) for value in (new, before))
    if options != expected:
        differs = ", ".join(sorted(options ^ expected))
        raise WanjaxError(
            f"the schedule of {name_of(new)} differs in its options, {differs}: choose one like {name_of(before)}"
        )
    return new
