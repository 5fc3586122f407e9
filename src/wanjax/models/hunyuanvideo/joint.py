# SPDX-License-Identifier: Apache-2.0
"""The order of text tokens in joint attention, and heads with norms of their own.

RoPE is applied before attention and text has no positions, so a video does not depend on the order of its text. The
real tokens come first: then the tokens that take part are the first ones, and a count of them is all that a kernel
needs.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32

from wanjax.layers.rope import Rope


def real_first(text: Float[Array, "B S E"], mask: Bool[Array, "B S"]) -> Float[Array, "B S E"]:
    """Returns the text with the tokens in the mask before the others, in their order."""
    return jnp.take_along_axis(text, jnp.argsort(~mask, axis=1, stable=True)[:, :, None], axis=1)


def normed_heads(x: Float[Array, "B L E"], norm: nnx.RMSNorm, heads: int) -> Float32[Array, "B L N D"]:
    """Normalises each head by itself; float32."""
    return norm(x.reshape(*x.shape[:2], heads, -1))


@jax.named_scope("rope")
def rotated(x: Float32[Array, "B L N D"], rope: Rope) -> Float32[Array, "B L N D"]:
    """Rotates channels p and p + D/2 of each head by the p-th angle of its token."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = rope.cos[None, :, None], rope.sin[None, :, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
