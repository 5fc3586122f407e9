# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings over frames, height and width (Su et al., RoFormer, 2021; three axes as in Wan)."""

from dataclasses import dataclass, field
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from wanjax.kernels.heads import normed_rotary
from wanjax.layers.norms import inverse_rms
from wanjax.sharding import spread


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rope:
    """Cosine and sine of the angle of each pair of channels at each token, float32; `length` tokens are real.

    Over several devices there are zeros behind them, as `patchify` has it.
    """

    cos: Float[Array, "_L P"]
    sin: Float[Array, "_L P"]
    length: int = field(metadata={"static": True})


def rope_3d(grid: tuple[int, int, int], axes: tuple[int, int, int], theta: float = 10000.0) -> Rope:
    """Tables for tokens in the order T, H, W of a `grid` of that shape.

    `axes` says how many channels of a head turn with each of T, H, W. Angles are computed in float64: in float32
    those of far positions are off by more than bfloat16 activations are.
    """
    angles = [
        np.arange(size)[:, None] * theta ** (-np.arange(0, channels, 2, dtype=np.float64) / channels)
        for size, channels in zip(grid, axes, strict=True)
    ]

    def table(function: np.ufunc) -> Float[Array, "_L P"]:
        """Of all angles at all tokens; a program that makes it holds but the values along each axis."""
        along = (jnp.asarray(function(angle), jnp.float32) for angle in angles)
        parts = (jnp.expand_dims(x, others) for x, others in zip(along, ((1, 2), (0, 2), (0, 1)), strict=True))
        whole = [jnp.broadcast_to(x, (*grid, x.shape[-1])) for x in parts]
        return spread(jnp.concatenate(whole, axis=-1).reshape(prod(grid), -1), ("length", None))

    return Rope(table(np.cos), table(np.sin), prod(grid))


@jax.named_scope("rope")
def normed_rope(x: Float[Array, "B L N*D"], norm: nnx.RMSNorm, rope: Rope) -> Float[Array, "B L N*D"]:
    """x under a norm over all heads together; in each head channel p is then turned with p + D/2 by the p-th angle.

    All in float32. Checkpoints pair channels 2p and 2p + 1; the converter reorders the columns of the q and k weights
    so that these pairs lie half a head apart: the products of q and k are the same, and a vector unit needs no
    shuffles within pairs.
    """
    assert norm.scale is not None
    return normed_rotary(x, inverse_rms(x, norm.epsilon), norm.scale[...], rope.cos, rope.sin)
