# SPDX-License-Identifier: Apache-2.0
"""The files that join encode, denoise and decode: settings, encoded inputs, latents; and initial noise.

A stage's file keeps the settings that shaped it, so that files which do not belong together are refused. Every file
appears under its name only when it is complete.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from wanjax.checkpoints.files import SafetensorsFile, save_safetensors
from wanjax.errors import WanjaxError
from wanjax.media.inputs import INPUTS
from wanjax.media.metadata import CONFIG, DIGESTS, EMBEDDINGS, LATENTS, MADE_BY, json_entry, stage_file
from wanjax.stores.writing import writing

STATE = "stage2_state.safetensors"
"""The state of denoising that is not complete."""
PREVIEW = "preview.png"
VIDEO = "output_video.mp4"
PICTURE_SETTINGS = ("height", "width", "frames", "resize", "follow")
"""Settings that shape what is encoded from pictures, beside the pictures."""
VIDEO_STREAM, OF_STREAM = "video", "_latents"  # the video's latents, and the end of the name of another stream's
VIDEO_SHAPE = "video_shape"
"""The frames, height, width and references that pictures were encoded for; the file's settings hold them."""
SURROUNDINGS = {
    "devices",
    "mesh",
    "rules",
    "attention",
    "compiler",
    "batch_guidance",
    "tiling",
    "param_dtype",
    "version",
}
"""Entries of a record on which a video depends only in its last digits, and which differ from machine to machine."""
LARGEST = 2**31
FLOATS = {"floats": jnp.floating}
FLOATS_AND_MASKS = FLOATS | {"integers": jnp.integer, "booleans": jnp.bool_}


def save_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write generation_config.json, which gives the later stages their default settings."""
    text = json.dumps(dict(settings), indent=2, ensure_ascii=False) + "\n"
    with writing(folder / CONFIG) as beside:
        # bytes of a path that are no UTF-8 are surrogates, which become the escapes of JSON
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")


def save_conditioning(
    folder: Path, tensors: Mapping[str, Shaped[Array | np.ndarray, "1 ..."]], settings: Mapping[str, Any]
) -> None:
    """Write the first stage's tensors, each with a first axis of size 1, with the settings that shaped them.

    The prompts always did. The pictures and the video's size did if pictures were given, or if a tensor has the five
    axes of a video; they tell the tensor `VIDEO_SHAPE`, which is not written.
    """
    tensors = {name: x for name, x in tensors.items() if name != VIDEO_SHAPE}
    of_video = any(settings.get(name) for name in INPUTS) or any(x.ndim == 5 for x in tensors.values())
    shaping = ("prompt", "negative_prompt", *((*PICTURE_SETTINGS, *INPUTS) if of_video else ()))
    shaped = {name: settings[name] for name in shaping if name in settings}
    paths = [path for name in INPUTS for path in np.ravel(shaped.get(name) or [])]
    if digests := {path: x for path, x in settings.get(DIGESTS, {}).items() if path in paths}:
        shaped[DIGESTS] = digests
    _save_stage(folder / EMBEDDINGS, tensors, shaped)


def load_conditioning(folder: Path, settings: Mapping[str, Any]) -> dict[str, Shaped[Array, "1 ..."]]:
    """Return the tensors of the folder's first stage; `settings` as `metadata.load_settings` returns them.

    They are floats, or masks of integers or booleans; their names and ranks are the caller's to check.
    Raises WanjaxError if the file is missing or broken, or was made with other prompts or pictures than `settings` say.
    """
    file = _open_stage(folder, EMBEDDINGS, settings)
    return {name: _read(file, name, FLOATS_AND_MASKS) for name in file.specs}


def load_video_shape(folder: Path) -> dict[str, Int[np.ndarray, "1 4"]]:
    """Return the array `VIDEO_SHAPE` of the folder's first stage, by its name.

    Empty for prompts alone, and where another program wrote the file.
    """
    record = json_entry(SafetensorsFile(folder / EMBEDDINGS), "settings")
    shape = [record.get(name) for name in ("frames", "height", "width")]
    if not all(isinstance(n, int) and 0 < n < LARGEST for n in shape):
        return {}
    return {VIDEO_SHAPE: np.array([[*shape, np.size(record.get("references") or [])]], np.int32)}


def save_latents(folder: Path, latents: Any, settings: Mapping[str, Any]) -> None:
    """Write the latents [1 C T H W] of a denoised video, or its streams, with the settings that shaped them."""
    record = {name: value for name, value in settings.items() if name != "fps"}
    streams = dict(latents) if isinstance(latents, Mapping) else {VIDEO_STREAM: latents}
    tensors = {"latents": streams.pop(VIDEO_STREAM), **{f"{name}{OF_STREAM}": x for name, x in streams.items()}}
    _save_stage(folder / LATENTS, tensors, record)


def load_latents(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Return the latents [1 C T H W] of the folder's second stage, or its streams by name, if it has several.

    `settings` are those that `metadata.load_settings` returns. Raises WanjaxError if they are missing, broken, not
    finite, of another rank, or made with other settings.
    """
    file = _open_stage(folder, LATENTS, settings)
    streams = {VIDEO_STREAM: _read(file, "latents", FLOATS, rank=5)}
    for name in file.specs:
        if name.endswith(OF_STREAM):
            streams[name.removesuffix(OF_STREAM)] = _read(file, name, FLOATS)
    if not all(jnp.isfinite(x).all() for x in streams.values()):
        raise WanjaxError(f"{file.path} holds latents that are not finite: `wanjax denoise` has to run again")
    return streams if len(streams) > 1 else streams[VIDEO_STREAM]


def load_noise(path: str | Path, names: Sequence[str] = ("noise",)) -> dict[str, Float[Array, "..."]]:
    """Return the tensors of these names in a safetensors file; raise WanjaxError unless it holds the first of them.

    The first is the initial noise.
    """
    file = SafetensorsFile(path)
    held = [name for name in names[1:] if name in file.specs]
    return {name: _read(file, name, FLOATS, first=None) for name in (names[0], *held)}


def _save_stage(
    path: Path, tensors: Mapping[str, Shaped[Array | np.ndarray, "1 ..."]], record: Mapping[str, Any]
) -> None:
    save_safetensors(path, {name: np.asarray(x) for name, x in tensors.items()}, {"settings": json.dumps(record)})


def _open_stage(folder: Path, name: str, settings: Mapping[str, Any]) -> SafetensorsFile:
    """Open a stage's file; raise WanjaxError if it is missing or was made with other settings than the folder's."""
    file, command = SafetensorsFile(stage_file(folder, name)), MADE_BY[name]
    record = json_entry(file, "settings")
    others = [key for key in INPUTS if record and key not in record]  # that are given in the one alone
    for key, value in (record | dict.fromkeys(others)).items():
        compared = key in settings or (key in INPUTS and value is not None)
        if key == DIGESTS:
            _check_digests(value, settings.get(key), f"{name} and {CONFIG} in {folder}", f"{command} --dir {folder}")
        elif compared and (settings.get(key) or None) != (value or None) and key not in SURROUNDINGS:
            raise WanjaxError(
                f"{name} and {CONFIG} in {folder} do not belong together: {key} is {_short(value)} in the one and "
                f"{_short(settings.get(key))} in the other, so `{command} --dir {folder}` has to run again"
            )
    return file


def _check_digests(first: Any, second: Any, where: str, command: str) -> None:
    """Raise WanjaxError where two records were made from other contents of one file."""
    for path in first if isinstance(first, dict) and isinstance(second, dict) else ():
        if second.get(path, first[path]) != first[path]:
            raise WanjaxError(
                f"{where} do not belong together: {path} had other contents for the one than for the other, so "
                f"`{command}` has to run again"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read(
    file: SafetensorsFile, name: str, kinds: Mapping[str, Any], *, rank: int | None = None, first: int | None = 1
) -> Shaped[Array, "..."]:
    """Return one tensor of these kinds, in bfloat16 where `dtype_info` says that it was before it was stored.

    Raises WanjaxError unless it has `rank` axes, and a first axis of the size `first`; None is any.
    """
    if name not in file.specs:
        raise WanjaxError(f"{file.path} holds no tensor {name!r}, only {', '.join(file.specs) or 'none at all'}")
    shape, dtype = file.specs[name]
    fits = any(jnp.issubdtype(dtype, kind) for kind in kinds.values()) and rank in (None, len(shape))
    if not fits or (first is not None and shape[:1] != (first,)):
        axes = f" of {rank} axes" if rank else ""
        right = f"{' or '.join(kinds)}{axes}{f', with a first axis of size {first}' if first else ''}"
        raise WanjaxError(f"{name!r} in {file.path} is {dtype} {list(shape)}: give {right}")
    was_bfloat16 = "bfloat16" in str(json_entry(file, "dtype_info").get(name))
    return jnp.asarray(file.read(name), jnp.bfloat16 if was_bfloat16 else None)
