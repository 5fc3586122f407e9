# SPDX-License-Identifier: Apache-2.0
"""What a server offers: its model's settings, sizes, pictures and solvers, and what it was started with.

A setting is described in the words of JSON Schema, from the one description that the command line has too. What the
model has no use for is left out.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from wanjax.checkpoints.lora_source import Lora
from wanjax.errors import SettingError, WanjaxError
from wanjax.layers.tiling import Tiling
from wanjax.media.metadata import DIGESTS
from wanjax.pipelines import guidance
from wanjax.pipelines.caching.rules import RULES
from wanjax.pipelines.model import VideoModel
from wanjax.pipelines.model import with_scheduler as with_scheduler_of
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import DRAW, LOADED, Setting, Settings, schema
from wanjax.pipelines.video_metadata import source_names
from wanjax.pipelines.windows import CONTROL
from wanjax.plan.estimate_cache import load_estimates
from wanjax.pricing.roofline import device_model
from wanjax.schedulers import SCHEDULERS, name_of
from wanjax.stores.paths import base_name

T = TypeVar("T")
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}


def model_card(pipe: Pipeline, tiling: Tiling | None, batch_guidance: bool) -> dict[str, Any]:
    """Return what the server tells of a model; sizes are WIDTHxHEIGHT by name, the model's own first."""
    defaults, model = pipe.defaults, pipe.model
    return {
        "id": defaults.model,
        "purpose": model.spec.task,
        "tasks": model.spec.tasks,
        "defaults": defaults.to_json(),
        "settings": setting_schemas(pipe),
        "sizes": {name: f"{width}x{height}" for name, (height, width) in pipe.sizes.items()},
        "pictures": pictures(model),
        "schedulers": schedulers(pipe),
        "started_with": started_with(pipe, tiling, batch_guidance),
        "grid": model.spec.size_multiple,
        "frames_step": model.vae.temporal_factor,
        "estimates": _estimates(pipe),
    }


def _estimates(pipe: Pipeline) -> list[dict[str, Any]]:
    """Return what `wanjax plan` said of this model on devices like the server's."""
    kind = pipe.partitioner.device.device_kind
    chip = device_model(kind)
    if not kind.startswith(chip.kind):  # an unknown accelerator, which counts as another
        return []
    return load_estimates(pipe.defaults.model, chip.name, pipe.partitioner.mesh.size)


def request_settings(pipe: Pipeline) -> Mapping[str, Setting]:
    """Return the settings of a video that a request may give, by name."""
    names = pipe.defaults.to_json().keys() - {*LOADED}
    return {name: setting for name, setting in schema(type(pipe.defaults)).items() if name in names}


def setting_schemas(pipe: Pipeline) -> dict[str, dict[str, Any]]:
    """Return the settings that a video of this model depends on, in the words of JSON Schema."""
    defaults, model = pipe.defaults.to_json(), pipe.model
    useless = {"original_prompt"} | (set() if model.spec.takes else {"resize"})  # the first is for other programs
    if "video" not in model.spec.takes or not model.spec.begins_from_video:
        useless.add("strength")
    if model.spec.continued_by is None:
        useless |= {"windows", "then"}
    if model.spec.continued_by != CONTROL:
        useless.add("overlap")
    rules = {"cache": _caches(pipe), "guidance_rule": _rules(pipe)}
    choices = {"follow": _ways(pipe), "sigmas": _levels(model, pipe.defaults), **rules}
    useless |= {name for name, some in choices.items() if len(some) < 2}
    schemas = {}
    for name, setting in request_settings(pipe).items():
        if name not in useless:
            values = setting.choices and tuple(choices.get(name, setting.choices))
            schemas[name] = json_schema(setting._replace(choices=values))
            schemas[name]["default"] = defaults[name]
    drawn = "Seed of the noise; one is drawn where none is given."  # elsewhere it is 42
    schemas["seed"] |= {"description": drawn, "default": DRAW}
    for name in rules.keys() & schemas.keys():
        schemas[name]["examples"] = rules[name]
    for name in ("height", "width"):
        schemas[name]["multipleOf"] = model.spec.size_multiple
    return schemas


def json_schema(setting: Setting) -> dict[str, Any]:
    """Return a setting's type, help and bounds in the words of JSON Schema."""
    words: dict[str, Any] = {"type": TYPES[setting.kind], "description": setting.help}
    bounds = {"minimum": setting.least, "exclusiveMinimum": setting.above, "maximum": setting.most}
    words |= {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
    words |= {"several": True} if setting.several else {}  # a list of texts, or the lines of one
    return words | ({"enum": list(setting.choices)} if setting.choices else {})


def _ways(pipe: Pipeline) -> list[str]:
    """Return the values of `follow` that make a difference."""
    choices = []
    for choice in schema(Settings)["follow"].choices if pipe.model.spec.reference_variants else ():
        with suppress(WanjaxError):
            choices.append(pipe.settings(follow=choice).follow)
    return choices


def _levels(model: VideoModel, settings: Settings) -> list[str]:
    """Return the ways of choosing noise levels that the model's scheduler has."""
    choices = schema(Settings)["sigmas"].choices if settings.sigmas else ()
    return _accepted(choices, lambda choice: model.spec.schedule(settings.updated({"sigmas": choice})))


def _caches(pipe: Pipeline) -> list[str]:
    """Return the step caches that the model can have with its default settings."""
    return _accepted(RULES, lambda name: pipe.settings(cache=name))


def _rules(pipe: Pipeline) -> list[str]:
    """Return the rules of guidance that the model can have, with guidance where it can have that."""
    scales = pipe.defaults.guidance_scale, 2.0
    pairs = [(name, scale) for name in guidance.RULES for scale in scales]
    accepted = _accepted(pairs, lambda pair: pipe.settings(guidance_rule=pair[0], guidance_scale=pair[1]))
    return list(dict.fromkeys(name for name, _ in accepted))


def schedulers(pipe: Pipeline) -> list[str]:
    """Return the names of the solvers that can take the steps, the model's own first."""
    others = _accepted(SCHEDULERS, lambda name: with_scheduler_of(pipe.model, name).spec.schedule(pipe.defaults))
    return list(dict.fromkeys([name_of(pipe.scheduler), *others]))


def _accepted(choices: Iterable[T], attempt: Callable[[T], object]) -> list[T]:
    """Return the choices with which an attempt raises no WanjaxError."""
    accepted: list[T] = []
    for choice in choices:
        with suppress(WanjaxError):
            attempt(choice)
            accepted.append(choice)
    return accepted


def with_scheduler(pipe: Pipeline, name: str | None) -> Pipeline:
    """Return the pipeline with another solver, if one is named; raise SettingError where it does not fit."""
    try:
        return pipe.with_solver(name)
    except WanjaxError as error:
        raise SettingError(str(error), "scheduler") from error


def pictures(model: VideoModel) -> dict[str, dict[str, Any]]:
    """Return the pictures and clips that the model takes, each with what it is for and whether it is needed."""
    beside = model.spec.picture_beside_clip
    more = {"video": f" Beside an image, {beside}."} if beside else {}
    return {
        one.name: {
            "description": one.help + more.get(one.name, ""),
            "required": one.required,
            "several": one.kind == "images",
        }
        for one in model.spec.inputs
    }


def without_folders(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata whose files and folders are named without where they are, since a client may read it."""

    def base_names(entry: str, value: Any) -> Any:
        if isinstance(value, list):
            return [base_names(entry, one) for one in value]
        if not isinstance(value, str):
            return value
        if entry != "lora":
            return base_name(value)
        return str(replace(lora := Lora.parse(value), file=base_name(lora.file)))

    cleaned = {name: base_names(name, value) if name in source_names() else value for name, value in metadata.items()}
    if digests := metadata.get(DIGESTS):
        cleaned[DIGESTS] = {base_name(path): digest for path, digest in digests.items()}
    return cleaned


def started_with(pipe: Pipeline, tiling: Tiling | None, batch_guidance: bool) -> dict[str, Any]:
    """Return what shapes every video of the server, by the names that the metadata has for it."""
    metadata = without_folders(pipe.metadata(pipe.defaults, {}, tiling=tiling, batch_guidance=batch_guidance))
    return {name: value for name, value in metadata.items() if name not in request_settings(pipe)}
