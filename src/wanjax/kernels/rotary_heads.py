# SPDX-License-Identifier: Apache-2.0
"""TPU kernels for heads between a projection and attention, each with one pass over memory.

XLA lays tokens along the lanes to join the halves of a head, and copies queries and keys back and forth for it. To
split the width of a token into parts for other devices, it copies twice. The kernels here read rows of all heads as a
projection wrote them, swap the halves of a head by a rotation of lanes, and write each part contiguously.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32

from wanjax.kernels.admitted import is_admitted
from wanjax.kernels.alignment import LANES, ceil_div, round_up
from wanjax.kernels.autodiff import with_gradient
from wanjax.kernels.target import target
from wanjax.sharding import TILE, Partitioner, current

ROWS = 256  # tokens at a time: more are no faster, and fewer make transfers too short


def normed_rotary(
    x: Float[Array, "B L E"],
    inverse: Float32[Array, "B L 1"],
    scale: Float32[Array, " E"],
    cos: Float32[Array, "L P"],
    sin: Float32[Array, "L P"],
    *,
    interpret: bool = False,
) -> Float[Array, "B L E"]:
    """Compute x · inverse · scale, then rotate channels p and p + P of each head of 2 P channels by the p-th angle.

    Float32 inside, rounded once to x's dtype. On several devices each computes its tokens, and its heads where heads
    are sharded. `interpret` runs the kernel without a TPU, slowly, for tests.
    """
    if not interpret and (not _runs(x, "normed_rotary") or 2 * cos.shape[1] != LANES):
        return reference(x, inverse, scale, cos, sin)
    partitioner = current()
    batch, length, heads, parts = _placement(partitioner, x, LANES)
    tokens = PartitionSpec(batch, length)
    specs = (PartitionSpec(batch, length, heads), tokens, PartitionSpec(heads), *2 * (PartitionSpec(length),))
    turn = partial(with_gradient, partial(call, parts=parts, interpret=interpret), reference)
    return partitioner.shard_map(turn, specs, specs[0])(x, inverse, scale, cos, sin)


def head_normed_rotary(
    x: Float[Array, "B L E"],
    scale: Float32[Array, " D"],
    bias: Float32[Array, " D"],
    cos: Float32[Array, "L P"],
    sin: Float32[Array, "L P"],
    *,
    eps: float,
    interpret: bool = False,
) -> Float[Array, "B L E"]:
    """Compute the layer norm of each head of x by itself, then rotate as `normed_rotary` does.

    The kernel has heads of 128 channels, and smaller ones of which several fill 128 lanes.
    """
    partitioner, size = current(), len(scale)
    batch, length, heads, parts = _placement(partitioner, x, size)
    shard = x.shape[2] // partitioner.size(heads)
    specification = partial(reference_by_head, eps=eps)
    if not (interpret or _runs(x, "head_normed_rotary")) or LANES % size or shard % LANES:
        return specification(x, scale, bias, cos, sin)
    turn = partial(with_gradient, partial(call_by_head, eps=eps, parts=parts, interpret=interpret), specification)
    vector, table = PartitionSpec(), PartitionSpec(length)
    specs = (PartitionSpec(batch, length, heads), vector, vector, table, table)
    return partitioner.shard_map(turn, specs, specs[0])(x, scale, bias, cos, sin)


def pack_for_all_to_all(x: Float[Array, "B L E"]) -> Float[Array, "B L E"]:
    """Return x, whose heads lie in memory by the device that they are sent to, if an all-to-all is to send them."""
    partitioner = current()
    if not _runs(x, "heads_apart") or x.shape[2] % LANES:
        return x
    batch, length, heads, parts = _placement(partitioner, x, LANES)
    if parts == 1:
        return x
    turn = partial(with_gradient, partial(pack, parts=parts, interpret=False), _identity)
    spec = PartitionSpec(batch, length, heads)
    return partitioner.shard_map(turn, (spec,), spec)(x)


def _runs(x: Array, kernel: str) -> bool:
    """Return whether a program for x's target uses a kernel."""
    return target(x).platform == "tpu" and is_admitted(kernel)


def _placement(partitioner: Partitioner, x: Array, size: int) -> tuple[Any, Any, Any, int]:
    """The mesh axes of batch, tokens and heads of `size` channels, and the parts that an all-to-all sends (1: none)."""
    width, devices = x.shape[2], partitioner.size("tp")
    axes = partitioner.activation(("batch", "length", "heads"), (*x.shape[:2], width // size))
    return *axes, devices if axes[2] is None and width % (LANES * devices) == 0 else 1


def reference(
    x: Float[Array, "B L E"],
    inverse: Float32[Array, "B L 1"],
    scale: Float32[Array, " E"],
    cos: Float32[Array, "L P"],
    sin: Float32[Array, "L P"],
) -> Float[Array, "B L E"]:
    """`normed_rotary` in plain JAX: the specification of the kernel, and its gradient."""
    y = (x.astype(jnp.float32) * inverse * scale[None, None]).reshape(*x.shape[:2], -1, 2 * cos.shape[1])
    return rotated(y, cos, sin).astype(x.dtype).reshape(x.shape)


def reference_by_head(
    x: Float[Array, "B L E"],
    scale: Float32[Array, " D"],
    bias: Float32[Array, " D"],
    cos: Float32[Array, "L P"],
    sin: Float32[Array, "L P"],
    *,
    eps: float,
) -> Float[Array, "B L E"]:
    """`head_normed_rotary` in plain JAX: the specification of the kernel, and its gradient."""
    y = x.astype(jnp.float32).reshape(*x.shape[:2], -1, len(scale))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    y = y * scale[None, None, None] + bias[None, None, None]
    return rotated(y, cos, sin).astype(x.dtype).reshape(x.shape)


def rotated(
    x: Float32[Array, "B L N D"], cos: Float32[Array, "L P"], sin: Float32[Array, "L P"]
) -> Float32[Array, "B L N D"]:
    """Rotate channels p and p + D/2 of each head by the p-th angle of its token."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def call(
    x: Array, inverse: Array, scale: Array, cos: Array, sin: Array, *, parts: int, interpret: bool
) -> Float[Array, "B L E"]:
    """The kernel of `normed_rotary`. It writes `parts` of consecutive heads, each contiguous, for an all-to-all."""
    rows = _height(x.shape[1])
    beside = [pl.BlockSpec((None, rows, 1), lambda b, i: (b, i, 0)), _vector(x.shape[2]), *2 * [_table(rows, cos)]]
    run = _pallas_call(_kernel, x, beside, parts=parts, interpret=interpret, name="normed_rotary")
    return _concatenate(run(x, inverse, scale[None], cos, sin))


def call_by_head(
    x: Array, scale: Array, bias: Array, cos: Array, sin: Array, *, eps: float, parts: int, interpret: bool
) -> Float[Array, "B L E"]:
    """The kernel of `head_normed_rotary`, which writes as that of `normed_rotary` does."""
    beside = [*2 * [_vector(LANES)], *2 * [_table(_height(x.shape[1]), cos)]]
    kernel = partial(_kernel_by_head, size=len(scale), eps=eps)
    run = _pallas_call(kernel, x, beside, parts=parts, interpret=interpret, name="head_normed_rotary")
    scale, bias = (jnp.tile(vector, LANES // len(vector))[None] for vector in (scale, bias))
    return _concatenate(run(x, scale, bias, cos, sin))


def _pallas_call(
    kernel: Callable, x: Array, beside: Sequence[pl.BlockSpec], *, parts: int, interpret: bool, name: str
) -> Callable:
    """A kernel over rows of x, and over the operands beside x, that writes rows in parts."""
    batch, length, width = x.shape
    rows = _height(length)
    return pl.pallas_call(
        kernel,
        grid=(batch, ceil_div(length, rows)),
        in_specs=[_rows(rows, width), *beside],
        out_specs=_rows_of_parts(parts, rows, width),
        out_shape=jax.ShapeDtypeStruct((parts, batch, length, width // parts), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name=name,
    )


def _concatenate(parts: Float[Array, "_N B L E"]) -> Float[Array, "B L _E"]:
    """Join parts along the width. The compiler drops this where the parts are then split again."""
    return jnp.moveaxis(parts, 0, 2).reshape(*parts.shape[1:3], -1)


def _kernel(x_ref, inverse_ref, scale_ref, cos_ref, sin_ref, out_ref):
    cos = jnp.concatenate([cos_ref[...], cos_ref[...]], axis=1)
    sin = jnp.concatenate([-sin_ref[...], sin_ref[...]], axis=1)
    inverse = inverse_ref[...]
    for start in range(0, x_ref.shape[1], LANES):
        head = pl.ds(start, LANES)
        x = x_ref[:, head].astype(jnp.float32) * inverse * scale_ref[:, head]
        part, within = divmod(start, out_ref.shape[2])
        out_ref[part, :, pl.ds(within, LANES)] = (x * cos + pltpu.roll(x, LANES // 2, 1) * sin).astype(out_ref.dtype)


def _kernel_by_head(x_ref, scale_ref, bias_ref, cos_ref, sin_ref, out_ref, *, size: int, eps: float):
    beside = LANES // size  # heads in a row of lanes
    cos = jnp.concatenate(2 * beside * [cos_ref[...]], axis=1)
    sin = jnp.concatenate(beside * [-sin_ref[...], sin_ref[...]], axis=1)
    lane = jax.lax.broadcasted_iota(jnp.int32, cos.shape, 1)
    first_half = lane % size < size // 2

    def mean(x):
        """The mean of each head, at all of its lanes."""
        means = [jnp.sum(jnp.where(lane // size == head, x, 0.0), axis=1, keepdims=True) for head in range(beside)]
        return sum(jnp.where(lane // size == head, means[head] / size, 0.0) for head in range(beside))

    for start in range(0, x_ref.shape[1], LANES):
        x = x_ref[:, pl.ds(start, LANES)].astype(jnp.float32)
        x = x - mean(x)
        x = x * jax.lax.rsqrt(mean(x * x) + eps) * scale_ref[...] + bias_ref[...]
        partner = jnp.where(first_half, pltpu.roll(x, LANES - size // 2, 1), pltpu.roll(x, size // 2, 1))
        part, within = divmod(start, out_ref.shape[2])
        out_ref[part, :, pl.ds(within, LANES)] = (x * cos + partner * sin).astype(out_ref.dtype)


def _identity(x: Array) -> Array:
    """`pack_for_all_to_all` in plain JAX: the values do not change."""
    return x


def pack(x: Float[Array, "B L E"], *, parts: int, interpret: bool = False) -> Float[Array, "B L E"]:
    """The kernel of `pack_for_all_to_all`."""
    width = x.shape[2]

    def kernel(x_ref, out_ref):
        for part in range(parts):
            out_ref[part] = x_ref[:, pl.ds(part * width // parts, width // parts)]

    return _concatenate(_pallas_call(kernel, x, [], parts=parts, interpret=interpret, name="heads_apart")(x))


def join_parts(parts: Float[Array, "_N B L E"], *, interpret: bool = False) -> Float[Array, "B L _E"]:
    """Join parts along the width of each token, after an all-to-all; `interpret` is for tests."""
    count, _, _, width = parts.shape
    if not interpret and (not _runs(parts, "heads_joined") or width % LANES):
        return _concatenate(parts)
    return with_gradient(partial(join, parts=count, interpret=interpret), _concatenate, parts)


def join(x: Float[Array, "_N B L E"], *, parts: int, interpret: bool) -> Float[Array, "B L _E"]:
    """The kernel of `join_parts`."""
    _, batch, length, width = x.shape
    rows = _height(length)

    def kernel(parts_ref, out_ref):
        for part in range(parts):
            out_ref[:, pl.ds(part * width, width)] = parts_ref[part]

    return pl.pallas_call(
        kernel,
        grid=(batch, ceil_div(length, rows)),
        in_specs=[_rows_of_parts(parts, rows, parts * width)],
        out_specs=_rows(rows, parts * width),
        out_shape=jax.ShapeDtypeStruct((batch, length, parts * width), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="heads_joined",
    )(x)


def _height(length: int) -> int:
    """Tokens of one block."""
    return min(ROWS, round_up(length, TILE))


def _vector(width: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, width), lambda b, i: (0, 0))


def _table(rows: int, table: Array) -> pl.BlockSpec:
    return pl.BlockSpec((rows, table.shape[1]), lambda b, i: (i, 0))


def _rows(rows: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, rows, width), lambda b, i: (b, i, 0))


def _rows_of_parts(parts: int, rows: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((parts, None, rows, width // parts), lambda b, i: (0, b, i, 0))
