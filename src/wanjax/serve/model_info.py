# SPDX-License-Identifier: Apache-2.0
"""Model cards: a model's settings, sizes, pictures and schedulers, and the settings of the server.

Each setting is described as JSON Schema, from the same source as the command's options. Settings that have no effect
for a model are left out.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from wanjax.checkpoints.lora_source import Lora
from wanjax.errors import SettingError, WanjaxError
from wanjax.jobs.notes import noting_warnings
from wanjax.layers.tiling import Tiling
from wanjax.media.metadata import DIGESTS_KEY
from wanjax.pipelines import guidance
from wanjax.pipelines.caching.rules import RULES
from wanjax.pipelines.model import VideoModel
from wanjax.pipelines.model import with_scheduler as model_with_scheduler
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import LOAD_SETTINGS, RANDOM_SEED, Setting, Settings, schema
from wanjax.pipelines.video_metadata import file_entry_names
from wanjax.pipelines.windows import CONTROL_INPUT
from wanjax.plan.estimate_cache import load_estimates
from wanjax.pricing.roofline import device_model
from wanjax.schedulers import SCHEDULERS, name_of
from wanjax.stores.paths import base_name

T = TypeVar("T")
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}


def model_card(pipe: Pipeline, tiling: Tiling | None, batch_guidance: bool) -> dict[str, Any]:
    """Describe a model for clients. Sizes are WIDTHxHEIGHT by name, with the default size first."""
    defaults, model = pipe.defaults, pipe.model
    return {
        "id": defaults.model,
        "purpose": model.spec.task,
        "tasks": model.spec.tasks,
        "defaults": defaults.to_json(),
        "settings": setting_schemas(pipe),
        "sizes": {name: f"{width}x{height}" for name, (height, width) in pipe.sizes.items()},
        "pictures": describe_inputs(model),
        "schedulers": scheduler_names(pipe),
        "started_with": shared_settings(pipe, tiling, batch_guidance),
        "grid": model.spec.size_multiple,
        "frames_step": model.vae.temporal_factor,
        "estimates": _estimates(pipe),
    }


def _estimates(pipe: Pipeline) -> list[dict[str, Any]]:
    """Return the results of `wanjax plan` for this model on devices like the server's."""
    device_kind = pipe.partitioner.device.device_kind
    chip = device_model(device_kind)
    if not device_kind.startswith(chip.device_kind):  # an unknown accelerator has no stored estimates
        return []
    return load_estimates(pipe.model_name, chip.name, pipe.partitioner.mesh.size, pipe.defaults.precision)


def request_settings(pipe: Pipeline) -> Mapping[str, Setting]:
    """List the settings that a request may contain, by name."""
    names = pipe.defaults.to_json().keys() - {*LOAD_SETTINGS}
    return {name: setting for name, setting in schema(type(pipe.defaults)).items() if name in names}


def setting_schemas(pipe: Pipeline) -> dict[str, dict[str, Any]]:
    """Return the JSON Schemas of the settings that affect videos of this model."""
    defaults, model = pipe.defaults.to_json(), pipe.model
    unused_names = {"original_prompt"} | (
        set() if model.spec.input_names else {"resize"}
    )  # programs set original_prompt, not users
    if "video" not in model.spec.input_names or not model.spec.starts_from_video:
        unused_names.add("strength")
    if model.spec.continuation_input is None:
        unused_names |= {"windows", "then", "match"}
    if model.spec.continuation_input != CONTROL_INPUT:
        unused_names.add("overlap")
    suggestions = {"cache": _step_caches(pipe), "guidance_rule": _guidance_rules(pipe)}
    choices = {"follow": _follow_values(pipe), "sigmas": _sigmas_values(model, pipe.defaults), **suggestions}
    unused_names |= {name for name, values in choices.items() if len(values) < 2}
    schemas = {}
    for name, setting in request_settings(pipe).items():
        if name not in unused_names:
            values = setting.choices and tuple(choices.get(name, setting.choices))
            schemas[name] = json_schema(setting._replace(choices=values))
            schemas[name]["default"] = defaults[name]
    seed_help = "Seed of the noise. Default: a random seed."  # other commands have 42 as the default
    schemas["seed"] |= {"description": seed_help, "default": RANDOM_SEED}
    for name in suggestions.keys() & schemas.keys():
        schemas[name]["examples"] = suggestions[name]
    for name in ("height", "width"):
        schemas[name]["multipleOf"] = model.spec.size_multiple
    return schemas


def json_schema(setting: Setting) -> dict[str, Any]:
    """Return the type, description and bounds of a setting as JSON Schema."""
    fields: dict[str, Any] = {"type": JSON_TYPES[setting.kind], "description": setting.help.partition("  [default")[0]}
    bounds = {"minimum": setting.minimum, "exclusiveMinimum": setting.exclusive_minimum, "maximum": setting.maximum}
    fields |= {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
    fields |= {"several": True} if setting.multiple else {}  # a list of texts, or one text with several lines
    return fields | ({"enum": list(setting.choices)} if setting.choices else {})


def _follow_values(pipe: Pipeline) -> list[str]:
    """Return the values of `follow` that change the result."""
    choices = []
    for choice in schema(Settings)["follow"].choices if pipe.model.spec.has_two_reference_implementations else ():
        with suppress(WanjaxError):
            choices.append(pipe.settings(follow=choice).follow)
    return choices


def _sigmas_values(model: VideoModel, settings: Settings) -> list[str]:
    """Return the values of `sigmas` that the model's scheduler supports."""
    return _working_choices(
        model.spec.sigma_schedules, lambda choice: model.spec.schedule(settings.updated({"sigmas": choice}))
    )


def _step_caches(pipe: Pipeline) -> list[str]:
    """Return the step caches that work with the model's default settings."""
    with noting_warnings(lambda message: None):  # auto warns where it reuses nothing
        return _working_choices(RULES, lambda name: pipe.settings(cache=name))


def _guidance_rules(pipe: Pipeline) -> list[str]:
    """List the guidance rules that the model supports, with its default guidance scale or with a scale above 1."""
    scales = pipe.defaults.guidance_scale, 2.0
    pairs = [(name, scale) for name in guidance.RULES for scale in scales]
    accepted = _working_choices(pairs, lambda pair: pipe.settings(guidance_rule=pair[0], guidance_scale=pair[1]))
    return list(dict.fromkeys(name for name, _ in accepted))


def scheduler_names(pipe: Pipeline) -> list[str]:
    """List the names of the schedulers that support the default steps, the model's own scheduler first."""
    others = _working_choices(
        SCHEDULERS, lambda name: model_with_scheduler(pipe.model, name).spec.schedule(pipe.defaults)
    )
    return list(dict.fromkeys([name_of(pipe.scheduler), *others]))


def _working_choices(choices: Iterable[T], attempt: Callable[[T], object]) -> list[T]:
    """List the choices for which `attempt` raises no WanjaxError."""
    accepted: list[T] = []
    for choice in choices:
        with suppress(WanjaxError):
            attempt(choice)
            accepted.append(choice)
    return accepted


def with_scheduler(pipe: Pipeline, name: str | None) -> Pipeline:
    """Return the pipeline with another scheduler, or itself if `name` is None.

    Raises:
        SettingError: The scheduler does not work with this model.
    """
    try:
        return pipe.with_solver(name)
    except WanjaxError as error:
        raise SettingError(str(error), "scheduler") from error


def describe_inputs(model: VideoModel) -> dict[str, dict[str, Any]]:
    """Describe the pictures and clips that the model takes: what each is for, and whether it is required."""
    with_image = model.spec.image_with_video
    extra_help = {"video": f" With an image, {with_image}."} if with_image else {}
    return {
        spec.name: {
            "description": spec.help + extra_help.get(spec.name, ""),
            "required": spec.required,
            "several": spec.kind == "images",
        }
        for spec in model.spec.inputs
    }


def strip_folders(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Replace paths in metadata by file names, because clients may read the metadata."""

    def strip_entry(entry: str, value: Any) -> Any:
        if isinstance(value, list):
            return [strip_entry(entry, element) for element in value]
        if not isinstance(value, str):
            return value
        if entry != "lora":
            return base_name(value)
        return str(replace(lora := Lora.parse(value), file=base_name(lora.file)))

    cleaned = {
        name: strip_entry(name, value) if name in file_entry_names() else value for name, value in metadata.items()
    }
    if digests := metadata.get(DIGESTS_KEY):
        cleaned[DIGESTS_KEY] = {base_name(path): digest for path, digest in digests.items()}
    return cleaned


def shared_settings(pipe: Pipeline, tiling: Tiling | None, batch_guidance: bool) -> dict[str, Any]:
    """Return the settings that all videos of the server share, under the names that the metadata uses."""
    metadata = strip_folders(pipe.metadata(pipe.defaults, {}, tiling=tiling, batch_guidance=batch_guidance))
    return {name: value for name, value in metadata.items() if name not in request_settings(pipe)}
