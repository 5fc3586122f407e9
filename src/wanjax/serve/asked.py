# SPDX-License-Identifier: Apache-2.0
"""What a request asks for: its fields as settings of the model, and its pictures as files.

The fields are the library's settings by name, and those of OpenAI's videos API: `size` as a text, `seconds`,
`input_reference` and `model`. Everything that can be wrong raises WanjaxError.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from wanjax.errors import SettingError, WanjaxError, shown
from wanjax.media.inputs import INPUTS, InputSpec
from wanjax.media.pictures import DECODING, PictureOfAnySize, opened, picture_of
from wanjax.pipelines.other_names import unknown_keyword
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import ALLOW_EMPTY, DRAW, Setting, Settings, check_prompt_text, pixels
from wanjax.schedulers import name_of
from wanjax.serve.limits import Limits
from wanjax.serve.offer import offered, with_scheduler
from wanjax.serve.variants import Known

FILMS = {b"ftyp": "mp4", b"\x1a\x45\xdf\xa3": "webm"}  # suffixes by what a file has near its start: mov and mkv too
SAME_PICTURE = "input_reference"  # OpenAI's name of `image`
CLIP = "clip"  # the name of the file that is given as `video`, beside which the result has that name
LONGEST_TEXT = 200  # characters of a setting other than the prompts
DATA_URL = re.compile(r"data:[\w/+.-]*;base64,(.*)", re.DOTALL)
SECONDS = Setting("seconds", float, above=0, most=3600)
MODEL, SCHEDULER = Setting("model", str), Setting("scheduler", str)
STRENGTH = Setting("lora", float, least=-10, most=10)
BESIDE = ("size", "seconds", *INPUTS, SAME_PICTURE, "model", "scheduler", "lora", ALLOW_EMPTY.name)
"""Fields that are no settings."""


class Asked(NamedTuple):
    """A request: a model, given settings, pictures by name, each as bytes, a solver, and the LoRAs' strengths."""

    pipe: Pipeline
    settings: Mapping[str, Any]
    pictures: Mapping[str, Sequence[bytes]]
    scheduler: str | None = None
    lora: Mapping[str, float] = {}


def read(fields: Mapping[str, Any], files: Mapping[str, Sequence[bytes]], known: Known, limits: Limits) -> Asked:
    """Reads the fields of a JSON object or a form, and a form's files.

    Raises WanjaxError for a field that is unknown or of another type, and for a picture that is none.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    allow_empty = fields.pop(ALLOW_EMPTY.name, None)
    if allow_empty is not None and "prompt" not in fields:
        fields["prompt"] = ""
    model = known.model(MODEL.read(fields.pop("model", known.first)))
    lora = known.strengths(_strengths(fields.pop("lora", {})))
    pictures = {name: list(given) for name, given in files.items()}
    inputs = inputs_of(model)
    for name in (*inputs, SAME_PICTURE):
        if name in fields:
            pictures.setdefault(name, []).extend(_from_text(name, fields.pop(name)))
    if SAME_PICTURE in pictures:
        pictures.setdefault("image", []).extend(pictures.pop(SAME_PICTURE))
    _check_pictures(pictures, inputs, limits)
    solver = SCHEDULER.read(fields.pop("scheduler")) if "scheduler" in fields else None
    solver = None if solver == name_of(model.scheduler) else solver
    settings = _shape(fields, model)
    _check_text("scheduler", solver, limits)
    for name, value in settings.items():
        _check_text(name, value, limits)
    check_prompt_text(settings.get("prompt"), allow_empty)
    return Asked(model, settings, pictures, solver, lora)


def inputs_of(pipe: Pipeline) -> dict[str, InputSpec]:
    """Returns the inputs that a request may name: those of all models, and the model's own."""
    return {**INPUTS, **{one.name: one for one in pipe.architecture.spec.inputs}}


def _strengths(given: Any) -> dict[str, float]:
    """Returns LoRAs' strengths from {NAME: STRENGTH}, or a text such as NAME:0.5,OTHER:1."""
    if isinstance(given, str):
        parts = [part.rpartition(":") for part in given.split(",") if part]
        given = {name: strength for name, _, strength in parts}
    if not isinstance(given, Mapping):
        raise SettingError(f"lora is given as {shown(given)} where a text such as NAME:0.5 is right", "lora")
    return {name.strip(): STRENGTH.parse(value) for name, value in given.items()}


def _shape(fields: Mapping[str, Any], pipe: Pipeline) -> dict[str, Any]:
    """Returns the settings of a request, each of its type, with `size` and `seconds` resolved."""
    known = offered(pipe)
    settings: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "size":
            settings |= _size(value, fields, pipe)
        elif name in known:
            settings[name] = known[name].parse(value)  # a form's texts and JSON's numbers mean the same
        elif name != "seconds":
            raise unknown_keyword(name, (*known, *BESIDE))
    if "seconds" in fields:
        settings["frames"] = _frames(fields, settings, pipe)
    return settings


def _size(value: Any, fields: Mapping[str, Any], pipe: Pipeline) -> dict[str, Any]:
    """Returns the settings that a size gives: WIDTHxHEIGHT, or the name of one of the model's."""
    if "height" in fields or "width" in fields:
        raise SettingError("size is given beside height or width: one way is enough", "size")
    if isinstance(value, str) and value in pipe.sizes:
        return {"size": value}
    found = pixels(value) if isinstance(value, str) else None
    if found is None:
        names = ", ".join(pipe.sizes)
        right = f"a text such as '832x480', or {names}, is right"
        raise SettingError(f"size is given as {shown(value)} where {right}", "size")
    return dict(zip(("height", "width"), found, strict=True))


def _frames(fields: Mapping[str, Any], settings: Mapping[str, Any], pipe: Pipeline) -> int:
    """Returns the number of frames nearest to `seconds` that the model can make."""
    if "frames" in settings:
        raise SettingError("seconds is given beside frames: one way is enough", "seconds")
    seconds, unit = SECONDS.parse(fields["seconds"]), pipe.architecture.vae.temporal_factor
    wanted = seconds * settings.get("fps", pipe.defaults.fps)
    return max(0, round((wanted - 1) / unit)) * unit + 1


def _check_text(name: str, value: Any, limits: Limits) -> None:
    most = limits.prompt if name in ("prompt", "original_prompt", "negative_prompt", "then") else LONGEST_TEXT
    if isinstance(value, str) and len(value) > most:
        told = f"the {name.replace('_', ' ')} has {len(value)} characters where {most} are allowed at most"
        raise SettingError(told, name)


def _from_text(name: str, value: Any) -> list[bytes]:
    """Returns pictures or clips that JSON holds, as data: URLs, alone, in a list, or as OpenAI's {"image_url": ...}."""
    return [_decoded(name, one) for one in (value[:100] if isinstance(value, list) else [value])]


def _decoded(name: str, value: Any) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("image_url")
    found = DATA_URL.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        told = f"{name} has no file: one in a form or a data: URL is right, and no address is fetched"
        raise SettingError(told, name)
    try:
        return base64.b64decode(found[1], validate=True)
    except binascii.Error as error:
        raise SettingError(f"the data: URL of {name} is no base64: {error}", name) from error


def _check_pictures(pictures: Mapping[str, Sequence[bytes]], inputs: Mapping[str, InputSpec], limits: Limits) -> None:
    for name, given in pictures.items():
        if name not in inputs:
            raise unknown_keyword(name, (*inputs, SAME_PICTURE))
        most = limits.references if inputs[name].kind == "images" else 1
        if len(given) > most:
            raise SettingError(f"{len(given)} files are given as {name} where {most} would do", name)


def save_pictures(
    pictures: Mapping[str, Sequence[bytes]], inputs: Mapping[str, InputSpec], folder: Path, limits: Limits
) -> dict[str, Any]:
    """Writes pictures as PNG files into a folder, and clips as they are; returns their names by input.

    Raises WanjaxError where one is none, or where all pictures are too large together by what their headers say. A clip
    is decoded by whoever reads it, within the bounds of this process.
    """
    saved: dict[str, Any] = {}
    left = limits.picture
    for name, given in pictures.items():
        several, still = inputs[name].kind == "images", inputs[name].kind in ("image", "images")
        for number, data in enumerate(given):
            stem = f"{name}_{number}" if several else CLIP if name == "video" else name
            kind = None if still else _film(data)
            if kind is None:
                with _opened(data, name, left) as image:  # one at a time in this process
                    left -= image.width * image.height
                    kind = str(image.format).lower()
                    if still:
                        kind, data = "png", _png(picture_of(image, name))
            file = f"{stem}.{kind}"
            (folder / file).write_bytes(data)
            saved[name] = [*saved.get(name, []), file] if several else file
    return saved


def _png(picture: PictureOfAnySize) -> bytes:
    Image.fromarray(picture).save(file := BytesIO(), "PNG")
    return file.getvalue()


def _film(data: bytes) -> str | None:
    """Returns the suffix of a film; None for what can only be a picture or an animation."""
    return next((suffix for mark, suffix in FILMS.items() if mark in data[:8]), None)


@contextmanager
def _opened(data: bytes, name: str, pixels: int) -> Iterator[Image.Image]:
    """Opens a picture of one of the formats that a stranger may send; raises SettingError that names the field."""
    try:
        with opened(BytesIO(data), name, pixels=pixels) as image:
            yield image
    except WanjaxError as error:
        raise SettingError(str(error), name) from error


def completed(asked: Asked, files: Mapping[str, Any], limits: Limits) -> Settings:
    """Returns all settings of a request whose pictures are files; raises WanjaxError where they make no video.

    A seed is drawn where none is given.
    """
    pipe = with_scheduler(asked.pipe, asked.scheduler)
    settings, shape = {"seed": DRAW, **asked.settings}, {"height", "width"} & asked.settings.keys()
    if len(shape) == 1:
        alone = shape.pop()
        raise SettingError(f"the {alone} is given alone: size, or height and width, are right", alone)
    limits.check(pipe.defaults.updated(settings))  # before pictures are fitted to it
    try:
        with DECODING:  # the clips of one request at a time are in memory
            _, chosen = pipe.prepare(**files, **settings)
    except WanjaxError as error:
        if (told := _by_field(error, files)) is error:
            raise
        raise told from error
    limits.check(chosen)
    return chosen


def _by_field(error: WanjaxError, files: Mapping[str, Any]) -> WanjaxError:
    """Returns an error that calls a file by its field, where it told the path that the file has here."""
    for name, file in files.items():
        for path in map(str, file if isinstance(file, list) else [file]):
            if path in str(error):
                return SettingError(str(error).replace(path, name), name)
    return error
