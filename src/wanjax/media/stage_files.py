# SPDX-License-Identifier: Apache-2.0
"""The files between the stages encode, denoise and decode: settings, conditioning, latents and initial noise.

The file of a stage has the settings that shaped it. This prevents combining files of different videos. Every file
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
from wanjax.errors import WanjaxError, reason
from wanjax.media.inputs import INPUT_SPECS
from wanjax.media.metadata import (
    CONFIG,
    DIGESTS_KEY,
    EMBEDDINGS_FILE,
    LATENTS_FILE,
    STAGE_COMMANDS,
    json_entry,
    stage_file,
)
from wanjax.media.noise_file import open_noise
from wanjax.stores.writing import atomic_write

STATE_FILE = "stage2_state.safetensors"
"""The state of an interrupted denoising."""
PREVIEW_FILE = "preview.png"
VIDEO_FILE = "output_video.mp4"
PICTURE_SETTINGS = ("height", "width", "frames", "resize", "outpaint", "follow")
"""The settings, in addition to the pictures, that shape the conditioning from pictures."""
VIDEO_MODALITY = "video"  # the latents of this modality are the tensor "latents"
MODALITY_SUFFIX = "_latents"  # suffix of the names of other modalities' tensors
VIDEO_SHAPE_TENSOR = "video_shape"
"""The tensor with the numbers of frames, height, width and references for which pictures were encoded."""
ENVIRONMENT_SETTINGS = {
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
"""Entries of metadata that differ between machines and change a video only by rounding."""
MAX_VIDEO_DIMENSION = 2**31
FLOAT_KINDS = {"floats": jnp.floating}
FLOAT_AND_MASK_KINDS = FLOAT_KINDS | {"integers": jnp.integer, "booleans": jnp.bool_}


def save_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write generation_config.json, from which the later stages take their default settings."""
    text = json.dumps(dict(settings), indent=2, ensure_ascii=False) + "\n"
    with atomic_write(folder / CONFIG) as partial_file:
        # surrogates stand for bytes of a path that are not UTF-8; JSON writes them as escapes
        partial_file.write_text(text, encoding="utf-8", errors="backslashreplace")


def save_conditioning(
    folder: Path, tensors: Mapping[str, Shaped[Array | np.ndarray, "1 ..."]], settings: Mapping[str, Any]
) -> None:
    """Write the conditioning, the output of the first stage, with the settings that shaped it.

    These settings are the prompts. If there are pictures, or if a tensor has the five axes of a video, the settings
    also include the pictures and the video's size. The tensor `VIDEO_SHAPE_TENSOR` is not written, because the settings
    have its values.

    Args:
        folder: The video's folder.
        tensors: Tensors by name, each with a first axis of size 1.
        settings: All settings of the video.
    """
    tensors = {name: x for name, x in tensors.items() if name != VIDEO_SHAPE_TENSOR}
    depends_on_size = any(settings.get(name) for name in INPUT_SPECS) or any(x.ndim == 5 for x in tensors.values())
    setting_names = ("prompt", "negative_prompt", *((*PICTURE_SETTINGS, *INPUT_SPECS) if depends_on_size else ()))
    used_settings = {name: settings[name] for name in setting_names if name in settings}
    paths = [path for name in INPUT_SPECS for path in np.ravel(used_settings.get(name) or [])]
    if digests := {path: x for path, x in settings.get(DIGESTS_KEY, {}).items() if path in paths}:
        used_settings[DIGESTS_KEY] = digests
    _save_stage(folder / EMBEDDINGS_FILE, tensors, used_settings)


def load_conditioning(folder: Path, settings: Mapping[str, Any]) -> dict[str, Shaped[Array, "1 ..."]]:
    """Return the conditioning in a folder: floats, and masks of integers or booleans.

    The caller checks names and ranks. Raises WanjaxError if the file is missing or broken, or if `settings`, the output
    of `metadata.load_settings`, has other prompts or pictures than the file.
    """
    file = _open_stage(folder, EMBEDDINGS_FILE, settings)
    return {name: _read(file, name, FLOAT_AND_MASK_KINDS) for name in file.specs}


def load_video_shape(folder: Path) -> dict[str, Int[np.ndarray, "1 4"]]:
    """Return the tensor `VIDEO_SHAPE_TENSOR` of a folder's conditioning by its name.

    The result is empty if only prompts were encoded, or if another program wrote the file.
    """
    settings = json_entry(_open_file(folder, EMBEDDINGS_FILE), "settings")
    shape = [settings.get(name) for name in ("frames", "height", "width")]
    if not all(isinstance(n, int) and 0 < n < MAX_VIDEO_DIMENSION for n in shape):
        return {}
    return {VIDEO_SHAPE_TENSOR: np.array([[*shape, np.size(settings.get("references") or [])]], np.int32)}


def save_latents(folder: Path, latents: Any, settings: Mapping[str, Any]) -> None:
    """Write latents [1 C T H W], or the latents of several modalities by name, with the settings that shaped them."""
    saved_settings = {name: value for name, value in settings.items() if name != "fps"}
    modalities = dict(latents) if isinstance(latents, Mapping) else {VIDEO_MODALITY: latents}
    tensors = {
        "latents": modalities.pop(VIDEO_MODALITY),
        **{f"{name}{MODALITY_SUFFIX}": x for name, x in modalities.items()},
    }
    _save_stage(folder / LATENTS_FILE, tensors, saved_settings)


def load_latents(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Return the latents [1 C T H W] in a folder, or the latents of several modalities by name.

    Raises WanjaxError if the latents are missing, broken, not finite or of another rank, or if `settings`, the output
    of `metadata.load_settings`, differs from the settings in the file.
    """
    file = _open_stage(folder, LATENTS_FILE, settings)
    modalities = {VIDEO_MODALITY: _read(file, "latents", FLOAT_KINDS, rank=5)}
    for name in file.specs:
        if name.endswith(MODALITY_SUFFIX):
            modalities[name.removesuffix(MODALITY_SUFFIX)] = _read(file, name, FLOAT_KINDS)
    if not all(jnp.isfinite(x).all() for x in modalities.values()):
        raise WanjaxError(f"{file.path} contains latents that are not finite: {_repeat(folder, LATENTS_FILE)}")
    return modalities if len(modalities) > 1 else modalities[VIDEO_MODALITY]


def load_noise(path: str | Path, names: Sequence[str] = ("noise",)) -> dict[str, Float[Array, "..."]]:
    """Return the tensors of these names in a safetensors file.

    The first name is the initial noise, which is required. The other tensors are optional. Raises WanjaxError if the
    initial noise is missing, or if a tensor has values that are not finite floats.
    """
    file = open_noise(path)
    optional_names = [name for name in names[1:] if name in file.specs]
    tensors = {name: _read(file, name, FLOAT_KINDS, first=None) for name in (names[0], *optional_names)}
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise WanjaxError(f"{name!r} in {path} has values that are not finite: generate it again, or leave it out")
    return tensors


def _save_stage(
    path: Path, tensors: Mapping[str, Shaped[Array | np.ndarray, "1 ..."]], settings: Mapping[str, Any]
) -> None:
    save_safetensors(path, {name: np.asarray(x) for name, x in tensors.items()}, {"settings": json.dumps(settings)})


def _open_file(folder: Path, name: str) -> SafetensorsFile:
    """Open a stage's file; raise WanjaxError if it is missing or damaged."""
    path = stage_file(folder, name)
    try:
        return SafetensorsFile(path)
    except WanjaxError as error:
        cause = reason(error.__cause__) if isinstance(error.__cause__, Exception) else error
        advice = _repeat(folder, name)
        raise WanjaxError(f"{path} cannot be read ({cause}): {advice}, or give a complete copy") from error


def _open_stage(folder: Path, name: str, settings: Mapping[str, Any]) -> SafetensorsFile:
    """Open a stage's file; raise WanjaxError if it is missing or was made with other settings than `settings`."""
    file = _open_file(folder, name)
    file_settings = json_entry(file, "settings")
    unused_inputs = [key for key in INPUT_SPECS if file_settings and key not in file_settings]
    for key, value in (file_settings | dict.fromkeys(unused_inputs)).items():
        is_compared = key in settings or (key in INPUT_SPECS and value is not None)
        if key == DIGESTS_KEY:
            _check_digests(value, settings.get(key), f"{name} and {CONFIG} in {folder}", _repeat(folder, name))
        elif is_compared and (settings.get(key) or None) != (value or None) and key not in ENVIRONMENT_SETTINGS:
            raise WanjaxError(
                f"{name} and {CONFIG} in {folder} do not belong together: {key} is {_repr_short(value)} in the first "
                f"and {_repr_short(settings.get(key))} in the second: {_repeat(folder, name)}"
            )
    return file


def _repeat(folder: Path, name: str) -> str:
    """Return advice to run the command that replaces a stage's file."""
    return f"run `{STAGE_COMMANDS[name]} --dir {folder} --force` again"


def _check_digests(first: Any, second: Any, subject: str, advice: str) -> None:
    """Raise WanjaxError if two sets of metadata have different digests for one path."""
    for path in first if isinstance(first, dict) and isinstance(second, dict) else ():
        if second.get(path, first[path]) != first[path]:
            raise WanjaxError(f"{subject} do not belong together: {path} changed between the two: {advice}")


def _repr_short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read(
    file: SafetensorsFile, name: str, kinds: Mapping[str, Any], *, rank: int | None = None, first: int | None = 1
) -> Shaped[Array, "..."]:
    """Read a tensor. If `dtype_info` in the file's metadata says that the tensor was bfloat16 before it was stored,
    return bfloat16.

    Args:
        file: The file.
        name: The tensor's name.
        kinds: The accepted dtypes, by a name for the message.
        rank: The number of axes; None accepts any.
        first: The size of the first axis; None accepts any.

    Raises:
        WanjaxError: The tensor is missing, or its dtype or shape is not accepted.
    """
    if name not in file.specs:
        tensors = f"only {', '.join(file.specs)}" if file.specs else "and no other"
        raise WanjaxError(f"{file.path} contains no tensor {name!r}, {tensors}: give a complete copy of the file")
    shape, dtype = file.specs[name]
    is_valid = any(jnp.issubdtype(dtype, kind) for kind in kinds.values()) and rank in (None, len(shape))
    if not is_valid or (first is not None and shape[:1] != (first,)):
        axes = f" of {rank} axes" if rank else ""
        expected = f"{' or '.join(kinds)}{axes}{f', with a first axis of size {first}' if first else ''}"
        raise WanjaxError(f"{name!r} in {file.path} is {dtype} {list(shape)}: give {expected}")
    was_bfloat16 = "bfloat16" in str(json_entry(file, "dtype_info").get(name))
    return jnp.asarray(file.read(name), jnp.bfloat16 if was_bfloat16 else None)
