# SPDX-License-Identifier: Apache-2.0
"""A request for a video.

The command line, the rows of a table and HTTP requests have the same fields, and one function parses them. The fields
are the settings and the names of `other_fields`. Numbers may be texts, because web forms send only texts. This module
does not import JAX, so that a process that only forwards requests occupies no devices.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any

from wanjax.checkpoints.lora_keys import MAX_STRENGTH
from wanjax.errors import RequestError, SettingError, WanjaxError, repr_short
from wanjax.media.inputs import IMAGE, INPUT_SPECS, VIDEO
from wanjax.pipelines.other_names import unknown_keyword
from wanjax.pipelines.settings import (
    ALLOW_EMPTY,
    LOAD_SETTINGS,
    SEAM_SETTINGS,
    Setting,
    Settings,
    is_text,
    parse_pixels,
    parse_size,
    read_size,
    schema,
)

PER_VIDEO = ("prompt", "original_prompt", "seed")  # settings that may differ between the videos of one run
ALTERNATIVES = {"size": ("height", "width"), "seconds": ("frames",)}  # fields that exclude each other
ROW = "row"  # the default noun for a row in messages
OPENAI_IMAGE = "input_reference"  # the name that OpenAI's API has for `image`
MODEL, SCHEDULER = schema(Settings)["model"], Setting("scheduler", str)
SECONDS = Setting("seconds", float, exclusive_minimum=0, maximum=3600)
LORA_STRENGTH = Setting("lora", float, minimum=-MAX_STRENGTH, maximum=MAX_STRENGTH)
FIELD_SETTINGS = {**schema(Settings), **{setting.name: setting for setting in (SECONDS, SCHEDULER)}}
PROMPT_FIELDS = ("prompt", "original_prompt", "negative_prompt", "then")
MAX_TEXT_LENGTH = 200  # the maximum length of untrusted texts other than prompts
WHOLE_FLOAT = re.compile(r"-?\d{1,20}\.0+")  # a whole number in a table of floats


def other_fields() -> tuple[str, ...]:
    """Return the fields of a request that are not settings of a video."""
    inputs = (*INPUT_SPECS, OPENAI_IMAGE)
    return ("size", SECONDS.name, *inputs, MODEL.name, SCHEDULER.name, LORA_STRENGTH.name, ALLOW_EMPTY.name)


def field_names() -> tuple[str, ...]:
    """List the names of all fields of a request."""
    return tuple(dict.fromkeys((*schema(Settings), *other_fields())))


def row_text(row_noun: str, numbers: str, count: int = 1) -> str:
    """Name rows of a table by their numbers, such as "line 2" or "rows 2, 5 below the header".

    Args:
        row_noun: The noun for a row, in the singular.
        numbers: The numbers as text.
        count: How many rows these are.
    """
    noun, space, rest = row_noun.partition(" ")
    return f"{noun}{'s' * (count > 1)} {numbers}{space}{rest}"


def duplicate_field(name: str) -> SettingError:
    """Create the error for a field that occurs twice in one request.

    Args:
        name: The field.
    """
    return SettingError(f"{name[:40]} is given twice: give it once", name[:40])


def unique_fields(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build the dict of a JSON object; raise SettingError for a duplicate name, because `json` accepts duplicates.

    Args:
        pairs: The names and values of the object.
    """
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise duplicate_field(name)
        fields[name] = value
    return fields


@dataclass(frozen=True)
class VideoRequest:
    """A request for a video, with the values that the user gave.

    Args:
        settings: The settings that the user gave, each with its setting's type; a cache and a guidance rule are texts.
            A size is stored as `height` and `width`, or as its name in `size`. `seconds` may replace `frames`.
        inputs: File names by input; an input that accepts several files has a list.
        model: The model; None for the loaded one.
        scheduler: The solver; None uses the model's default.
        lora: The strengths of LoRAs by name, if they differ from the defaults.
        row: The number of the request's row in a table; 0 without a table.
        row_noun: The noun for a row in messages, such as "line".
    """

    settings: Mapping[str, Any]
    inputs: Mapping[str, str | list[str]] = field(default_factory=dict)
    model: str | None = None
    scheduler: str | None = None
    lora: Mapping[str, float] = field(default_factory=dict)
    row: int = 0
    row_noun: str = field(default=ROW, compare=False)

    @classmethod
    def parse(
        cls,
        fields: Mapping[str, Any],
        *,
        row: int = 0,
        row_noun: str = ROW,
        accepted_names: Collection[str] | None = None,
        field_settings: Mapping[str, Setting] = FIELD_SETTINGS,
        sizes: Mapping[str, tuple[int, int]] | None = None,
        max_prompt_length: int | None = None,
        complete: bool = True,
    ) -> "VideoRequest":
        """Parse a request from fields.

        Args:
            fields: Python, JSON or TOML values, or their texts, by name. A value of None counts as missing.
            row: The number of the table's row that holds the fields.
            row_noun: The noun for a row in messages.
            accepted_names: The names of accepted fields; None accepts the names of `field_names`.
            field_settings: The type and bounds of each field. The bounds may be tighter than the bounds of `Settings`.
            sizes: The model's sizes, (height, width) by name; None accepts the sizes of all models.
            max_prompt_length: The maximum length of a prompt from an untrusted source. None sets no limit on any text.
            complete: Whether a prompt is required. Pass False for an incomplete request, such as a command's options.

        Returns:
            The request.

        Raises:
            SettingError: A field is unknown or wrong; the error has the field's name.
        """
        fields = {name: value for name, value in fields.items() if value is not None}
        names = field_names() if accepted_names is None else accepted_names
        if unknown_names := [name for name in fields if name not in names]:
            raise unknown_keyword(unknown_names[0], names, kind="field")
        check_alternatives(fields)
        allow_empty = fields.pop(ALLOW_EMPTY.name, None)
        if allow_empty is not None:
            fields.setdefault("prompt", "")
        if OPENAI_IMAGE in fields:
            fields[IMAGE.name] = _merge_files(fields.get(IMAGE.name), fields.pop(OPENAI_IMAGE))
        model_fields = {
            setting.name: _parse_value(field_settings[setting.name], fields.pop(setting.name), max_prompt_length)
            for setting in (MODEL, SCHEDULER)
            if setting.name in fields
        }
        lora = _parse_lora_strengths(fields.pop(LORA_STRENGTH.name, {}))
        inputs = {name: _parse_files(name, fields.pop(name)) for name in INPUT_SPECS if name in fields}
        settings: dict[str, Any] = {}
        for name, value in fields.items():
            if name == "size":
                settings |= _parse_size(value, sizes)
            else:
                settings[name] = _parse_value(field_settings[name], value, max_prompt_length)
        if complete:
            _check_prompt(settings.get("prompt"), allow_empty)
        return cls(settings, inputs, lora=lora, row=row, row_noun=row_noun, **model_fields)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "VideoRequest":
        """Rebuild a request from a video's metadata, without the model; raise SettingError for a wrong value.

        Args:
            metadata: The metadata of the video.
        """
        values = {name: value for name, value in metadata.items() if value is not None}
        settings = {
            name: _to_json(setting.read(values[name]))
            for name, setting in schema(Settings).items()
            if name in values and name not in LOAD_SETTINGS
        }
        return cls(
            settings,
            {name: _parse_files(name, values[name]) for name in INPUT_SPECS if values.get(name)},
            scheduler=SCHEDULER.read(values[SCHEDULER.name]) if SCHEDULER.name in values else None,
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields from which `parse` makes this request. `row` is not a field."""
        model_fields = {MODEL.name: self.model, SCHEDULER.name: self.scheduler, LORA_STRENGTH.name: self.lora}
        return {**self.settings, **self.inputs, **{name: value for name, value in model_fields.items() if value}}

    def to_json(self) -> dict[str, Any]:
        """Convert the request to JSON."""
        return {x.name: getattr(self, x.name) for x in dataclass_fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "VideoRequest":
        """Read the output of `to_json`, possibly from a version of wanjax with other fields.

        Args:
            value: The JSON.
        """
        return cls(**{x.name: value[x.name] for x in dataclass_fields(cls) if x.name in value})

    @property
    def common(self) -> "VideoRequest":
        """The request without prompt and seed: the part that all requests of one run have in common."""
        return replace(
            self, settings={k: x for k, x in self.settings.items() if k not in PER_VIDEO}, row=0, row_noun=ROW
        )

    def updated(self, settings: Mapping[str, Any]) -> "VideoRequest":
        """Return a copy with some settings replaced.

        Args:
            settings: Values of settings by name.
        """
        return replace(self, settings={**self.settings, **settings})

    def has_effect(self, name: str) -> bool:
        """Return False for a strength without a video, and for a setting of seams in a video of one window.

        Args:
            name: The setting.
        """
        if name not in ("strength", *SEAM_SETTINGS) or VIDEO.name in self.inputs:  # a driving clip has several windows
            return True
        has_windows = (self.settings.get("windows") or 1) > 1 or bool(self.settings.get("then"))
        return has_windows and name in SEAM_SETTINGS

    def with_defaults(self, defaults: "VideoRequest") -> "VideoRequest":
        """Fill in defaults. A default is ignored if the request sets the field, or an alternative from `ALTERNATIVES`.

        Args:
            defaults: A request with the defaults.
        """
        present_names = set(self.settings)
        for name, alternatives in ALTERNATIVES.items():
            if name in present_names:
                present_names.update(alternatives)
            elif present_names & {*alternatives}:
                present_names.add(name)
        settings = {name: value for name, value in defaults.settings.items() if name not in present_names}
        return replace(
            self,
            settings={**settings, **self.settings},
            inputs={**defaults.inputs, **self.inputs},
            model=self.model or defaults.model,
            scheduler=self.scheduler or defaults.scheduler,
            lora={**defaults.lora, **self.lora},
        )

    def seconds_to_frames(self, fps: int, unit: int) -> "VideoRequest":
        """Convert `seconds` to the nearest valid number of frames, `unit`·n + 1.

        Args:
            fps: The frame rate if the request sets none.
            unit: The number of frames per latent frame.

        Raises:
            SettingError: The video has several windows, each of which has the length that `frames` sets.
        """
        settings = dict(self.settings)
        if (seconds := settings.pop(SECONDS.name, None)) is None:
            return self
        if settings.get("windows", 1) > 1 or settings.get("then"):
            problem = "seconds sets the length of a video of one window, and this video has several"
            raise SettingError(f"{problem}: give frames, the length of each window", SECONDS.name)
        frames = seconds * settings.get("fps", fps)
        return replace(self, settings={**settings, "frames": max(0, round((frames - 1) / unit)) * unit + 1})

    @property
    def position(self) -> str:
        """Where the request is in its table, such as "line 2"; empty without a table."""
        return row_text(self.row_noun, str(self.row)) if self.row else ""

    def add_row_number(self, error: WanjaxError) -> WanjaxError:
        """Put the number of the request's row in front of an error's message.

        Args:
            error: The error.
        """
        kind = RequestError if isinstance(error, RequestError) else WanjaxError
        return kind(f"{self.position}: {error}") if self.row else error


@dataclass(frozen=True)
class PreparedRequest:
    """A complete request, ready for a run.

    Args:
        settings: All settings of the video.
        metadata: The metadata for the video's file.
    """

    settings: Settings
    metadata: Mapping[str, Any] = field(default_factory=dict)


def check_alternatives(fields: Mapping[str, Any], name_prefix: str = "") -> None:
    """Raise SettingError if a request sets both `size` and a side, or both `seconds` and `frames`.

    Args:
        fields: Values by name; None counts as missing.
        name_prefix: The prefix of the names in messages, "--" for options.
    """
    for name, alternatives in ALTERNATIVES.items():
        if fields.get(name) is not None and any(fields.get(other) is not None for other in alternatives):
            others = " or ".join(f"{name_prefix}{other}" for other in alternatives)
            raise SettingError(f"{name_prefix}{name} cannot be combined with {others}: give only one of them", name)


def _check_prompt(prompt: Any, allow_empty: Any) -> None:
    """Raise SettingError for an empty or missing prompt, unless the request allows it."""
    allows_empty = allow_empty is not None and ALLOW_EMPTY.parse(allow_empty)
    if not (isinstance(prompt, str) and prompt.strip()) and not allows_empty:
        state = "empty" if isinstance(prompt, str) else "missing"
        raise SettingError(f"the prompt is {state}: describe the video, or set {ALLOW_EMPTY.name}", "prompt")


def _parse_value(setting: Setting, value: Any, max_prompt_length: int | None) -> Any:
    """Parse the value of a setting into JSON."""
    name = setting.name
    if isinstance(value, str) and "\0" in value:  # neither metadata nor file names can hold the character \0
        raise SettingError(f"{name} contains the character \\0, got {repr_short(value)}: remove it", name)
    parsed_value = setting.parse(_whole_to_int(value) if setting.kind is int else value)
    limit = max_prompt_length if max_prompt_length is None or name in PROMPT_FIELDS else MAX_TEXT_LENGTH
    if limit is not None and isinstance(parsed_value, str) and len(parsed_value) > limit:
        message = f"the {name.replace('_', ' ')} has {len(parsed_value)} characters: at most {limit} are allowed"
        raise SettingError(message, name)
    return _to_json(parsed_value)


def _to_json(value: Any) -> bool | int | float | str:
    """Convert a setting's value to JSON: a cache and a guidance rule become texts."""
    return value if isinstance(value, bool | int | float | str) else str(value)


def _whole_to_int(value: Any) -> Any:
    """Convert 4.0 to 4; return other values unchanged. A column of integers with an empty cell holds floats."""
    try:
        number = float(value) if isinstance(value, str) and WHOLE_FLOAT.fullmatch(value) else value
        return int(number) if isinstance(number, float) and number.is_integer() else value
    except OverflowError:
        return value


def _parse_size(value: Any, sizes: Mapping[str, tuple[int, int]] | None) -> dict[str, Any]:
    """Convert a size to settings: (height, width), a text such as 832x480, or a name in `sizes`."""
    if isinstance(value, tuple):
        return parse_size(value, {})
    if sizes is None and is_text(value):
        return {"size": size} if isinstance(size := read_size(value), str) else parse_size(size, {})
    if sizes is not None and is_text(value) and (value in sizes or parse_pixels(value)):
        return {"size": value} if value in sizes else parse_size(value, {})
    height, width = next(iter((sizes or {}).values()), (480, 832))
    names = f"one of {', '.join(sizes)}" if sizes else "the name of one of the model's sizes"
    forms = f"WIDTHxHEIGHT such as '{width}x{height}', or {names}"
    raise SettingError(f"size must be {forms}, got {repr_short(value)}", "size")


def _merge_files(files: Any, more_files: Any) -> Any:
    """Merge the files that a request gives under both names of one input."""
    return more_files if files is None else [files, more_files]


def _parse_files(name: str, value: Any) -> str | list[str]:
    """Check the file names of an input: a list if the input accepts several, else one name."""
    accepts_several = INPUT_SPECS[name].kind == "images"
    files = list(value) if accepts_several and isinstance(value, list | tuple) else [value]
    for file in files:
        if not isinstance(file, str) or not file or "\0" in file:  # a file name may have bytes that are not valid UTF-8
            raise SettingError(f"{name} must be a file name, got {repr_short(file)}", name)
    return files if accepts_several else files[0]


def _parse_lora_strengths(strengths: Any) -> dict[str, float]:
    """Parse LoRA strengths from {NAME: STRENGTH}, or from a text such as NAME:0.5,OTHER:1."""
    if isinstance(strengths, str):
        parts = [part.rpartition(":") for part in strengths.split(",") if part]
        strengths = {name: strength for name, _, strength in parts}
    if not isinstance(strengths, Mapping):
        raise SettingError(f"lora must be a text such as NAME:0.5, got {repr_short(strengths)}", "lora")
    return {name.strip(): LORA_STRENGTH.parse(value) for name, value in strengths.items()}
