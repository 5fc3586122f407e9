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
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from wanjax.errors import SettingError, WanjaxError
from wanjax.media.inputs import IMAGE, INPUTS, InputSpec, check_inputs
from wanjax.media.pictures import DECODE_LOCK, NoPicture, PictureOfAnySize, open_image, to_picture
from wanjax.pipelines.other_names import unknown_keyword
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.request import MODEL, RIVALS, SAME_IMAGE, VALUES, VideoRequest, fields_beside
from wanjax.pipelines.settings import DRAW, Settings
from wanjax.schedulers import name_of
from wanjax.serve.limits import Limits
from wanjax.serve.model_info import request_settings, with_scheduler
from wanjax.serve.variants import ServedModels

FILMS = {b"ftyp": "mp4", b"\x1a\x45\xdf\xa3": "webm"}  # suffixes by what a file has near its start: mov and mkv too
FILM_NAMES = ("mp4", "mov", "webm", "mkv")
CLIP = "clip"  # the name of the file that is given as `video`, beside which the result has that name
DATA_URL = re.compile(r"data:[\w/+.-]*;base64,(.*)", re.DOTALL)


def read(
    fields: Mapping[str, Any], files: Mapping[str, Sequence[bytes]], models: ServedModels, limits: Limits
) -> tuple[VideoRequest, dict[str, list[bytes]]]:
    """Read the fields of a JSON object or a form, and a form's files.

    Returns a request with its model and the strengths of all LoRAs, and its pictures and clips by input. Raises
    WanjaxError for a field that is unknown or of another type, and for a picture that is none.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    fields.setdefault(MODEL.name, models.first)
    model = models.model(MODEL.read(fields[MODEL.name]))
    pictures, inputs = {name: list(contents) for name, contents in files.items()}, inputs_of(model)
    spec = model.model.spec
    named = [IMAGE.name if name == SAME_IMAGE else name for name in (*pictures, *fields)]
    check_inputs([name for name in named if name in inputs], model.defaults.model, spec.task, spec.inputs)
    for name in (*inputs, SAME_IMAGE):
        if name in fields:
            pictures.setdefault(name, []).extend(_from_text(name, fields.pop(name)))
    if SAME_IMAGE in pictures:
        pictures.setdefault(IMAGE.name, []).extend(pictures.pop(SAME_IMAGE))
    _check_pictures(pictures, inputs, limits)
    names, values = (*request_settings(model), *fields_beside()), limits.bound_settings(VALUES)
    request = VideoRequest.parse(fields, accepted=names, values=values, sizes=model.sizes, longest=limits.prompt)
    solver = None if request.scheduler == name_of(model.scheduler) else request.scheduler
    return replace(request, scheduler=solver, lora=models.strengths(request.lora)), pictures


def inputs_of(pipe: Pipeline) -> dict[str, InputSpec]:
    """Return the inputs that a request may name: those of all models, and the model's own."""
    return {**INPUTS, **{one.name: one for one in pipe.model.spec.inputs}}


def _from_text(name: str, value: Any) -> list[bytes]:
    """Return pictures or clips that JSON holds, as data: URLs, alone, in a list, or as OpenAI's {"image_url": ...}."""
    return [_decoded(name, one) for one in (value[:100] if isinstance(value, list) else [value])]


def _decoded(name: str, value: Any) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("image_url")
    match = DATA_URL.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        problem = f"{name} has no file: send one in a form, or a data: URL; no address is fetched"
        raise SettingError(problem, name)
    try:
        data = base64.b64decode(match[1], validate=True)
    except binascii.Error as error:
        raise SettingError(f"the data: URL of {name} is no base64: {error}", name) from error
    if not data:
        raise empty_file(name)
    return data


def empty_file(name: str) -> SettingError:
    """Return the error for a file of no bytes."""
    return SettingError(f"{name[:40]} is an empty file: send a complete copy of it", name[:40])


def _check_pictures(pictures: Mapping[str, Sequence[bytes]], inputs: Mapping[str, InputSpec], limits: Limits) -> None:
    for name, contents in pictures.items():
        if name not in inputs:
            raise unknown_keyword(name, (*inputs, SAME_IMAGE))
        most = limits.references if inputs[name].kind == "images" else 1
        if len(contents) > most:
            raise SettingError(f"{len(contents)} files are given as {name}: give {most} at most", name)


def save_pictures(
    pictures: Mapping[str, Sequence[bytes]],
    inputs: Mapping[str, InputSpec],
    folder: Path,
    limits: Limits,
    *,
    takes_clips: bool = True,
) -> dict[str, Any]:
    """Write pictures as PNG files into a folder, and clips as they are; return their names by input.

    Raises WanjaxError where one is none, or where all pictures are too large together by what their headers say. That
    for a clip which is given as a picture says where it belongs, if the model `takes_clips`. A clip is decoded by
    whoever reads it, within the bounds of this process.
    """
    saved: dict[str, Any] = {}
    left = limits.picture
    for name, contents in pictures.items():
        several, still = inputs[name].kind == "images", inputs[name].kind in ("image", "images")
        for number, data in enumerate(contents):
            stem = f"{name}_{number}" if several else CLIP if name == "video" else name
            kind = None if still else _film(data)
            if kind is None:
                with _naming(inputs[name], data, takes_clips), open_image(BytesIO(data), name, pixels=left) as image:
                    left -= image.width * image.height  # one at a time in this process
                    kind = str(image.format).lower()
                    if still:
                        kind, data = "png", _png(to_picture(image, name))
            file = f"{stem}.{kind}"
            (folder / file).write_bytes(data)
            saved[name] = [*saved.get(name, []), file] if several else file
    return saved


def _png(picture: PictureOfAnySize) -> bytes:
    Image.fromarray(picture).save(file := BytesIO(), "PNG")
    return file.getvalue()


def _film(data: bytes) -> str | None:
    """Return the suffix of a film; None for what can only be a picture or an animation."""
    return next((suffix for mark, suffix in FILMS.items() if mark in data[:8]), None)


@contextmanager
def _naming(spec: InputSpec, data: bytes, takes_clips: bool) -> Iterator[None]:
    """Raise an error in opening a file as that of its field, and say which file the field takes."""
    try:
        yield
    except NoPicture as error:
        message = str(error)
        if spec.kind in ("clip", "mask"):
            picture = "a picture, " if spec.kind == "mask" else ""
            message = f"{spec.name} is no clip: send {picture}a film ({', '.join(FILM_NAMES)}) or an animation"
        elif takes_clips and (_film(data) or not isinstance(error.__cause__, UnidentifiedImageError)):  # an animation
            message = f"{message}; send a clip as video"
        raise SettingError(message, spec.name) from error
    except WanjaxError as error:
        raise SettingError(str(error), spec.name) from error


@contextmanager
def naming_size(fields: Mapping[str, Any]) -> Iterator[None]:
    """Raise the error of a height or a width as that of the size that gave it."""
    try:
        yield
    except SettingError as error:
        if error.setting in RIVALS["size"] and "size" in fields:
            raise SettingError(str(error), "size") from error
        raise


def complete_settings(request: VideoRequest, pipe: Pipeline, files: Mapping[str, Any], limits: Limits) -> Settings:
    """Return all settings of a request whose pictures are files; raise WanjaxError where they make no video.

    A seed is drawn where none is given.
    """
    pipe = with_scheduler(pipe, request.scheduler)
    request = request.timed(pipe.defaults.fps, pipe.model.vae.temporal_factor)
    settings, shape = {"seed": DRAW, **request.settings}, {"height", "width"} & request.settings.keys()
    if len(shape) == 1:
        alone = shape.pop()
        raise SettingError(f"the {alone} is given alone: give size, or height and width", alone)
    limits.check(pipe.defaults.updated(settings))  # before pictures are fitted to it
    try:
        with DECODE_LOCK:  # the clips of one request at a time are in memory
            _, chosen = pipe.prepare(**files, **settings)
    except WanjaxError as error:
        if (renamed := _by_field(error, files)) is error:
            raise
        raise renamed from error
    limits.check(chosen)
    return chosen


def _by_field(error: WanjaxError, files: Mapping[str, Any]) -> WanjaxError:
    """Return an error that calls a file by its field, where it told the path that the file has here."""
    for name, file in files.items():
        for path in map(str, file if isinstance(file, list) else [file]):
            if path in str(error):
                return SettingError(str(error).replace(path, name), name)
    return error
