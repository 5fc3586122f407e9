# SPDX-License-Identifier: Apache-2.0
"""The Pallas kernels of sparse-linear attention on TPUs.

`prepare` passes over q, k and v once: sums of blocks, and what linear attention keeps of the keys. `listed` makes lists
of the blocks to keep from the scores of these blocks. `attend` computes both parts of attention: a few blocks of
queries a grid step, each with a list of its own, since their products fill the waits of one another.
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
from wanjax.kernels.attention.flash_tiles import HEADROOM, MAX_WEIGHT_SUM

TILE = 256  # keys of a step, which fill a matrix unit
LEAD = 2  # steps whose weights are computed before their values are added, so that the matrix unit does not wait
ROWS = 2048  # tokens of a grid step of `prepare`
LISTS = 128  # of a grid step of `listed`
BITS = 32  # of a score


class Sizes(NamedTuple):
    """Static arguments of the kernels."""

    queries: int
    tokens: int  # that take part; those after them are padding
    heads: int  # of one example
    block_q: int
    block_kv: int
    top_k: int  # blocks of keys of a list
    lists: int  # of a grid step
    body: int  # tiles of each list that are unrolled

    @property
    def together(self) -> int:
        """Blocks of keys in a tile."""
        return TILE // self.block_kv

    @property
    def tiles(self) -> int:
        """Whole tiles of a list; the last one to four blocks come after them, and may end within a block."""
        return (self.top_k - 1) // self.together

    @property
    def rows(self) -> int:
        """Queries of a grid step."""
        return self.lists * self.block_q


def prepare(
    q: Float[Array, "B L E"], k: Float[Array, "B L E"], v: Float[Array, "B L E"], sizes: Sizes, *, interpret: bool
) -> tuple[Float32[Array, "_B _L D"], Float32[Array, "_B _S D"], Float32[Array, "_B D _D"]]:
    """Return the sums of the blocks of q and of k, and Σ φ(k)ᵀ [v, 1], of the heads of all examples."""
    size = q.shape[2] // sizes.heads
    unit = math.lcm(sizes.block_q, sizes.block_kv, LANES)
    tokens = min(round_up(ROWS, unit), round_up(sizes.tokens, unit))
    heads, steps = len(q) * sizes.heads, ceil_div(sizes.tokens, tokens)
    rows = pl.BlockSpec((None, tokens, size), lambda b, h, i: (b, i, h))
    sums = [tokens // block for block in (sizes.block_q, sizes.block_kv)]
    return pl.pallas_call(
        partial(_prepare, sizes=sizes),
        grid=(len(q), sizes.heads, steps),
        in_specs=[rows, rows, rows],
        out_specs=[
            *(pl.BlockSpec((None, count, size), lambda b, h, i: (b * sizes.heads + h, i, 0)) for count in sums),
            pl.BlockSpec((None, size, 2 * size), lambda b, h, i: (b * sizes.heads + h, 0, 0)),
        ],
        out_shape=[
            *(jax.ShapeDtypeStruct((heads, steps * count, size), jnp.float32) for count in sums),
            jax.ShapeDtypeStruct((heads, size, 2 * size), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="sparse_linear_prepare",
    )(q, k, v)


def _prepare(q_ref, k_ref, v_ref, of_q_ref, of_k_ref, state_ref, *, sizes: Sizes) -> None:
    """The grid runs over examples, heads and tokens."""
    i, tokens = pl.program_id(2), q_ref.shape[0]
    live = sizes.tokens - i * tokens

    def add(ragged: bool) -> None:
        q, k, v = q_ref[...], k_ref[...], v_ref[...]
        if ragged:  # memory after the last token holds anything
            seen = iota((tokens, 1), 0) < live
            q, k, v = (jnp.where(seen, x, jnp.zeros_like(x)) for x in (q, k, v))
        of_q_ref[...], of_k_ref[...] = _sums(q, sizes.block_q), _sums(k, sizes.block_kv)
        x = k.T.astype(jnp.float32)  # channels along the rows, so that softmax adds whole registers
        weights = jnp.exp(x - x.max(axis=0, keepdims=True))
        weights = (weights * (1.0 / weights.sum(axis=0, keepdims=True))).astype(k.dtype)
        if ragged:
            weights = jnp.where(iota((1, tokens), 1) < live, weights, jnp.zeros_like(weights))
        state = matmul(weights, jnp.concatenate([v, jnp.ones_like(v)], axis=1))
        state_ref[...] = jnp.where(i == 0, state, state_ref[...] + state)

    last = pl.num_programs(2) - 1
    if sizes.tokens % tokens:
        pl.when(i < last)(lambda: add(False))
    pl.when(i == last)(lambda: add(True)) if sizes.tokens % tokens else add(False)


def _sums(x: Float[Array, "L D"], size: int) -> Float32[Array, "_L D"]:
    """The sum of each block of rows, by a product."""
    shape = (len(x) // size, len(x))
    return matmul(jnp.where(iota(shape, 0) == iota(shape, 1) // size, 1.0, 0.0).astype(x.dtype), x)


def list_blocks(scores: Float32[Array, "_L _S"], sizes: Sizes, *, interpret: bool) -> Int32[Array, "_L _T"]:
    """Return, for each row, the first keys of the blocks with the largest scores, ascending, as whole lanes.

    Among equal scores the first count. What is listed after `sizes.top_k` blocks is no block.
    """
    rows, blocks = scores.shape
    wide, lanes = round_up(blocks, LANES), round_up(sizes.top_k, LANES)
    return pl.pallas_call(
        partial(_list_blocks, blocks=blocks, sizes=sizes),
        grid=(ceil_div(rows, LISTS),),
        in_specs=[pl.BlockSpec((LISTS, wide), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((LISTS, lanes), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, lanes), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=48 << 20),
        interpret=interpret,
        name="sparse_linear_lists",
    )(scores)


def _list_blocks(scores_ref, out_ref, *, blocks: int, sizes: Sizes) -> None:
    """Find the least score to keep bit by bit, count what is kept up to each block, and searches these counts."""
    scores = scores_ref[...]
    lists, wide = scores.shape
    real = iota(scores.shape, 1) < blocks
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)  # one zero, without a sign
    order = jnp.where(real, jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits), jnp.int32(-(2**31)))
    least = jnp.full((lists, 1), -(2**31), jnp.int32)
    for bit in reversed(range(BITS)):
        higher = least ^ jnp.int32(-(2**31) if bit == BITS - 1 else 1 << bit)
        count = jnp.where(order >= higher, 1.0, 0.0).sum(axis=1, keepdims=True)
        least = jnp.where(count >= sizes.top_k, higher, least)
    upper = jnp.where(iota((wide, wide), 0) <= iota((wide, wide), 1), 1.0, 0.0).astype(jnp.bfloat16)

    def counted(marks: Array) -> Array:
        """The number of marks up to each lane, which is exact: products of ones, summed in float32."""
        return matmul(marks.astype(jnp.bfloat16), upper)

    above, equal = (jnp.where(x, 1.0, 0.0) for x in (order > least, order == least))
    missing = sizes.top_k - above.sum(axis=1, keepdims=True)
    counts = counted(jnp.maximum(above, jnp.where(counted(equal) <= missing, equal, 0.0)))
    counts = jnp.where(real, counts, jnp.float32(jnp.inf))
    parts = [counts[:, at : at + LANES] for at in range(0, wide, LANES)]
    for at in range(0, out_ref.shape[1], LANES):
        place = (iota((lists, LANES), 1) + at).astype(jnp.float32)
        part = reduce(jnp.add, (jnp.where(x[:, -1:] <= place, 1, 0) for x in parts))
        lane = jnp.zeros((lists, LANES), jnp.int32)  # the first whose count is above the place
        for step in (64, 32, 16, 8, 4, 2, 1):
            lane = jnp.where(_entries_at(parts, part, lane + step - 1) <= place, lane + step, lane)
        out_ref[:, at : at + LANES] = (part * LANES + lane) * sizes.block_kv


def _entries_at(parts: list[Array], part: Int32[Array, "L S"], lane: Int32[Array, "L S"]) -> Float32[Array, "L S"]:
    """Return the entry at a lane of one of the parts, for each entry."""
    entries = jnp.take_along_axis(parts[0], lane, axis=1)
    for index, x in enumerate(parts[1:], 1):
        entries = jnp.where(part == index, jnp.take_along_axis(x, lane, axis=1), entries)
    return entries


def attend(
    first: Int32[Array, "_B _L _N _T"],
    q: Float[Array, "B L E"],
    k: Float[Array, "B L E"],
    v: Float[Array, "B L E"],
    state: Float[Array, "_B _D _E"],
    bias: Float32[Array, "1 D"],
    sizes: Sizes,
    *,
    buffers: int,
    vmem_bytes: int,
    interpret: bool,
) -> Float[Array, "B L E"]:
    """Return both parts of attention.

    `first` are the first keys of the blocks that each list has, for each grid step. `state` is by head, [D 2D]: the
    projected values of linear attention and, in each column, its weights; in bfloat16 as a sum of two, one above the
    other. All keys of a head are in VMEM, in one or two `buffers`.
    """
    size = q.shape[2] // sizes.heads
    keys = round_up(sizes.tokens, sizes.block_kv)
    rows = pl.BlockSpec((None, sizes.rows, size), lambda b, h, i: (b, i, h))
    mode = pl.Buffered(1) if buffers == 1 else None
    whole = pl.BlockSpec((None, keys, size), lambda b, h, i: (b, 0, h), pipeline_mode=mode)
    scores = len(q) * sizes.heads * q.shape[1] * sizes.top_k * sizes.block_kv
    return pl.pallas_call(
        partial(_attend, sizes=sizes),
        grid=(len(q), sizes.heads, first.shape[1]),
        in_specs=[
            pl.BlockSpec(
                (None, None, *first.shape[2:]),
                lambda b, h, i: (b * sizes.heads + h, i, 0, 0),
                memory_space=pltpu.SMEM,
            ),
            rows,
            whole,
            whole,
            pl.BlockSpec((None, *state.shape[1:]), lambda b, h, i: (b * sizes.heads + h, 0, 0)),
            pl.BlockSpec(bias.shape, lambda b, h, i: (0, 0)),
        ],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[pltpu.VMEM((sizes.rows, n), jnp.float32) for n in (size, LANES, LANES)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * size, transcendentals=scores, bytes_accessed=4 * q.size * q.dtype.itemsize
        ),
        interpret=interpret,
        name="sparse_linear",
    )(first, q, k, v, state, bias)


class Step(NamedTuple):
    """References of a grid step; the last three are its state, with a row for each query."""

    first: jax.Ref
    q: jax.Ref
    k: jax.Ref
    v: jax.Ref
    total: jax.Ref  # [L D], the sum of weighted values
    weight: jax.Ref  # [L 128], the sum of weights, in a part for each lane
    offset: jax.Ref  # [L 128], the same in all lanes


class Piece(NamedTuple):
    """A few blocks of one list."""

    rows: slice  # of the queries
    index: int  # of the list
    at: Array | int
    count: int
    last: bool  # the list ends with them


def _attend(
    first_ref, q_ref, k_ref, v_ref, state_ref, bias_ref, o_ref, total_ref, weight_ref, offset_ref, *, sizes: Sizes
) -> None:
    """The grid runs over examples, heads and blocks of queries.

    A row's offset comes from the first keys of its list, and no maximum is taken, as in `flash_tpu`. If the weights of
    a row show that a logit left the range, the step is taken again with the maximum of all as its offset.
    """
    step = Step(first_ref, q_ref, k_ref, v_ref, total_ref, weight_ref, offset_ref)
    live = sizes.tokens - pl.program_id(2) * sizes.rows

    def attempt(careful: Array) -> Array:
        pl.when(careful == 1)(lambda: _raise_offsets(step, sizes))
        for piece in _pieces(sizes, 0, 1):
            probed = _probed(step, piece, sizes) + HEADROOM[q_ref.dtype.name]
            offset_ref[piece.rows, :] = jnp.where(careful == 1, offset_ref[piece.rows, :], probed)
        total_ref[...] = jnp.zeros(total_ref.shape)
        weight_ref[...] = jnp.zeros(weight_ref.shape)
        _add(step, sizes)
        weight, real = weight_ref[...].sum(axis=1, keepdims=True), iota((sizes.rows, 1), 0) < live
        out = total_ref[...] * (1.0 / weight) + _linear(q_ref[...], state_ref[...]) + bias_ref[...]
        o_ref[...] = (jnp.where(real, out, 0.0) if sizes.queries > sizes.tokens else out).astype(o_ref.dtype)
        past = jnp.max(jnp.where((weight <= MAX_WEIGHT_SUM) | ~real, 0, 1))  # NaN too
        return jnp.where((careful == 0) & (past == 1), 1, 2)

    # one body for both attempts, so that products fill the waits at its ends, and its code is there once
    jax.lax.while_loop(lambda careful: careful < 2, attempt, jnp.int32(0))


def _probed(step: Step, piece: Piece, sizes: Sizes) -> Float32[Array, "L _S"]:
    """The mean score of a block, in all lanes: a product with its mean key takes no maximum along the lanes."""
    k = _keys(step.k, step, piece, sizes).astype(jnp.float32)
    if piece.last:
        k = jnp.where(_seen(step, piece, (len(k), 1), sizes), k, 0.0)
    mean = jnp.broadcast_to(k.mean(axis=0, keepdims=True), (LANES, k.shape[1])).astype(step.k.dtype)
    return _scaled(step.q[piece.rows, :], mean)


def _linear(q: Float[Array, "L D"], state: Float[Array, "_D _E"]) -> Float32[Array, "L D"]:
    """Linear attention of queries, whose features need not be divided by their sum: weights have them too."""
    wide = q.astype(jnp.float32)
    features = jnp.exp(wide - wide.max(axis=1, keepdims=True)).astype(q.dtype)
    if len(state) > features.shape[1]:
        features = jnp.concatenate([features, features], axis=1)
    both = matmul(features, state)
    return both[:, : q.shape[1]] / both[:, q.shape[1] :]


def _add(step: Step, sizes: Sizes) -> None:
    """Add the weights and weighted values of all listed keys, with the offset unchanged."""
    waiting: list[tuple[slice, Array, Array]] = []

    def add_values(most: int = 0) -> None:
        while len(waiting) > most:
            rows, weights, v = waiting.pop(0)
            step.total[rows, :] += matmul(weights, v)

    def add(piece: Piece) -> None:
        scores, v = _scores(step, piece, sizes), _keys(step.v, step, piece, sizes)
        if piece.last and sizes.tokens % sizes.block_kv:  # memory after the last token holds anything
            v = jnp.where(_seen(step, piece, (len(v), 1), sizes), v, jnp.zeros_like(v))
        offset = step.offset[piece.rows, :]
        weights = [jnp.exp2(x - offset[:, : x.shape[1]]) for x in _by_lanes(scores)]
        for x in _joined(weights, jnp.add):
            step.weight[piece.rows, : x.shape[1]] += x
        waiting.append((piece.rows, jnp.concatenate(weights, axis=1).astype(v.dtype), v))
        add_values(LEAD)

    _visit(sizes, add, add_values)


def _raise_offsets(step: Step, sizes: Sizes) -> None:
    """Set the offset of each row to the maximum of its logits."""
    step.offset[...] = jnp.full(step.offset.shape, -jnp.inf)

    def lift(piece: Piece) -> None:
        for x in _joined(_by_lanes(_scores(step, piece, sizes)), jnp.maximum):
            step.offset[piece.rows, : x.shape[1]] = jnp.maximum(step.offset[piece.rows, : x.shape[1]], x)

    _visit(sizes, lift, lambda: None)
    step.offset[...] = jnp.broadcast_to(step.offset[...].max(axis=1, keepdims=True), step.offset.shape)


def _visit(sizes: Sizes, add: Callable[[Piece], None], finish: Callable[[], None]) -> None:
    """Call `add` for all pieces of all lists, those of one list after those of another, and `finish` at bare ends."""
    tiles, together, loops = sizes.tiles, sizes.together, sizes.tiles // sizes.body
    loops = loops if loops > 1 else 0

    def unrolled(begin: Array | int, count: int) -> None:
        for tile in range(count):
            for piece in _pieces(sizes, (begin + tile) * together, together):
                add(piece)

    def body(index: Array, carry: None) -> None:
        unrolled(index * sizes.body, sizes.body)
        finish()

    if loops:
        jax.lax.fori_loop(0, loops, body, None)
    unrolled(loops * sizes.body, tiles - loops * sizes.body)
    for piece in _pieces(sizes, tiles * together, sizes.top_k - tiles * together):
        add(piece)
    finish()


def _pieces(sizes: Sizes, at: Array | int, count: int) -> Iterator[Piece]:
    """Yield the same blocks of each list."""
    last = isinstance(at, int) and at + count == sizes.top_k
    for index in range(sizes.lists):
        yield Piece(slice(index * sizes.block_q, (index + 1) * sizes.block_q), index, at, count, last)


def _scores(step: Step, piece: Piece, sizes: Sizes) -> Float32[Array, "L S"]:
    """Scores as exponents of two; -inf for keys that are padding."""
    scores = _scaled(step.q[piece.rows, :], _keys(step.k, step, piece, sizes))
    if piece.last and sizes.tokens % sizes.block_kv:
        scores = jnp.where(_seen(step, piece, (1, scores.shape[1]), sizes), scores, -jnp.inf)
    return scores


def _scaled(q: Float[Array, "L D"], k: Float[Array, "S D"]) -> Float32[Array, "L S"]:
    """Scores as exponents of two, multiplied after the product: a factor of the queries would be rounded with them."""
    return matmul(q, k, transposed=True) * (q.shape[1] ** -0.5 * math.log2(math.e))


def _keys(ref: jax.Ref, step: Step, piece: Piece, sizes: Sizes) -> Float[Array, "S D"]:
    """The keys, or values, of a piece."""
    starts = (pl.multiple_of(step.first[piece.index, piece.at + n], sizes.block_kv) for n in range(piece.count))
    return jnp.concatenate([ref[pl.ds(start, sizes.block_kv), :] for start in starts])


def _seen(step: Step, piece: Piece, shape: tuple[int, int], sizes: Sizes) -> Array:
    """Mark the keys of a list's last piece that are no padding; only its last block can end within."""
    before = (piece.count - 1) * sizes.block_kv
    return iota(shape, shape.index(max(shape))) < before + sizes.tokens - step.first[piece.index, sizes.top_k - 1]


def _by_lanes(x: Float32[Array, "L S"]) -> list[Array]:
    return [x[:, at : at + LANES] for at in range(0, x.shape[1], LANES)]


def _joined(parts: list[Array], join: Callable[[Array, Array], Array]) -> list[Array]:
    """Join those parts that are whole registers; the last may not be, and stays."""
    whole = [x for x in parts if x.shape[1] == LANES]
    return [*([reduce(join, whole)] if whole else []), *parts[len(whole) :]]
