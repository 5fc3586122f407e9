# SPDX-License-Identifier: Apache-2.0
"""The Pallas kernels of sparse-linear attention on TPUs.

There are three kernels. `prepare` reads q, k and v once, and computes the sums of blocks and the state of linear
attention. `list_blocks` lists the blocks with the largest scores. `attend` computes the sparse part and the linear part
of attention. In a grid step of `attend`, there are a few blocks of queries, each with its own list. While one block
waits, the products of another block run.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from wanjax.kernels.alignment import LANES, ceil_div, round_up
from wanjax.kernels.attention.blocks import iota, matmul
from wanjax.kernels.attention.flash_tiles import MAX_WEIGHT_SUM, OFFSET_MARGIN

TILE_KV = 256  # keys of a step; they fill a matrix unit
# Number of steps whose weights are computed before the values of the first step are added; the matrix unit then does
# not wait
PIPELINE_DEPTH = 2
TOKENS_PER_STEP = 2048  # maximum tokens in a grid step of `prepare`
LISTS_PER_STEP = 128  # rows in a grid step of `list_blocks`
SCORE_BITS = 32


class KernelSizes(NamedTuple):
    """Static arguments of the kernels."""

    num_queries: int
    num_tokens: int  # valid tokens; later tokens are padding
    heads: int  # of one example
    block_q: int
    block_kv: int
    top_k: int  # blocks of keys in a list
    lists: int  # number of blocks of queries in a grid step of `attend`; each block has a list
    unroll: int  # number of tiles of each list that are unrolled

    @property
    def blocks_per_tile(self) -> int:
        """Blocks of keys in a tile."""
        return TILE_KV // self.block_kv

    @property
    def tiles(self) -> int:
        """The number of full tiles of a list. One to four blocks follow the full tiles. The last one may be partial."""
        return (self.top_k - 1) // self.blocks_per_tile

    @property
    def rows(self) -> int:
        """Queries of a grid step."""
        return self.lists * self.block_q


def prepare(
    q: Float[Array, "B L E"], k: Float[Array, "B L E"], v: Float[Array, "B L E"], sizes: KernelSizes, *, interpret: bool
) -> tuple[Float32[Array, "_B _L D"], Float32[Array, "_B _S D"], Float32[Array, "_B D _D"]]:
    """Return the sums over each block of q and of k, and Σ φ(k)ᵀ [v, 1], for the heads of all examples."""
    head_dim = q.shape[2] // sizes.heads
    alignment = math.lcm(sizes.block_q, sizes.block_kv, LANES)
    block_tokens = min(round_up(TOKENS_PER_STEP, alignment), round_up(sizes.num_tokens, alignment))
    heads, steps = len(q) * sizes.heads, ceil_div(sizes.num_tokens, block_tokens)
    rows = pl.BlockSpec((None, block_tokens, head_dim), lambda b, h, i: (b, i, h))
    blocks_per_step = [block_tokens // block_size for block_size in (sizes.block_q, sizes.block_kv)]
    return pl.pallas_call(
        partial(_prepare, sizes=sizes),
        grid=(len(q), sizes.heads, steps),
        in_specs=[rows, rows, rows],
        out_specs=[
            *(
                pl.BlockSpec((None, num_blocks, head_dim), lambda b, h, i: (b * sizes.heads + h, i, 0))
                for num_blocks in blocks_per_step
            ),
            pl.BlockSpec((None, head_dim, 2 * head_dim), lambda b, h, i: (b * sizes.heads + h, 0, 0)),
        ],
        out_shape=[
            *(
                jax.ShapeDtypeStruct((heads, steps * num_blocks, head_dim), jnp.float32)
                for num_blocks in blocks_per_step
            ),
            jax.ShapeDtypeStruct((heads, head_dim, 2 * head_dim), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="sparse_linear_prepare",
    )(q, k, v)


def _prepare(q_ref, k_ref, v_ref, q_sums_ref, k_sums_ref, state_ref, *, sizes: KernelSizes) -> None:
    """Compute the results of `prepare`. The grid has examples, heads and blocks of tokens."""
    i, block_tokens = pl.program_id(2), q_ref.shape[0]
    num_valid = sizes.num_tokens - i * block_tokens

    def add(ragged: bool) -> None:
        q, k, v = q_ref[...], k_ref[...], v_ref[...]
        if ragged:  # after the last token, memory is undefined
            valid = iota((block_tokens, 1), 0) < num_valid
            q, k, v = (jnp.where(valid, x, jnp.zeros_like(x)) for x in (q, k, v))
        q_sums_ref[...], k_sums_ref[...] = _block_sums(q, sizes.block_q), _block_sums(k, sizes.block_kv)
        x = k.T.astype(jnp.float32)  # channels are on the first axis, so that softmax adds whole registers
        weights = jnp.exp(x - x.max(axis=0, keepdims=True))
        weights = (weights * (1.0 / weights.sum(axis=0, keepdims=True))).astype(k.dtype)
        if ragged:
            weights = jnp.where(iota((1, block_tokens), 1) < num_valid, weights, jnp.zeros_like(weights))
        state = matmul(weights, jnp.concatenate([v, jnp.ones_like(v)], axis=1))
        state_ref[...] = jnp.where(i == 0, state, state_ref[...] + state)

    last = pl.num_programs(2) - 1
    if sizes.num_tokens % block_tokens:
        pl.when(i < last)(lambda: add(False))
    pl.when(i == last)(lambda: add(True)) if sizes.num_tokens % block_tokens else add(False)


def _block_sums(x: Float[Array, "L D"], size: int) -> Float32[Array, "_L D"]:
    """Return the sum of each block of rows, by a matrix product."""
    shape = (len(x) // size, len(x))
    return matmul(jnp.where(iota(shape, 0) == iota(shape, 1) // size, 1.0, 0.0).astype(x.dtype), x)


def list_blocks(scores: Float32[Array, "_L _S"], sizes: KernelSizes, *, interpret: bool) -> Int32[Array, "_L _T"]:
    """Return the `sizes.top_k` blocks with the largest scores in each row, in ascending order.

    A block is given by the position of its first key. Among blocks with equal scores, the first ones are selected. The
    entries after the first `sizes.top_k` only pad the row to whole lanes.
    """
    rows, blocks = scores.shape
    padded_blocks, padded_top_k = round_up(blocks, LANES), round_up(sizes.top_k, LANES)
    return pl.pallas_call(
        partial(_list_blocks, blocks=blocks, sizes=sizes),
        grid=(ceil_div(rows, LISTS_PER_STEP),),
        in_specs=[pl.BlockSpec((LISTS_PER_STEP, padded_blocks), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((LISTS_PER_STEP, padded_top_k), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, padded_top_k), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=48 << 20),
        interpret=interpret,
        name="sparse_linear_lists",
    )(scores)


def _list_blocks(scores_ref, out_ref, *, blocks: int, sizes: KernelSizes) -> None:
    """List the selected blocks. First find the lowest selected score, bit by bit. Then count the selected blocks up to
    each position, and search these counts for the position of each list entry."""
    scores = scores_ref[...]
    rows, padded_blocks = scores.shape
    is_block = iota(scores.shape, 1) < blocks
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)  # -0 becomes 0
    sortable = jnp.where(is_block, jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits), jnp.int32(-(2**31)))
    threshold = jnp.full((rows, 1), -(2**31), jnp.int32)
    for bit in reversed(range(SCORE_BITS)):
        candidate = threshold ^ jnp.int32(-(2**31) if bit == SCORE_BITS - 1 else 1 << bit)
        count = jnp.where(sortable >= candidate, 1.0, 0.0).sum(axis=1, keepdims=True)
        threshold = jnp.where(count >= sizes.top_k, candidate, threshold)
    square = (padded_blocks, padded_blocks)
    upper_triangle = jnp.where(iota(square, 0) <= iota(square, 1), 1.0, 0.0).astype(jnp.bfloat16)

    def cumulative_count(selected: Array) -> Array:
        """Return the number of ones up to each lane. The number is exact, because it is a float32 sum of ones."""
        return matmul(selected.astype(jnp.bfloat16), upper_triangle)

    is_larger, is_equal = (jnp.where(x, 1.0, 0.0) for x in (sortable > threshold, sortable == threshold))
    num_equal = sizes.top_k - is_larger.sum(axis=1, keepdims=True)
    counts = cumulative_count(jnp.maximum(is_larger, jnp.where(cumulative_count(is_equal) <= num_equal, is_equal, 0.0)))
    counts = jnp.where(is_block, counts, jnp.float32(jnp.inf))
    count_registers = [counts[:, lane_start : lane_start + LANES] for lane_start in range(0, padded_blocks, LANES)]
    for lane_start in range(0, out_ref.shape[1], LANES):
        rank = (iota((rows, LANES), 1) + lane_start).astype(jnp.float32)
        register = reduce(jnp.add, (jnp.where(x[:, -1:] <= rank, 1, 0) for x in count_registers))
        lane = jnp.zeros((rows, LANES), jnp.int32)  # the first lane with a count above the rank
        for step in (64, 32, 16, 8, 4, 2, 1):
            lane = jnp.where(_take_lane(count_registers, register, lane + step - 1) <= rank, lane + step, lane)
        out_ref[:, lane_start : lane_start + LANES] = (register * LANES + lane) * sizes.block_kv


def _take_lane(
    registers: list[Array], register: Int32[Array, "L S"], lane: Int32[Array, "L S"]
) -> Float32[Array, "L S"]:
    """For each pair of a register's index and a lane, return the value in this lane of the register."""
    entries = jnp.take_along_axis(registers[0], lane, axis=1)
    for index, x in enumerate(registers[1:], 1):
        entries = jnp.where(register == index, jnp.take_along_axis(x, lane, axis=1), entries)
    return entries


def attend(
    first_keys: Int32[Array, "_B _L _N _T"],
    q: Float[Array, "B L E"],
    k: Float[Array, "B L E"],
    v: Float[Array, "B L E"],
    state: Float[Array, "_B _D _E"],
    bias: Float32[Array, "1 D"],
    sizes: KernelSizes,
    *,
    buffers: int,
    vmem_bytes: int,
    interpret: bool,
) -> Float[Array, "B L E"]:
    """Return the sum of the sparse and the linear part of attention. All keys of a head are in VMEM.

    Args:
        first_keys: The first keys of the listed blocks, for each head, grid step and list.
        q: Queries.
        k: Keys.
        v: Values.
        state: For each head a matrix [D 2D]. The first D columns are the projected values of linear attention, and each
            of the other columns is its weights. In bfloat16 a matrix [2D 2D], whose second half of rows is the rounding
            error of the first half.
        bias: The bias of the projection.
        sizes: Static arguments.
        buffers: The number of buffers for keys. With 2, the keys of the next head are prefetched.
        vmem_bytes: The limit of VMEM.
        interpret: Run the kernel without a TPU.
    """
    head_dim = q.shape[2] // sizes.heads
    num_keys = round_up(sizes.num_tokens, sizes.block_kv)
    q_spec = pl.BlockSpec((None, sizes.rows, head_dim), lambda b, h, i: (b, i, h))
    pipeline_mode = pl.Buffered(1) if buffers == 1 else None
    kv_spec = pl.BlockSpec((None, num_keys, head_dim), lambda b, h, i: (b, 0, h), pipeline_mode=pipeline_mode)
    scores = len(q) * sizes.heads * q.shape[1] * sizes.top_k * sizes.block_kv
    return pl.pallas_call(
        partial(_attend, sizes=sizes),
        grid=(len(q), sizes.heads, first_keys.shape[1]),
        in_specs=[
            pl.BlockSpec(
                (None, None, *first_keys.shape[2:]),
                lambda b, h, i: (b * sizes.heads + h, i, 0, 0),
                memory_space=pltpu.SMEM,
            ),
            q_spec,
            kv_spec,
            kv_spec,
            pl.BlockSpec((None, *state.shape[1:]), lambda b, h, i: (b * sizes.heads + h, 0, 0)),
            pl.BlockSpec(bias.shape, lambda b, h, i: (0, 0)),
        ],
        out_specs=q_spec,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[pltpu.VMEM((sizes.rows, n), jnp.float32) for n in (head_dim, LANES, LANES)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * head_dim, transcendentals=scores, bytes_accessed=4 * q.size * q.dtype.itemsize
        ),
        interpret=interpret,
        name="sparse_linear",
    )(first_keys, q, k, v, state, bias)


class StepRefs(NamedTuple):
    """References of a grid step. The last three refer to scratch memory with a row for each query."""

    first_keys: jax.Ref
    q: jax.Ref
    k: jax.Ref
    v: jax.Ref
    value_sum: jax.Ref  # [L D], the sum of weighted values
    weight_sum: jax.Ref  # [L 128], the sum of weights in 128 parts
    offset: jax.Ref  # [L 128], the offset, which is the same in all lanes


class TileSlice(NamedTuple):
    """Consecutive blocks of one list that are computed together."""

    rows: slice  # the queries of the list
    index: int  # the index of the list
    first_position: Array | int  # position of the first block in the list
    count: int  # blocks
    ends_list: bool


def _attend(
    first_keys_ref,
    q_ref,
    k_ref,
    v_ref,
    state_ref,
    bias_ref,
    o_ref,
    value_sum_ref,
    weight_sum_ref,
    offset_ref,
    *,
    sizes: KernelSizes,
) -> None:
    """Compute the result of `attend`. The grid has examples, heads and blocks of queries.

    A row's offset is the mean score of the first block of its list, plus a margin. If a row's sum of weights shows that
    a logit is out of range, the grid step is repeated with the maximum of all logits as the offset.
    """
    step = StepRefs(first_keys_ref, q_ref, k_ref, v_ref, value_sum_ref, weight_sum_ref, offset_ref)
    num_valid = sizes.num_tokens - pl.program_id(2) * sizes.rows

    def attempt(uses_max: Array) -> Array:
        pl.when(uses_max == 1)(lambda: _set_offsets_to_max(step, sizes))
        for tile in _tile_slices(sizes, 0, 1):
            probe = _mean_scores(step, tile, sizes) + OFFSET_MARGIN[q_ref.dtype.name]
            offset_ref[tile.rows, :] = jnp.where(uses_max == 1, offset_ref[tile.rows, :], probe)
        value_sum_ref[...] = jnp.zeros(value_sum_ref.shape)
        weight_sum_ref[...] = jnp.zeros(weight_sum_ref.shape)
        _accumulate_keys(step, sizes)
        weight_sum, valid = weight_sum_ref[...].sum(axis=1, keepdims=True), iota((sizes.rows, 1), 0) < num_valid
        out = value_sum_ref[...] * (1.0 / weight_sum) + _linear_attention(q_ref[...], state_ref[...]) + bias_ref[...]
        o_ref[...] = (jnp.where(valid, out, 0.0) if sizes.num_queries > sizes.num_tokens else out).astype(o_ref.dtype)
        out_of_range = jnp.max(jnp.where((weight_sum <= MAX_WEIGHT_SUM) | ~valid, 0, 1))  # NaN too
        return jnp.where((uses_max == 0) & (out_of_range == 1), 1, 2)

    # one loop body for both attempts, so that the compiled code exists only once
    jax.lax.while_loop(lambda uses_max: uses_max < 2, attempt, jnp.int32(0))


def _mean_scores(step: StepRefs, tile: TileSlice, sizes: KernelSizes) -> Float32[Array, "L _S"]:
    """Return the mean score of a block, repeated in all lanes. It is computed as a product with the block's mean key,
    so no reduction along lanes is needed."""
    k = _read(step.k, step, tile, sizes).astype(jnp.float32)
    if tile.ends_list:
        k = jnp.where(_valid_keys(step, tile, (len(k), 1), sizes), k, 0.0)
    mean = jnp.broadcast_to(k.mean(axis=0, keepdims=True), (LANES, k.shape[1])).astype(step.k.dtype)
    return _scores_of(step.q[tile.rows, :], mean)


def _linear_attention(q: Float[Array, "L D"], state: Float[Array, "_D _E"]) -> Float32[Array, "L D"]:
    """Compute linear attention. Features are not normalized, because the result is a quotient of two sums of them."""
    q32 = q.astype(jnp.float32)
    features = jnp.exp(q32 - q32.max(axis=1, keepdims=True)).astype(q.dtype)
    if len(state) > features.shape[1]:
        features = jnp.concatenate([features, features], axis=1)
    values_and_weights = matmul(features, state)
    return values_and_weights[:, : q.shape[1]] / values_and_weights[:, q.shape[1] :]


def _accumulate_keys(step: StepRefs, sizes: KernelSizes) -> None:
    """Add the weights and weighted values of all listed keys, with a fixed offset."""
    pending: list[tuple[slice, Array, Array]] = []

    def add_values(max_pending: int = 0) -> None:
        while len(pending) > max_pending:
            rows, weights, v = pending.pop(0)
            step.value_sum[rows, :] += matmul(weights, v)

    def add(tile: TileSlice) -> None:
        scores, v = _scores(step, tile, sizes), _read(step.v, step, tile, sizes)
        if tile.ends_list and sizes.num_tokens % sizes.block_kv:  # after the last token, memory is undefined
            v = jnp.where(_valid_keys(step, tile, (len(v), 1), sizes), v, jnp.zeros_like(v))
        offset = step.offset[tile.rows, :]
        weights = [jnp.exp2(x - offset[:, : x.shape[1]]) for x in _split_by_lanes(scores)]
        for x in _reduce_registers(weights, jnp.add):
            step.weight_sum[tile.rows, : x.shape[1]] += x
        pending.append((tile.rows, jnp.concatenate(weights, axis=1).astype(v.dtype), v))
        add_values(PIPELINE_DEPTH)

    _for_each_tile(sizes, add, add_values)


def _set_offsets_to_max(step: StepRefs, sizes: KernelSizes) -> None:
    """Set the offset of each row to the maximum of its logits."""
    step.offset[...] = jnp.full(step.offset.shape, -jnp.inf)

    def raise_offsets(tile: TileSlice) -> None:
        for x in _reduce_registers(_split_by_lanes(_scores(step, tile, sizes)), jnp.maximum):
            step.offset[tile.rows, : x.shape[1]] = jnp.maximum(step.offset[tile.rows, : x.shape[1]], x)

    _for_each_tile(sizes, raise_offsets, lambda: None)
    step.offset[...] = jnp.broadcast_to(step.offset[...].max(axis=1, keepdims=True), step.offset.shape)


def _for_each_tile(sizes: KernelSizes, visit: Callable[[TileSlice], None], finish: Callable[[], None]) -> None:
    """Call `visit` for all slices of all lists. Call `finish` after each iteration of the loop, and after the lists."""
    tiles, blocks_per_tile, loops = sizes.tiles, sizes.blocks_per_tile, sizes.tiles // sizes.unroll
    loops = loops if loops > 1 else 0

    def visit_tiles(begin: Array | int, count: int) -> None:
        for index in range(count):
            for tile in _tile_slices(sizes, (begin + index) * blocks_per_tile, blocks_per_tile):
                visit(tile)

    def loop_body(index: Array, carry: None) -> None:
        visit_tiles(index * sizes.unroll, sizes.unroll)
        finish()

    if loops:
        jax.lax.fori_loop(0, loops, loop_body, None)
    visit_tiles(loops * sizes.unroll, tiles - loops * sizes.unroll)
    for tile in _tile_slices(sizes, tiles * blocks_per_tile, sizes.top_k - tiles * blocks_per_tile):
        visit(tile)
    finish()


def _tile_slices(sizes: KernelSizes, first_position: Array | int, count: int) -> Iterator[TileSlice]:
    """Yield a slice of each list: `count` blocks from `first_position` on."""
    ends_list = isinstance(first_position, int) and first_position + count == sizes.top_k
    for index in range(sizes.lists):
        yield TileSlice(
            slice(index * sizes.block_q, (index + 1) * sizes.block_q), index, first_position, count, ends_list
        )


def _scores(step: StepRefs, tile: TileSlice, sizes: KernelSizes) -> Float32[Array, "L S"]:
    """Return scores as exponents of two. The score of a padded key is -inf."""
    scores = _scores_of(step.q[tile.rows, :], _read(step.k, step, tile, sizes))
    if tile.ends_list and sizes.num_tokens % sizes.block_kv:
        scores = jnp.where(_valid_keys(step, tile, (1, scores.shape[1]), sizes), scores, -jnp.inf)
    return scores


def _scores_of(q: Float[Array, "L D"], k: Float[Array, "S D"]) -> Float32[Array, "L S"]:
    """Return scores as exponents of two. Scores are scaled after the product, because scaled queries would be
    rounded."""
    return matmul(q, k, transposed=True) * (q.shape[1] ** -0.5 * math.log2(math.e))


def _read(ref: jax.Ref, step: StepRefs, tile: TileSlice, sizes: KernelSizes) -> Float[Array, "S D"]:
    """Read the keys, or the values, of the blocks in a slice."""
    starts = (
        pl.multiple_of(step.first_keys[tile.index, tile.first_position + n], sizes.block_kv) for n in range(tile.count)
    )
    return jnp.concatenate([ref[pl.ds(start, sizes.block_kv), :] for start in starts])


def _valid_keys(step: StepRefs, tile: TileSlice, shape: tuple[int, int], sizes: KernelSizes) -> Array:
    """Return a mask of the valid keys in the last slice of a list. Only the last block can be partial."""
    earlier_keys = (tile.count - 1) * sizes.block_kv
    return (
        iota(shape, shape.index(max(shape)))
        < earlier_keys + sizes.num_tokens - step.first_keys[tile.index, sizes.top_k - 1]
    )


def _split_by_lanes(x: Float32[Array, "L S"]) -> list[Array]:
    return [x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)]


def _reduce_registers(parts: list[Array], reduce_pair: Callable[[Array, Array], Array]) -> list[Array]:
    """Reduce all parts that fill a register to one register. If the last part is narrower, return it unchanged."""
    full_registers = [x for x in parts if x.shape[1] == LANES]
    return [*([reduce(reduce_pair, full_registers)] if full_registers else []), *parts[len(full_registers) :]]
