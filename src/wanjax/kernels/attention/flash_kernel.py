# SPDX-License-Identifier: Apache-2.0
"""The Pallas kernel of flash_tpu: one block of queries against one block of keys, with an offset for the maximum.

Scores are laid out keys × queries: the offsets and sums of many queries are one row of registers, and the second
product takes the weights without a transpose. Keys are processed in bodies that are unrolled whole. The matrix unit
waits only at the two ends of a body.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32

from wanjax.kernels.attention.flash_state import (
    CAREFUL,
    CAREFUL_Q,
    HEADROOM,
    LARGEST_SUM,
    LEAD,
    PROBE,
    PROBED,
    REGISTER,
    STRIP_KV,
    STRIP_Q,
    TILE_Q,
    Mask,
    Pieces,
    Sizes,
    State,
    Sums,
    positions,
    size_of,
)
from wanjax.kernels.attention.masks import divide_live, finite_max


def kernel(live_ref, q_ref, k_ref, v_ref, *refs, sizes: Sizes) -> None:
    """The grid runs over heads, blocks of queries, and blocks of keys.

    `refs` are the sums to go on from, if resumed, for queries that are ready; then the result, or the sums if
    unfinished, after the ready queries if those are new; then the state.
    """
    head, i, j = (pl.program_id(axis) for axis in range(3))
    add = partial(_add_block, live_ref[head // sizes.heads], (i, j), sizes=sizes)
    last = -(-sizes.queries // sizes.block_q) - 1
    left = -(-(sizes.queries - last * sizes.block_q) // TILE_Q) * TILE_Q
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
    """Returns the first queries of a reference, whose rows or columns they are."""
    return ref.at[:, :count] if ref.shape[1] == sizes.block_q else ref.at[:count]


def _add_block(live: Array, place: tuple[Array, Array], q_ref, k_ref, v_ref, *refs, sizes: Sizes) -> None:
    """Adds the block of keys at a place in the grid; the references are those of `kernel`."""
    before, refs = (Sums(q_ref, *refs[:3]), refs[3:]) if sizes.resumed else (None, refs)
    results = 2 if not sizes.unfinished else 3 if sizes.resumed else 4
    out, state = refs[:results], State(*refs[results:])
    i, j = place
    first_q, first_kv = i * sizes.block_q, j * sizes.block_kv
    last = j == -(-sizes.keys // sizes.block_kv) - 1
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
        state = state._replace(kept_weight=before.weight, kept_total=before.total)
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

    Grid step (i, j) visits `count` blocks of `chunk` keys in its block of keys, whose starts are listed from `first`
    on; `count` is by example. Queries i with a `tail` of 1 also see the keys from the last whole block to `live`.
    """
    state = State(*scratch)
    i, j = pl.program_id(1), pl.program_id(2)
    example, cell, steps = pl.program_id(0) // sizes.heads, i * pl.num_programs(2) + j, pl.num_programs(2)
    first, count = first_ref[cell], count_ref[example * pl.num_programs(1) * steps + cell]
    live, held = live_ref[example], sizes.block_kv // sizes.chunk
    after = live // sizes.chunk - j * held  # the place of the tail among the blocks of this step

    @pl.when((i == 0) & (j == 0))
    def _():
        state.flags[CAREFUL] = 0

    @pl.when(j == 0)
    def _():
        _begin(q_ref, state, i * sizes.block_q, sizes)

    @pl.when((state.flags[PROBED] == 0) & (count > 0))
    def _():
        _lift(k_ref, state, Pieces(sizes.chunk, (start_ref[first],)), PROBE, headroom=HEADROOM[q_ref.dtype.name])
        state.flags[PROBED] = 1

    _add_blocks(k_ref, v_ref, state, start_ref, (first, count), sizes)

    @pl.when((after >= 0) & (after < held) & (live % sizes.chunk > 0) & (tail_ref[i] == 1))
    def _():
        _add_lifted(k_ref, v_ref, state, after * sizes.chunk, sizes.chunk, Mask(live % sizes.chunk))

    pl.when(j == steps - 1)(lambda: _finish(o_ref, lse_ref, state))


def _add_blocks(k_ref, v_ref, state: State, start_ref, listed: tuple[Array, Array], sizes: Sizes) -> None:
    """Adds listed blocks of keys."""
    first, count = listed

    def pieces(index: Array, blocks: int) -> Pieces:
        return Pieces(sizes.chunk, tuple(start_ref[first + index + n] for n in range(blocks)))

    def quickly() -> None:
        def add(index: Array, blocks: int) -> None:
            _add(k_ref, v_ref, state, pieces(index, blocks), blocks * sizes.chunk)

        _together(0, count, sizes.body // sizes.chunk, add)

    def carefully() -> None:
        _loop(0, count, lambda index: _add_lifted(k_ref, v_ref, state, pieces(index, 1), sizes.chunk))

    _add_checked(state, quickly, carefully)


def _together(begin: Array | int, end: Array | int, most: int, add: Callable[[Array, int], None]) -> None:
    """Calls `add(index, count)` for steps of up to `most` neighbours, then for ever fewer, until `end`."""
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
    kept: bool = False,
) -> None:
    """Adds keys quickly, then again with care if a logit left the range.

    `first` says that there are no sums of earlier keys, `kept` that these are kept already.
    """
    if not (first or kept):
        _copy((state.weight, state.total), (state.kept_weight, state.kept_total))

    @pl.when(state.flags[CAREFUL] == 0)
    def _():
        quickly()

        @pl.when(jnp.max(jnp.where(state.weight[...] <= LARGEST_SUM, 0, 1)) == 1)  # NaN too
        def _():
            state.flags[CAREFUL] = 1
            state.weight[...] = jnp.zeros(state.weight.shape) if first else state.kept_weight[...]
            state.total[...] = jnp.zeros(state.total.shape) if first else state.kept_total[...]

    pl.when(state.flags[CAREFUL] == 1)(carefully)


def _add_lifted(k_ref, v_ref, state: State, start: Array | int | Pieces, count: int, mask: Mask | None = None) -> None:
    """Adds keys with the offset first raised to their maximum."""
    _lift(k_ref, state, start, count, mask)
    _add(k_ref, v_ref, state, start, count, mask)


def _finish(o_ref, lse_ref, state: State) -> None:
    """Writes the weighted values over the sum of weights, and the log-sum-exp."""
    weight = state.weight[...].sum(axis=0, keepdims=True)
    o_ref[...] = divide_live(state.total[...], weight).astype(o_ref.dtype).T
    lse_ref[...] = jnp.where(weight == 0, -jnp.inf, (state.offset[...] + jnp.log2(weight)) * math.log(2))


def _add_whole(k_ref, v_ref, state: State, last: Array, sizes: Sizes) -> None:
    """Adds a block of keys that every query sees: whole bodies, and in the last block the keys after them."""
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
    _add_checked(state, quickly, carefully, first=only and not resumed, kept=only and resumed)


def _add_seen(
    k_ref, v_ref, state: State, live: Array, first_q: Array, first_kv: Array, sizes: Sizes, headroom: float
) -> None:
    """Adds the keys of a block that a count and a window leave: chunks that every query sees, then masked ones."""
    chunk = sizes.chunk

    def inside(position: Array | int) -> Array:
        return jnp.clip(position - first_kv, 0, sizes.block_kv)

    (left, right), queries = sizes.window, state.q.shape[1]
    some = inside(first_q - left), inside(jnp.minimum(live, first_q + queries + right))
    every = inside(first_q + queries - 1 - left), inside(jnp.minimum(live, first_q + 1 + right))
    begin = (every[0] + chunk - 1) // chunk
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

    _loop(some[0] // chunk, (some[1] + chunk - 1) // chunk - (end - begin), masked)


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


def _precision(x: Array) -> str:
    return "highest" if x.dtype == jnp.float32 else "default"  # one pass of the matrix unit is exact for bfloat16


def _begin(q_ref, state: State, first_q: Array, sizes: Sizes) -> None:
    """Transposes and scales the queries; those past the last become zeros, since memory there holds anything."""
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
    whole = -(-count // REGISTER) * REGISTER
    return _strips(whole, STRIP_KV), Mask(count) if mask is None and whole > count else mask


def _rows(ref, start: Array | int | Pieces, keys: slice) -> Array:
    """Reads some of the keys that begin at `start`, or some of the pieces."""
    if not isinstance(start, Pieces):
        return ref[pl.ds(start + keys.start, size_of(keys)), :]
    step = min(start.size, size_of(keys))
    places = ((start.starts[at // start.size], at % start.size) for at in range(keys.start, keys.stop, step))
    parts = [ref[pl.ds(pl.multiple_of(first, start.size) + offset, step), :] for first, offset in places]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _scores(
    k_ref, state: State, start: Array | int | Pieces, keys: slice, strip: slice, mask: Mask | None
) -> Float32[Array, "S L"]:
    """Scores of a strip of keys and a strip of queries, as exponents of two; -inf for masked keys."""
    k = _rows(k_ref, start, keys)
    if k.shape[1] < state.q.shape[0]:
        k = jnp.concatenate([k, k], axis=1)
    s = jnp.dot(k, state.q[:, strip], preferred_element_type=jnp.float32, precision=_precision(k))
    return s if mask is None or mask.spares(keys) else jnp.where(mask.seen(keys, strip), s, -jnp.inf)


def _lift(
    k_ref, state: State, start: Array | int | Pieces, count: int, mask: Mask | None = None, *, headroom: float = 0.0
) -> None:
    """Raises the offset to the maximum of these keys, if that is higher, and rescales the sums."""
    strips, mask = _ragged(count, mask)
    for strip in _strips(state.q.shape[1], STRIP_Q):
        _lift_to(state, strip, _tops(k_ref, state, start, strips, strip, mask) + headroom)


def _probe(k_ref, state: State, count: int, headroom: float) -> None:
    """Sets the first offset by the first keys."""
    strips, mask = _ragged(count, None)
    for strip in _strips(state.q.shape[1], STRIP_Q):
        state.offset[:, strip] = _tops(k_ref, state, 0, strips, strip, mask) + headroom


def _tops(
    k_ref, state: State, start: Array | int | Pieces, strips: list[slice], strip: slice, mask: Mask | None
) -> Array:
    tops = [_scores(k_ref, state, start, keys, strip, mask).max(axis=0, keepdims=True) for keys in strips]
    return reduce(jnp.maximum, tops)


def _lift_to(state: State, strip: slice, top: Float32[Array, "1 L"]) -> None:
    old = state.offset[:, strip]
    new = jnp.maximum(old, top)
    change = jnp.exp2(old - finite_max(new))
    state.offset[:, strip] = new
    state.weight[:, strip] *= change
    state.total[:, strip] *= change


def _add(k_ref, v_ref, state: State, start: Array | int | Pieces, count: int, mask: Mask | None = None) -> None:
    """Adds the weights and weighted values of these keys, with the offset unchanged.

    The compiler's schedule depends on the order of these steps; docs/attention.md has the cost of others.
    """
    strips, mask = _ragged(count, mask)
    waiting: list[tuple[Array, slice, Array]] = []
    for keys in strips:
        v = _rows(v_ref, start, keys)
        step = None if mask is None or mask.spares(keys) else mask
        if step is not None:
            v = jnp.where(step.rows(keys), v, jnp.zeros_like(v))  # memory past the last key holds anything
        v = v.T
        for strip in _strips(state.q.shape[1], STRIP_Q):
            offset = state.offset[:, strip]
            s = _scores(k_ref, state, start, keys, strip, step)
            p = jnp.exp2(s - (offset if step is None else finite_max(offset)))
            state.weight[:, strip] += _in_eights(p).sum(axis=0)
            waiting.append((v, strip, p.astype(v.dtype)))
            if len(waiting) > LEAD:
                _add_values(state, *waiting.pop(0))
    for values in waiting:
        _add_values(state, *values)


def _add_values(state: State, v: Array, strip: slice, p: Array) -> None:
    state.total[:, strip] += jnp.dot(v, p, preferred_element_type=jnp.float32, precision=_precision(v))


def _add_carefully(k_ref, v_ref, state: State, begin: Array | int, end: Array | int, count: int) -> None:
    """Adds steps of `count` keys, and raises the offset to their maximum before each.

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
    """Groups rows by eight, as registers hold them: registers are added or compared whole."""
    return x.reshape(-1, 8, x.shape[1])
