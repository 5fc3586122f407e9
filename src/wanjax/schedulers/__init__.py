# SPDX-License-Identifier: Apache-2.0
"""Look up a scheduler by name, read one from a scheduler_config.json, or replace a checkpoint's scheduler."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

from wanjax.errors import OTHER_SOLVER_NAMES, WanjaxError, near_names, repr_short
from wanjax.schedulers.base import TRAIN_STEPS, Scheduler, check_flow, one_step
from wanjax.schedulers.consistency import RCM, Consistency, RCMEuler
from wanjax.schedulers.ddim import DDIM
from wanjax.schedulers.diffusion import FIRST_AND_LAST_BETA, Diffusion
from wanjax.schedulers.dpm import DPM
from wanjax.schedulers.flow_dpm import FlowDPM
from wanjax.schedulers.flow_euler import FlowEuler
from wanjax.schedulers.unipc import UniPC

__all__ = [
    "DDIM",
    "DPM",
    "RCM",
    "SCHEDULERS",
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

SCHEDULERS: Mapping[str, Scheduler] = {
    "unipc": UniPC(),
    "euler": FlowEuler(),
    "dpm++": FlowDPM(),
    "ddim": DDIM(),
    "dpm": DPM(),
    "consistency": Consistency(),
    "rcm": RCM(),
    "rcm-ode": RCMEuler(),
}
# the name of the flow shift in UniPC's config; the configs of other flow schedulers call it `shift`
UNIPC_SHIFT = "flow_shift"
_OPTION_EXAMPLES = "unipc:order=1", "consistency:timesteps=1000,757,522", "rcm:sigma_max=200"

# For each entry of a config: the default of the reference, and the values that wanjax supports.
_COMMON_ENTRIES = {
    "num_train_timesteps": (TRAIN_STEPS, [TRAIN_STEPS]),
    "use_dynamic_shifting": (False, [False, None]),
    "use_karras_sigmas": (False, [False, None]),
    "use_exponential_sigmas": (False, [False, None]),
    "use_beta_sigmas": (False, [False, None]),
    "shift_terminal": (None, [None]),
}
_MULTISTEP_ENTRIES = _COMMON_ENTRIES | {
    "prediction_type": ("epsilon", ["flow_prediction"]),
    "use_flow_sigmas": (False, [True]),
    "lower_order_final": (True, [True]),
    "final_sigmas_type": ("zero", ["zero"]),
    "thresholding": (False, [False, None]),
}
_UNIPC_ENTRIES = _MULTISTEP_ENTRIES | {
    "predict_x0": (True, [True]),
    "solver_type": ("bh2", ["bh2", "midpoint", "heun", "logrho"]),  # the reference treats all four values as "bh2"
    "disable_corrector": ([], [[], None]),
    "solver_p": (None, [None]),
}
_DPM_ENTRIES = _MULTISTEP_ENTRIES | {
    "algorithm_type": ("dpmsolver++", ["dpmsolver++"]),
    "solver_type": ("midpoint", ["midpoint"]),
    "use_lu_lambdas": (False, [False, None]),
}
_DIFFUSION_ENTRIES = {
    "num_train_timesteps": (TRAIN_STEPS, [TRAIN_STEPS]),
    "beta_start": (FIRST_AND_LAST_BETA[0], FIRST_AND_LAST_BETA[:1]),
    "beta_end": (FIRST_AND_LAST_BETA[1], FIRST_AND_LAST_BETA[1:]),
    "beta_schedule": ("scaled_linear", ["scaled_linear"]),
    "trained_betas": (None, [None]),
    "prediction_type": ("epsilon", ["v_prediction"]),
    "rescale_betas_zero_snr": (False, [True]),
    "set_alpha_to_one": (True, [True]),
    "steps_offset": (0, [0]),
}
_FLOW_ENTRIES = _COMMON_ENTRIES | {"invert_sigmas": (False, [False, None]), "scale_factors": (None, [None])}
_SELF_FORCING_ENTRIES = {
    "num_inference_steps": (TRAIN_STEPS, [TRAIN_STEPS]),
    "num_train_timesteps": (TRAIN_STEPS, [TRAIN_STEPS]),
    "sigma_max": (1.0, [1.0]),
    "sigma_min": (0.0, [0.0]),
    "extra_one_step": (True, [True]),
    "inverse_timesteps": (False, [False]),
    "reverse_sigmas": (False, [False]),
}


def _read_diffusion(kind: type[Diffusion], config: Mapping[str, Any]) -> Diffusion:
    """Read the config of a diffusion scheduler.

    Entries that the reference ignores, such as clip_sample, are not checked.
    """
    return kind(snr_shift=config.get("snr_shift_scale", 3.0), spacing=config.get("timestep_spacing", "leading"))


class _ConfigSpec(NamedTuple):
    """How to read the config of a scheduler class: the function that makes the scheduler, the entries to check, and
    the name of the entry with the flow shift."""

    make: Callable[[Mapping[str, Any]], Scheduler]
    entries: Mapping[str, tuple[Any, Sequence[Any]]]
    shift_entry: str = ""


_CONFIG_SPECS = {
    "UniPCMultistepScheduler": _ConfigSpec(
        lambda config: UniPC(order=config.get("solver_order", 2)), _UNIPC_ENTRIES, UNIPC_SHIFT
    ),
    "DPMSolverMultistepScheduler": _ConfigSpec(
        lambda config: FlowDPM(order=config.get("solver_order", 2)), _DPM_ENTRIES, UNIPC_SHIFT
    ),
    "FlowMatchEulerDiscreteScheduler": _ConfigSpec(
        lambda config: Consistency() if config.get("stochastic_sampling") else FlowEuler(), _FLOW_ENTRIES, "shift"
    ),
    "FlowMatchLCMScheduler": _ConfigSpec(lambda config: Consistency(), _FLOW_ENTRIES, "shift"),
    "SelfForcingFlowMatchScheduler": _ConfigSpec(lambda config: Consistency(), _SELF_FORCING_ENTRIES, "shift"),
    "CogVideoXDDIMScheduler": _ConfigSpec(partial(_read_diffusion, DDIM), _DIFFUSION_ENTRIES),
    "CogVideoXDPMScheduler": _ConfigSpec(partial(_read_diffusion, DPM), _DIFFUSION_ENTRIES),
}


def from_config(config: Mapping[str, Any]) -> Scheduler:
    """Create the scheduler that a scheduler_config.json describes.

    Raises WanjaxError for an unknown class, and for an entry with an unsupported value.
    """
    name = config.get("_class_name")
    if not isinstance(name, str) or name not in _CONFIG_SPECS:
        raise WanjaxError(f"the scheduler class {name!r} is unknown: use {' or '.join(_CONFIG_SPECS)}")
    config_spec = _CONFIG_SPECS[name]
    for entry, (default, supported) in config_spec.entries.items():
        value = config.get(entry, default)
        if value not in supported:
            raise WanjaxError(
                f"the scheduler's {entry} {value!r} is not supported: use {' or '.join(map(repr, supported))}"
            )
    if config_spec.shift_entry in config:
        check_flow(config[config_spec.shift_entry], "official")
    return config_spec.make(config)


def shift_of(config: Mapping[str, Any]) -> Any:
    """Return the flow shift in a scheduler_config.json, or None if the file has no flow shift."""
    return config.get(UNIPC_SHIFT, config.get("shift"))


def parse(text: object, usable_names: Collection[str] = tuple(SCHEDULERS)) -> Scheduler:
    """Parse a scheduler's name and an optional option, such as `unipc` or `unipc:order=1`.

    Raises WanjaxError for an unknown name or option, and for an invalid value. The message suggests only names in
    `usable_names`.
    """
    name, colon, option = str(text).partition(":")
    field, _, value_text = option.partition("=")
    scheduler = SCHEDULERS.get(name)
    value = (
        _parse_option(value_text, getattr(scheduler, field))
        if scheduler and colon and field and field == scheduler.option
        else None
    )
    if scheduler is None or (colon and value is None):
        similar = (
            [OTHER_SOLVER_NAMES[name]]
            if OTHER_SOLVER_NAMES.get(name) in usable_names
            else near_names(name, usable_names, 1)
        )
        examples = [example for example in _OPTION_EXAMPLES if example.partition(":")[0] in usable_names]
        with_options = f", or with options {', '.join(examples)}" if examples else ""
        choices = f"give {', '.join(usable_names)}{with_options}"
        advice = f"did you mean {similar[0]}?" if similar and not colon else choices
        if scheduler:
            raise WanjaxError(f"the option {repr_short(option)} of scheduler {repr_short(text)} is invalid: {advice}")
        raise WanjaxError(f"no scheduler is named {repr_short(text)}: {advice}")
    return replace(scheduler, **{field: value}) if colon else scheduler


def name_of(scheduler: Scheduler) -> str:
    """Return the text that `parse` reads as this scheduler. If there is no such text, return the scheduler's `repr`.

    Values that come from the checkpoint are not part of the text.
    """
    for name, default in SCHEDULERS.items():
        if type(scheduler) is type(default):
            options = (field.name for field in fields(default) if field.name not in default.checkpoint_fields)
            changed = [field for field in options if getattr(scheduler, field) != getattr(default, field)]
            if set(changed) <= {default.option}:
                return name + "".join(f":{field}={_format_option(getattr(scheduler, field))}" for field in changed)
    return repr(scheduler)


def _parse_option(text: str, default: int | float | tuple[float, ...]) -> int | float | tuple[float, ...] | None:
    """Parse an option's value as the type of its default. Return None if the text is malformed."""
    if isinstance(default, int):
        return int(text) if text.isdecimal() else None
    try:
        return tuple(map(float, text.split(","))) if isinstance(default, tuple) else float(text)
    except ValueError:
        return None


def _format_option(value: int | float | tuple[float, ...]) -> str:
    """Format an option's value for `_parse_option`."""
    numbers = value if isinstance(value, tuple) else (value,)
    return ",".join(str(int(number)) if number == int(number) else repr(number) for number in numbers)


def _schedule_options(scheduler: Scheduler) -> set[str]:
    """Return the names of the options of a scheduler's schedule."""
    return set(inspect.signature(scheduler.schedule).parameters)


def _usable_with(original: Scheduler) -> list[str]:
    """Return the names of the schedulers that can replace the scheduler of a checkpoint."""
    options = _schedule_options(original)
    return [
        name
        for name, scheduler in SCHEDULERS.items()
        if scheduler.prediction == original.prediction and _schedule_options(scheduler) == options
    ]


def resolve(scheduler: str | Scheduler, original: Scheduler) -> Scheduler:
    """Return the scheduler that replaces a checkpoint's scheduler.

    Args:
        scheduler: The new scheduler, or its name. If it is a name, the values of the new scheduler's
            `checkpoint_fields` are copied from `original`.
        original: The checkpoint's scheduler.

    Raises:
        WanjaxError: The two schedulers expect different predictions, or their schedules have different options.
    """
    replacement = scheduler if isinstance(scheduler, Scheduler) else parse(scheduler, _usable_with(original))
    if replacement.prediction != original.prediction:
        mismatch = f"{name_of(replacement)} does not fit this model, which predicts {original.prediction}"
        raise WanjaxError(f"{mismatch}: give {', '.join(_usable_with(original))}")
    if replacement is not scheduler:
        shared_fields = set(replacement.checkpoint_fields) & set(original.checkpoint_fields)
        replacement = replace(replacement, **{field: getattr(original, field) for field in shared_fields})
    options, expected_options = map(_schedule_options, (replacement, original))
    if options != expected_options:
        difference = ", ".join(sorted(name.replace("sigma_schedule", "sigmas") for name in options ^ expected_options))
        raise WanjaxError(
            f"the schedule of {name_of(replacement)} has other options ({difference}) than the model's: "
            f"give {', '.join(_usable_with(original))}"
        )
    return replacement
