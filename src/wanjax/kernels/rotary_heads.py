# SPDX-License-Identifier: Apache-2.0
"""TPU kernels for the steps between a projection and attention: norm, rotary embedding, and packing for an all-to-all.

Each kernel makes one pass over memory. XLA makes more: it swaps the halves of a head by copying queries and keys to a
layout with tokens along the lanes, and back. To split the channels of a token into parts for other devices, XLA copies
twice. The kernels read rows of all heads in the layout of the projection. They swap the halves of a head by a rotation
of lanes, and write each part contiguously.
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
from wanjax.sharding import TILE_ROWS, Partitioner, current_partitioner

MAX_BLOCK_TOKENS = 256  # larger blocks are not faster, and smaller blocks make transfers too short


def normed_rotary(
    x: Float[Array, "B L E"],
    inverse_rms: Float32[Array, "B L 1"],
    scale: Float32[Array, " E"],
    cos: Float32[Array, "L P"],
    sin: Float32[Array, "L P"],
    *,
    interpret: bool = False,
) -> Float[Array, "B L E"]:
    """Compute x · inverse_rms · scale. Then rotate channels p and p + P of each head of 2 P channels by the p-th angle.

    The computation is in float32, and the result is rounded once to x's dtype. If there are several devices, each
    device computes its own tokens and, if heads are sharded, its own heads. If `interpret` is True, the kernel runs
    without a TPU, slowly, for tests.
    """
    if not interpret and (not _uses_kernel(x, "normed_rotary") or 2 * cos.shape[1] != LANES):
        return reference(x, inverse_rms, scale, cos, sin)
    partitioner = current_partitioner()
    batch, length, heads, parts = _sharding_of_heads(partitioner, x.shape, LANES)
    tokens = PartitionSpec(batch, length)
    specs = (PartitionSpec(batch, length, heads), tokens, PartitionSpec(heads), *2 * (PartitionSpec(length),))
    sharded_call = partial(with_gradient, partial(call, parts=parts, interpret=interpret), reference)
    return partitioner.shard_map(sharded_call, specs, specs[0])(x, inverse_rms, scale, cos, sin)


def head_normed_rotary(
    x: Float[Array, "B L E"],
    scale: Float32[Array, " D"],
    bias: Float32[Array, " D"] | None,
    cos: Float32[Array, "L P"],
    sin: Float32[Array, "L P"],
    *,
    eps: float,
    interpret: bool = False,
) -> Float[Array, "B L E"]:
    """Compute the norm of each head of x separately: a layer norm, or an RMS norm if `bias` is None. Then rotate as
    `normed_rotary` does.

    The kernel supports head sizes that divide 128.
    """
    partitioner, head_dim = current_partitioner(), len(scale)
    batch, length, heads, parts = _sharding_of_heads(partitioner, x.shape, head_dim)
    local_width = x.shape[2] // partitioner.axis_size(heads)
    reference_fn = partial(reference_by_head, eps=eps)
    if not (interpret or _uses_kernel(x, "head_normed_rotary")) or LANES % head_dim or local_width % LANES:
        return reference_fn(x, scale, bias, cos, sin)
    sharded_call = partial(
        with_gradient, partial(call_by_head, eps=eps, parts=parts, interpret=interpret), reference_fn
    )
    vector_spec, table_spec = PartitionSpec(), PartitionSpec(length)
    specs = (PartitionSpec(batch, length, heads), vector_spec, vector_spec, table_spec, table_spec)
    return partitioner.shard_map(sharded_call, specs, specs[0])(x, scale, bias, cos, sin)


def pack_for_all_to_all(x: Float[Array, "B L E"]) -> Float[Array, "B L E"]:
    """If an all-to-all will send the heads of x, order them in memory by destination device."""
    partitioner = current_partitioner()
    if not _uses_kernel(x, "heads_apart") or x.shape[2] % LANES:
        return x
    batch, length, heads, parts = _sharding_of_heads(partitioner, x.shape, LANES)
    if parts == 1:
        return x
    sharded_call = partial(with_gradient, partial(pack, parts=parts, interpret=False), _identity)
    spec = PartitionSpec(batch, length, heads)
    return partitioner.shard_map(sharded_call, (spec,), spec)(x)


def parts_for_all_to_all(shape: Sequence[int]) -> int:
    """Return the number of contiguous groups into which an all-to-all splits heads [B L E] of 128 channels. Without an
    all-to-all, return 1."""
    return _sharding_of_heads(current_partitioner(), shape, LANES)[3]


def _uses_kernel(x: Array, kernel: str) -> bool:
    """Return whether programs for the target of x use this kernel."""
    return target(x).platform == "tpu" and is_admitted(kernel)


def _sharding_of_heads(partitioner: Partitioner, shape: Sequence[int], head_dim: int) -> tuple[Any, Any, Any, int]:
    """Return the mesh axes of batch, tokens and heads, and the number of parts that an all-to-all sends (1 without an
    all-to-all)."""
    width, num_devices = shape[2], partitioner.axis_size("tp")
    axes = partitioner.activation_spec(("batch", "length", "heads"), (*shape[:2], width // head_dim))
    return *axes, num_devices if axes[2] is None and width % (LANES * num_devices) == 0 else 1


def reference(
    x: Float[Array, "B L E"],
    inverse_rms: Float32[Array, "B L 1"],
    scale: Float32[Array, " E"],
    cos: Float32[Array, "L P"],
    sin: Float32[Array, "L P"],
) -> Float[Array, "B L E"]:
    """Compute `normed_rotary` in plain JAX. This is the specification of the kernel, and gives its gradient."""
    y = (x.astype(jnp.float32) * inverse_rms * scale[None, None]).reshape(*x.shape[:2], -1, 2 * cos.shape[1])
    return apply_rotary(y, cos, sin).astype(x.dtype).reshape(x.shape)


def reference_by_head(
    x: Float[Array, "B L E"],
    scale: Float32[Array, " D"],
    bias: Float32[Array, " D"] | None,
    cos: Float32[Array, "L P"],
    sin: Float32[Array, "L P"],
    *,
    eps: float,
) -> Float[Array, "B L E"]:
    """Compute `head_normed_rotary` in plain JAX. This is the specification of the kernel, and gives its gradient."""
    y = x.astype(jnp.float32).reshape(*x.shape[:2], -1, len(scale))
    if bias is not None:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps) * scale[None, None, None]
    if bias is not None:
        y = y + bias[None, None, None]
    return apply_rotary(y, cos, sin).astype(x.dtype).reshape(x.shape)


def apply_rotary(
    x: Float32[Array, "B L N D"], cos: Float32[Array, "L P"], sin: Float32[Array, "L P"]
) -> Float32[Array, "B L N D"]:
    """Rotate channels p and p + D/2 of each head by the p-th angle of its token."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def call(
    x: Array, inverse_rms: Array, scale: Array, cos: Array, sin: Array, *, parts: int, interpret: bool
) -> Float[Array, "B L E"]:
    """Call the kernel of `normed_rotary`. The kernel writes `parts` groups of heads for an all-to-all. Each group is
    contiguous."""
    block_tokens = _tokens_per_block(x.shape[1])
    other_specs = [
        pl.BlockSpec((None, block_tokens, 1), lambda b, i: (b, i, 0)),
        _vector_spec(x.shape[2]),
        *2 * [_table_spec(block_tokens, cos)],
    ]
    kernel_call = _pallas_call(
        _normed_rotary_kernel, x, other_specs, parts=parts, interpret=interpret, name="normed_rotary"
    )
    return concatenate_parts(kernel_call(x, inverse_rms, scale[None], cos, sin))


def call_by_head(
    x: Array, scale: Array, bias: Array | None, cos: Array, sin: Array, *, eps: float, parts: int, interpret: bool
) -> Float[Array, "B L E"]:
    """Call the kernel of `head_normed_rotary`, which writes in the layout of `normed_rotary`."""
    vectors = [jnp.tile(vector, LANES // len(scale))[None] for vector in (scale, bias) if vector is not None]
    other_specs = [*2 * [_table_spec(_tokens_per_block(x.shape[1]), cos)], *len(vectors) * [_vector_spec(LANES)]]
    kernel = partial(_head_normed_rotary_kernel, head_dim=len(scale), eps=eps)
    kernel_call = _pallas_call(kernel, x, other_specs, parts=parts, interpret=interpret, name="head_normed_rotary")
    return concatenate_parts(kernel_call(x, cos, sin, *vectors))


def _pallas_call(
    kernel: Callable, x: Array, other_specs: Sequence[pl.BlockSpec], *, parts: int, interpret: bool, name: str
) -> Callable:
    """Build the call of a kernel. The kernel reads rows of x and of other operands, and writes the rows in parts."""
    batch, length, width = x.shape
    block_tokens = _tokens_per_block(length)
    return pl.pallas_call(
        kernel,
        grid=(batch, ceil_div(length, block_tokens)),
        in_specs=[_row_spec(block_tokens, width), *other_specs],
        out_specs=_part_spec(parts, block_tokens, width),
        out_shape=jax.ShapeDtypeStruct((parts, batch, length, width // parts), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name=name,
    )


def concatenate_parts(parts: Float[Array, "_N B L E"]) -> Float[Array, "B L _E"]:
    """Concatenate parts along the channels. If the result is split again, the compiler removes both operations."""
    return jnp.moveaxis(parts, 0, 2).reshape(*parts.shape[1:3], -1)


def _normed_rotary_kernel(x_ref, inverse_rms_ref, scale_ref, cos_ref, sin_ref, out_ref):
    cos = jnp.concatenate([cos_ref[...], cos_ref[...]], axis=1)
    sin = jnp.concatenate([-sin_ref[...], sin_ref[...]], axis=1)
    inverse_rms = inverse_rms_ref[...]
    for start in range(0, x_ref.shape[1], LANES):
        lanes = pl.ds(start, LANES)
        x = x_ref[:, lanes].astype(jnp.float32) * inverse_rms * scale_ref[:, lanes]
        part, offset = divmod(start, out_ref.shape[2])
        out_ref[part, :, pl.ds(offset, LANES)] = (x * cos + pltpu.roll(x, LANES // 2, 1) * sin).astype(out_ref.dtype)


def _head_normed_rotary_kernel(x_ref, cos_ref, sin_ref, scale_ref, *refs: Any, head_dim: int, eps: float):
    *bias_refs, out_ref = refs  # an RMS norm has no bias
    heads_per_row = LANES // head_dim  # heads in a row of lanes
    cos = jnp.concatenate(2 * heads_per_row * [cos_ref[...]], axis=1)
    sin = jnp.concatenate(heads_per_row * [-sin_ref[...], sin_ref[...]], axis=1)
    lane = jax.lax.broadcasted_iota(jnp.int32, cos.shape, 1)
    is_first_half = lane % head_dim < head_dim // 2

    def mean(x):
        """Compute the mean of each head, repeated in all of its lanes."""
        head_means = [
            jnp.sum(jnp.where(lane // head_dim == head, x, 0.0), axis=1, keepdims=True) for head in range(heads_per_row)
        ]
        return sum(
            jnp.where(lane // head_dim == head, head_means[head] / head_dim, 0.0) for head in range(heads_per_row)
        )

    for start in range(0, x_ref.shape[1], LANES):
        x = x_ref[:, pl.ds(start, LANES)].astype(jnp.float32)
        x = x - mean(x) if bias_refs else x
        x = x * jax.lax.rsqrt(mean(x * x) + eps) * scale_ref[...]
        x = x + bias_refs[0][...] if bias_refs else x
        partner = jnp.where(is_first_half, pltpu.roll(x, LANES - head_dim // 2, 1), pltpu.roll(x, head_dim // 2, 1))
        part, offset = divmod(start, out_ref.shape[2])
        out_ref[part, :, pl.ds(offset, LANES)] = (x * cos + partner * sin).astype(out_ref.dtype)


def _identity(x: Array) -> Array:
    """Compute `pack_for_all_to_all` in plain JAX. Packing changes the order in memory, but not the values."""
    return x


def pack(x: Float[Array, "B L E"], *, parts: int, interpret: bool = False) -> Float[Array, "B L E"]:
    """Call the kernel of `pack_for_all_to_all`."""
    width = x.shape[2]

    def kernel(x_ref, out_ref):
        for part in range(parts):
            out_ref[part] = x_ref[:, pl.ds(part * width // parts, width // parts)]

    return concatenate_parts(_pallas_call(kernel, x, [], parts=parts, interpret=interpret, name="heads_apart")(x))


def join_parts(parts: Float[Array, "_N B L E"], *, interpret: bool = False) -> Float[Array, "B L _E"]:
    """After an all-to-all, concatenate the parts of each token's channels. `interpret` is for tests."""
    count, _, _, width = parts.shape
    if not interpret and (not _uses_kernel(parts, "heads_joined") or width % LANES):
        return concatenate_parts(parts)
    return with_gradient(partial(join, parts=count, interpret=interpret), concatenate_parts, parts)


def join(x: Float[Array, "_N B L E"], *, parts: int, interpret: bool) -> Float[Array, "B L _E"]:
    """Call the kernel of `join_parts`."""
    _, batch, length, width = x.shape
    block_tokens = _tokens_per_block(length)

    def kernel(parts_ref, out_ref):
        for part in range(parts):
            out_ref[:, pl.ds(part * width, width)] = parts_ref[part]

    return pl.pallas_call(
        kernel,
        grid=(batch, ceil_div(length, block_tokens)),
        in_specs=[_part_spec(parts, block_tokens, parts * width)],
        out_specs=_row_spec(block_tokens, parts * width),
        out_shape=jax.ShapeDtypeStruct((batch, length, parts * width), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="heads_joined",
    )(x)


def _tokens_per_block(length: int) -> int:
    """Return the number of tokens in a block."""
    return min(MAX_BLOCK_TOKENS, round_up(length, TILE_ROWS))


def _vector_spec(width: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, width), lambda b, i: (0, 0))


def _table_spec(rows: int, table: Array) -> pl.BlockSpec:
    return pl.BlockSpec((rows, table.shape[1]), lambda b, i: (i, 0))


def _row_spec(rows: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, rows, width), lambda b, i: (b, i, 0))


def _part_spec(parts: int, rows: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((parts, None, rows, width // parts), lambda b, i: (0, b, i, 0))
