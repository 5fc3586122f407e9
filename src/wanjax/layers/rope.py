# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings over frames, height and width (Su et al., RoFormer, 2021; three axes as in Wan)."""

from dataclasses import dataclass, field

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
    positions = np.meshgrid(*(np.arange(size) for size in grid), indexing="ij")
    angles = [
        position.reshape(-1, 1) * theta ** (-np.arange(0, channels, 2, dtype=np.float64) / channels)
        for position, channels in zip(positions, axes, strict=True)
    ]
    angle = np.concatenate(angles, axis=1)
    cos, sin = (spread(jnp.asarray(table, jnp.float32), ("length", None)) for table in (np.cos(angle), np.sin(angle)))
    return Rope(cos, sin, len(angle))


@jax.named_scope("rope")
def normed_rope(x: Float[Array, "B L N*D"], norm: nnx.RMSNorm, rope: Rope) -> Float[Array, "B L N*D"]:
    """x under a norm over all heads together; in each head channel p is then turned with p + D/2 by the p-th angle.

    All in float32. Checkpoints pair channels 2p and 2p + 1; the converter reorders the columns of the q and k weights
    so that these pairs lie half a head apart: the products of q and k are the same, and a vector unit needs no
    shuffles within pairs.
    """
    assert norm.scale is not None
    return normed_rotary(x, inverse_rms(x, norm.epsilon), norm.scale[...], rope.cos, rope.sin)
