# SPDX-License-Identifier: Apache-2.0
"""Checks of the inputs of a pipeline's stages: images, arrays and settings."""

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from wanjax.errors import SettingError, WanjaxError, repr_short
from wanjax.execution import reject_tracer
from wanjax.figures import pluralize
from wanjax.layers.precision import Precision
from wanjax.layers.tiling import Tiling
from wanjax.media.stage_files import VIDEO_SHAPE_TENSOR
from wanjax.pipelines.settings import DTYPES, Settings, strength_without_video

Shape = tuple[int | None, ...]  # an axis of any size is None
FLOAT_MARGIN = 0.05  # how far frames may be outside of 0 and 1, for example because a resampling filter overshoots


def checked_prompt(prompt: Any) -> str:
    """Return a prompt; raise SettingError if it is None or a list. For other settings, None means the default."""
    if prompt is None:
        raise SettingError('prompt must be a text, got None: give "" for a video without a prompt', "prompt")
    if isinstance(prompt, list | tuple):
        raise SettingError(f"prompt must be one text, got {repr_short(prompt)}: call this for each prompt", "prompt")
    return prompt


def checked_prompt_list(prompts: Any) -> Iterable[Any]:
    """Return a list of prompts; raise WanjaxError for one prompt, and for a value of another type."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):  # a text is a sequence too, of letters
        raise WanjaxError(f"prompts must be a list, got {repr_short(prompts)}: call pipe(prompt) for one prompt")
    return prompts


def checked_prompt_text(prompt: Any) -> str:
    """Return a prompt; raise WanjaxError if it is not a text."""
    if not isinstance(prompt, str):
        raise WanjaxError(f"the prompt must be a text, got {repr_short(prompt)}: give one, such as 'a red circle'")
    return prompt


def check_settings_type(settings: Any) -> None:
    """Raise WanjaxError unless a value is `Settings`."""
    if not isinstance(settings, Settings):
        raise WanjaxError(
            f"settings must be a wanjax.Settings, got {repr_short(settings)}: pipe.settings() returns one"
        )


def check_flag(value: Any, name: str) -> None:
    """Raise WanjaxError unless the value of a keyword is True or False."""
    if not isinstance(value, bool):
        raise WanjaxError(f"{name} must be True or False, got {repr_short(value)}")


def check_function(function: Any, name: str, *arguments: str) -> None:
    """Raise WanjaxError unless a value is None or a function that takes these arguments.

    Args:
        function: The value.
        name: The name of the keyword whose value it is.
        arguments: Words for each argument of the function, such as "a Step".
    """
    if function is None:
        return
    requirement = f"{name} must be a function that takes {' and '.join(arguments)}"
    if not callable(function):
        raise WanjaxError(f"{requirement}, got {repr_short(function)}")
    try:
        parameters = signature(function)
    except (TypeError, ValueError):  # a function written in C has no signature
        return
    try:
        parameters.bind(*arguments)
    except TypeError as error:
        count = "one argument" if len(arguments) == 1 else f"{len(arguments)} arguments"
        raise WanjaxError(f"{requirement}, got one with the parameters {parameters}: write it with {count}") from error


def on_host(pictures: Any) -> Any:
    """Convert JAX arrays to NumPy arrays, also inside lists; return anything else unchanged.

    Raises WanjaxError for an array that is being traced.
    """
    if isinstance(pictures, jax.Array):
        reject_tracer(pictures)
        return np.asarray(pictures)
    return [on_host(x) for x in pictures] if isinstance(pictures, list | tuple | Generator) else pictures


def check_noise(noise: Any, expected: tuple[int, ...], name: str = "noise") -> None:
    """Raise WanjaxError unless noise is a float array of the expected shape."""
    _check_floats(f"the {name}", noise, f"an array {list(expected)}")
    if noise.shape != expected:
        raise WanjaxError(f"the {name} of this video must have the shape {list(expected)}, got {list(noise.shape)}")


def check_latents(latents: Any, channels: int) -> None:
    """Raise WanjaxError unless latents are a float array for one video with this number of channels."""
    expected = f"[1, {channels}, T, H, W]"
    _check_floats("the latents", latents, f"an array {expected}")
    batch, count, *sides = latents.shape if latents.ndim == 5 else (0, 0, 0)
    if (batch, count) != (1, channels) or 0 in sides:
        raise WanjaxError(f"the latents of one video must have the shape {expected}, got {list(latents.shape)}")


def check_modalities(latents: Any, extra_modalities: Collection[str], model: str) -> None:
    """Raise WanjaxError unless latents are a mapping with the model's modalities, or one array if it has only one."""
    modalities = sorted(latents) if isinstance(latents, Mapping) else []
    if modalities != (expected := sorted(["video", *extra_modalities]) if extra_modalities else []):
        actual_modalities, model_modalities = (" and ".join(names) or "one array" for names in (modalities, expected))
        raise WanjaxError(
            f"the latents of {model} must be {model_modalities}, got {actual_modalities}: give the output of denoise"
        )


def check_conditioning_type(conditioning: Any, kind: type) -> None:
    """Raise WanjaxError unless a value is the output of `encode` of the same kind of model."""
    if not isinstance(conditioning, kind):
        raise WanjaxError(f"denoise needs the {kind.__name__} of `encode`, got {repr_short(conditioning)}")
    optional: Collection[str] = conditioning._field_defaults  # pyright: ignore[reportAttributeAccessIssue]
    for name, value in zip(conditioning._fields, conditioning, strict=True):  # pyright: ignore
        if not (hasattr(value, "shape") or (value is None and name in optional)):
            raise WanjaxError(f"the {name} of the prompt must be an array, got {repr_short(value)}: encode again")


def check_num_prompts(conditioning: Any, num_videos: int) -> None:
    """Raise WanjaxError unless the output of `encode` has one prompt for each video."""
    if (count := len(conditioning[0])) != num_videos:
        problem = f"the conditioning has {pluralize(count, 'prompt')}, and the call has {pluralize(num_videos, 'seed')}"
        raise WanjaxError(f"{problem}: give as many seeds, or make several videos by pipe(prompt, seeds=[1, 2])")


class FieldShape(NamedTuple):
    """The expected shape of a field of `encode`'s output.

    Args:
        shape: The shape; None for an axis of any size.
        optional: True if the field may be None.
    """

    shape: Shape
    optional: bool = False


def check_conditioning(conditioning: Any, shapes: Mapping[str, FieldShape], model: str, task: str) -> None:
    """Raise WanjaxError unless the fields of `encode`'s output fit a video.

    Args:
        conditioning: A named tuple. Fields without a default belong to prompts: features [B S E] must be floats, and
            masks [B S] may have any type. Fields with a default belong to images. Each must be None unless `shapes` has
            its name.
        shapes: The expected shapes, by field.
        model: The model's name.
        task: The model's task.
    """
    for name, expected in shapes.items():
        array = getattr(conditioning, name)
        if array is None and not expected.optional:
            raise WanjaxError(f"{name} is missing, which {task} needs: encode the pictures with the prompt")
        is_features = len(expected.shape) > 2 and name not in conditioning._field_defaults
        if array is None or (
            _shape_matches(array.shape, expected.shape) and not (is_features and not _is_floats(array))
        ):
            continue
        expected_shape = ", ".join("any" if n is None else str(n) for n in expected.shape)
        if name in conditioning._field_defaults:
            raise WanjaxError(
                f"the {name} of this video must have the shape [{expected_shape}], got {list(array.shape)}: encode "
                "again, with the size and the frames of the video"
            )
        kind = "floats " * is_features
        raise WanjaxError(
            f"the {name} of {model} must be {kind}[{expected_shape}], got {array.dtype} {list(array.shape)}: "
            "encode the prompt with this model"
        )
    for name in conditioning._field_defaults:
        if getattr(conditioning, name) is not None and name not in (*shapes, VIDEO_SHAPE_TENSOR):
            raise WanjaxError(f"{name} is set, but {task} does not use it: encode the prompt alone")


def _is_floats(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _shape_matches(shape: tuple[int, ...], expected: Shape) -> bool:
    return len(shape) == len(expected) and all(b in (a, None) for a, b in zip(shape, expected, strict=True))


def check_frames(frames: Any) -> None:
    """Raise WanjaxError unless frames are an array, or a list of arrays of one shape, in uint8 or floats."""
    is_list = isinstance(frames, Sequence) and not isinstance(frames, str | bytes)
    arrays: list[Any] = list(frames) if is_list else [frames]
    rank = 3 if is_list else 4
    expected = "uint8 [T, H, W, 3], or floats from 0 to 1"
    if not arrays or not all(isinstance(x, np.ndarray | jax.Array) for x in arrays):
        raise WanjaxError(f"frames must be {expected}, got {repr_short(frames)}")
    for array in arrays:
        reject_tracer(array)
    first = arrays[0]
    is_bytes_or_floats = first.dtype == jnp.uint8 or jnp.issubdtype(first.dtype, jnp.floating)
    if first.ndim != rank or first.shape[-1] != 3 or not is_bytes_or_floats:
        raise WanjaxError(f"frames must be {expected}, got {first.dtype} {list(first.shape)}")
    if first.dtype != jnp.uint8:
        low, high = min(float(x.min()) for x in arrays), max(float(x.max()) for x in arrays)
        if not (low >= -FLOAT_MARGIN and high <= 1 + FLOAT_MARGIN):
            raise WanjaxError(f"frames must be {expected}, got floats from {low:g} to {high:g}")
    if any(x.shape != first.shape for x in arrays):
        raise WanjaxError("all frames of a video must have the same size, got different sizes")


def check_frame_dtype(dtype: Any) -> None:
    """Raise WanjaxError unless frames can have this type: uint8, or floats."""
    try:
        is_valid = jnp.dtype(dtype) == jnp.uint8 or jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        is_valid = False
    if not is_valid:
        raise WanjaxError(f"the dtype of frames must be uint8, or floats such as float32, got {repr_short(dtype)}")


def check_tiling(tiling: Any, vae: Any, unit: int | None = None) -> Tiling | None:
    """Fill in the defaults of a tiling for an autoencoder; return None for no tiling.

    Raises WanjaxError for another type, and for tiles that are not multiples of `unit` pixels. If `unit` is None, it is
    the size of a latent position.
    """
    if not isinstance(tiling, Tiling | None):
        raise WanjaxError(f"tiling must be a wanjax.Tiling() or None, got {repr_short(tiling)}")
    return tiling and tiling.with_defaults(vae.tiling, unit or vae.spatial_factor)


def check_strength(settings: Settings, *, has_video: bool, starts_from_video: bool) -> None:
    """Raise SettingError for a strength without an input video, or for a model that always starts from noise."""
    if not has_video:
        raise strength_without_video(settings.strength)
    if not starts_from_video:
        raise SettingError(
            f"a strength of {settings.strength} has no effect on {settings.model}, which starts from noise and uses "
            "the video as a control signal: leave the strength out",
            "strength",
        )


def check_loaded(loaded: Settings, requested: Mapping[str, Any]) -> None:
    """Raise WanjaxError if the requested model, dtype or precision differs from the loaded one."""
    if (model := requested.get("model")) not in (None, loaded.model):
        raise WanjaxError(f"the model of this pipeline is {loaded.model}: call wanjax.load({str(model)!r})")
    if (precision := requested.get("precision")) not in (None, loaded.precision):
        precision = Precision.of(precision)
        other = f"wanjax.load({loaded.model!r}, precision={str(precision)!r})"
        raise WanjaxError(f"this pipeline was loaded with the precision {loaded.precision}: call {other}")
    for role in requested.keys() - {"model", "precision"}:
        name, loaded_name = dtype_name(requested[role], role), getattr(loaded, role)
        if name not in (None, loaded_name):
            load_call = f"wanjax.load({loaded.model!r}, {role}={name!r})"
            raise WanjaxError(f"this pipeline was loaded in {loaded_name}: call {load_call}")


def _check_floats(subject: str, x: Any, expected: str) -> None:
    if not isinstance(x, np.ndarray | jax.Array):
        raise WanjaxError(f"{subject} must be {expected}, got {repr_short(x)}")
    reject_tracer(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise WanjaxError(f"{subject} must be floats, got {x.dtype}")


def dtype_name(dtype: DTypeLike | None, role: str = "dtype") -> str | None:
    """Return the name of a dtype; return None for None.

    Args:
        dtype: A name, or a dtype of JAX or NumPy.
        role: The name of the argument, for the error.

    Raises:
        WanjaxError: The dtype is not in `DTYPES`.
    """
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except (TypeError, ValueError):
        name = str(dtype)
    if name not in DTYPES:
        raise WanjaxError(f"the {role} {name} is not supported: use {' or '.join(DTYPES)}")
    return name
