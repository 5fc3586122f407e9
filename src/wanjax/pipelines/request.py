# SPDX-License-Identifier: Apache-2.0
"""A request for a video. The command line, a table's rows and HTTP have the same fields, and one function parses them.

The fields are the settings by name and those of `fields_beside`. Numbers may be given as texts, because forms only have
texts. This module does not import JAX, so that a process that only forwards requests takes no devices.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any

from wanjax.checkpoints.lora_keys import MAX_STRENGTH
from wanjax.errors import SettingError, WanjaxError, repr_short
from wanjax.media.inputs import IMAGE, INPUTS
from wanjax.pipelines.other_names import unknown_keyword
from wanjax.pipelines.settings import (
    ALLOW_EMPTY,
    LOADED,
    Setting,
    Settings,
    is_text,
    pixels,
    read_size,
    schema,
    sides,
)

OWN = ("prompt", "original_prompt", "seed")  # settings that may differ between the videos of one run
RIVALS = {"size": ("height", "width"), "seconds": ("frames",)}  # alternative fields for the same thing
SAME_IMAGE = "input_reference"  # OpenAI's name of `image`
MODEL, SCHEDULER = schema(Settings)["model"], Setting("scheduler", str)
SECONDS = Setting("seconds", float, above=0, most=3600)
STRENGTH = Setting("lora", float, least=-MAX_STRENGTH, most=MAX_STRENGTH)
VALUES = {**schema(Settings), **{one.name: one for one in (SECONDS, SCHEDULER)}}
PROMPTS = ("prompt", "original_prompt", "negative_prompt", "then")
LONGEST_TEXT = 200  # the maximal length of untrusted texts other than prompts
WHOLE = re.compile(r"-?\d{1,20}\.0+")  # a whole number in a table of floats


def fields_beside() -> tuple[str, ...]:
    """Return the fields of a request that are not settings of a video."""
    return ("size", SECONDS.name, *INPUTS, SAME_IMAGE, MODEL.name, SCHEDULER.name, STRENGTH.name, ALLOW_EMPTY.name)


def known_fields() -> tuple[str, ...]:
    """Return all fields of a request."""
    return tuple(dict.fromkeys((*schema(Settings), *fields_beside())))


def given_twice(name: str) -> SettingError:
    """Return the error for a field that stands twice in one request.

    Args:
        name: The field.
    """
    return SettingError(f"{name[:40]} is given twice: give it once", name[:40])


def unique_fields(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raise SettingError where a name stands twice, of which a parser keeps the last alone.

    Args:
        pairs: Its names and values.
    """
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise given_twice(name)
        fields[name] = value
    return fields


@dataclass(frozen=True)
class VideoRequest:
    """A request for a video. Values that were not given are missing.

    Args:
        settings: The given settings, each with its setting's type; a cache and a guidance rule as texts. A size is
            `height` and `width`, or its name as `size`; `seconds` may replace `frames`.
        inputs: File names by input; a list if the input accepts several.
        model: The model; None is the loaded one.
        scheduler: The solver; None is the model's.
        lora: The strengths of LoRAs by name, if they differ from the default.
        row: The number of the request's row in a table; 0 without a table.
    """

    settings: Mapping[str, Any]
    inputs: Mapping[str, str | list[str]] = field(default_factory=dict)
    model: str | None = None
    scheduler: str | None = None
    lora: Mapping[str, float] = field(default_factory=dict)
    row: int = 0

    @classmethod
    def parse(
        cls,
        fields: Mapping[str, Any],
        *,
        row: int = 0,
        accepted: Collection[str] | None = None,
        values: Mapping[str, Setting] = VALUES,
        sizes: Mapping[str, tuple[int, int]] | None = None,
        longest: int | None = None,
        whole: bool = True,
    ) -> "VideoRequest":
        """Parse a request from fields; None means that a field is not given.

        Args:
            fields: Python, JSON or TOML values, or their texts, by name.
            row: The number of the row that they come from.
            accepted: The accepted names; None accepts those of `known_fields`.
            values: The settings, possibly with tighter bounds.
            sizes: A model's sizes, (height, width) by name; None accepts any size that some model may have.
            longest: The maximal length of a prompt from an untrusted source; None does not limit texts.
            whole: False for a part of a request, such as a command's options, which needs no prompt.

        Returns:
            The request.

        Raises:
            SettingError: A field is unknown or wrong; the error has the field's name.
        """
        fields = {name: value for name, value in fields.items() if value is not None}
        names = known_fields() if accepted is None else accepted
        if unknown := [name for name in fields if name not in names]:
            raise unknown_keyword(unknown[0], names)
        check_one_way(fields)
        allow_empty = fields.pop(ALLOW_EMPTY.name, None)
        if allow_empty is not None:
            fields.setdefault("prompt", "")
        if SAME_IMAGE in fields:
            fields[IMAGE.name] = _both(fields.get(IMAGE.name), fields.pop(SAME_IMAGE))
        named = {
            x.name: _value(values[x.name], fields.pop(x.name), longest) for x in (MODEL, SCHEDULER) if x.name in fields
        }
        lora = _strengths(fields.pop(STRENGTH.name, {}))
        inputs = {name: _files(name, fields.pop(name)) for name in INPUTS if name in fields}
        settings: dict[str, Any] = {}
        for name, value in fields.items():
            settings |= _size(value, sizes) if name == "size" else {name: _value(values[name], value, longest)}
        if whole:
            _check_prompt(settings.get("prompt"), allow_empty)
        return cls(settings, inputs, lora=lora, row=row, **named)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "VideoRequest":
        """Return the request in a video's metadata, for any model; raise SettingError for a wrong value.

        Args:
            metadata: The metadata of the video.
        """
        values = {name: value for name, value in metadata.items() if value is not None}
        settings = [one for name, one in schema(Settings).items() if name in values and name not in LOADED]
        return cls(
            {one.name: _in_json(one.read(values[one.name])) for one in settings},
            {name: _files(name, values[name]) for name in INPUTS if values.get(name)},
            scheduler=SCHEDULER.read(values[SCHEDULER.name]) if SCHEDULER.name in values else None,
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that parse to this request, without its row."""
        named = {MODEL.name: self.model, SCHEDULER.name: self.scheduler, STRENGTH.name: self.lora}
        return {**self.settings, **self.inputs, **{name: value for name, value in named.items() if value}}

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON."""
        return {each.name: getattr(self, each.name) for each in dataclass_fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "VideoRequest":
        """Read the output of `to_json`, possibly from a version with other fields.

        Args:
            value: The JSON.
        """
        return cls(**{each.name: value[each.name] for each in dataclass_fields(cls) if each.name in value})

    @property
    def shared(self) -> "VideoRequest":
        """The part of the request that all requests of one run must share."""
        return replace(self, settings={k: x for k, x in self.settings.items() if k not in OWN}, row=0)

    def updated(self, settings: Mapping[str, Any]) -> "VideoRequest":
        """Return the request with some settings replaced.

        Args:
            settings: Values of settings by name.
        """
        return replace(self, settings={**self.settings, **settings})

    def under(self, options: "VideoRequest") -> "VideoRequest":
        """Fill in options where the request gives no value itself, including by an alternative field in `RIVALS`.

        Args:
            options: A request with the defaults.
        """
        stated = set(self.settings)
        for one, others in RIVALS.items():
            stated |= {*others} if one in stated else {one} if stated & {*others} else set()
        settings = {name: value for name, value in options.settings.items() if name not in stated}
        return replace(
            self,
            settings={**settings, **self.settings},
            inputs={**options.inputs, **self.inputs},
            model=self.model or options.model,
            scheduler=self.scheduler or options.scheduler,
            lora={**options.lora, **self.lora},
        )

    def timed(self, fps: int, unit: int) -> "VideoRequest":
        """Replace seconds by the nearest number of frames, `unit`·n + 1.

        Args:
            fps: The frame rate if the request has none.
            unit: The number of frames in a latent frame.
        """
        settings = dict(self.settings)
        if (seconds := settings.pop(SECONDS.name, None)) is None:
            return self
        wanted = seconds * settings.get("fps", fps)
        return replace(self, settings={**settings, "frames": max(0, round((wanted - 1) / unit)) * unit + 1})

    def wrong(self, error: WanjaxError) -> WanjaxError:
        """Prefix an error with the number of the row.

        Args:
            error: The error.
        """
        return WanjaxError(f"row {self.row}: {error}") if self.row else error


@dataclass(frozen=True)
class PreparedRequest:
    """A complete request, ready for a run.

    Args:
        settings: All settings of the video.
        metadata: The metadata for the video's file.
    """

    settings: Settings
    metadata: Mapping[str, Any] = field(default_factory=dict)


def check_one_way(fields: Mapping[str, Any], dashes: str = "") -> None:
    """Raise SettingError if both a size and a side are given, or both seconds and frames.

    Args:
        fields: Values by name; None means not given.
        dashes: The prefix of the names in messages, "--" for options.
    """
    for one, others in RIVALS.items():
        if fields.get(one) is not None and any(fields.get(other) is not None for other in others):
            alternatives = " or ".join(f"{dashes}{other}" for other in others)
            raise SettingError(f"{dashes}{one} is given beside {alternatives}: one way is enough", one)


def _check_prompt(prompt: Any, allow_empty: Any) -> None:
    """Raise SettingError for an empty or missing prompt, unless the request allows it."""
    if not (isinstance(prompt, str) and prompt.strip()) and ALLOW_EMPTY.parse(allow_empty or False) is not True:
        state = "empty" if isinstance(prompt, str) else "missing"
        raise SettingError(f"the prompt is {state}: say what the video shows, or set {ALLOW_EMPTY.name}", "prompt")


def _value(setting: Setting, value: Any, longest: int | None) -> Any:
    """Parse a setting's value; return it as a text if it is neither a text nor a number."""
    name = setting.name
    if isinstance(value, str) and "\0" in value:  # which no metadata and no name of a file holds
        raise SettingError(f"{name} is given as {repr_short(value)} with the character \\0: leave it out", name)
    parsed = setting.parse(_whole(value) if setting.kind is int else value)
    most = longest if longest is None or name in PROMPTS else LONGEST_TEXT
    if most is not None and isinstance(parsed, str) and len(parsed) > most:
        message = f"the {name.replace('_', ' ')} has {len(parsed)} characters where {most} are allowed at most"
        raise SettingError(message, name)
    return _in_json(parsed)


def _in_json(value: Any) -> bool | int | float | str:
    """Return a setting's value as JSON: a cache and a guidance rule as their texts."""
    return value if isinstance(value, bool | int | float | str) else str(value)


def _whole(value: Any) -> Any:
    """Convert 4.0 to 4, since a column of whole numbers with an empty cell holds floats; leave other values."""
    try:
        number = float(value) if isinstance(value, str) and WHOLE.fullmatch(value) else value
        return int(number) if isinstance(number, float) and number.is_integer() else value
    except OverflowError:
        return value


def _size(value: Any, names: Mapping[str, tuple[int, int]] | None) -> dict[str, Any]:
    """Return the settings for a size: (height, width), a text such as 832x480, or one of the names."""
    if isinstance(value, tuple):
        return sides(value, {})
    if names is None and is_text(value):
        return {"size": size} if isinstance(size := read_size(value), str) else sides(size, {})
    if names is not None and is_text(value) and (value in names or pixels(value)):
        return {"size": value} if value in names else sides(value, {})
    height, width = next(iter((names or {}).values()), (480, 832))
    right = f"a text such as '{width}x{height}', or {', '.join(names or ('480p',))}"
    raise SettingError(f"size is given as {repr_short(value)}: give {right}", "size")


def _both(one: Any, other: Any) -> Any:
    """Merge the files of an input that was given by two names."""
    return other if one is None else [one, other]


def _files(name: str, value: Any) -> str | list[str]:
    """Check file names: one, or several if the input accepts them."""
    several = INPUTS[name].kind == "images"
    each = list(value) if several and isinstance(value, list | tuple) else [value]
    for one in each:
        if not isinstance(one, str) or not one or "\0" in one:  # a name may hold bytes that are no text
            raise SettingError(f"{name} is given as {repr_short(one)} where the name of a file is needed", name)
    return each if several else each[0]


def _strengths(strengths: Any) -> dict[str, float]:
    """Parse LoRA strengths from {NAME: STRENGTH}, or from a text such as NAME:0.5,OTHER:1."""
    if isinstance(strengths, str):
        parts = [part.rpartition(":") for part in strengths.split(",") if part]
        strengths = {name: strength for name, _, strength in parts}
    if not isinstance(strengths, Mapping):
        raise SettingError(f"lora is given as {repr_short(strengths)} where a text such as NAME:0.5 is needed", "lora")
    return {name.strip(): STRENGTH.parse(value) for name, value in strengths.items()}
