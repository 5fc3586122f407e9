# SPDX-License-Identifier: Apache-2.0
"""The Pallas kernel of flash_tpu, and its call: a block of queries against a block of keys, an offset for the maximum.

Scores are laid out keys × queries: the offsets and sums of many queries are one row of registers, and the second
product takes the weights without a transpose. Keys are processed in bodies that are unrolled whole. The matrix unit
waits only at the two ends of a body.
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
from wanjax.kernels.attention.blocks import precision_of
from wanjax.kernels.attention.flash_tiles import (
    CAREFUL_Q,
    HEADROOM,
    LARGEST_SUM,
    LEAD,
    PROBE,
    REGISTER,
    SPILL_BYTES,
    STRIP_KV,
    STRIP_Q,
    TILE_Q,
    Config,
)
from wanjax.kernels.attention.masks import divide_live, finite_max

CAREFUL, PROBED = 0, 1  # flags of a head: it left the range; its offset is set


class Sizes(NamedTuple):
    """Static arguments of the kernel."""

    queries: int
    keys: int
    heads: int  # of one example
    block_q: int
    block_kv: int
    body: int  # keys that are unrolled
    chunk: int  # keys of a careful step, of a masked one, or of a listed block; they divide a body
    group: int  # queries that have one list of blocks
    ragged: bool  # a count or a window hides some keys from some queries
    window: tuple[int, int]  # keys before and after a query's own position
    factor: float  # of q, so that logits are exponents of two
    resumed: bool = False  # the sums start from those of other keys
    unfinished: bool = False  # the sums are the result, to which other keys are to be added

    @property
    def only(self) -> bool:
        """Return whether all keys are in one block."""
        return self.keys <= self.block_kv and not self.ragged


class State(NamedTuple):
    """References to the state that one block of queries carries over the keys."""

    q: jax.Ref  # [D L], times the factor; for bfloat16 [2·D L], with the rounding error of the first half behind it
    offset: jax.Ref  # [1 L]
    weight: jax.Ref  # [8 L], the sum of weights in eight parts
    total: jax.Ref  # [D L], the sum of weighted values
    saved_weight: jax.Ref  # both as before this block of keys
    saved_total: jax.Ref
    scores: jax.Ref  # [S L], of the next careful step
    top: jax.Ref  # [8 L], the largest of them in eight parts
    flags: jax.Ref


class Sums(NamedTuple):
    """What attention to some of the keys leaves to that to others: the first fields of `State`, for all queries."""

    q: Any
    offset: Any
    weight: Any
    total: Any


class Mask(NamedTuple):
    """The keys of a step that take part: those before `live` and within the window; the first is `ahead` of query 0."""

    live: Array | int
    window: tuple[int, int] | None = None
    ahead: Array | int = 0

    def spares(self, keys: slice) -> bool:
        """Return whether it is known that all these keys take part."""
        return isinstance(self.live, int) and keys.stop <= self.live

    def rows(self, keys: slice) -> Bool[Array, "S 1"]:
        return positions(keys, 0) < self.live

    def seen(self, keys: slice, strip: slice) -> Bool[Array, "S L"] | Bool[Array, "S 1"]:
        if self.window is None:
            return self.rows(keys)
        left, right = self.window
        ahead = self.ahead + positions(keys, 0) - positions(strip, 1)
        return self.rows(keys) & (ahead >= -left) & (ahead <= right)


class Pieces(NamedTuple):
    """Keys that are not side by side: for each group of queries, the starts of pieces of so many keys.

    A piece whose start is not below `end` is none.
    """

    size: int
    group: int
    starts: tuple[tuple[Array, ...], ...]
    end: Array

    def of(self, strip: slice, keys: slice) -> Iterator[tuple[slice, Array, Array]]:
        """Yield, for a strip of queries, the rows of each piece among some keys, their first key, and if it is one."""
        step = min(self.size, size_of(keys))
        for at in range(keys.start, keys.stop, step):
            first = self.starts[strip.start // self.group][at // self.size]
            real = first < self.end
            yield slice(at - keys.start, at - keys.start + step), jnp.where(real, first, 0) + at % self.size, real


def size_of(x: slice) -> int:
    return x.stop - x.start


def positions(x: slice, axis: int) -> Array:
    """The positions of a slice along an axis of a matrix."""
    return x.start + jax.lax.broadcasted_iota(jnp.int32, (1,) * axis + (size_of(x),) + (1,) * (1 - axis), axis)


@partial(jax.jit, static_argnames=("sizes", "kv_heads", "head_dim", "config"), inline=True)  # is traced once
def call(
    scalars: tuple, operands: tuple, before: Sums | None, *, sizes: Sizes, kv_heads: int, head_dim: int, config: Config
) -> Any:
    """The kernel over a grid of examples, their heads, blocks of queries and blocks of keys.

    `operands` are q, k and v: [B L N·D] and [B S K·D], or [B·N L D] and [B·K S D]. `scalars` are the number of keys
    that take part in each example, or those of listed blocks. Sums are written where those before them were.
    """
    listed, (q, k, v) = len(scalars) > 1, operands
    block_q, queries, beside = sizes.block_q, sizes.queries, q.shape[2] // head_dim  # heads side by side in a row
    heads = q.shape[0] * beside  # of all examples
    split = q.dtype == jnp.bfloat16  # q times the factor, as a sum of two: one alone would lose three digits
    if split and 2 * head_dim <= LANES:  # fills rows that would be padded; the kernel doubles wider rows
        k = jnp.concatenate([k, k], axis=2)

    q_place = _place_of_rows(sizes.heads, beside)
    q_spec = pl.BlockSpec((None, block_q, head_dim), lambda b, h, i, j, *_: q_place(b, h, i))
    sums = Sums((head_dim * (1 + split), q.dtype), (1, jnp.float32), (8, jnp.float32), (head_dim, jnp.float32))
    new = [] if not sizes.unfinished else sums[1:] if before else sums  # queries are made ready once
    columns = round_up(queries, block_q) if new else queries

    def rows_spec(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, block_q), lambda b, h, i, j, *_: (b * sizes.heads + h, 0, i))

    def row_shape(rows: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((heads, rows, columns), dtype)

    results = pl.pallas_call(
        partial(kernel_of_blocks if listed else kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(heads // sizes.heads, sizes.heads, ceil_div(queries, block_q), ceil_div(sizes.keys, sizes.block_kv)),
            in_specs=[
                rows_spec(sums.q[0]) if before else q_spec,
                *_specs_of_keys(k.shape[2], sizes, sizes.heads // kv_heads, beside, head_dim, config.buffers),
                *(rows_spec(rows) for rows, _ in sums[1:] if before),
            ],
            out_specs=[rows_spec(rows) for rows, _ in new] or [q_spec, rows_spec(1)],
            scratch_shapes=_scratch(sizes, sums.q[0], head_dim, q.dtype),
        ),
        out_shape=[row_shape(*entry) for entry in new]
        or [jax.ShapeDtypeStruct(q.shape, q.dtype), row_shape(1, jnp.float32)],
        input_output_aliases={len(scalars) + 3 + n: n for n in range(len(new))} if before else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem_bytes(head_dim, q.dtype.itemsize) + SPILL_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * sizes.keys,
            transcendentals=q.size // head_dim * sizes.keys,
            bytes_accessed=q.dtype.itemsize * (2 * q.size + k.size + v.size),
        ),
        interpret=config.interpret,
        name="flash_blocks" if listed else "flash_attention",
    )(*scalars, before.q if before else q, k, v, *(before[1:] if before else ()))
    return results if not new else Sums(before.q, *results) if before else Sums(*results)


def _place_of_rows(heads: int, beside: int) -> Callable[..., tuple]:
    """Return the block of some rows of a head of an example; heads are side by side in them, or one after another."""
    return (lambda b, h, i: (b * heads + h, i, 0)) if beside == 1 else (lambda b, h, i: (b, i, h))


def _specs_of_keys(
    width: int, sizes: Sizes, group: int, beside: int, head_dim: int, buffers: int
) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """Blocks of keys, of rows of this width, and of values; `group` heads share them."""

    rows = _place_of_rows(sizes.heads // group, beside)

    def place(b, h, i, j, live, *_):
        return rows(b, h if group == 1 else h // group, _seen_block(b, i, j, live, sizes) if sizes.ragged else j)

    spec = partial(pl.BlockSpec, index_map=place, pipeline_mode=pl.Buffered(1) if buffers == 1 else None)
    k_width = width if beside == 1 else head_dim
    return spec((None, sizes.block_kv, k_width)), spec((None, sizes.block_kv, head_dim))


def _seen_block(b, i, j, live, sizes: Sizes):
    """The block of keys to fetch for block i of queries of an example: j, or the nearest block that a query sees."""
    left, right = sizes.window
    first = (i * sizes.block_q - left) // sizes.block_kv
    last = jnp.minimum(live[b], i * sizes.block_q + sizes.block_q + right) - 1
    return jnp.clip(j, jnp.maximum(first, 0), jnp.maximum(last // sizes.block_kv, 0))


def _scratch(sizes: Sizes, q_rows: int, head_dim: int, dtype: jnp.dtype) -> list[Any]:
    """The memory of the kernel's `State`, in the order of its fields."""
    queries = sizes.block_q
    return [
        pltpu.VMEM((q_rows, queries), dtype),
        pltpu.VMEM((1, queries), jnp.float32),
        pltpu.VMEM((8, queries), jnp.float32),
        pltpu.VMEM((head_dim, queries), jnp.float32),
        pltpu.VMEM((8, queries), jnp.float32),
        pltpu.VMEM((head_dim, queries), jnp.float32),
        pltpu.VMEM((sizes.chunk, queries), jnp.float32),
        pltpu.VMEM((8, queries), jnp.float32),
        pltpu.SMEM((2,), jnp.int32),
    ]


def kernel(live_ref, q_ref, k_ref, v_ref, *refs, sizes: Sizes) -> None:
    """The grid runs over examples, heads, blocks of queries, and blocks of keys.

    `refs` are the sums to go on from, if resumed, for queries that are ready; then the result, or the sums if
    unfinished, after the ready queries if those are new; then the state.
    """
    example, i, j = (pl.program_id(axis) for axis in (0, 2, 3))
    add = partial(_add_block, live_ref[example], (i, j), sizes=sizes)
    last = ceil_div(sizes.queries, sizes.block_q) - 1
    left = round_up(sizes.queries - last * sizes.block_q, TILE_Q)
    if left >= sizes.block_q:
        add(q_ref, k_ref, v_ref, *refs)
        return

    @pl.when(i < last)
    def _():
        add(q_ref, k_ref, v_ref, *refs)

    @pl.when(i == last)
    def _():
        first = (ref if ref.shape == (2,) else _first(ref, left, sizes) for ref in refs)
        add(_first(q_ref, left, sizes), k_ref, v_ref, *first)


def _first(ref: Any, count: int, sizes: Sizes) -> Any:
    """Return the first queries of a reference, whose rows or columns they are."""
    return ref.at[:, :count] if ref.shape[1] == sizes.block_q else ref.at[:count]


def _add_block(live: Array, place: tuple[Array, Array], q_ref, k_ref, v_ref, *refs, sizes: Sizes) -> None:
    """Add the block of keys at a place in the grid; the references are those of `kernel`."""
    before, refs = (Sums(q_ref, *refs[:3]), refs[3:]) if sizes.resumed else (None, refs)
    results = 2 if not sizes.unfinished else 3 if sizes.resumed else 4
    out, state = refs[:results], State(*refs[results:])
    i, j = place
    first_q, first_kv = i * sizes.block_q, j * sizes.block_kv
    last = j == ceil_div(sizes.keys, sizes.block_kv) - 1
    headroom = HEADROOM[k_ref.dtype.name]

    @pl.when((i == 0) & (j == 0))
    def _():
        state.flags[CAREFUL] = 0

    @pl.when(j == 0)
    def _():
        if before is None:
            _begin(q_ref, state, first_q, sizes)
        else:
            _copy(before, state[: len(before)])
            state.flags[PROBED] = 0
        if before is None and not sizes.ragged:
            _probe(k_ref, state, min(PROBE, sizes.keys), headroom)

    if before is not None and sizes.only:
        state = state._replace(saved_weight=before.weight, saved_total=before.total)
    if sizes.ragged:
        _add_seen(k_ref, v_ref, state, live, first_q, first_kv, sizes, headroom)
    else:
        _add_whole(k_ref, v_ref, state, last, sizes)

    @pl.when(last)
    def _():
        if sizes.unfinished:
            _copy(state[len(Sums._fields) - results : len(Sums._fields)], out)
        else:
            _finish(out[0], out[1], state)


def _copy(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[...] = source[...]


def kernel_of_blocks(
    first_ref, count_ref, tail_ref, start_ref, live_ref, q_ref, k_ref, v_ref, o_ref, lse_ref, *scratch, sizes: Sizes
) -> None:
    """Visits listed blocks of keys alone; the grid is that of `kernel`.

    In grid step (i, j) each group of queries visits up to `count` blocks of `chunk` keys in the block of keys, whose
    starts are listed from `first` on; `count` is by example. Groups with a `tail` of 1 also see the keys from the last
    whole block to `live`.
    """
    state, groups = State(*scratch), range(sizes.block_q // sizes.group)
    example, i, j = (pl.program_id(axis) for axis in (0, 2, 3))
    steps = pl.num_programs(3)
    cell = i * steps + j
    first, count = first_ref[cell], count_ref[example * pl.num_programs(2) * steps + cell]
    live, held = live_ref[example], sizes.block_kv // sizes.chunk
    after = live // sizes.chunk - j * held  # the place of the tail among the blocks of this step

    @pl.when((i == 0) & (j == 0))
    def _():
        state.flags[CAREFUL] = 0

    @pl.when(j == 0)
    def _():
        _begin(q_ref, state, i * sizes.block_q, sizes)

    end = live - live % sizes.chunk - j * sizes.block_kv

    def pieces(index: Array | int, blocks: int) -> Pieces:
        lists = (tuple(start_ref[first + (index + n) * len(groups) + g] for n in range(blocks)) for g in groups)
        return Pieces(sizes.chunk, sizes.group, tuple(lists), end)

    @pl.when(count > 0)
    def _():
        _lift_new(k_ref, state, pieces(0, 1), PROBE, HEADROOM[q_ref.dtype.name])

    _add_blocks(k_ref, v_ref, state, pieces, count, sizes)

    @pl.when((after >= 0) & (after < held) & (live % sizes.chunk > 0))
    def _():
        none = end + sizes.chunk
        starts = tuple((jnp.where(tail_ref[i * len(groups) + g] == 1, end, none),) for g in groups)
        seen = Pieces(sizes.chunk, sizes.group, starts, none)
        _add_lifted(k_ref, v_ref, state, seen, sizes.chunk, Mask(live % sizes.chunk))

    pl.when(j == steps - 1)(lambda: _finish(o_ref, lse_ref, state))


def _add_blocks(k_ref, v_ref, state: State, pieces: Callable[[Array, int], Pieces], count: Array, sizes: Sizes) -> None:
    """Add listed blocks of keys: `count` for each group of queries, those from an index on being `pieces` of it."""

    def quickly() -> None:
        def add(index: Array, blocks: int) -> None:
            _add(k_ref, v_ref, state, pieces(index, blocks), blocks * sizes.chunk)

        _together(0, count, sizes.body // sizes.chunk, add)

    def carefully() -> None:
        _loop(0, count, lambda index: _add_lifted(k_ref, v_ref, state, pieces(index, 1), sizes.chunk))

    _add_checked(state, quickly, carefully)


def _together(begin: Array | int, end: Array | int, most: int, add: Callable[[Array, int], None]) -> None:
    """Call `add(index, count)` for steps of up to `most` neighbours, then for ever fewer, until `end`."""
    for count in sorted({max(1, most // 4**n) for n in range(most)}, reverse=True):
        steps = (end - begin) // count
        _loop(0, steps, lambda index, begin=begin, count=count: add(begin + index * count, count))
        begin = begin + steps * count


def _add_checked(
    state: State,
    quickly: Callable[[], None],
    carefully: Callable[[], None],
    *,
    first: bool = False,
    saved: bool = False,
) -> None:
    """Add keys quickly, then again with care if a logit left the range.

    `first` says that there are no sums of earlier keys, `saved` that these are saved already.
    """
    if not (first or saved):
        _copy((state.weight, state.total), (state.saved_weight, state.saved_total))

    @pl.when(state.flags[CAREFUL] == 0)
    def _():
        quickly()

        @pl.when(jnp.max(jnp.where(state.weight[...] <= LARGEST_SUM, 0, 1)) == 1)  # NaN too
        def _():
            state.flags[CAREFUL] = 1
            state.weight[...] = jnp.zeros(state.weight.shape) if first else state.saved_weight[...]
            state.total[...] = jnp.zeros(state.total.shape) if first else state.saved_total[...]

    pl.when(state.flags[CAREFUL] == 1)(carefully)


def _add_lifted(k_ref, v_ref, state: State, start: Array | int | Pieces, count: int, mask: Mask | None = None) -> None:
    """Add keys with the offset first raised to their maximum."""
    _lift(k_ref, state, start, count, mask)
    _add(k_ref, v_ref, state, start, count, mask)


def _finish(o_ref, lse_ref, state: State) -> None:
    """Write the weighted values over the sum of weights, and the log-sum-exp."""
    weight = state.weight[...].sum(axis=0, keepdims=True)
    o_ref[...] = divide_live(state.total[...], weight).astype(o_ref.dtype).T
    lse_ref[...] = jnp.where(weight == 0, -jnp.inf, (state.offset[...] + jnp.log2(weight)) * math.log(2))


def _add_whole(k_ref, v_ref, state: State, last: Array, sizes: Sizes) -> None:
    """Add a block of keys that every query sees: whole bodies, and in the last block the keys after them."""
    end, tail = _bodies(last, sizes), sizes.keys % sizes.body

    def with_tail(add: Callable) -> None:
        if tail:
            pl.when(last)(lambda: add(k_ref, v_ref, state, end * sizes.body, tail))

    def quickly() -> None:
        _loop(0, end, lambda index: _add(k_ref, v_ref, state, index * sizes.body, sizes.body))
        with_tail(_add)

    def carefully() -> None:
        _add_carefully(k_ref, v_ref, state, 0, end * (sizes.body // sizes.chunk), sizes.chunk)
        with_tail(_add_lifted)

    only, resumed = sizes.only, sizes.resumed
    _add_checked(state, quickly, carefully, first=only and not resumed, saved=only and resumed)


def _add_seen(
    k_ref, v_ref, state: State, live: Array, first_q: Array, first_kv: Array, sizes: Sizes, headroom: float
) -> None:
    """Add the keys of a block that a count and a window leave: chunks that every query sees, then masked ones."""
    chunk = sizes.chunk

    def inside(position: Array | int) -> Array:
        return jnp.clip(position - first_kv, 0, sizes.block_kv)

    (left, right), queries = sizes.window, state.q.shape[1]
    some = inside(first_q - left), inside(jnp.minimum(live, first_q + queries + right))
    every = inside(first_q + queries - 1 - left), inside(jnp.minimum(live, first_q + 1 + right))
    begin = ceil_div(every[0], chunk)
    end = jnp.maximum(begin, every[1] // chunk)

    def quickly() -> None:
        def add(index: Array, chunks: int) -> None:
            _add(k_ref, v_ref, state, index * chunk, chunks * chunk)

        _together(begin, end, sizes.body // chunk, add)

    @pl.when(end > begin)
    def _():
        @pl.when(state.flags[PROBED] == 0)
        def _():
            _lift(k_ref, state, begin * chunk, min(PROBE, chunk), headroom=headroom)
            state.flags[PROBED] = 1

        _add_checked(state, quickly, lambda: _add_carefully(k_ref, v_ref, state, begin, end, chunk))

    def masked(index: Array) -> None:
        start = (index + jnp.where(index >= begin, end - begin, 0)) * chunk
        mask = Mask(live - first_kv - start, sizes.window, first_kv + start - first_q)
        _add_lifted(k_ref, v_ref, state, start, chunk, mask)

    _loop(some[0] // chunk, ceil_div(some[1], chunk) - (end - begin), masked)


def _bodies(last: Array, sizes: Sizes) -> Array | int:
    """Whole bodies in this block of keys."""
    per_block = sizes.block_kv // sizes.body
    in_last = ((sizes.keys - 1) % sizes.block_kv + 1) // sizes.body
    return in_last if sizes.only or in_last == per_block else jnp.where(last, in_last, per_block)


def _loop(start: Array | int, stop: Array | int, step: Callable[[Array], None]) -> None:
    def once(index: Array, carry: None) -> None:
        step(index)

    jax.lax.fori_loop(start, stop, once, None)


def _strips(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _begin(q_ref, state: State, first_q: Array, sizes: Sizes) -> None:
    """Transpose and scale the queries; those past the last become zeros, since memory there holds anything."""
    q = sizes.factor * q_ref[...].T.astype(jnp.float32)  # [D L]
    if sizes.queries % sizes.block_q:
        q = jnp.where(first_q + positions(slice(0, q.shape[1]), 1) < sizes.queries, q, 0.0)
    high = q.astype(state.q.dtype)
    head_dim = q.shape[0]
    state.q[:head_dim] = high
    if state.q.shape[0] > head_dim:
        state.q[head_dim:] = (q - high.astype(jnp.float32)).astype(state.q.dtype)
    state.offset[...] = jnp.full(state.offset.shape, -jnp.inf)
    state.weight[...] = jnp.zeros(state.weight.shape)
    state.total[...] = jnp.zeros(state.total.shape)
    state.flags[PROBED] = 0


def _ragged(count: int, mask: Mask | None) -> tuple[list[slice], Mask | None]:
    """Strips of keys in whole registers, and the mask for the last of them if keys end within a register."""
    whole = round_up(count, REGISTER)
    return _strips(whole, STRIP_KV), Mask(count) if mask is None and whole > count else mask


def _rows(ref, start: Array | int | Pieces, keys: slice, strip: slice) -> Array:
    """Read some of the keys that begin at `start`, or some of the pieces of a strip of queries."""
    if not isinstance(start, Pieces):
        return ref[pl.ds(start + keys.start, size_of(keys)), :]
    pieces, unit = start.of(strip, keys), math.gcd(start.size, size_of(keys))
    parts = [ref[pl.ds(pl.multiple_of(first, unit), size_of(rows)), :] for rows, first, _ in pieces]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _strips_of(state: State, start: Array | int | Pieces) -> list[slice]:
    """Strips of queries that see the same keys."""
    return _strips(state.q.shape[1], min(STRIP_Q, start.group) if isinstance(start, Pieces) else STRIP_Q)


def _scores(
    k_ref, state: State, start: Array | int | Pieces, keys: slice, strip: slice, mask: Mask | None
) -> Float32[Array, "S L"]:
    """Scores of a strip of keys and a strip of queries, as exponents of two; -inf for masked keys."""
    k = _rows(k_ref, start, keys, strip)
    if k.shape[1] < state.q.shape[0]:
        k = jnp.concatenate([k, k], axis=1)
    s = jnp.dot(k, state.q[:, strip], preferred_element_type=jnp.float32, precision=precision_of(k.dtype))
    return s if mask is None or mask.spares(keys) else jnp.where(mask.seen(keys, strip), s, -jnp.inf)


def _lift(
    k_ref, state: State, start: Array | int | Pieces, count: int, mask: Mask | None = None, *, headroom: float = 0.0
) -> None:
    """Raise the offset to the maximum of these keys, if that is higher, and rescales the sums."""
    strips, mask = _ragged(count, mask)
    for strip in _strips_of(state, start):
        _lift_to(state, strip, _tops(k_ref, state, start, strips, strip, mask) + headroom)


def _lift_new(k_ref, state: State, start: Pieces, count: int, headroom: float) -> None:
    """Set the offsets that are not set yet by the first keys."""
    for strip in _strips_of(state, start):
        top = _tops(k_ref, state, start, [slice(0, count)], strip, None) + headroom
        state.offset[:, strip] = jnp.where(state.offset[:, strip] == -jnp.inf, top, state.offset[:, strip])


def _probe(k_ref, state: State, count: int, headroom: float) -> None:
    """Set the first offset by the first keys."""
    strips, mask = _ragged(count, None)
    for strip in _strips(state.q.shape[1], STRIP_Q):
        state.offset[:, strip] = _tops(k_ref, state, 0, strips, strip, mask) + headroom


def _tops(
    k_ref, state: State, start: Array | int | Pieces, strips: list[slice], strip: slice, mask: Mask | None
) -> Array:
    tops = []
    for keys in strips:
        scores = _scores(k_ref, state, start, keys, strip, mask)
        parts = start.of(strip, keys) if isinstance(start, Pieces) else [(slice(0, len(scores)), 0, True)]
        tops += [jnp.where(real, scores[rows].max(axis=0, keepdims=True), -jnp.inf) for rows, _, real in parts]
    return reduce(jnp.maximum, tops)


def _lift_to(state: State, strip: slice, top: Float32[Array, "1 L"]) -> None:
    old = state.offset[:, strip]
    new = jnp.maximum(old, top)
    change = jnp.exp2(old - finite_max(new))
    state.offset[:, strip] = new
    state.weight[:, strip] *= change
    state.total[:, strip] *= change


def _add(k_ref, v_ref, state: State, start: Array | int | Pieces, count: int, mask: Mask | None = None) -> None:
    """Add the weights and weighted values of these keys, with the offset unchanged.

    The compiler's schedule depends on the order of these steps; docs/attention.md has the cost of others.
    """
    strips, mask = _ragged(count, mask)
    waiting: list[tuple[Array, slice, Array]] = []
    columns = _strips_of(state, start)
    lead = LEAD * STRIP_Q // size_of(columns[0]) if isinstance(start, Pieces) else LEAD  # as many queries in flight
    for keys in strips:
        step = None if mask is None or mask.spares(keys) else mask
        v = None
        for strip in columns:
            if v is None or (isinstance(start, Pieces) and strip.start % start.group == 0):
                v = _rows(v_ref, start, keys, strip)
                if step is not None:
                    v = jnp.where(step.rows(keys), v, jnp.zeros_like(v))  # memory past the last key holds anything
                v = v.T
            s = _scores(k_ref, state, start, keys, strip, step)
            p = _weights(s, state.offset[:, strip], start, keys, strip, masked=step is not None)
            state.weight[:, strip] += _in_eights(p).sum(axis=0)
            waiting.append((v, strip, p.astype(v.dtype)))
            if len(waiting) > lead:
                _add_values(state, *waiting.pop(0))
    for values in waiting:
        _add_values(state, *values)


def _weights(s: Array, offset: Array, start: Array | int | Pieces, keys: slice, strip: slice, masked: bool) -> Array:
    """The weights of scores; zeros for pieces that are none."""
    offset = finite_max(offset) if masked else offset
    if not isinstance(start, Pieces):
        return jnp.exp2(s - offset)
    parts = [jnp.exp2(s[rows] - jnp.where(real, offset, jnp.inf)) for rows, _, real in start.of(strip, keys)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _add_values(state: State, v: Array, strip: slice, p: Array) -> None:
    state.total[:, strip] += jnp.dot(v, p, preferred_element_type=jnp.float32, precision=precision_of(v.dtype))


def _add_carefully(k_ref, v_ref, state: State, begin: Array | int, end: Array | int, count: int) -> None:
    """Add steps of `count` keys, and raise the offset to their maximum before each.

    The scores of a step are computed in the step before and kept in VMEM, so that the matrix unit does not wait for the
    maximum.
    """
    strips = _strips(state.q.shape[1], CAREFUL_Q)

    def score(index: Array | int, strip: slice) -> None:
        s = _scores(k_ref, state, index * count, slice(0, count), strip, None)
        state.scores[:, strip] = s
        state.top[:, strip] = _in_eights(s).max(axis=0)

    def step(index: Array) -> None:
        waiting: list[tuple[Array, slice, Array]] = []
        v = v_ref[pl.ds(index * count, count), :].T
        for strip in strips:
            _lift_to(state, strip, state.top[:, strip].max(axis=0, keepdims=True))
        for strip in strips:
            s = state.scores[:, strip]
            score(jnp.minimum(index + 1, end - 1), strip)
            p = jnp.exp2(s - state.offset[:, strip])
            state.weight[:, strip] += _in_eights(p).sum(axis=0)
            waiting.append((v, strip, p.astype(v.dtype)))
            if len(waiting) > 1:
                _add_values(state, *waiting.pop(0))
        _add_values(state, *waiting.pop())

    for strip in strips:
        score(begin, strip)
    _loop(begin, end, step)


def _in_eights(x: Float32[Array, "S L"]) -> Float32[Array, "_S 8 L"]:
    """Group rows by eight, as registers hold them: registers are added or compared whole."""
    return x.reshape(-1, 8, x.shape[1])
