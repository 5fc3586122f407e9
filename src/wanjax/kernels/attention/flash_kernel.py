# SPDX-License-Identifier: Apache-2.0
"""The Pallas kernel of flash_tpu, and its call: a block of queries against a block of keys.

Scores are laid out keys × queries: the offsets and sums of many queries are one row of registers, and the second
product takes the weights without a transpose. The fast path subtracts an offset in place of the running maximum; the
safe path raises the offset to the maximum first. A compute block of `block_kv_compute` keys is unrolled whole, so that
the matrix unit waits only at its two ends.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float32

from wanjax.kernels.alignment import LANES, ceil_div, round_up
from wanjax.kernels.attention.blocks import matmul_precision
from wanjax.kernels.attention.flash_tiles import (
    COMPILER_VMEM_BYTES,
    HEADROOM,
    MAX_WEIGHT_SUM,
    PIPELINE_DEPTH,
    PROBE_KV,
    REGISTER_ROWS,
    SAFE_Q,
    STRIP_KV,
    STRIP_Q,
    TILE_Q,
    Config,
)
from wanjax.kernels.attention.masks import divide_or_zero, finite_max

SAFE, PROBED = 0, 1  # indices of a head's flags: whether it uses the safe path, and whether its offset is set


class Sizes(NamedTuple):
    """Static arguments of the kernel."""

    queries: int
    keys: int
    heads: int  # of one example
    block_q: int
    block_kv: int
    block_kv_compute: int  # unrolled keys, a compute block
    step_kv: int  # keys of a safe step, of a masked one, or of a listed block; divides block_kv_compute
    q_per_list: int  # consecutive queries that share a list of blocks
    ragged: bool  # a key count or a window hides some keys from some queries
    window: tuple[int, int]  # keys before and after a query's own position
    q_scale: float  # softmax scale · log2 e: logits are exponents of two
    has_carry: bool = False  # start from the sums of earlier keys
    return_sums: bool = False  # return the sums, for later keys to be added

    @property
    def single_block(self) -> bool:
        """Return whether all keys are in one block."""
        return self.keys <= self.block_kv and not self.ragged


class State(NamedTuple):
    """References to the state of one block of queries, which is updated by each block of keys."""

    q: jax.Ref  # [D L], times q_scale; for bfloat16 [2·D L]: the second half is the rounding error of the first
    offset: jax.Ref  # [1 L]
    weight_sum: jax.Ref  # [8 L], the sum of weights in eight parts
    value_sum: jax.Ref  # [D L], the sum of weighted values
    saved_weight_sum: jax.Ref  # both sums before this block of keys, to restore
    saved_value_sum: jax.Ref
    scores: jax.Ref  # [S L], of the next safe step
    score_max: jax.Ref  # [8 L], their maximum in eight parts
    flags: jax.Ref


class PartialSums(NamedTuple):
    """Softmax sums of all queries after some of the keys, the first fields of `State`: the carry to a next call."""

    q: Any
    offset: Any
    weight_sum: Any
    value_sum: Any


class Mask(NamedTuple):
    """The keys of a step that take part: the first `num_valid`, and of these the ones within the window.

    `relative_start` is the position of the step's first key minus that of query 0.
    """

    num_valid: Array | int
    window: tuple[int, int] | None = None
    relative_start: Array | int = 0

    def all_valid(self, kv_strip: slice) -> bool:
        """Return whether all these keys are known to be valid at trace time."""
        return isinstance(self.num_valid, int) and kv_strip.stop <= self.num_valid

    def valid(self, kv_strip: slice) -> Bool[Array, "S 1"]:
        return positions(kv_strip, 0) < self.num_valid

    def visible(self, kv_strip: slice, q_strip: slice) -> Bool[Array, "S L"] | Bool[Array, "S 1"]:
        if self.window is None:
            return self.valid(kv_strip)
        left, right = self.window
        distance = self.relative_start + positions(kv_strip, 0) - positions(q_strip, 1)
        return self.valid(kv_strip) & (distance >= -left) & (distance <= right)


class BlockList(NamedTuple):
    """Blocks of `size` keys each, for each group of `q_per_list` queries: the position of their first keys.

    A start at or after `end` is padding.
    """

    size: int
    q_per_list: int
    starts: tuple[tuple[Array, ...], ...]
    end: Array

    def slices(self, q_strip: slice, kv_strip: slice) -> Iterator[tuple[slice, Array, Array]]:
        """Yield each block, or part of a block, of the keys in `kv_strip` that a strip of queries attends to.

        Yields:
            Its rows in the strip, the position of its first key, and False if it is padding.
        """
        size = min(self.size, size_of(kv_strip))
        for offset in range(kv_strip.start, kv_strip.stop, size):
            start = self.starts[q_strip.start // self.q_per_list][offset // self.size]
            is_block = start < self.end
            yield (
                slice(offset - kv_strip.start, offset - kv_strip.start + size),
                jnp.where(is_block, start, 0) + offset % self.size,
                is_block,
            )


def size_of(x: slice) -> int:
    return x.stop - x.start


def positions(x: slice, axis: int) -> Array:
    """Return the positions of a slice along an axis of a matrix."""
    return x.start + jax.lax.broadcasted_iota(jnp.int32, (1,) * axis + (size_of(x),) + (1,) * (1 - axis), axis)


@partial(jax.jit, static_argnames=("sizes", "kv_heads", "head_dim", "config"), inline=True)  # is traced once
def call(
    scalars: tuple,
    operands: tuple,
    carry: PartialSums | None,
    *,
    sizes: Sizes,
    kv_heads: int,
    head_dim: int,
    config: Config,
) -> Any:
    """Call the kernel over a grid of examples, their heads, blocks of queries and blocks of keys.

    `operands` are q, k and v: [B L N·D] and [B S K·D], or [B·N L D] and [B·K S D]. `scalars` are the number of valid
    keys of each example, or the lists of `sparse_kernel`. New sums overwrite those of the carry.
    """
    is_sparse, (q, k, v) = len(scalars) > 1, operands
    block_q, queries = sizes.block_q, sizes.queries
    heads_per_row = q.shape[2] // head_dim  # 1 if heads are on the first axis
    heads = q.shape[0] * heads_per_row  # of all examples
    split_q = q.dtype == jnp.bfloat16  # q times q_scale as a sum of two: one bfloat16 would lose three digits
    if (
        split_q and 2 * head_dim <= LANES
    ):  # two copies of k fill a row, for both halves of q; the kernel itself doubles wider rows
        k = jnp.concatenate([k, k], axis=2)

    q_index_map = _row_index_map(sizes.heads, heads_per_row)
    q_spec = pl.BlockSpec((None, block_q, head_dim), lambda b, h, i, j, *_: q_index_map(b, h, i))
    sum_shapes = PartialSums(
        (head_dim * (1 + split_q), q.dtype), (1, jnp.float32), (8, jnp.float32), (head_dim, jnp.float32)
    )
    new_sums = [] if not sizes.return_sums else sum_shapes[1:] if carry else sum_shapes  # q is scaled and split once
    padded_queries = round_up(queries, block_q) if new_sums else queries

    def rows_spec(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, block_q), lambda b, h, i, j, *_: (b * sizes.heads + h, 0, i))

    def row_shape(rows: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((heads, rows, padded_queries), dtype)

    results = pl.pallas_call(
        partial(sparse_kernel if is_sparse else kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(heads // sizes.heads, sizes.heads, ceil_div(queries, block_q), ceil_div(sizes.keys, sizes.block_kv)),
            in_specs=[
                rows_spec(sum_shapes.q[0]) if carry else q_spec,
                *_kv_specs(k.shape[2], sizes, sizes.heads // kv_heads, heads_per_row, head_dim, config.buffers),
                *(rows_spec(rows) for rows, _ in sum_shapes[1:] if carry),
            ],
            out_specs=[rows_spec(rows) for rows, _ in new_sums] or [q_spec, rows_spec(1)],
            scratch_shapes=_scratch_shapes(sizes, sum_shapes.q[0], head_dim, q.dtype),
        ),
        out_shape=[row_shape(*entry) for entry in new_sums]
        or [jax.ShapeDtypeStruct(q.shape, q.dtype), row_shape(1, jnp.float32)],
        input_output_aliases={len(scalars) + 3 + n: n for n in range(len(new_sums))} if carry else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem_bytes(head_dim, q.dtype.itemsize) + COMPILER_VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * sizes.keys,
            transcendentals=q.size // head_dim * sizes.keys,
            bytes_accessed=q.dtype.itemsize * (2 * q.size + k.size + v.size),
        ),
        interpret=config.interpret,
        name="flash_blocks" if is_sparse else "flash_attention",
    )(*scalars, carry.q if carry else q, k, v, *(carry[1:] if carry else ()))
    return results if not new_sums else PartialSums(carry.q, *results) if carry else PartialSums(*results)


def _row_index_map(heads: int, heads_per_row: int) -> Callable[..., tuple]:
    """Return the index map of a head's rows: heads are side by side in a row, or on the first axis."""
    return (lambda b, h, i: (b * heads + h, i, 0)) if heads_per_row == 1 else (lambda b, h, i: (b, i, h))


def _kv_specs(
    row_width: int, sizes: Sizes, heads_per_kv: int, heads_per_row: int, head_dim: int, buffers: int
) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """Return the block specs of keys, whose rows have `row_width` channels, and of values.

    `heads_per_kv` heads of q share a head of keys.
    """

    row_index_map = _row_index_map(sizes.heads // heads_per_kv, heads_per_row)

    def index_map(b, h, i, j, kv_lengths, *_):
        return row_index_map(
            b,
            h if heads_per_kv == 1 else h // heads_per_kv,
            _nearest_visible_block(b, i, j, kv_lengths, sizes) if sizes.ragged else j,
        )

    spec = partial(pl.BlockSpec, index_map=index_map, pipeline_mode=pl.Buffered(1) if buffers == 1 else None)
    k_width = row_width if heads_per_row == 1 else head_dim
    return spec((None, sizes.block_kv, k_width)), spec((None, sizes.block_kv, head_dim))


def _nearest_visible_block(b, i, j, kv_lengths, sizes: Sizes):
    """Return the block of keys to fetch in grid step j for block i of queries: j, or the nearest visible block."""
    left, right = sizes.window
    first_block = (i * sizes.block_q - left) // sizes.block_kv
    last_key = jnp.minimum(kv_lengths[b], i * sizes.block_q + sizes.block_q + right) - 1
    return jnp.clip(j, jnp.maximum(first_block, 0), jnp.maximum(last_key // sizes.block_kv, 0))


def _scratch_shapes(sizes: Sizes, q_rows: int, head_dim: int, dtype: jnp.dtype) -> list[Any]:
    """Return the scratch memory of the kernel's `State`, in the order of its fields."""
    queries = sizes.block_q
    return [
        pltpu.VMEM((q_rows, queries), dtype),
        pltpu.VMEM((1, queries), jnp.float32),
        pltpu.VMEM((8, queries), jnp.float32),
        pltpu.VMEM((head_dim, queries), jnp.float32),
        pltpu.VMEM((8, queries), jnp.float32),
        pltpu.VMEM((head_dim, queries), jnp.float32),
        pltpu.VMEM((sizes.step_kv, queries), jnp.float32),
        pltpu.VMEM((8, queries), jnp.float32),
        pltpu.SMEM((2,), jnp.int32),
    ]


def kernel(kv_lengths_ref, q_ref, k_ref, v_ref, *refs, sizes: Sizes) -> None:
    """Compute dense attention; the grid runs over examples, heads, blocks of queries and blocks of keys.

    `refs` are, in order: with `has_carry` the sums of the carry, whose q is `q_ref`; the result and its log-sum-exp, or
    with `return_sums` the new sums, q among them only without a carry; the scratch of `State`.
    """
    example, i, j = (pl.program_id(axis) for axis in (0, 2, 3))
    add_block = partial(_add_block, kv_lengths_ref[example], (i, j), sizes=sizes)
    last_block = ceil_div(sizes.queries, sizes.block_q) - 1
    remaining = round_up(sizes.queries - last_block * sizes.block_q, TILE_Q)
    if remaining >= sizes.block_q:
        add_block(q_ref, k_ref, v_ref, *refs)
        return

    @pl.when(i < last_block)
    def _():
        add_block(q_ref, k_ref, v_ref, *refs)

    @pl.when(i == last_block)
    def _():
        first_refs = (ref if ref.shape == (2,) else _first_queries(ref, remaining, sizes) for ref in refs)
        add_block(_first_queries(q_ref, remaining, sizes), k_ref, v_ref, *first_refs)


def _first_queries(ref: Any, num_queries: int, sizes: Sizes) -> Any:
    """Return the first queries of a reference, along whichever axis has them."""
    return ref.at[:, :num_queries] if ref.shape[1] == sizes.block_q else ref.at[:num_queries]


def _add_block(kv_length: Array, grid_index: tuple[Array, Array], q_ref, k_ref, v_ref, *refs, sizes: Sizes) -> None:
    """Add the block of keys of a grid step; for the references see `kernel`."""
    carry, refs = (PartialSums(q_ref, *refs[:3]), refs[3:]) if sizes.has_carry else (None, refs)
    num_results = 2 if not sizes.return_sums else 3 if sizes.has_carry else 4
    out, state = refs[:num_results], State(*refs[num_results:])
    i, j = grid_index
    q_start, kv_start = i * sizes.block_q, j * sizes.block_kv
    is_last = j == ceil_div(sizes.keys, sizes.block_kv) - 1
    headroom = HEADROOM[k_ref.dtype.name]

    @pl.when((i == 0) & (j == 0))
    def _():
        state.flags[SAFE] = 0

    @pl.when(j == 0)
    def _():
        if carry is None:
            _init_state(q_ref, state, q_start, sizes)
        else:
            _copy(carry, state[: len(carry)])
            state.flags[PROBED] = 0
        if carry is None and not sizes.ragged:
            _init_offset(k_ref, state, min(PROBE_KV, sizes.keys), headroom)

    if carry is not None and sizes.single_block:
        state = state._replace(saved_weight_sum=carry.weight_sum, saved_value_sum=carry.value_sum)
    if sizes.ragged:
        _add_ragged(k_ref, v_ref, state, kv_length, q_start, kv_start, sizes, headroom)
    else:
        _add_dense(k_ref, v_ref, state, is_last, sizes)

    @pl.when(is_last)
    def _():
        if sizes.return_sums:
            _copy(state[len(PartialSums._fields) - num_results : len(PartialSums._fields)], out)
        else:
            _finish(out[0], out[1], state)


def _copy(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[...] = source[...]


def sparse_kernel(
    list_start_ref,
    list_length_ref,
    sees_tail_ref,
    block_start_ref,
    kv_lengths_ref,
    q_ref,
    k_ref,
    v_ref,
    o_ref,
    lse_ref,
    *scratch,
    sizes: Sizes,
) -> None:
    """Compute block-sparse attention: visit only listed blocks of keys, on the same grid as `kernel`.

    In grid step (i, j) each group of queries visits at most `list_length` blocks of `step_kv` keys, which lie in the
    grid step's block of keys and whose first keys are in `block_start_ref` from `list_start` on. `list_length` differs
    by example. Groups whose `sees_tail_ref` is 1 also see the keys after the last whole block, up to `kv_length`.
    """
    state, groups = State(*scratch), range(sizes.block_q // sizes.q_per_list)
    example, i, j = (pl.program_id(axis) for axis in (0, 2, 3))
    kv_steps = pl.num_programs(3)
    grid_step = i * kv_steps + j
    list_start = list_start_ref[grid_step]
    list_length = list_length_ref[example * pl.num_programs(2) * kv_steps + grid_step]
    kv_length, blocks_per_step = kv_lengths_ref[example], sizes.block_kv // sizes.step_kv
    tail_block = kv_length // sizes.step_kv - j * blocks_per_step  # index of the tail among this grid step's blocks

    @pl.when((i == 0) & (j == 0))
    def _():
        state.flags[SAFE] = 0

    @pl.when(j == 0)
    def _():
        _init_state(q_ref, state, i * sizes.block_q, sizes)

    tail_start = kv_length - kv_length % sizes.step_kv - j * sizes.block_kv

    def blocks_from(index: Array | int, count: int) -> BlockList:
        starts = (
            tuple(block_start_ref[list_start + (index + n) * len(groups) + g] for n in range(count)) for g in groups
        )
        return BlockList(sizes.step_kv, sizes.q_per_list, tuple(starts), tail_start)

    @pl.when(list_length > 0)
    def _():
        _init_offset_from_list(k_ref, state, blocks_from(0, 1), PROBE_KV, HEADROOM[q_ref.dtype.name])

    _add_listed_blocks(k_ref, v_ref, state, blocks_from, list_length, sizes)

    @pl.when((tail_block >= 0) & (tail_block < blocks_per_step) & (kv_length % sizes.step_kv > 0))
    def _():
        tail_end = tail_start + sizes.step_kv
        starts = tuple((jnp.where(sees_tail_ref[i * len(groups) + g] == 1, tail_start, tail_end),) for g in groups)
        tail = BlockList(sizes.step_kv, sizes.q_per_list, starts, tail_end)
        _raise_offset_and_add(k_ref, v_ref, state, tail, sizes.step_kv, Mask(kv_length % sizes.step_kv))

    pl.when(j == kv_steps - 1)(lambda: _finish(o_ref, lse_ref, state))


def _add_listed_blocks(
    k_ref, v_ref, state: State, blocks_from: Callable[[Array, int], BlockList], list_length: Array, sizes: Sizes
) -> None:
    """Add the first `list_length` listed blocks of keys; `blocks_from(index, count)` returns some of the list."""

    def fast_path() -> None:
        def add(index: Array, count: int) -> None:
            _add_keys(k_ref, v_ref, state, blocks_from(index, count), count * sizes.step_kv)

        _loop_in_chunks(0, list_length, sizes.block_kv_compute // sizes.step_kv, add)

    def safe_path() -> None:
        _loop(
            0,
            list_length,
            lambda index: _raise_offset_and_add(k_ref, v_ref, state, blocks_from(index, 1), sizes.step_kv),
        )

    _add_with_fallback(state, fast_path, safe_path)


def _loop_in_chunks(begin: Array | int, end: Array | int, max_count: int, add: Callable[[Array, int], None]) -> None:
    """Call `add(index, count)` until `end`, with `max_count` at a time first and ever fewer for the remainder."""
    for count in sorted({max(1, max_count // 4**n) for n in range(max_count)}, reverse=True):
        steps = (end - begin) // count
        _loop(0, steps, lambda index, begin=begin, count=count: add(begin + index * count, count))
        begin = begin + steps * count


def _add_with_fallback(
    state: State,
    fast_path: Callable[[], None],
    safe_path: Callable[[], None],
    *,
    starts_empty: bool = False,
    already_saved: bool = False,
) -> None:
    """Add keys by the fast path; if a logit left the range of the offset, restore the sums and take the safe path.

    `starts_empty`: there are no sums of earlier keys. `already_saved`: these sums need not be saved again.
    """
    if not (starts_empty or already_saved):
        _copy((state.weight_sum, state.value_sum), (state.saved_weight_sum, state.saved_value_sum))

    @pl.when(state.flags[SAFE] == 0)
    def _():
        fast_path()

        @pl.when(jnp.max(jnp.where(state.weight_sum[...] <= MAX_WEIGHT_SUM, 0, 1)) == 1)  # NaN too
        def _():
            state.flags[SAFE] = 1
            state.weight_sum[...] = jnp.zeros(state.weight_sum.shape) if starts_empty else state.saved_weight_sum[...]
            state.value_sum[...] = jnp.zeros(state.value_sum.shape) if starts_empty else state.saved_value_sum[...]

    pl.when(state.flags[SAFE] == 1)(safe_path)


def _raise_offset_and_add(
    k_ref, v_ref, state: State, start: Array | int | BlockList, count: int, mask: Mask | None = None
) -> None:
    """Raise the offset to the maximum of these keys, then add them."""
    _raise_offset(k_ref, state, start, count, mask)
    _add_keys(k_ref, v_ref, state, start, count, mask)


def _finish(o_ref, lse_ref, state: State) -> None:
    """Divide the sum of weighted values by the sum of weights; write the result and the log-sum-exp."""
    weight_sum = state.weight_sum[...].sum(axis=0, keepdims=True)
    o_ref[...] = divide_or_zero(state.value_sum[...], weight_sum).astype(o_ref.dtype).T
    lse_ref[...] = jnp.where(weight_sum == 0, -jnp.inf, (state.offset[...] + jnp.log2(weight_sum)) * math.log(2))


def _add_dense(k_ref, v_ref, state: State, is_last: Array, sizes: Sizes) -> None:
    """Add a block of keys that all queries attend to: full compute blocks, and the tail in the last block."""
    num_blocks, tail = _num_compute_blocks(is_last, sizes), sizes.keys % sizes.block_kv_compute

    def add_tail(add: Callable) -> None:
        if tail:
            pl.when(is_last)(lambda: add(k_ref, v_ref, state, num_blocks * sizes.block_kv_compute, tail))

    def fast_path() -> None:
        _loop(
            0,
            num_blocks,
            lambda index: _add_keys(k_ref, v_ref, state, index * sizes.block_kv_compute, sizes.block_kv_compute),
        )
        add_tail(_add_keys)

    def safe_path() -> None:
        _add_pipelined_safe(
            k_ref, v_ref, state, 0, num_blocks * (sizes.block_kv_compute // sizes.step_kv), sizes.step_kv
        )
        add_tail(_raise_offset_and_add)

    single_block, has_carry = sizes.single_block, sizes.has_carry
    _add_with_fallback(
        state,
        fast_path,
        safe_path,
        starts_empty=single_block and not has_carry,
        already_saved=single_block and has_carry,
    )


def _add_ragged(
    k_ref, v_ref, state: State, kv_length: Array, q_start: Array, kv_start: Array, sizes: Sizes, headroom: float
) -> None:
    """Add the visible keys of a block: first the steps without a mask, then the masked steps."""
    step_kv = sizes.step_kv

    def clip_to_block(position: Array | int) -> Array:
        return jnp.clip(position - kv_start, 0, sizes.block_kv)

    (left, right), queries = sizes.window, state.q.shape[1]
    some_visible = clip_to_block(q_start - left), clip_to_block(jnp.minimum(kv_length, q_start + queries + right))
    all_visible = (
        clip_to_block(q_start + queries - 1 - left),
        clip_to_block(jnp.minimum(kv_length, q_start + 1 + right)),
    )
    begin = ceil_div(all_visible[0], step_kv)
    end = jnp.maximum(begin, all_visible[1] // step_kv)

    def fast_path() -> None:
        def add(index: Array, count: int) -> None:
            _add_keys(k_ref, v_ref, state, index * step_kv, count * step_kv)

        _loop_in_chunks(begin, end, sizes.block_kv_compute // step_kv, add)

    @pl.when(end > begin)
    def _():
        @pl.when(state.flags[PROBED] == 0)
        def _():
            _raise_offset(k_ref, state, begin * step_kv, min(PROBE_KV, step_kv), headroom=headroom)
            state.flags[PROBED] = 1

        _add_with_fallback(state, fast_path, lambda: _add_pipelined_safe(k_ref, v_ref, state, begin, end, step_kv))

    def add_masked(index: Array) -> None:
        start = (index + jnp.where(index >= begin, end - begin, 0)) * step_kv
        mask = Mask(kv_length - kv_start - start, sizes.window, kv_start + start - q_start)
        _raise_offset_and_add(k_ref, v_ref, state, start, step_kv, mask)

    _loop(some_visible[0] // step_kv, ceil_div(some_visible[1], step_kv) - (end - begin), add_masked)


def _num_compute_blocks(is_last: Array, sizes: Sizes) -> Array | int:
    """Return the number of full compute blocks in this block of keys."""
    num_in_others = sizes.block_kv // sizes.block_kv_compute
    num_in_last = ((sizes.keys - 1) % sizes.block_kv + 1) // sizes.block_kv_compute
    return (
        num_in_last
        if sizes.single_block or num_in_last == num_in_others
        else jnp.where(is_last, num_in_last, num_in_others)
    )


def _loop(start: Array | int, stop: Array | int, step: Callable[[Array], None]) -> None:
    def body(index: Array, carry: None) -> None:
        step(index)

    jax.lax.fori_loop(start, stop, body, None)


def _strips(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _init_state(q_ref, state: State, q_start: Array, sizes: Sizes) -> None:
    """Clear the state and write the queries, transposed and scaled; undefined queries after the last become 0."""
    q = sizes.q_scale * q_ref[...].T.astype(jnp.float32)  # [D L]
    if sizes.queries % sizes.block_q:
        q = jnp.where(q_start + positions(slice(0, q.shape[1]), 1) < sizes.queries, q, 0.0)
    high = q.astype(state.q.dtype)
    head_dim = q.shape[0]
    state.q[:head_dim] = high
    if state.q.shape[0] > head_dim:
        state.q[head_dim:] = (q - high.astype(jnp.float32)).astype(state.q.dtype)
    state.offset[...] = jnp.full(state.offset.shape, -jnp.inf)
    state.weight_sum[...] = jnp.zeros(state.weight_sum.shape)
    state.value_sum[...] = jnp.zeros(state.value_sum.shape)
    state.flags[PROBED] = 0


def _strips_and_mask(num_keys: int, mask: Mask | None) -> tuple[list[slice], Mask | None]:
    """Return strips of keys in whole registers, and the mask of the last one if keys end within a register."""
    padded_keys = round_up(num_keys, REGISTER_ROWS)
    return _strips(padded_keys, STRIP_KV), Mask(num_keys) if mask is None and padded_keys > num_keys else mask


def _read_keys(ref, start: Array | int | BlockList, kv_strip: slice, q_strip: slice) -> Array:
    """Read the rows `kv_strip` of the keys from `start` on, or of the listed blocks of a strip of queries."""
    if not isinstance(start, BlockList):
        return ref[pl.ds(start + kv_strip.start, size_of(kv_strip)), :]
    slices, alignment = start.slices(q_strip, kv_strip), math.gcd(start.size, size_of(kv_strip))
    parts = [ref[pl.ds(pl.multiple_of(first, alignment), size_of(rows)), :] for rows, first, _ in slices]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _q_strips(state: State, start: Array | int | BlockList) -> list[slice]:
    """Return strips of queries that attend to the same keys."""
    return _strips(state.q.shape[1], min(STRIP_Q, start.q_per_list) if isinstance(start, BlockList) else STRIP_Q)


def _scores(
    k_ref, state: State, start: Array | int | BlockList, kv_strip: slice, q_strip: slice, mask: Mask | None
) -> Float32[Array, "S L"]:
    """Scores of a strip of keys and a strip of queries, as exponents of two; -inf for masked keys."""
    k = _read_keys(k_ref, start, kv_strip, q_strip)
    if k.shape[1] < state.q.shape[0]:
        k = jnp.concatenate([k, k], axis=1)
    s = jnp.dot(k, state.q[:, q_strip], preferred_element_type=jnp.float32, precision=matmul_precision(k.dtype))
    return s if mask is None or mask.all_valid(kv_strip) else jnp.where(mask.visible(kv_strip, q_strip), s, -jnp.inf)


def _raise_offset(
    k_ref,
    state: State,
    start: Array | int | BlockList,
    num_keys: int,
    mask: Mask | None = None,
    *,
    headroom: float = 0.0,
) -> None:
    """Raise the offset to the maximum of these keys, if that is higher, and rescale the sums."""
    kv_strips, mask = _strips_and_mask(num_keys, mask)
    for q_strip in _q_strips(state, start):
        _raise_offset_to(state, q_strip, _max_scores(k_ref, state, start, kv_strips, q_strip, mask) + headroom)


def _init_offset_from_list(k_ref, state: State, start: BlockList, num_keys: int, headroom: float) -> None:
    """Set the offsets that are still -inf from the first keys of the list."""
    for q_strip in _q_strips(state, start):
        max_score = _max_scores(k_ref, state, start, [slice(0, num_keys)], q_strip, None) + headroom
        state.offset[:, q_strip] = jnp.where(state.offset[:, q_strip] == -jnp.inf, max_score, state.offset[:, q_strip])


def _init_offset(k_ref, state: State, num_keys: int, headroom: float) -> None:
    """Set the offset from the first keys."""
    kv_strips, mask = _strips_and_mask(num_keys, None)
    for q_strip in _strips(state.q.shape[1], STRIP_Q):
        state.offset[:, q_strip] = _max_scores(k_ref, state, 0, kv_strips, q_strip, mask) + headroom


def _max_scores(
    k_ref, state: State, start: Array | int | BlockList, kv_strips: list[slice], q_strip: slice, mask: Mask | None
) -> Array:
    maxima = []
    for kv_strip in kv_strips:
        scores = _scores(k_ref, state, start, kv_strip, q_strip, mask)
        blocks = start.slices(q_strip, kv_strip) if isinstance(start, BlockList) else [(slice(0, len(scores)), 0, True)]
        maxima += [
            jnp.where(is_block, scores[rows].max(axis=0, keepdims=True), -jnp.inf) for rows, _, is_block in blocks
        ]
    return reduce(jnp.maximum, maxima)


def _raise_offset_to(state: State, q_strip: slice, max_score: Float32[Array, "1 L"]) -> None:
    old_offset = state.offset[:, q_strip]
    new_offset = jnp.maximum(old_offset, max_score)
    correction = jnp.exp2(old_offset - finite_max(new_offset))
    state.offset[:, q_strip] = new_offset
    state.weight_sum[:, q_strip] *= correction
    state.value_sum[:, q_strip] *= correction


def _add_keys(
    k_ref, v_ref, state: State, start: Array | int | BlockList, num_keys: int, mask: Mask | None = None
) -> None:
    """Add the weights and weighted values of these keys, with the offset unchanged.

    The compiler's schedule depends on the order of these steps; docs/attention.md has the cost of others.
    """
    kv_strips, mask = _strips_and_mask(num_keys, mask)
    pending: list[tuple[Array, slice, Array]] = []
    q_strips = _q_strips(state, start)
    is_list = isinstance(start, BlockList)
    depth = PIPELINE_DEPTH * STRIP_Q // size_of(q_strips[0]) if is_list else PIPELINE_DEPTH  # as many queries in flight
    for kv_strip in kv_strips:
        strip_mask = None if mask is None or mask.all_valid(kv_strip) else mask
        v = None
        for q_strip in q_strips:
            if v is None or (isinstance(start, BlockList) and q_strip.start % start.q_per_list == 0):
                v = _read_keys(v_ref, start, kv_strip, q_strip)
                if strip_mask is not None:
                    v = jnp.where(strip_mask.valid(kv_strip), v, jnp.zeros_like(v))  # v is undefined after the last key
                v = v.T
            s = _scores(k_ref, state, start, kv_strip, q_strip, strip_mask)
            p = _weights(s, state.offset[:, q_strip], start, kv_strip, q_strip, masked=strip_mask is not None)
            state.weight_sum[:, q_strip] += _split_rows_by_sublanes(p).sum(axis=0)
            pending.append((v, q_strip, p.astype(v.dtype)))
            if len(pending) > depth:
                _add_values(state, *pending.pop(0))
    for values in pending:
        _add_values(state, *values)


def _weights(
    s: Array, offset: Array, start: Array | int | BlockList, kv_strip: slice, q_strip: slice, masked: bool
) -> Array:
    """Return the weights of scores, zeros for the padding of a list."""
    offset = finite_max(offset) if masked else offset
    if not isinstance(start, BlockList):
        return jnp.exp2(s - offset)
    parts = [
        jnp.exp2(s[rows] - jnp.where(is_block, offset, jnp.inf))
        for rows, _, is_block in start.slices(q_strip, kv_strip)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _add_values(state: State, v: Array, q_strip: slice, p: Array) -> None:
    state.value_sum[:, q_strip] += jnp.dot(
        v, p, preferred_element_type=jnp.float32, precision=matmul_precision(v.dtype)
    )


def _add_pipelined_safe(
    k_ref, v_ref, state: State, first_step: Array | int, end_step: Array | int, step_kv: int
) -> None:
    """Add steps of `step_kv` keys; before each, raise the offset to their maximum.

    Each step computes the scores of the next one, so that the matrix unit does not wait for the maximum.
    """
    q_strips = _strips(state.q.shape[1], SAFE_Q)

    def score(index: Array | int, q_strip: slice) -> None:
        s = _scores(k_ref, state, index * step_kv, slice(0, step_kv), q_strip, None)
        state.scores[:, q_strip] = s
        state.score_max[:, q_strip] = _split_rows_by_sublanes(s).max(axis=0)

    def step(index: Array) -> None:
        pending: list[tuple[Array, slice, Array]] = []
        v = v_ref[pl.ds(index * step_kv, step_kv), :].T
        for q_strip in q_strips:
            _raise_offset_to(state, q_strip, state.score_max[:, q_strip].max(axis=0, keepdims=True))
        for q_strip in q_strips:
            s = state.scores[:, q_strip]
            score(jnp.minimum(index + 1, end_step - 1), q_strip)
            p = jnp.exp2(s - state.offset[:, q_strip])
            state.weight_sum[:, q_strip] += _split_rows_by_sublanes(p).sum(axis=0)
            pending.append((v, q_strip, p.astype(v.dtype)))
            if len(pending) > 1:
                _add_values(state, *pending.pop(0))
        _add_values(state, *pending.pop())

    for q_strip in q_strips:
        score(first_step, q_strip)
    _loop(first_step, end_step, step)


def _split_rows_by_sublanes(x: Float32[Array, "S L"]) -> Float32[Array, "_S 8 L"]:
    """Group rows by the eight sublanes of a register: registers are added or compared whole."""
    return x.reshape(-1, 8, x.shape[1])
