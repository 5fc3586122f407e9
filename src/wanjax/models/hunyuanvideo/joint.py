# SPDX-License-Identifier: Apache-2.0
"""Two streams of tokens as one sequence for attention, and heads with norms of their own.

On several devices both streams are sharded by tokens. In the joint sequence each device holds its own part of both, so
that joining and dividing send nothing. Attention does not depend on the order of its keys, and RoPE has been applied
before.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Shaped

from wanjax.layers.rope import Rope
from wanjax.sharding import current, spread


def _parts() -> int:
    """The number of parts into which tokens are divided: `sharding.spread` pads to a multiple of it."""
    partitioner = current()
    return 1 if partitioner is None else partitioner.size(("sp", "tp"))


def join(video: Shaped[Array, "B L ..."], text: Shaped[Array, "B S ..."]) -> Shaped[Array, "B L+S ..."]:
    """Joins the tokens of a video and of its text, both padded by `sharding.spread`."""
    both = [x.reshape(x.shape[0], _parts(), -1, *x.shape[2:]) for x in (video, text)]
    return jnp.concatenate(both, axis=2).reshape(video.shape[0], -1, *video.shape[2:])


def divide(joint: Float[Array, "B _L E"], text: int) -> tuple[Float[Array, "B L E"], Float[Array, "B S E"]]:
    """The inverse of `join` for a number of text tokens."""
    batch, length, width = joint.shape
    parts = jnp.split(joint.reshape(batch, _parts(), -1, width), [(length - text) // _parts()], axis=2)
    video, words = (part.reshape(batch, -1, width) for part in parts)
    return video, words


def joint_keys(rope: Rope, text: Bool[Array, "B S"]) -> Bool[Array, "B _L"]:
    """Marks the keys of joint attention: a video's real tokens, and the text tokens in their mask."""
    text = spread(text, ("batch", "length"))
    real = jnp.arange(rope.cos.shape[0]) < rope.length
    return join(jnp.broadcast_to(real, (text.shape[0], len(real))), text)


def normed_heads(x: Float[Array, "B L E"], norm: nnx.RMSNorm, heads: int) -> Float32[Array, "B L N D"]:
    """Normalises each head by itself; float32."""
    return norm(x.reshape(*x.shape[:2], heads, -1))


@jax.named_scope("rope")
def rotated(x: Float32[Array, "B L N D"], rope: Rope) -> Float32[Array, "B L N D"]:
    """Rotates channels p and p + D/2 of each head by the p-th angle of its token."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = rope.cos[None, :, None], rope.sin[None, :, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
