# SPDX-License-Identifier: Apache-2.0
"""Parse the requests of clients: fields become settings of the model, and pictures become files.

The fields have the names of the library's settings, or come from OpenAI's videos API: `size` as a text, `seconds`,
`input_reference` and `model`. Every invalid field raises WanjaxError.
"""

import base64
import binascii
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from wanjax.errors import SettingError, WanjaxError, comma_list, json_values, near_names, repr_short
from wanjax.jobs.notes import noting_warnings
from wanjax.media.inputs import CLIP_SUFFIXES, IMAGE, INPUT_SPECS, VIDEO, InputSpec, check_inputs
from wanjax.media.pictures import DECODE_LOCK, NotAPictureError, PictureOfAnySize, open_image, to_picture
from wanjax.pipelines.other_names import FIELD_ADVICE, LOAD_KEYWORDS, OUTPUT_NAMES, RENAMED
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.request import (
    ALTERNATIVES,
    FIELD_SETTINGS,
    LORA_STRENGTH,
    MODEL,
    OPENAI_IMAGE,
    SCHEDULER,
    SECONDS,
    VideoRequest,
    other_fields,
)
from wanjax.pipelines.settings import ALLOW_EMPTY, LOAD_SETTINGS, RANDOM_SEED, Settings, schema
from wanjax.schedulers import name_of
from wanjax.serve.limits import Limits
from wanjax.serve.model_info import request_settings, with_scheduler
from wanjax.serve.served_models import ServedModels

# file suffixes by a signature near the start of the file; files of mov and mkv match too
CLIP_SUFFIX_BY_SIGNATURE = {b"ftyp": "mp4", b"\x1a\x45\xdf\xa3": "webm"}
CLIP_STEM = "clip"  # the file stem of the input `video`; the stem `video` would clash with the result, video.mp4
OTHER_FIELDS = {name: SCHEDULER.name for name in ("sampler", "sampler_name", "sample_solver", "solver")} | {
    "generator": "seed=42"
}
"""Fields that other programs use in requests for a video, each with the field to use instead."""
DATA_URL = re.compile(r"data:[\w/+.-]*;base64,(.*)", re.DOTALL)


def read_request(
    fields: Mapping[str, Any], files: Mapping[str, Sequence[bytes]], models: ServedModels, limits: Limits
) -> tuple[VideoRequest, dict[str, list[bytes]]]:
    """Read the fields of a JSON object or a form, and a form's files.

    Args:
        fields: The fields by name.
        files: The contents of the files by field.
        models: The models that the request may name.
        limits: Limits of a request.

    Returns:
        The request, with its model and the strengths of all LoRAs, and the contents of pictures and clips by input.

    Raises:
        WanjaxError: A field is unknown or has a wrong type, or a file is not a picture or clip.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    with json_values():
        return _read_request(fields, files, models, limits)


def _read_request(
    fields: dict[str, Any], files: Mapping[str, Sequence[bytes]], models: ServedModels, limits: Limits
) -> tuple[VideoRequest, dict[str, list[bytes]]]:
    fields.setdefault(MODEL.name, models.default_name)
    model = models.model(MODEL.read(fields[MODEL.name]))
    pictures, inputs = {name: list(contents) for name, contents in files.items()}, inputs_of(model)
    spec = model.model.spec
    input_names = [IMAGE.name if name == OPENAI_IMAGE else name for name in (*pictures, *fields)]
    check_inputs([name for name in input_names if name in inputs], model.model_name, spec.task, spec.inputs)
    _check_names(pictures, fields, model)
    for name in (*inputs, OPENAI_IMAGE):
        if name in fields:
            pictures.setdefault(name, []).extend(_decode_files(name, fields.pop(name)))
    if OPENAI_IMAGE in pictures:
        pictures.setdefault(IMAGE.name, []).extend(pictures.pop(OPENAI_IMAGE))
    _check_counts(pictures, inputs, limits)
    models.check_loras(fields.get(LORA_STRENGTH.name))
    request = VideoRequest.parse(
        fields,
        accepted_names=_accepted_names(model),
        field_settings=limits.limit_settings(FIELD_SETTINGS),
        sizes=model.sizes,
        max_prompt_length=limits.prompt,
    )
    scheduler = None if request.scheduler == name_of(model.scheduler) else request.scheduler
    return replace(request, scheduler=scheduler, lora=models.strengths(request.lora)), pictures


class LargeNumber(str):
    """The text of a JSON number that is too large for a float."""


def check_json_types(fields: Mapping[str, Any]) -> None:
    """Check that numbers and booleans of a JSON object are not texts, as they are in a form.

    `seconds` may be a text, because clients of OpenAI's API send a text.

    Raises:
        SettingError: A number or a boolean is a text.
    """
    for name, value in fields.items():
        setting = ALLOW_EMPTY if name == ALLOW_EMPTY.name else FIELD_SETTINGS.get(name)
        if setting is None or setting is SECONDS or not isinstance(value, str) or isinstance(value, LargeNumber):
            continue
        if setting.kind in (bool, int, float) and value != "random":  # a seed may be "random"
            try:
                parsed_value = setting.parse(value)
            except WanjaxError:  # `VideoRequest.parse` raises it again, with the allowed values
                continue
            message = f"{name} is the text {json.dumps(value[:40])}: send {json.dumps(parsed_value)} without quotes"
            raise SettingError(message, name)


def _accepted_names(pipe: Pipeline) -> list[str]:
    """Return the names of all fields of a request for a model."""
    return list(dict.fromkeys((*request_settings(pipe), *other_fields(), *inputs_of(pipe))))


def _check_names(files: Iterable[str], fields: Iterable[str], pipe: Pipeline) -> None:
    """Check that all fields exist, and that only fields of pictures and clips have files.

    Raises:
        SettingError: A field does not exist for this model, or cannot be a file.
    """
    names, input_names = _accepted_names(pipe), (*inputs_of(pipe), OPENAI_IMAGE)
    for name in (*files, *fields):
        if name not in names:
            raise SettingError(f"{repr_short(name)} is not a field of a request: {_advice(name, names)}", name[:40])
    for name in files:
        if name not in input_names:
            raise SettingError(f"{name} is sent as a file: send it as the text of a field", name)


def _advice(name: str, names: Collection[str]) -> str:
    """Return what to do instead of sending an unknown field."""
    if RENAMED.get(name) in names:
        return f"use {RENAMED[name]}"
    if name in OTHER_FIELDS:
        return f"use {OTHER_FIELDS[name]}"
    if name in OUTPUT_NAMES:
        return "GET /v1/videos/ID/content returns the video; a picture is sent as image, and a clip as video"
    if name in FIELD_ADVICE:
        return FIELD_ADVICE[name]
    if name in LOAD_KEYWORDS:
        value = "; started_with in /v1/models has its value" if name in LOAD_SETTINGS else ""
        return f"it is fixed when the server starts, so leave it out{value}"
    similar = near_names(name, names, 1)
    if name in schema(Settings):
        return "it has no effect for this model, so leave it out" + (f", or use {similar[0]}" if similar else "")
    return f"use {similar[0]}" if similar else f"leave it out, or use {comma_list(names)}"


def inputs_of(pipe: Pipeline) -> dict[str, InputSpec]:
    """Return the inputs that a request may name: the inputs of all models, and additional inputs of this model."""
    return {**INPUT_SPECS, **{spec.name: spec for spec in pipe.model.spec.inputs}}


def _decode_files(name: str, value: Any) -> list[bytes]:
    """Decode the pictures or clips of a JSON field.

    The field has a data: URL, a list of data: URLs, or OpenAI's {"image_url": ...}.
    """
    return [_decode_data_url(name, url) for url in (value[:100] if isinstance(value, list) else [value])]


def _decode_data_url(name: str, value: Any) -> bytes:
    url = value.get("image_url") if isinstance(value, Mapping) else value
    match = DATA_URL.fullmatch(url) if isinstance(url, str) else None
    if match is None:
        is_path = isinstance(url, str) and url.startswith(("/", "~", "\\"))  # a message contains no folders
        message = f"{name} must be a file of a form or a data: URL with base64, got "
        message += "the path of a file" if is_path else repr_short(value)
        raise SettingError(f"{message}: send the file itself, because the server fetches no URL", name)
    try:
        data = base64.b64decode(match[1], validate=True)
    except binascii.Error as error:
        problem = f"the data: URL of {name} is not valid base64 ({error})"
        raise SettingError(f"{problem}: encode the file again", name) from error
    if not data:
        raise empty_file_error(name)
    return data


def empty_file_error(name: str) -> SettingError:
    """Return the error for a file without content."""
    return SettingError(f"{name[:40]} is an empty file: send the complete file", name[:40])


def _check_counts(pictures: Mapping[str, Sequence[bytes]], inputs: Mapping[str, InputSpec], limits: Limits) -> None:
    for name, contents in pictures.items():
        limit = limits.references if inputs[name].kind == "images" else 1
        if len(contents) > limit:
            raise SettingError(f"{name} has {len(contents)} files: send {limit} at most", name)


def save_pictures(
    pictures: Mapping[str, Sequence[bytes]],
    inputs: Mapping[str, InputSpec],
    folder: Path,
    limits: Limits,
    *,
    takes_clips: bool = True,
) -> dict[str, Any]:
    """Write pictures into a folder as PNG files, and write clips unchanged.

    Clips are decoded later, when they are used.

    Args:
        pictures: The contents by input.
        inputs: The inputs.
        folder: The folder.
        limits: Limits of a request. The number of pixels is read from the header of each picture.
        takes_clips: Whether the model takes clips. If a clip was sent as a picture, the error then suggests the field
            for clips.

    Returns:
        The file names by input.

    Raises:
        WanjaxError: A file is not a picture or clip, or all pictures together are too large.
    """
    file_names: dict[str, Any] = {}
    remaining_pixels = limits.picture
    for name, contents in pictures.items():
        takes_several, is_still = inputs[name].kind == "images", inputs[name].kind in ("image", "images")
        for index, data in enumerate(contents):
            stem = file_stem(inputs[name], index)
            suffix = None if is_still else _clip_suffix(data)
            if suffix is None:
                with (
                    _reporting_field_errors(inputs[name], data, takes_clips),
                    open_image(BytesIO(data), name, pixels=remaining_pixels) as image,
                ):
                    remaining_pixels -= image.width * image.height  # only one picture is in memory at a time
                    suffix = str(image.format).lower()
                    if is_still:
                        suffix, data = "png", _encode_png(to_picture(image, name))
            file_name = f"{stem}.{suffix}"
            (folder / file_name).write_bytes(data)
            file_names[name] = [*file_names.get(name, []), file_name] if takes_several else file_name
    return file_names


def file_stem(spec: InputSpec, index: int) -> str:
    """Return the file name, without the suffix, of the picture or clip with this index of an input."""
    return f"{spec.name}_{index}" if spec.kind == "images" else CLIP_STEM if spec.name == VIDEO.name else spec.name


def _encode_png(picture: PictureOfAnySize) -> bytes:
    Image.fromarray(picture).save(file := BytesIO(), "PNG")
    return file.getvalue()


def _clip_suffix(data: bytes) -> str | None:
    """Return the file suffix of a video file. Return None for data that is not a video file, such as a picture."""
    return next((suffix for signature, suffix in CLIP_SUFFIX_BY_SIGNATURE.items() if signature in data[:8]), None)


@contextmanager
def _reporting_field_errors(spec: InputSpec, data: bytes, takes_clips: bool) -> Iterator[None]:
    """Convert an error about opening a file to an error about its field, which says which files the field takes."""
    try:
        yield
    except NotAPictureError as error:
        message = str(error)
        if spec.kind in ("clip", "mask"):
            picture = "a picture, " if spec.kind == "mask" else ""
            suffixes = ", ".join(suffix.removeprefix(".") for suffix in CLIP_SUFFIXES)
            message = f"{spec.name} is not a clip: send {picture}a video file ({suffixes}) or an animation"
        # Pillow can read an animation
        elif takes_clips and (_clip_suffix(data) or not isinstance(error.__cause__, UnidentifiedImageError)):
            message = f"{message}; send clips in the field video"
        raise SettingError(message, spec.name) from error
    except WanjaxError as error:
        raise SettingError(str(error), spec.name) from error


@contextmanager
def reporting_size_errors(fields: Mapping[str, Any]) -> Iterator[None]:
    """Convert an error about height or width to an error about size, if the request contains `size`."""
    try:
        yield
    except SettingError as error:
        if error.setting in ALTERNATIVES["size"] and "size" in fields:
            raise SettingError(str(error), "size") from error
        raise


def complete_settings(
    request: VideoRequest, pipe: Pipeline, files: Mapping[str, Any], limits: Limits
) -> tuple[Settings, list[str]]:
    """Complete the settings of a request, and return the warnings about them. If it has no seed, draw a random seed.

    Args:
        request: The request.
        pipe: The pipeline of its model.
        files: The paths of its pictures and clips, by input.
        limits: Limits of a request.

    Raises:
        WanjaxError: No video can be made with these settings.
    """
    pipe = with_scheduler(pipe, request.scheduler)
    fields, request = request.settings, request.seconds_to_frames(pipe.defaults.fps, pipe.model.vae.temporal_factor)
    settings, sides = {"seed": RANDOM_SEED, **request.settings}, {"height", "width"} & request.settings.keys()
    if len(sides) == 1:
        side = sides.pop()
        raise SettingError(f"{side} is given alone: give size, or both height and width", side)
    notes: list[str] = []
    grid = {"spatial": pipe.model.spec.size_multiple, "temporal": pipe.model.vae.temporal_factor}
    with _reporting_length_errors(fields, pipe):  # checked before pictures are resized to this size
        requested = pipe.defaults.updated(settings)
        limits.check(requested, **grid)
    try:
        with DECODE_LOCK, noting_warnings(notes.append):  # only one request's clips are in memory at a time
            _, complete = pipe.prepare(**files, **settings)
    except WanjaxError as error:
        if (renamed := _with_field_name(error, files)) is error:
            raise
        raise renamed from error
    with _reporting_length_errors(fields, pipe):
        limits.check(complete, **grid)
    return complete, notes


@contextmanager
def _reporting_length_errors(fields: Mapping[str, Any], pipe: Pipeline) -> Iterator[None]:
    """Convert an error about the pixels of a video to an error about its length, if the size is not larger than the
    model's default."""
    try:
        yield
    except SettingError as error:
        length_field = next((name for name in (SECONDS.name, "frames", "windows") if name in fields), None)
        sides = {name: fields.get(name) or getattr(pipe.defaults, name) for name in ("height", "width")}
        if error.setting != "size" or length_field is None or prod(sides.values()) > prod(pipe.defaults.size):
            raise
        raise SettingError(str(error), length_field) from error


def _with_field_name(error: WanjaxError, files: Mapping[str, Any]) -> WanjaxError:
    """Return a copy of an error that names the field instead of the path of the field's file."""
    for name, file in files.items():
        for path in map(str, file if isinstance(file, list) else [file]):
            if path in str(error):
                return SettingError(str(error).replace(path, name), name)
    return error
