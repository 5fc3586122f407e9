# SPDX-License-Identifier: Apache-2.0
"""The Pallas kernel of flash_tpu, and the function that calls it.

A grid step computes a block of queries with a block of keys. The scores have the shape keys × queries. In this shape,
one row of registers contains the offsets or sums of many queries, and the product with the values needs no transpose.
The fast path subtracts a fixed offset from the logits, in place of the running maximum. The running-max path first
raises the offset to the maximum. A compute block of `block_kv_compute` keys is completely unrolled, so that the matrix
unit waits only at the start and the end of the block.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
    MAX_WEIGHT_SUM,
    OFFSET_MARGIN,
    PIPELINE_DEPTH,
    PROBE_KV,
    REGISTER_ROWS,
    RUNNING_MAX_STEP_Q,
    STRIP_KV,
    STRIP_Q,
    TILE_Q,
    Config,
)
from wanjax.kernels.attention.masks import divide_or_zero, finite_max
from wanjax.kernels.attention.ring_weights import ShardedMatrix, join_while_computing

# Indices of a head's two flags: whether the head uses the running-max path, and whether its offset is set
RUNNING_MAX_FLAG, OFFSET_SET_FLAG = 0, 1


class KernelSizes(NamedTuple):
    """Static arguments of the kernel."""

    num_queries: int
    num_keys: int
    heads: int  # of one example
    block_q: int
    block_kv: int
    block_kv_compute: int  # keys of a compute block, which is unrolled
    step_kv: int  # keys of a running-max step, of a masked step, or of a listed block; divides block_kv_compute
    q_per_list: int  # consecutive queries that share a list of blocks
    ragged: bool  # True if a length for each example, or a window, hides some keys from some queries
    window: tuple[int, int]  # keys before and after a query's own position
    q_scale: float  # softmax scale · log2 e, because weights are powers of two
    has_carry: bool = False  # whether to start from the sums of earlier keys
    return_sums: bool = False  # whether to return the sums, so that later keys can be added

    @property
    def is_single_block(self) -> bool:
        """Whether all keys are in one block."""
        return self.num_keys <= self.block_kv and not self.ragged


class SoftmaxRefs(NamedTuple):
    """References to the state of one block of queries. Each block of keys updates the state."""

    q: jax.Ref  # q · q_scale [D L]; for bfloat16 [2·D L], whose second half is the rounding error of the first half
    offset: jax.Ref  # [1 L]
    weight_sum: jax.Ref  # [8 L], the sum of weights in eight parts
    value_sum: jax.Ref  # [D L], the sum of weighted values
    saved_weight_sum: jax.Ref  # copies of both sums from before this block of keys, to restore them
    saved_value_sum: jax.Ref
    scores: jax.Ref  # [S L], the scores of the next running-max step
    score_max: jax.Ref  # [8 L], the maximum of these scores in eight parts
    flags: jax.Ref


@runtime_checkable
class RestorableSums(Protocol):
    """The state that `add_with_fallback` needs: the softmax sums, copies of them, and the flags."""

    @property
    def weight_sum(self) -> jax.Ref: ...
    @property
    def value_sum(self) -> jax.Ref: ...
    @property
    def saved_weight_sum(self) -> jax.Ref: ...
    @property
    def saved_value_sum(self) -> jax.Ref: ...
    @property
    def flags(self) -> jax.Ref: ...


class PartialSums(NamedTuple):
    """The softmax sums of all queries over a part of the keys, which the next call takes as its carry. The fields are
    the first fields of `SoftmaxRefs`."""

    q: Any
    offset: Any
    weight_sum: Any
    value_sum: Any


class StepMask(NamedTuple):
    """The mask of a step. A key is visible if it is one of the first `num_valid` keys of the step and in the window.

    `relative_start` is the position of the step's first key minus the position of query 0.
    """

    num_valid: Array | int
    window: tuple[int, int] | None = None
    relative_start: Array | int = 0

    def all_valid(self, kv_strip: slice) -> bool:
        """Return whether all these keys are valid and this is known at trace time."""
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
    """The lists of blocks of `size` keys: one list for each group of `q_per_list` queries.

    An entry in `starts` is the position of a block's first key. An entry of `end` or more is padding.
    """

    size: int
    q_per_list: int
    starts: tuple[tuple[Array, ...], ...]
    end: Array

    def slices(self, q_strip: slice, kv_strip: slice) -> Iterator[tuple[slice, Array, Array]]:
        """Yield the listed blocks, or parts of blocks, that a strip of queries has in `kv_strip`.

        Yields:
            The rows of the block in the strip, the position of the block's first key, and False if the block is
                padding.
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


# With `jit`, the function is traced only once
@partial(jax.jit, static_argnames=("sizes", "kv_heads", "head_dim", "config"), inline=True)
def call(
    scalars: tuple,
    operands: tuple,
    carry: PartialSums | None,
    *,
    sizes: KernelSizes,
    kv_heads: int,
    head_dim: int,
    config: Config,
    matrices: tuple[ShardedMatrix, ...] = (),
) -> Any:
    """Call the kernel on a grid of examples, heads, blocks of queries and blocks of keys.

    `operands` are q, k and v: [B L N·D] and [B S K·D], or [B·N L D] and [B·K S D]. `scalars` has the number of valid
    keys of each example, or the lists of `sparse_kernel`. The new sums overwrite the sums of the carry. With
    `matrices`, the call also joins the shards of these weights while it computes. It then returns the joined weights,
    and no sums.
    """
    is_sparse, (q, k, v) = len(scalars) > 1, operands
    block_q, num_queries = sizes.block_q, sizes.num_queries
    heads_per_row = q.shape[2] // head_dim  # 1 if the heads are on the first axis
    heads = q.shape[0] * heads_per_row  # of all examples
    # q · q_scale is a sum of two bfloat16 numbers, because a single bfloat16 number would lose three digits
    split_q = q.dtype == jnp.bfloat16
    if split_q and 2 * head_dim <= LANES:
        k = jnp.concatenate([k, k], axis=2)  # a copy for each half of q; for wider heads, the kernel makes the copies

    q_index_map = row_index_map(sizes.heads, heads_per_row)
    q_spec = pl.BlockSpec((None, block_q, head_dim), lambda b, h, i, j, *_: q_index_map(b, h, i))
    sum_shapes = PartialSums(
        (head_dim * (1 + split_q), q.dtype), (1, jnp.float32), (8, jnp.float32), (head_dim, jnp.float32)
    )
    new_sums = [] if not sizes.return_sums else sum_shapes[1:] if carry else sum_shapes  # q is scaled and split once
    padded_queries = round_up(num_queries, block_q) if new_sums else num_queries

    def rows_spec(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, block_q), lambda b, h, i, j, *_: (b * sizes.heads + h, 0, i))

    def row_shape(rows: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((heads, rows, padded_queries), dtype)

    body, inputs = partial(sparse_kernel if is_sparse else kernel, sizes=sizes), (carry.q if carry else q, k, v)
    inputs += carry[1:] if carry else ()
    out_shape = [row_shape(*entry) for entry in new_sums] or [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        row_shape(1, jnp.float32),
    ]
    shards = [shard for matrix in matrices for shard in matrix.shards]
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    if matrices:
        body = join_while_computing(body, matrices, len(scalars), len(inputs), len(out_shape))
        scalars = (*scalars, matrices[0].first[None])
    results = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(
                heads // sizes.heads,
                sizes.heads,
                ceil_div(num_queries, block_q),
                ceil_div(sizes.num_keys, sizes.block_kv),
            ),
            in_specs=[
                rows_spec(sum_shapes.q[0]) if carry else q_spec,
                *_kv_specs(k.shape[2], sizes, sizes.heads // kv_heads, heads_per_row, head_dim, config.buffers),
                *(rows_spec(rows) for rows, _ in sum_shapes[1:] if carry),
                *[in_memory] * len(shards),
            ],
            out_specs=([rows_spec(rows) for rows, _ in new_sums] or [q_spec, rows_spec(1)])
            + [in_memory] * len(matrices),
            scratch_shapes=_scratch_shapes(sizes, sum_shapes.q[0], head_dim, q.dtype)
            + [pltpu.SemaphoreType.DMA((len(shards),))] * bool(matrices),
        ),
        out_shape=out_shape + [matrix.joined for matrix in matrices],
        input_output_aliases={len(scalars) + 3 + n: n for n in range(len(new_sums))} if carry else {},
        compiler_params=pltpu.CompilerParams(
            # the core that starts the copies of `matrices` also waits for them
            dimension_semantics=("arbitrary",) * 4 if matrices else ("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem_bytes(head_dim, q.dtype.itemsize) + COMPILER_VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * sizes.num_keys,
            transcendentals=q.size // head_dim * sizes.num_keys,
            bytes_accessed=q.dtype.itemsize * (2 * q.size + k.size + v.size),
        ),
        interpret=config.interpret,
        name="flash_blocks" if is_sparse else "flash_attention",
    )(*scalars, *inputs, *shards)
    return results if not new_sums else PartialSums(carry.q, *results) if carry else PartialSums(*results)


def row_index_map(heads: int, heads_per_row: int) -> Callable[..., tuple]:
    """Return the index map of a head's rows. Heads are on the first axis if a row has one head, else side by side."""
    return (lambda b, h, i: (b * heads + h, i, 0)) if heads_per_row == 1 else (lambda b, h, i: (b, i, h))


def _kv_specs(
    row_width: int, sizes: KernelSizes, heads_per_kv: int, heads_per_row: int, head_dim: int, buffers: int
) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """Return the block specs of keys, whose rows have `row_width` channels, and of values.

    `heads_per_kv` heads of q share a head of keys.
    """

    kv_row_index_map = row_index_map(sizes.heads // heads_per_kv, heads_per_row)

    def index_map(b, h, i, j, kv_lengths, *_):
        return kv_row_index_map(
            b,
            h if heads_per_kv == 1 else h // heads_per_kv,
            _nearest_visible_block(b, i, j, kv_lengths, sizes) if sizes.ragged else j,
        )

    spec = partial(pl.BlockSpec, index_map=index_map, pipeline_mode=pl.Buffered(1) if buffers == 1 else None)
    k_width = row_width if heads_per_row == 1 else head_dim
    return spec((None, sizes.block_kv, k_width)), spec((None, sizes.block_kv, head_dim))


def _nearest_visible_block(b, i, j, kv_lengths, sizes: KernelSizes):
    """Return the index of the block of keys to fetch in grid step j for block i of queries. If block j has no visible
    key, this is the nearest block that has one."""
    left, right = sizes.window
    first_block = (i * sizes.block_q - left) // sizes.block_kv
    last_key = jnp.minimum(kv_lengths[b], i * sizes.block_q + sizes.block_q + right) - 1
    return jnp.clip(j, jnp.maximum(first_block, 0), jnp.maximum(last_key // sizes.block_kv, 0))


def _scratch_shapes(sizes: KernelSizes, q_rows: int, head_dim: int, dtype: jnp.dtype) -> list[Any]:
    """Return the scratch memory of the kernel's `SoftmaxRefs`, in the order of its fields."""
    num_queries = sizes.block_q
    return [
        pltpu.VMEM((q_rows, num_queries), dtype),
        pltpu.VMEM((1, num_queries), jnp.float32),
        pltpu.VMEM((8, num_queries), jnp.float32),
        pltpu.VMEM((head_dim, num_queries), jnp.float32),
        pltpu.VMEM((8, num_queries), jnp.float32),
        pltpu.VMEM((head_dim, num_queries), jnp.float32),
        pltpu.VMEM((sizes.step_kv, num_queries), jnp.float32),
        pltpu.VMEM((8, num_queries), jnp.float32),
        pltpu.SMEM((2,), jnp.int32),
    ]


def kernel(kv_lengths_ref, q_ref, k_ref, v_ref, *refs, sizes: KernelSizes) -> None:
    """Compute dense attention. The grid has examples, heads, blocks of queries and blocks of keys.

    `refs` has three groups of references:

    1. With `has_carry`, the sums of the carry except `q`, which is `q_ref`.
    2. The result and its log-sum-exp. With `return_sums`, the new sums instead, which include `q` if there is no carry.
    3. The scratch memory of `SoftmaxRefs`.
    """
    example, i, j = (pl.program_id(axis) for axis in (0, 2, 3))
    add_block = partial(_add_block, kv_lengths_ref[example], (i, j), sizes=sizes)
    add_to_queries(add_block, i, q_ref, k_ref, v_ref, refs, sizes)


def add_to_queries(add_block: Callable, i: Array, q_ref, k_ref, v_ref, refs: Sequence[Any], sizes: KernelSizes) -> None:
    """Call `add_block(q_ref, k_ref, v_ref, *refs)`. For the last block of queries, pass only the rows of its queries.

    Args:
        add_block: The function.
        i: The index of the block of queries.
        q_ref: The queries.
        k_ref: A block of keys.
        v_ref: A block of values.
        refs: References that have an axis of queries, and the flags, which have one axis.
        sizes: The sizes.
    """
    last_block = ceil_div(sizes.num_queries, sizes.block_q) - 1
    remaining = round_up(sizes.num_queries - last_block * sizes.block_q, TILE_Q)
    if remaining >= sizes.block_q:
        add_block(q_ref, k_ref, v_ref, *refs)
        return

    @pl.when(i < last_block)
    def _():
        add_block(q_ref, k_ref, v_ref, *refs)

    @pl.when(i == last_block)
    def _():
        first_refs = (ref if len(ref.shape) == 1 else _first_queries(ref, remaining, sizes) for ref in refs)
        add_block(_first_queries(q_ref, remaining, sizes), k_ref, v_ref, *first_refs)


def _first_queries(ref: Any, num_queries: int, sizes: KernelSizes) -> Any:
    """Return a reference to the first queries. The axis of queries is the axis with `block_q` entries."""
    return ref.at[:, :num_queries] if ref.shape[1] == sizes.block_q else ref.at[:num_queries]


def _add_block(
    kv_length: Array, grid_index: tuple[Array, Array], q_ref, k_ref, v_ref, *refs, sizes: KernelSizes
) -> None:
    """Add the block of keys of a grid step. `kernel` explains the references."""
    carry, refs = (PartialSums(q_ref, *refs[:3]), refs[3:]) if sizes.has_carry else (None, refs)
    num_results = 2 if not sizes.return_sums else 3 if sizes.has_carry else 4
    out, state = refs[:num_results], SoftmaxRefs(*refs[num_results:])
    i, j = grid_index
    q_start, kv_start = i * sizes.block_q, j * sizes.block_kv
    is_last = j == ceil_div(sizes.num_keys, sizes.block_kv) - 1
    offset_margin = OFFSET_MARGIN[k_ref.dtype.name]

    @pl.when((i == 0) & (j == 0))
    def _():
        state.flags[RUNNING_MAX_FLAG] = 0

    @pl.when(j == 0)
    def _():
        if carry is None:
            _init_state(q_ref, state, q_start, sizes)
        else:
            _copy_refs(carry, state[: len(carry)])
            state.flags[OFFSET_SET_FLAG] = 0
        if carry is None and not sizes.ragged:
            _init_offset(k_ref, state, min(PROBE_KV, sizes.num_keys), offset_margin)

    if carry is not None and sizes.is_single_block:
        state = state._replace(saved_weight_sum=carry.weight_sum, saved_value_sum=carry.value_sum)
    if sizes.ragged:
        _add_ragged(k_ref, v_ref, state, kv_length, q_start, kv_start, sizes, offset_margin)
    else:
        _add_dense(k_ref, v_ref, state, is_last, sizes)

    @pl.when(is_last)
    def _():
        if sizes.return_sums:
            _copy_refs(state[len(PartialSums._fields) - num_results : len(PartialSums._fields)], out)
        else:
            _write_results(out[0], out[1], state)


def _copy_refs(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[...] = source[...]


def sparse_kernel(
    list_start_ref,
    list_length_ref,
    visits_tail_ref,
    block_start_ref,
    kv_lengths_ref,
    q_ref,
    k_ref,
    v_ref,
    o_ref,
    lse_ref,
    *scratch,
    sizes: KernelSizes,
) -> None:
    """Compute block-sparse attention, which visits only listed blocks of keys. The grid is that of `kernel`.

    In grid step (i, j), each group of queries visits at most `list_length` blocks of `step_kv` keys. All these blocks
    are in the block of keys of the grid step. `block_start_ref` has the positions of their first keys, from index
    `list_start` on. `list_length` may differ between examples. If `visits_tail_ref` is 1 for a group of queries, the
    group also visits the tail: the keys after the last full block, up to `kv_length`.
    """
    state, groups = SoftmaxRefs(*scratch), range(sizes.block_q // sizes.q_per_list)
    example, i, j = (pl.program_id(axis) for axis in (0, 2, 3))
    kv_steps = pl.num_programs(3)
    grid_step = i * kv_steps + j
    list_start = list_start_ref[grid_step]
    list_length = list_length_ref[example * pl.num_programs(2) * kv_steps + grid_step]
    kv_length, blocks_per_step = kv_lengths_ref[example], sizes.block_kv // sizes.step_kv
    tail_block = kv_length // sizes.step_kv - j * blocks_per_step  # index of the tail in this grid step's block of keys

    @pl.when((i == 0) & (j == 0))
    def _():
        state.flags[RUNNING_MAX_FLAG] = 0

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
        _init_offset_from_list(k_ref, state, blocks_from(0, 1), PROBE_KV, OFFSET_MARGIN[q_ref.dtype.name])

    _add_listed_blocks(k_ref, v_ref, state, blocks_from, list_length, sizes)

    @pl.when((tail_block >= 0) & (tail_block < blocks_per_step) & (kv_length % sizes.step_kv > 0))
    def _():
        tail_end = tail_start + sizes.step_kv
        starts = tuple((jnp.where(visits_tail_ref[i * len(groups) + g] == 1, tail_start, tail_end),) for g in groups)
        tail = BlockList(sizes.step_kv, sizes.q_per_list, starts, tail_end)
        _raise_offset_and_add(k_ref, v_ref, state, tail, sizes.step_kv, StepMask(kv_length % sizes.step_kv))

    pl.when(j == kv_steps - 1)(lambda: _write_results(o_ref, lse_ref, state))


def _add_listed_blocks(
    k_ref,
    v_ref,
    state: SoftmaxRefs,
    blocks_from: Callable[[Array, int], BlockList],
    list_length: Array,
    sizes: KernelSizes,
) -> None:
    """Add the first `list_length` listed blocks of keys. `blocks_from(index, count)` returns a part of the list."""

    def add_with_fixed_offset() -> None:
        def add(index: Array, count: int) -> None:
            _accumulate_keys(k_ref, v_ref, state, blocks_from(index, count), count * sizes.step_kv)

        _loop_in_chunks(0, list_length, sizes.block_kv_compute // sizes.step_kv, add)

    def add_with_running_max() -> None:
        loop(
            0,
            list_length,
            lambda index: _raise_offset_and_add(k_ref, v_ref, state, blocks_from(index, 1), sizes.step_kv),
        )

    add_with_fallback(state, add_with_fixed_offset, add_with_running_max)


def _loop_in_chunks(begin: Array | int, end: Array | int, max_count: int, add: Callable[[Array, int], None]) -> None:
    """Call `add(index, count)` for consecutive chunks of the range from `begin` to `end`. Most chunks have `max_count`
    entries, and the chunks at the end have fewer."""
    for count in sorted({max(1, max_count // 4**n) for n in range(max_count)}, reverse=True):
        steps = (end - begin) // count
        loop(0, steps, lambda index, begin=begin, count=count: add(begin + index * count, count))
        begin = begin + steps * count


def add_with_fallback(
    state: RestorableSums,
    add_with_fixed_offset: Callable[[], None],
    add_with_running_max: Callable[[], None],
    *,
    starts_empty: bool = False,
    is_saved: bool = False,
    max_weight_sum: float = MAX_WEIGHT_SUM,
) -> None:
    """Add keys by the fast path. If a logit is out of the range of the offset, restore the sums and use the running-max
    path.

    Args:
        state: The softmax sums.
        add_with_fixed_offset: The fast path.
        add_with_running_max: The running-max path.
        starts_empty: Whether there are no sums of earlier keys.
        is_saved: Whether the sums of earlier keys are already saved.
        max_weight_sum: A sum of weights above this number means that a logit is out of range.
    """
    if not (starts_empty or is_saved):
        _copy_refs((state.weight_sum, state.value_sum), (state.saved_weight_sum, state.saved_value_sum))

    @pl.when(state.flags[RUNNING_MAX_FLAG] == 0)
    def _():
        add_with_fixed_offset()

        @pl.when(jnp.max(jnp.where(state.weight_sum[...] <= max_weight_sum, 0, 1)) == 1)  # NaN too
        def _():
            state.flags[RUNNING_MAX_FLAG] = 1
            state.weight_sum[...] = jnp.zeros(state.weight_sum.shape) if starts_empty else state.saved_weight_sum[...]
            state.value_sum[...] = jnp.zeros(state.value_sum.shape) if starts_empty else state.saved_value_sum[...]

    pl.when(state.flags[RUNNING_MAX_FLAG] == 1)(add_with_running_max)


def _raise_offset_and_add(
    k_ref, v_ref, state: SoftmaxRefs, start: Array | int | BlockList, count: int, mask: StepMask | None = None
) -> None:
    """Raise the offset to the maximum score of these keys, then add the keys."""
    _raise_offset(k_ref, state, start, count, mask)
    _accumulate_keys(k_ref, v_ref, state, start, count, mask)


def _write_results(o_ref, lse_ref, state: SoftmaxRefs) -> None:
    """Divide the sum of weighted values by the sum of weights. Write the result and the log-sum-exp."""
    weight_sum = state.weight_sum[...].sum(axis=0, keepdims=True)
    o_ref[...] = divide_or_zero(state.value_sum[...], weight_sum).astype(o_ref.dtype).T
    lse_ref[...] = jnp.where(weight_sum == 0, -jnp.inf, (state.offset[...] + jnp.log2(weight_sum)) * math.log(2))


def _add_dense(k_ref, v_ref, state: SoftmaxRefs, is_last: Array, sizes: KernelSizes) -> None:
    """Add a block of keys to which all queries attend. The last block of keys may end with a partial compute block."""
    num_blocks, tail = num_compute_blocks(is_last, sizes), sizes.num_keys % sizes.block_kv_compute

    def add_tail(add: Callable) -> None:
        if tail:
            pl.when(is_last)(lambda: add(k_ref, v_ref, state, num_blocks * sizes.block_kv_compute, tail))

    def add_with_fixed_offset() -> None:
        loop(
            0,
            num_blocks,
            lambda index: _accumulate_keys(k_ref, v_ref, state, index * sizes.block_kv_compute, sizes.block_kv_compute),
        )
        add_tail(_accumulate_keys)

    def add_with_running_max() -> None:
        _add_with_running_max(
            k_ref, v_ref, state, 0, num_blocks * (sizes.block_kv_compute // sizes.step_kv), sizes.step_kv
        )
        add_tail(_raise_offset_and_add)

    is_single_block, has_carry = sizes.is_single_block, sizes.has_carry
    add_with_fallback(
        state,
        add_with_fixed_offset,
        add_with_running_max,
        starts_empty=is_single_block and not has_carry,
        is_saved=is_single_block and has_carry,
    )


def _add_ragged(
    k_ref,
    v_ref,
    state: SoftmaxRefs,
    kv_length: Array,
    q_start: Array,
    kv_start: Array,
    sizes: KernelSizes,
    offset_margin: float,
) -> None:
    """Add the visible keys of a block: first the steps without a mask, then the masked steps."""
    step_kv = sizes.step_kv

    def clip_to_block(position: Array | int) -> Array:
        return jnp.clip(position - kv_start, 0, sizes.block_kv)

    (left, right), num_queries = sizes.window, state.q.shape[1]
    any_visible_range = (
        clip_to_block(q_start - left),
        clip_to_block(jnp.minimum(kv_length, q_start + num_queries + right)),
    )
    all_visible_range = (
        clip_to_block(q_start + num_queries - 1 - left),
        clip_to_block(jnp.minimum(kv_length, q_start + 1 + right)),
    )
    begin = ceil_div(all_visible_range[0], step_kv)
    end = jnp.maximum(begin, all_visible_range[1] // step_kv)

    def add_with_fixed_offset() -> None:
        def add(index: Array, count: int) -> None:
            _accumulate_keys(k_ref, v_ref, state, index * step_kv, count * step_kv)

        _loop_in_chunks(begin, end, sizes.block_kv_compute // step_kv, add)

    @pl.when(end > begin)
    def _():
        @pl.when(state.flags[OFFSET_SET_FLAG] == 0)
        def _():
            _raise_offset(k_ref, state, begin * step_kv, min(PROBE_KV, step_kv), offset_margin=offset_margin)
            state.flags[OFFSET_SET_FLAG] = 1

        add_with_fallback(
            state, add_with_fixed_offset, lambda: _add_with_running_max(k_ref, v_ref, state, begin, end, step_kv)
        )

    def add_masked(index: Array) -> None:
        start = (index + jnp.where(index >= begin, end - begin, 0)) * step_kv
        mask = StepMask(kv_length - kv_start - start, sizes.window, kv_start + start - q_start)
        _raise_offset_and_add(k_ref, v_ref, state, start, step_kv, mask)

    loop(any_visible_range[0] // step_kv, ceil_div(any_visible_range[1], step_kv) - (end - begin), add_masked)


def num_compute_blocks(is_last: Array, sizes: KernelSizes) -> Array | int:
    """Return the number of full compute blocks in this block of keys."""
    num_in_others = sizes.block_kv // sizes.block_kv_compute
    num_in_last = ((sizes.num_keys - 1) % sizes.block_kv + 1) // sizes.block_kv_compute
    return (
        num_in_last
        if sizes.is_single_block or num_in_last == num_in_others
        else jnp.where(is_last, num_in_last, num_in_others)
    )


def loop(start: Array | int, stop: Array | int, step: Callable[[Array], None]) -> None:
    def body(index: Array, carry: None) -> None:
        step(index)

    jax.lax.fori_loop(start, stop, body, None)


def strips(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _init_state(q_ref, state: SoftmaxRefs, q_start: Array, sizes: KernelSizes) -> None:
    """Clear the state, and write the transposed and scaled queries. The input after the last query is undefined, so 0
    is written there."""
    q = sizes.q_scale * q_ref[...].T.astype(jnp.float32)  # [D L]
    if sizes.num_queries % sizes.block_q:
        q = jnp.where(q_start + positions(slice(0, q.shape[1]), 1) < sizes.num_queries, q, 0.0)
    high = q.astype(state.q.dtype)
    head_dim = q.shape[0]
    state.q[:head_dim] = high
    if state.q.shape[0] > head_dim:
        state.q[head_dim:] = (q - high.astype(jnp.float32)).astype(state.q.dtype)
    state.offset[...] = jnp.full(state.offset.shape, -jnp.inf)
    state.weight_sum[...] = jnp.zeros(state.weight_sum.shape)
    state.value_sum[...] = jnp.zeros(state.value_sum.shape)
    state.flags[OFFSET_SET_FLAG] = 0


def _strips_and_mask(num_keys: int, mask: StepMask | None) -> tuple[list[slice], StepMask | None]:
    """Return strips of keys that fill whole registers, and the mask. If the keys end within a register and there is no
    mask, return a mask of the valid keys."""
    padded_keys = round_up(num_keys, REGISTER_ROWS)
    return strips(padded_keys, STRIP_KV), StepMask(num_keys) if mask is None and padded_keys > num_keys else mask


def _read_keys(ref, start: Array | int | BlockList, kv_strip: slice, q_strip: slice) -> Array:
    """Read the rows `kv_strip` of the keys that begin at `start`. If `start` is a `BlockList`, read the rows from the
    listed blocks of the strip of queries."""
    if not isinstance(start, BlockList):
        return ref[pl.ds(start + kv_strip.start, size_of(kv_strip)), :]
    slices, alignment = start.slices(q_strip, kv_strip), math.gcd(start.size, size_of(kv_strip))
    parts = [ref[pl.ds(pl.multiple_of(first, alignment), size_of(rows)), :] for rows, first, _ in slices]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _q_strips(state: SoftmaxRefs, start: Array | int | BlockList) -> list[slice]:
    """Return strips of queries. All queries of a strip attend to the same blocks of keys."""
    return strips(state.q.shape[1], min(STRIP_Q, start.q_per_list) if isinstance(start, BlockList) else STRIP_Q)


def _scores(
    k_ref, state: SoftmaxRefs, start: Array | int | BlockList, kv_strip: slice, q_strip: slice, mask: StepMask | None
) -> Float32[Array, "S L"]:
    """Return the scores of a strip of keys and a strip of queries, as exponents of two. The score of a masked key is
    -inf."""
    k = _read_keys(k_ref, start, kv_strip, q_strip)
    if k.shape[1] < state.q.shape[0]:
        k = jnp.concatenate([k, k], axis=1)
    s = jnp.dot(k, state.q[:, q_strip], preferred_element_type=jnp.float32, precision=matmul_precision(k.dtype))
    return s if mask is None or mask.all_valid(kv_strip) else jnp.where(mask.visible(kv_strip, q_strip), s, -jnp.inf)


def _raise_offset(
    k_ref,
    state: SoftmaxRefs,
    start: Array | int | BlockList,
    num_keys: int,
    mask: StepMask | None = None,
    *,
    offset_margin: float = 0.0,
) -> None:
    """Raise the offset to the maximum score of these keys plus a margin, and rescale the sums. The offset never
    decreases."""
    kv_strips, mask = _strips_and_mask(num_keys, mask)
    for q_strip in _q_strips(state, start):
        _raise_offset_to(state, q_strip, _max_scores(k_ref, state, start, kv_strips, q_strip, mask) + offset_margin)


def _init_offset_from_list(k_ref, state: SoftmaxRefs, start: BlockList, num_keys: int, offset_margin: float) -> None:
    """Set each offset that is still -inf to the maximum score of the first keys in the list, plus a margin."""
    for q_strip in _q_strips(state, start):
        max_score = _max_scores(k_ref, state, start, [slice(0, num_keys)], q_strip, None) + offset_margin
        state.offset[:, q_strip] = jnp.where(state.offset[:, q_strip] == -jnp.inf, max_score, state.offset[:, q_strip])


def _init_offset(k_ref, state: SoftmaxRefs, num_keys: int, offset_margin: float) -> None:
    """Set the offset to the maximum score of the first keys, plus a margin."""
    kv_strips, mask = _strips_and_mask(num_keys, None)
    for q_strip in strips(state.q.shape[1], STRIP_Q):
        state.offset[:, q_strip] = _max_scores(k_ref, state, 0, kv_strips, q_strip, mask) + offset_margin


def _max_scores(
    k_ref,
    state: SoftmaxRefs,
    start: Array | int | BlockList,
    kv_strips: list[slice],
    q_strip: slice,
    mask: StepMask | None,
) -> Array:
    maxima = []
    for kv_strip in kv_strips:
        scores = _scores(k_ref, state, start, kv_strip, q_strip, mask)
        blocks = start.slices(q_strip, kv_strip) if isinstance(start, BlockList) else [(slice(0, len(scores)), 0, True)]
        maxima += [
            jnp.where(is_block, scores[rows].max(axis=0, keepdims=True), -jnp.inf) for rows, _, is_block in blocks
        ]
    return reduce(jnp.maximum, maxima)


def _raise_offset_to(state: SoftmaxRefs, q_strip: slice, max_score: Float32[Array, "1 L"]) -> None:
    old_offset = state.offset[:, q_strip]
    new_offset = jnp.maximum(old_offset, max_score)
    correction = jnp.exp2(old_offset - finite_max(new_offset))
    state.offset[:, q_strip] = new_offset
    state.weight_sum[:, q_strip] *= correction
    state.value_sum[:, q_strip] *= correction


def _accumulate_keys(
    k_ref, v_ref, state: SoftmaxRefs, start: Array | int | BlockList, num_keys: int, mask: StepMask | None = None
) -> None:
    """Add the weights and weighted values of these keys, with the offset unchanged.

    The compiler's schedule depends on the order of these steps. docs/attention.md has the cost of other orders.
    """
    kv_strips, mask = _strips_and_mask(num_keys, mask)
    pending: list[tuple[Array, slice, Array]] = []
    q_strips = _q_strips(state, start)
    is_list = isinstance(start, BlockList)
    # Strips of listed blocks are shorter, so more of them are processed at the same time
    depth = PIPELINE_DEPTH * STRIP_Q // size_of(q_strips[0]) if is_list else PIPELINE_DEPTH
    for kv_strip in kv_strips:
        strip_mask = None if mask is None or mask.all_valid(kv_strip) else mask
        v = None
        for q_strip in q_strips:
            if v is None or (isinstance(start, BlockList) and q_strip.start % start.q_per_list == 0):
                v = _read_keys(v_ref, start, kv_strip, q_strip)
                if strip_mask is not None:
                    # The memory of v after the last key is undefined
                    v = jnp.where(strip_mask.valid(kv_strip), v, jnp.zeros_like(v))
                v = v.T
            s = _scores(k_ref, state, start, kv_strip, q_strip, strip_mask)
            p = _weights(s, state.offset[:, q_strip], start, kv_strip, q_strip, masked=strip_mask is not None)
            state.weight_sum[:, q_strip] += split_rows_by_sublanes(p).sum(axis=0)
            pending.append((v, q_strip, p.astype(v.dtype)))
            if len(pending) > depth:
                _accumulate_values(state, *pending.pop(0))
    for values in pending:
        _accumulate_values(state, *values)


def _weights(
    s: Array, offset: Array, start: Array | int | BlockList, kv_strip: slice, q_strip: slice, masked: bool
) -> Array:
    """Return the weights for scores. Padding of a list has weight 0."""
    offset = finite_max(offset) if masked else offset
    if not isinstance(start, BlockList):
        return jnp.exp2(s - offset)
    parts = [
        jnp.exp2(s[rows] - jnp.where(is_block, offset, jnp.inf))
        for rows, _, is_block in start.slices(q_strip, kv_strip)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _accumulate_values(state: SoftmaxRefs, v: Array, q_strip: slice, p: Array) -> None:
    state.value_sum[:, q_strip] += jnp.dot(
        v, p, preferred_element_type=jnp.float32, precision=matmul_precision(v.dtype)
    )


def _add_with_running_max(
    k_ref, v_ref, state: SoftmaxRefs, first_step: Array | int, end_step: Array | int, step_kv: int
) -> None:
    """Add steps of `step_kv` keys. Before each step, raise the offset to the maximum score of its keys.

    Each step computes the scores of the next one, so that the matrix unit does not wait for the maximum.
    """
    q_strips = strips(state.q.shape[1], RUNNING_MAX_STEP_Q)

    def score(index: Array | int, q_strip: slice) -> None:
        s = _scores(k_ref, state, index * step_kv, slice(0, step_kv), q_strip, None)
        state.scores[:, q_strip] = s
        state.score_max[:, q_strip] = split_rows_by_sublanes(s).max(axis=0)

    def step(index: Array) -> None:
        pending: list[tuple[Array, slice, Array]] = []
        v = v_ref[pl.ds(index * step_kv, step_kv), :].T
        for q_strip in q_strips:
            _raise_offset_to(state, q_strip, state.score_max[:, q_strip].max(axis=0, keepdims=True))
        for q_strip in q_strips:
            s = state.scores[:, q_strip]
            score(jnp.minimum(index + 1, end_step - 1), q_strip)
            p = jnp.exp2(s - state.offset[:, q_strip])
            state.weight_sum[:, q_strip] += split_rows_by_sublanes(p).sum(axis=0)
            pending.append((v, q_strip, p.astype(v.dtype)))
            if len(pending) > 1:
                _accumulate_values(state, *pending.pop(0))
        _accumulate_values(state, *pending.pop())

    for q_strip in q_strips:
        score(first_step, q_strip)
    loop(first_step, end_step, step)


def split_rows_by_sublanes(x: Float32[Array, "S L"]) -> Float32[Array, "_S 8 L"]:
    """Group rows by the eight sublanes of a register, because the vector unit adds or compares whole registers."""
    return x.reshape(-1, 8, x.shape[1])
