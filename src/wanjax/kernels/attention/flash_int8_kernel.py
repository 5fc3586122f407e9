# SPDX-License-Identifier: Apache-2.0
"""The Pallas kernel of flash_tpu with q kᵀ in int8, and the function that calls it.

The kernel differs from `flash_kernel` in three ways:

1. Queries and keys are int8. The keys of a head have one scale. The kernel quantizes a block of queries when the block
   arrives in VMEM, with a scale for each query. A score is an integer. The score times the query's scale is an exponent
   of two.
2. The offset of the fast path is an integer, and the matrix unit subtracts it. A head of 128 channels fills half of the
   depth of the matrix unit. In the other half, a query has the digits of its offset, and each key has the place values
   of the digits.
3. Weights are bfloat16, so that `exp2` needs half as many registers. The matrix unit also sums the weights, because
   rows of ones are appended to the values.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float32, Int8

from wanjax.kernels.alignment import ceil_div, round_up
from wanjax.kernels.attention.flash_kernel import (
    RUNNING_MAX_FLAG,
    KernelSizes,
    add_to_queries,
    add_with_fallback,
    loop,
    num_compute_blocks,
    positions,
    row_index_map,
    size_of,
    split_rows_by_sublanes,
    strips,
)
from wanjax.kernels.attention.flash_tiles import (
    COMPILER_VMEM_BYTES,
    INT8_REGISTER_ROWS,
    RUNNING_MAX_STEP_Q,
    Config,
)
from wanjax.kernels.attention.masks import divide_or_zero

INT8_MAX = 127  # -128 is not used, so that the range is symmetric
STRIP_Q, STRIP_KV = 256, 256  # queries and keys of one step
PIPELINE_DEPTH = 4  # the scores of this many steps are computed before the values of the first step are added
NUM_ONES_ROWS = 16  # rows of ones that are appended to the values: one register
NUM_SUM_ROWS = 8  # rows with the sums of weights, all equal
MIN_SCALE = 1e-30  # the scale of rows of zeros
PROBE_KV = 256  # the maximum of the first 256 keys sets a row's offset; with more keys, fewer logits exceed it by much
MAX_WEIGHT_SUM = 2.0**32  # for a larger sum, bfloat16 is too coarse for the exponents of two


class SoftmaxRefs(NamedTuple):
    """References to the state of one block of queries, which is updated by each block of keys."""

    q: jax.Ref  # int8 [2·D L]: the queries, and below them the digits of the offset
    scale: jax.Ref  # [1 L]: a score times the scale is an exponent of two; the scale is a bfloat16 number
    offset: jax.Ref  # [1 L]: an integer that is subtracted from scores
    weight_sum: jax.Ref  # [8 L], the sum of weights, repeated in each row
    value_sum: jax.Ref  # [D L], the sum of weighted values
    saved_weight_sum: jax.Ref  # copies of both sums from before this block of keys, to restore them
    saved_value_sum: jax.Ref
    scores: jax.Ref  # [S L], the scores of the next running-max step
    score_max: jax.Ref  # [8 L], the maximum of these scores in eight parts
    flags: jax.Ref


@partial(jax.jit, static_argnames=("sizes", "kv_heads", "head_dim", "config"), inline=True)  # traced only once
def call(
    k_scale: Float32[Array, " _K"],
    q: Array,
    k: Array,
    v: Array,
    *,
    sizes: KernelSizes,
    kv_heads: int,
    head_dim: int,
    config: Config,
) -> Any:
    """Call the kernel over a grid of examples, their heads, blocks of queries and blocks of keys.

    Args:
        k_scale: The scale of the keys of each head of each example.
        q: Queries [B L N·D], bfloat16.
        k: Keys [B S K·D], int8.
        v: Values [B S K·D], bfloat16.
        sizes: Static arguments.
        kv_heads: The number of heads of k and v.
        head_dim: The number of channels of a head.
        config: Tile sizes.

    Returns:
        The result [B L N·D], and the log-sum-exp of each query [B·N 1 L].
    """
    block_q, num_queries = sizes.block_q, sizes.num_queries
    heads = len(q) * sizes.heads
    index_map = row_index_map(sizes.heads, sizes.heads)
    q_spec = pl.BlockSpec((None, block_q, head_dim), lambda b, h, i, j, *_: index_map(b, h, i))
    lse_spec = pl.BlockSpec((None, 1, block_q), lambda b, h, i, j, *_: (b * sizes.heads + h, 0, i))
    heads_per_kv, kv_index_map = sizes.heads // kv_heads, row_index_map(kv_heads, kv_heads)
    kv_spec = pl.BlockSpec(
        (None, sizes.block_kv, head_dim),
        lambda b, h, i, j, *_: kv_index_map(b, h // heads_per_kv, j),
        pipeline_mode=pl.Buffered(1) if config.buffers == 1 else None,
    )
    return pl.pallas_call(
        partial(kernel, sizes=sizes, heads_per_kv=heads_per_kv),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(q), sizes.heads, ceil_div(num_queries, block_q), ceil_div(sizes.num_keys, sizes.block_kv)),
            in_specs=[q_spec, kv_spec, kv_spec],
            out_specs=[q_spec, lse_spec],
            scratch_shapes=_scratch_shapes(sizes, head_dim),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((heads, 1, num_queries), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem_bytes(head_dim, q.dtype.itemsize) + COMPILER_VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * sizes.num_keys,
            transcendentals=q.size // head_dim * sizes.num_keys,
            bytes_accessed=2 * (2 * q.size + v.size) + k.size,
        ),
        interpret=config.interpret,
        name="flash_attention_int8",
    )(k_scale, q, k, v)


def _scratch_shapes(sizes: KernelSizes, head_dim: int) -> list[Any]:
    """Return the scratch memory of `SoftmaxRefs`, in the order of its fields."""
    shapes = [
        ((2 * head_dim, jnp.int8), (1, jnp.float32), (1, jnp.float32)),
        ((NUM_SUM_ROWS, jnp.float32), (head_dim, jnp.float32)) * 2,
        ((sizes.step_kv, jnp.float32), (8, jnp.float32)),
    ]
    rows = [pltpu.VMEM((rows, sizes.block_q), dtype) for group in shapes for rows, dtype in group]
    return [*rows, pltpu.SMEM((1,), jnp.int32)]


def kernel(k_scale_ref, q_ref, k_ref, v_ref, *refs, sizes: KernelSizes, heads_per_kv: int) -> None:
    """Compute attention; the grid runs over examples, heads, blocks of queries and blocks of keys.

    `refs` has the result, its log-sum-exp, and the scratch memory of `SoftmaxRefs`.
    """
    example, head, i, j = (pl.program_id(axis) for axis in range(4))
    k_scale = k_scale_ref[(example * sizes.heads + head) // heads_per_kv]
    add_to_queries(partial(_add_block, k_scale, (i, j), sizes=sizes), i, q_ref, k_ref, v_ref, refs, sizes)


def _add_block(
    k_scale: Array, grid_index: tuple[Array, Array], q_ref, k_ref, v_ref, o_ref, lse_ref, *scratch, sizes: KernelSizes
) -> None:
    """Add the block of keys of a grid step. `kernel` explains the references."""
    (i, j), state = grid_index, SoftmaxRefs(*scratch)
    is_last = j == ceil_div(sizes.num_keys, sizes.block_kv) - 1
    num_blocks, tail = num_compute_blocks(is_last, sizes), sizes.num_keys % sizes.block_kv_compute

    @pl.when((i == 0) & (j == 0))
    def _():
        state.flags[RUNNING_MAX_FLAG] = 0

    @pl.when(j == 0)
    def _():
        _init_queries(q_ref, k_scale, state, i * sizes.block_q, sizes)
        _init_offset(k_ref, state, min(PROBE_KV, sizes.num_keys, sizes.block_kv))

    def add_tail(add: Callable) -> None:
        if tail:
            pl.when(is_last)(lambda: add(k_ref, v_ref, state, num_blocks * sizes.block_kv_compute, tail))

    def add_with_fixed_offset() -> None:
        def add(index: Array) -> None:
            _accumulate_keys(k_ref, v_ref, state, index * sizes.block_kv_compute, sizes.block_kv_compute)

        loop(0, num_blocks, add)
        add_tail(_accumulate_keys)

    def add_with_running_max() -> None:
        _add_with_running_max(
            k_ref, v_ref, state, num_blocks * (sizes.block_kv_compute // sizes.step_kv), sizes.step_kv
        )
        add_tail(_raise_offset_and_add)

    add_with_fallback(
        state,
        add_with_fixed_offset,
        add_with_running_max,
        starts_empty=sizes.is_single_block,
        max_weight_sum=MAX_WEIGHT_SUM,
    )

    @pl.when(is_last)
    def _():
        weight_sum = state.weight_sum[:1]
        o_ref[...] = divide_or_zero(state.value_sum[...], weight_sum).astype(o_ref.dtype).T
        lse_ref[...] = (state.offset[...] * state.scale[...] + jnp.log2(weight_sum)) * math.log(2)


def _init_queries(q_ref, k_scale: Array, state: SoftmaxRefs, q_start: Array, sizes: KernelSizes) -> None:
    """Clear the sums, and write the transposed and quantized queries. The input after the last query is undefined, so
    0 is written there."""
    q = sizes.q_scale * q_ref[...].T.astype(jnp.float32)  # [D L]
    if sizes.num_queries % sizes.block_q:
        q = jnp.where(q_start + positions(slice(0, q.shape[1]), 1) < sizes.num_queries, q, 0.0)
    absmax = jnp.abs(q).max(axis=0, keepdims=True)
    scale = _round_up_to_bfloat16(jnp.maximum(absmax * (k_scale / INT8_MAX), MIN_SCALE))
    state.scale[...] = scale
    state.q[: len(q)] = jnp.round(q * (k_scale / scale)).astype(jnp.int32).astype(jnp.int8)
    state.weight_sum[...] = jnp.zeros(state.weight_sum.shape)
    state.value_sum[...] = jnp.zeros(state.value_sum.shape)


def _round_up_to_bfloat16(x: Float32[Array, "1 L"]) -> Float32[Array, "1 L"]:
    """Round positive numbers up to the next bfloat16, so that a later cast to bfloat16 does not change them."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type((bits + 0xFFFF) & -0x10000, jnp.float32)


def _init_offset(k_ref, state: SoftmaxRefs, num_keys: int) -> None:
    """Set the offset to the maximum score of the first keys. Write the digits of the negative offset below the queries.

    The place values of the digits are 1, 127, 127 …
    """
    head_dim = state.q.shape[0] // 2
    largest_offset = (head_dim - 1) * INT8_MAX**2  # scores are at most head_dim · 127²
    for q_strip in strips(state.q.shape[1], STRIP_Q):
        offset = jnp.clip(_max_scores(k_ref, state, 0, num_keys, q_strip), -largest_offset, largest_offset)
        offset_magnitude, index = (
            jnp.abs(offset).astype(jnp.int32),
            jax.lax.broadcasted_iota(jnp.int32, (head_dim, 1), 0),
        )
        later_digits = jnp.clip(offset_magnitude // INT8_MAX - INT8_MAX * (index - 1), 0, INT8_MAX)
        digits = jnp.where(index == 0, offset_magnitude % INT8_MAX, later_digits)
        state.q[head_dim:, q_strip] = jnp.where(offset < 0, digits, -digits).astype(jnp.int8)
        state.offset[:, q_strip] = offset


def _append_digit_values(k: Int8[Array, "S D"]) -> Int8[Array, "S _D"]:
    """Append the place values of the offset's digits to the channels of the keys."""
    is_first = jax.lax.broadcasted_iota(jnp.int32, k.shape, 1) == 0
    return jnp.concatenate([k, jnp.where(is_first, 1, INT8_MAX).astype(jnp.int8)], axis=1)


def _scores(k: Int8[Array, "S _D"], state: SoftmaxRefs, q_strip: slice) -> Float32[Array, "S L"]:
    """Return the scores. If `k` includes the place values of the digits, the offset is subtracted.

    Scores are integers below 2^24, which float32 represents exactly.
    """
    return jnp.dot(k, state.q[: k.shape[1], q_strip], preferred_element_type=jnp.int32).astype(jnp.float32)


def _weights(s: Float32[Array, "S L"], state: SoftmaxRefs, q_strip: slice) -> BFloat16[Array, "S L"]:
    """Return the weights for scores from which the offset is already subtracted."""
    return jnp.exp2(s.astype(jnp.bfloat16) * state.scale[:, q_strip].astype(jnp.bfloat16))


def _strips_of_keys(num_keys: int) -> list[slice]:
    """Return strips of keys that fill whole registers."""
    return strips(round_up(num_keys, INT8_REGISTER_ROWS), STRIP_KV)


def _valid_keys(kv_strip: slice, num_keys: int) -> Array | None:
    """Return a mask of the first `num_keys` keys in a strip, or None if these are all keys of the strip."""
    return None if kv_strip.stop <= num_keys else positions(kv_strip, 0) < num_keys


def _max_scores(k_ref, state: SoftmaxRefs, start: Array | int, num_keys: int, q_strip: slice) -> Float32[Array, "1 L"]:
    maxima = []
    for kv_strip in _strips_of_keys(num_keys):
        scores = _scores(k_ref[pl.ds(start + kv_strip.start, size_of(kv_strip)), :], state, q_strip)
        valid = _valid_keys(kv_strip, num_keys)
        scores = scores if valid is None else jnp.where(valid, scores, -jnp.inf)
        maxima.append(scores.max(axis=0, keepdims=True))
    return reduce(jnp.maximum, maxima)


def _accumulate_keys(
    k_ref, v_ref, state: SoftmaxRefs, start: Array | int, num_keys: int, *, uses_offset_digits: bool = True
) -> None:
    """Add the weights and weighted values of these keys, with the offset unchanged.

    `uses_offset_digits` must be False after the offset was raised, because its digits keep the old value.
    """
    pending: list[tuple[Array, slice, Array]] = []
    for kv_strip in _strips_of_keys(num_keys):
        rows, valid = pl.ds(start + kv_strip.start, size_of(kv_strip)), _valid_keys(kv_strip, num_keys)
        k = _append_digit_values(k_ref[rows, :]) if uses_offset_digits else k_ref[rows, :]
        v = v_ref[rows, :]
        v = _append_ones_rows(
            v if valid is None else jnp.where(valid, v, jnp.zeros_like(v))
        )  # undefined after the last key
        for q_strip in strips(state.q.shape[1], STRIP_Q):
            s = _scores(k, state, q_strip)
            p = _weights(s if uses_offset_digits else s - state.offset[:, q_strip], state, q_strip)
            pending.append((v, q_strip, p if valid is None else jnp.where(valid, p, jnp.zeros_like(p))))
            if len(pending) > PIPELINE_DEPTH:
                _accumulate_values(state, *pending.pop(0))
    for values in pending:
        _accumulate_values(state, *values)


def _append_ones_rows(v: BFloat16[Array, "S D"]) -> BFloat16[Array, "_D S"]:
    return jnp.concatenate([v.T, jnp.ones((NUM_ONES_ROWS, len(v)), v.dtype)])


def _accumulate_values(
    state: SoftmaxRefs, v: BFloat16[Array, "_D S"], q_strip: slice, p: BFloat16[Array, "S L"]
) -> None:
    """Add the weighted values, and the sums of weights, which are the rows after them."""
    sums, head_dim = jnp.dot(v, p, preferred_element_type=jnp.float32), len(v) - NUM_ONES_ROWS
    state.value_sum[:, q_strip] += sums[:head_dim]
    state.weight_sum[:, q_strip] += sums[head_dim : head_dim + NUM_SUM_ROWS]


def _raise_offset_and_add(k_ref, v_ref, state: SoftmaxRefs, start: Array | int, num_keys: int) -> None:
    """Raise the offset to the maximum of these keys, then add them."""
    for q_strip in strips(state.q.shape[1], STRIP_Q):
        _raise_offset_to(state, q_strip, _max_scores(k_ref, state, start, num_keys, q_strip))
    _accumulate_keys(k_ref, v_ref, state, start, num_keys, uses_offset_digits=False)


def _raise_offset_to(state: SoftmaxRefs, q_strip: slice, max_score: Float32[Array, "1 L"]) -> None:
    old_offset = state.offset[:, q_strip]
    new_offset = jnp.maximum(old_offset, max_score)
    correction = jnp.exp2((old_offset - new_offset) * state.scale[:, q_strip])
    state.offset[:, q_strip] = new_offset
    state.weight_sum[:, q_strip] *= correction
    state.value_sum[:, q_strip] *= correction


def _add_with_running_max(k_ref, v_ref, state: SoftmaxRefs, end_step: Array | int, step_kv: int) -> None:
    """Add steps of `step_kv` keys. Before each step, raise the offset to the maximum score of its keys.

    Each step computes the scores of the next one, so that the matrix unit does not wait for the maximum.
    """
    q_strips = strips(state.q.shape[1], RUNNING_MAX_STEP_Q)

    def score(index: Array | int, q_strip: slice) -> None:
        s = _scores(k_ref[pl.ds(index * step_kv, step_kv), :], state, q_strip)
        state.scores[:, q_strip] = s
        state.score_max[:, q_strip] = split_rows_by_sublanes(s).max(axis=0)

    def step(index: Array) -> None:
        pending: list[tuple[Array, slice, Array]] = []
        v = _append_ones_rows(v_ref[pl.ds(index * step_kv, step_kv), :])
        for q_strip in q_strips:
            _raise_offset_to(state, q_strip, state.score_max[:, q_strip].max(axis=0, keepdims=True))
        for q_strip in q_strips:
            s = state.scores[:, q_strip]
            score(jnp.minimum(index + 1, end_step - 1), q_strip)
            pending.append((v, q_strip, _weights(s - state.offset[:, q_strip], state, q_strip)))
            if len(pending) > 1:
                _accumulate_values(state, *pending.pop(0))
        _accumulate_values(state, *pending.pop())

    for q_strip in q_strips:
        score(0, q_strip)
    loop(0, end_step, step)
