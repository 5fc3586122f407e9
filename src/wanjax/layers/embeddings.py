# SPDX-License-Identifier: Apache-2.0
"""Embeddings of timesteps and of tokens."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wanjax.errors import WanjaxError, repr_shape
from wanjax.figures import pluralize
from wanjax.layers.mlp import MLP
from wanjax.layers.placement import with_axes

ContextT = TypeVar("ContextT", bound=tuple[Any, ...])

# the timestep of each video, or one timestep for all videos
Timesteps = Float[Array, " B"] | Float[Array, ""] | float | int


def broadcast_timesteps(t: Timesteps, num_videos: int) -> Float[Array, " B"]:
    """Broadcast timesteps to [B], one for each video of the batch. Raises WanjaxError for another number of
    timesteps."""
    if not isinstance(t, jax.Array | np.ndarray | np.generic | float | int):
        raise WanjaxError(f"timesteps must be a number or an array, got {repr_shape(t)}: give one for each video")
    if jnp.shape(t) not in ((), (1,), (num_videos,)):
        problem = f"timesteps {repr_shape(t)} for {pluralize(num_videos, 'video')}"
        raise WanjaxError(f"{problem}: give one number, or one for each video")
    return t if isinstance(t, jax.Array) and t.ndim else jnp.full((num_videos,), t, jnp.float32)


def checked_text(text: Float[Array, "B S E"], width: int) -> Float[Array, "B S E"]:
    """Return encoded prompts. Raises WanjaxError unless they are [B S `width`]."""
    if getattr(text, "ndim", None) != 3 or text.shape[-1] != width:
        problem = f"encoded prompts must be [B S {width}], got {repr_shape(text)}"
        raise WanjaxError(f"{problem}: give the result of this model's text encoder")
    return text


def context_of(
    context: Float[Array, "B S _E"] | ContextT, compute: Callable[[Float[Array, "B S _E"]], ContextT], num_videos: int
) -> ContextT:
    """Return the result of a transformer's method `context`, which is computed if the caller gives encoded prompts.

    Args:
        context: Encoded prompts, or the result of the method.
        compute: The method, for encoded prompts.
        num_videos: The number of videos in the latents.

    Raises:
        WanjaxError: The context is the output of a pipeline's `encode`, or has not a prompt for each video.
    """
    if hasattr(context, "prompt_embeds"):
        raise WanjaxError(f"encoded prompts must be an array, got {repr_shape(context)}: give its prompt_embeds")
    if isinstance(context, tuple):
        return context  # pyright: ignore[reportReturnType]
    if (shape := getattr(context, "shape", ())) and shape[0] != num_videos:
        problem = f"encoded prompts {repr_shape(context)} for {pluralize(num_videos, 'video')}"
        raise WanjaxError(f"{problem}: give a prompt for each video")
    return compute(context)  # pyright: ignore[reportArgumentType]


def check_tokens(tokens: Any) -> None:
    """Raise WanjaxError unless tokens are an array of ids [B S]."""
    if len(getattr(tokens, "shape", ())) != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        problem = f"tokens must be an array of ids [B S], got {repr_shape(tokens)}"
        raise WanjaxError(f"{problem}: pipe.encode_prompts(prompt) encodes a text")


def check_images(images: Any) -> None:
    """Raise WanjaxError unless images are an array [B H W 3]."""
    if len(getattr(images, "shape", ())) != 4 or images.shape[-1] != 3:
        problem = f"images must be an array [B H W 3], got {repr_shape(images)}"
        raise WanjaxError(f"{problem}: pipe.encode(prompt, image=...) encodes a picture")


def sinusoidal_embedding(t: Float[Array, " B"], channels: int, max_period: float = 10000.0) -> Float32[Array, "B C"]:
    """Return the cosines and then the sines of t times each of `channels / 2` frequencies.

    The frequencies decrease from 1 to slightly more than 1 / `max_period`.
    """
    half = channels // 2
    frequencies = jnp.exp(-jnp.log(max_period) * jnp.arange(half, dtype=jnp.float32) / half)
    angles = t.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class TimeEmbed(MLP):
    """An MLP of sinusoidal embeddings of timesteps, in float32. A lower precision would change videos visibly."""

    def __init__(self, channels: int, width: int, rngs: nnx.Rngs):
        """Create the MLP. `channels` is the number of channels of the sinusoidal embedding."""
        features, axes = (channels, width, width), (None, "mlp", "embed")
        super().__init__(features, axes, jax.nn.silu, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)
        self.channels = channels

    def __call__(self, t: Float[Array, " B"]) -> Float32[Array, "B _E"]:
        return super().__call__(sinusoidal_embedding(t, self.channels))


def token_embed(vocab_size: int, width: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Embed:
    """Create a token embedding that returns rows in the dtype of its table. The caller then casts only these rows, not
    the table."""
    init = with_axes(nnx.initializers.normal(1.0), ("vocab", "embed"))
    return nnx.Embed(vocab_size, width, embedding_init=init, dtype=param_dtype, param_dtype=param_dtype, rngs=rngs)
