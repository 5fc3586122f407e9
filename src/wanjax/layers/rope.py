# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings over frames, height and width (Su et al., RoFormer, 2021)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32

from wanjax.errors import WanjaxError, repr_shape
from wanjax.figures import pluralize
from wanjax.kernels import rotary_heads
from wanjax.kernels.rotary_heads import head_normed_rotary, normed_rotary
from wanjax.layers.norms import inverse_rms
from wanjax.sharding import padded_length, shard_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rope:
    """Cosine and sine of the angle of each pair of channels at each token, float32 [L P].

    The first `length` tokens are real. On several devices, zeros are appended, as in `patchify`.
    """

    cos: Any  # an array; JAX's tree functions may replace it by other values
    sin: Any
    length: int = field(metadata={"static": True})


class Angles(NamedTuple):
    """Cosine and sine of the angle of each pair of channels at positions along one axis, float32 [T P]."""

    cos: Float32[np.ndarray | Array, "T P"]
    sin: Float32[np.ndarray | Array, "T P"]


def angles(positions: Sequence[float] | np.ndarray, channels: int, theta: float = 10000.0) -> Angles:
    """Return the angles of `channels` channels at positions along one axis.

    Angles are computed in float64. In float32, the error of the angles at late positions would be larger than the
    rounding error of bfloat16 activations.
    """
    frequencies = theta ** (-np.arange(0, channels, 2, dtype=np.float64) / channels)
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    return Angles(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def rope_3d(
    grid: tuple[int, int, int],
    axes: tuple[int, int, int],
    theta: float = 10000.0,
    *,
    positions: Sequence[Float[np.ndarray, " _L"]] | None = None,
    unrotated: int = 0,
    room: int = 0,
) -> Rope:
    """Return the tables for a `grid` of tokens in the order T, H, W, followed by `unrotated` tokens.

    Args:
        grid: The number of tokens along T, H and W.
        axes: The channels of a head that rotate with each of T, H, W.
        theta: The base of the frequencies.
        positions: The positions along each axis; None counts from 0.
        unrotated: The number of tokens after the grid that do not rotate.
        room: As in `sharding.padded_length`.

    Raises:
        WanjaxError: The grid is not three numbers.
    """
    if not isinstance(grid, tuple) or len(grid) != 3:
        problem = f"a grid must be the numbers of tokens along T, H and W, got {repr_shape(grid)}"
        raise WanjaxError(f"{problem}: give the result of transformer.grid(latents)")
    axis_positions = positions or [np.arange(size) for size in grid]
    return rope_from_angles(
        [angles(x, channels, theta) for x, channels in zip(axis_positions, axes, strict=True)],
        unrotated=unrotated,
        room=room,
    )


def check_rope(rope: Rope, grid: tuple[int, int, int]) -> Rope:
    """Return the tables of RoPE; raise WanjaxError if they are for another number of tokens than the grid's."""
    if getattr(rope, "length", None) != prod(grid):
        other = f"rope for {pluralize(rope.length, 'token')}" if isinstance(rope, Rope) else repr_shape(rope)
        problem = f"latents of {pluralize(prod(grid), 'token')} with {other}"
        raise WanjaxError(f"{problem}: leave rope out, or give the result of transformer.rope for these latents")
    return rope


def rope_from_angles(axis_angles: Sequence[Angles], *, unrotated: int = 0, room: int = 0) -> Rope:
    """Compute the tables for tokens in the order T, H, W from the angles along each axis. The tables end with
    `unrotated` tokens. `room` is that of `sharding.padded_length`.

    If a program calls this function, only the angles are constants or arguments of the program, not the larger tables.
    """
    grid = tuple(len(angles.cos) for angles in axis_angles)

    def table(parts: Iterable[Any], identity: float) -> Float32[Array, "L P"]:
        parts_and_other_axes = zip(parts, ((1, 2), (0, 2), (0, 1)), strict=True)
        expanded = (jnp.expand_dims(jnp.asarray(x), other_axes) for x, other_axes in parts_and_other_axes)
        broadcast = [jnp.broadcast_to(x, (*grid, x.shape[-1])) for x in expanded]
        rows = jnp.concatenate(broadcast, axis=-1).reshape(prod(grid), -1)
        if unrotated:
            rows = jnp.concatenate([rows, jnp.full((unrotated, rows.shape[1]), identity, jnp.float32)])
        return shard_tokens(rows, ("length", None), length=padded_length(len(rows), room=room))

    cos, sin = (x.cos for x in axis_angles), (x.sin for x in axis_angles)
    return Rope(table(cos, 1.0), table(sin, 0.0), prod(grid) + unrotated)


@jax.named_scope("rope")
def norm_and_rope(x: Float[Array, "B L E"], norm: nnx.RMSNorm, rope: Rope) -> Float[Array, "B L E"]:
    """Normalise x over all heads together, then rotate channels p and p + D/2 of each head by the p-th angle.

    The computation is in float32. In checkpoints, channels 2p and 2p + 1 are a pair. When a checkpoint is loaded, the
    columns of the q and k weights are reordered, so that the two channels of a pair are half a head apart. This does
    not change the products of q and k, and the vector unit need not shuffle neighbouring channels.
    """
    assert norm.scale is not None
    return normed_rotary(x, inverse_rms(x, norm.epsilon), norm.scale[...], rope.cos, rope.sin)


@jax.named_scope("rope")
def head_norm_and_rope(
    x: Float[Array, "B L E"], norm: nnx.LayerNorm | nnx.RMSNorm, rope: Rope
) -> Float[Array, "B L E"]:
    """Apply a norm over the channels of each head of x, then rotate as `norm_and_rope` does."""
    assert norm.scale is not None
    bias = norm.bias[...] if isinstance(norm, nnx.LayerNorm) and norm.bias is not None else None
    return head_normed_rotary(x, norm.scale[...], bias, rope.cos, rope.sin, eps=norm.epsilon)


@jax.named_scope("rope")
def apply_rotary(x: Float[Array, "B L N D"], rope: Rope | Angles) -> Float[Array, "B L N D"]:
    """Rotate heads as `norm_and_rope` does. The computation is in float32."""
    return rotary_heads.apply_rotary(x.astype(jnp.float32), jnp.asarray(rope.cos), jnp.asarray(rope.sin)).astype(
        x.dtype
    )
