# SPDX-License-Identifier: Apache-2.0
"""Checks of the inputs of a pipeline's stages: images, arrays and settings."""

from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from wanjax.errors import SettingError, WanjaxError, repr_short
from wanjax.execution import refuse_traced
from wanjax.layers.tiling import Tiling
from wanjax.media.stage_files import VIDEO_SHAPE
from wanjax.pipelines.settings import DTYPES, Settings

Shape = tuple[int | None, ...]  # None for any size


def check_prompt(prompt: Any) -> str:
    """Return a prompt; raise SettingError if it is None, which for other settings means the default."""
    if prompt is None:
        raise SettingError('prompt is None: give a text, or "" for a video from no prompt', "prompt")
    return prompt


def on_host(pictures: Any) -> Any:
    """Convert JAX arrays to NumPy arrays, also inside lists; return anything else unchanged.

    Raises WanjaxError for an array that is being traced.
    """
    if isinstance(pictures, jax.Array):
        refuse_traced(pictures)
        return np.asarray(pictures)
    return [on_host(x) for x in pictures] if isinstance(pictures, list | tuple | Generator) else pictures


def check_noise(noise: Any, expected: tuple[int, ...], name: str = "noise") -> None:
    """Raise WanjaxError unless noise is a float array of the expected shape."""
    _check_floats(f"the {name} is", noise, f"an array {list(expected)}")
    if noise.shape != expected:
        raise WanjaxError(f"the {name} has the shape {list(noise.shape)} where this video needs {list(expected)}")


def check_latents(latents: Any, channels: int) -> None:
    """Raise WanjaxError unless latents are a float array for one video with this number of channels."""
    expected = f"one video's [1, {channels}, T, H, W]"
    _check_floats("the latents are", latents, expected)
    batch, count, *sides = latents.shape if latents.ndim == 5 else (0, 0, 0)
    if (batch, count) != (1, channels) or 0 in sides:
        raise WanjaxError(f"the latents have the shape {list(latents.shape)}: give {expected}")


def check_streams(latents: Any, others: Collection[str], model: str) -> None:
    """Raise WanjaxError unless latents are a mapping with the model's streams, or one array if it has only one."""
    streams = sorted(latents) if isinstance(latents, Mapping) else []
    if streams != (expected := sorted(["video", *others]) if others else []):
        names, wanted = (" and ".join(names) or "one array" for names in (streams, expected))
        raise WanjaxError(f"the latents are {names}, and those of {model} are {wanted}: give what denoise returns")


def check_conditioning_type(conditioning: Any, kind: type) -> None:
    """Raise WanjaxError unless this is the output of `encode` of the same kind of model."""
    if not isinstance(conditioning, kind):
        raise WanjaxError(f"{repr_short(conditioning)} is given to denoise: give the {kind.__name__} of `encode`")


class FieldShape(NamedTuple):
    """The expected shape of a field of `encode`'s output.

    Args:
        shape: The shape; None for an axis of any size.
        optional: True if the field may be None.
    """

    shape: Shape
    optional: bool = False


def check_conditioning(conditioning: Any, shapes: Mapping[str, FieldShape], model: str, purpose: str) -> None:
    """Raise WanjaxError unless the fields of `encode`'s output fit a video.

    Args:
        conditioning: A named tuple. Fields without a default belong to prompts: features [B S E] must be floats, masks
            [B S] may have any type. Fields with a default belong to images, and must be None unless `shapes` has them.
        shapes: The expected shapes, by field.
        model: The model's name.
        purpose: The model's task.
    """
    for name, expected in shapes.items():
        array = getattr(conditioning, name)
        if array is None and not expected.optional:
            raise WanjaxError(f"there is no {name}, which {purpose} needs: encode the pictures with the prompt")
        features = len(expected.shape) > 2 and name not in conditioning._field_defaults
        if array is None or (_fits(array.shape, expected.shape) and not (features and not _is_floats(array))):
            continue
        wanted = ", ".join("any" if n is None else str(n) for n in expected.shape)
        if name in conditioning._field_defaults:
            raise WanjaxError(
                f"the {name} has the shape {list(array.shape)} where this video needs [{wanted}]: encode again, with "
                "the size and the frames of the video"
            )
        raise WanjaxError(
            f"the {name} are {array.dtype} {list(array.shape)} where {model} has {'floats ' * features}[{wanted}]: "
            "they were made with another model"
        )
    for name in conditioning._field_defaults:
        if getattr(conditioning, name) is not None and name not in (*shapes, VIDEO_SHAPE):
            raise WanjaxError(f"{name} is given, which {purpose} has no use for: encode the prompt alone")


def _is_floats(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _fits(shape: tuple[int, ...], expected: Shape) -> bool:
    return len(shape) == len(expected) and all(b in (a, None) for a, b in zip(shape, expected, strict=True))


def check_frames(frames: Any) -> None:
    """Raise WanjaxError unless frames are an array, or a list of arrays of one shape, of bytes or floats."""
    listed = isinstance(frames, Sequence) and not isinstance(frames, str | bytes)
    arrays: list[Any] = list(frames) if listed else [frames]
    rank = 3 if listed else 4
    expected = "uint8 [T, H, W, 3], or floats from 0 to 1"
    if not arrays or not all(isinstance(x, np.ndarray | jax.Array) for x in arrays):
        raise WanjaxError(f"{repr_short(frames)} is given as frames: give {expected}")
    for array in arrays:
        refuse_traced(array)
    first = arrays[0]
    bytes_or_floats = first.dtype == jnp.uint8 or jnp.issubdtype(first.dtype, jnp.floating)
    if first.ndim != rank or first.shape[-1] != 3 or not bytes_or_floats:
        raise WanjaxError(f"{first.dtype} {list(first.shape)} is given as frames: give {expected}")
    if any(x.shape != first.shape for x in arrays):
        raise WanjaxError("the frames have different sizes: all frames of a video have the same size")


def check_tiling(tiling: Any, vae: Any, unit: int | None = None) -> Tiling | None:
    """Complete a tiling for an autoencoder; return None for whole frames.

    Raises WanjaxError for anything else, and for tiles that are not multiples of `unit` pixels (None: a latent pixel).
    """
    if not isinstance(tiling, Tiling | None):
        raise WanjaxError(f"the tiling is given as {repr_short(tiling)}: give wanjax.Tiling()")
    return tiling and tiling.completed(vae.tiling, unit or vae.spatial_factor)


def check_strength(settings: Settings, *, video: bool, starts_from_video: bool) -> None:
    """Raise SettingError for a strength without a video, or with a model that does not start from one."""
    strength = f"a strength of {settings.strength} is given"
    if not video:
        raise SettingError(
            f"{strength} without a video to begin from: give video (--video) too, or no strength", "strength"
        )
    if not starts_from_video:
        why = f"{settings.model} is only guided by a video, it begins from noise: leave it out"
        raise SettingError(f"{strength} and {why}", "strength")


def check_loaded(loaded: Settings, requested: Mapping[str, Any]) -> None:
    """Raise WanjaxError if the requested model or dtype differs from the loaded one."""
    if (model := requested.get("model")) not in (None, loaded.model):
        raise WanjaxError(f"this pipeline was loaded as {loaded.model}: wanjax.load({str(model)!r}) loads that model")
    for role in requested.keys() - {"model"}:
        name, loaded_name = dtype_name(requested[role], role), getattr(loaded, role)
        if name not in (None, loaded_name):
            other = f"wanjax.load({loaded.model!r}, {role}={name!r})"
            raise WanjaxError(f"this pipeline was loaded in {loaded_name}: {other} loads one in {name}")


def _check_floats(what: str, x: Any, expected: str) -> None:
    if not isinstance(x, np.ndarray | jax.Array):
        raise WanjaxError(f"{what} given as {repr_short(x)}: give {expected}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise WanjaxError(f"{what} {x.dtype}: give floats")


def dtype_name(dtype: DTypeLike | None, role: str = "dtype") -> str | None:
    """Return the name of a dtype, given as a name or as a JAX or NumPy dtype; None for None.

    Raises WanjaxError, with `role` as the dtype's name, for a dtype that is not in `DTYPES`.
    """
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except (TypeError, ValueError):
        name = str(dtype)
    if name not in DTYPES:
        raise WanjaxError(f"the {role} {name} is not offered: {' and '.join(DTYPES)} are")
    return name
