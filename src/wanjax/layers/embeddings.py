# SPDX-License-Identifier: Apache-2.0
"""Embeddings of scalars."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def sinusoid(t: Float[Array, " B"], channels: int, max_period: float = 10000.0) -> Float32[Array, "B C"]:
    """Cosines, then sines, of `t` at `channels / 2` frequencies from 1 down to above `1 / max_period`, in float32."""
    half = channels // 2
    frequencies = jnp.exp(-jnp.log(max_period) * jnp.arange(half, dtype=jnp.float32) / half)
    angles = t.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
