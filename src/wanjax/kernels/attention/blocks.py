# SPDX-License-Identifier: Apache-2.0
"""Heads one after another or all at once, and the blocks of queries and keys that are walked through in each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int32

from wanjax.errors import WanjaxError
from wanjax.kernels.alignment import LANES, ceil_div
from wanjax.kernels.attention.masks import Window, in_window
from wanjax.kernels.attention.radial import Radial, lists
from wanjax.sharding import pad_to


@dataclass(frozen=True)
class Config:
    """The largest numbers of queries and keys in a block; blocks are as even as the lengths allow.

    `batched` computes all heads of all examples at once, which suits an accelerator; otherwise one after another, which
    keeps the scores of a block in a CPU's cache.
    """

    block_q: int
    block_kv: int
    batched: bool

    def __post_init__(self):
        if self.block_q < 1 or self.block_kv < 1:
            raise WanjaxError(f"blocks of {self.block_q} queries and {self.block_kv} keys: each must be at least 1")


def over(f: Callable, axes: Sequence[int | None], *, batched: bool) -> Callable:
    """Map f over an axis of its arguments; an argument without the axis, or with one entry, is shared by all."""

    def run(*arguments: Array | None) -> tuple[Array, ...]:
        xs, ways = list(arguments), list(axes)
        for i, (x, axis) in enumerate(zip(arguments, axes, strict=True)):
            if x is None or (axis is not None and x.shape[axis] == 1):
                xs[i], ways[i] = x if x is None else x.squeeze(axis), None
        counts = {x.shape[way] for x, way in zip(xs, ways, strict=True) if x is not None and way is not None}
        if not counts:
            return jax.tree.map(lambda y: y[None], f(*xs))
        if batched:
            return jax.vmap(f, ways)(*xs)
        return jax.lax.map(lambda index: f(*map(partial(_entry, index), xs, ways)), jnp.arange(counts.pop()))

    return run


def by_head(x: Float[Array, "B L N D"]) -> Float[Array, "_B L D"]:
    """x with the heads of all examples on its first axis."""
    return jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], x.shape[3])


def apart(x: Float[Array, "_B L D"], heads: int) -> Float[Array, "B L N D"]:
    """The inverse of `by_head`, for so many heads of an example."""
    return jnp.moveaxis(x.reshape(-1, heads, *x.shape[1:]), 1, 2)


def to_rows(x: Float[Array, "B L N D"]) -> Float[Array, "_B L _D"]:
    """x as a TPU kernel reads it: heads of whole lanes side by side, as projections write them; others `by_head`."""
    return x.reshape(*x.shape[:2], -1) if x.shape[3] % LANES == 0 else by_head(x)


def from_rows(x: Float[Array, "_B L _D"], heads: int, size: int) -> Float[Array, "B L N D"]:
    """The inverse of `to_rows`."""
    return x.reshape(*x.shape[:2], heads, size) if size % LANES == 0 else apart(x, heads)


def _entry(index: Array, x: Array | None, axis: int | None) -> Array | None:
    if x is None or axis is None:
        return x
    casts_all = x.dtype == jnp.bfloat16 and jax.__version_info__ < (0, 11)
    return (_wide_entry if casts_all else _index)(x, index, axis)


def _index(x: Array, index: Array, axis: int) -> Array:
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _wide_entry(x: BFloat16[Array, "..."], index: Array, axis: int) -> Float32[Array, "..."]:
    """An entry in float32. Up to jax 0.10, XLA on CPUs would cast all entries to float32 before a loop indexes them.

    So it indexes integers: the bits of a bfloat16 are the upper half of the float32 of the same value.
    """
    bits = _index(jax.lax.bitcast_convert_type(x, jnp.uint16), index, axis)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


@_wide_entry.defjvp
def _wide_entry_jvp(axis: int, values: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _wide_entry(*values, axis), _index(tangents[0], values[1], axis).astype(jnp.float32)


class Grid(NamedTuple):
    """Blocks of `rows` queries, each of which sees at most `reach` neighbouring keys, in blocks of `columns`.

    Blocks tile what a block of queries reaches exactly: the first may be shorter, and no key is padding.
    """

    blocks: int
    rows: int
    back: int
    reach: int
    keys: int
    columns: int
    steps: int

    @property
    def ragged(self) -> int:
        """The number of keys in the first block."""
        return self.reach - (self.steps - 1) * self.columns

    def begins(self, start: Array) -> tuple[Array, Array]:
        """The first key of the first block, and those of the others, for the queries from `start` on."""
        first = jnp.clip(start - self.back, 0, self.keys - self.reach)
        return first, first + self.ragged + self.columns * jnp.arange(self.steps - 1, dtype=start.dtype)

    @property
    def starts(self) -> Array:
        """The first query of each block."""
        return self.rows * jnp.arange(self.blocks)

    def padded(self, x: Array) -> Array:
        """x with zeros behind its queries, to whole blocks."""
        return pad_to(x, 0, self.blocks * self.rows)


def grid(queries: int, keys: int, window: Window | None, config: Config) -> Grid:
    """The blocks of so many queries and keys, as even as the lengths allow and at most as large as configured."""
    blocks, rows = even(queries, config.block_q)
    back, ahead = (keys if side is None else side for side in window or (None, None))
    reach = min(keys, rows + back + ahead)
    steps, columns = even(reach, config.block_kv)
    return Grid(blocks, rows, back, reach, keys, columns, steps)


def seen(
    live: Bool[Array, " S"] | None, window: Window | None, start: Array, rows: int, begin: Array, count: int
) -> Bool[Array, "_L _S"] | None:
    """Mark the keys from `begin` on that the queries from `start` on see; None is all."""
    marks = None if live is None else take(live, begin, count)[None, :]
    if window is None:
        return marks
    near = in_window(start + jnp.arange(rows), begin + jnp.arange(count), window)
    return near if marks is None else near & marks


class Visits(NamedTuple):
    """The blocks of keys that some blocks of queries visit under a radial mask, a few together at each step."""

    rows: slice  # of blocks of queries
    columns: Int32[np.ndarray, "_B _T _S"]
    counts: Int32[np.ndarray, " _B"]  # of the listed blocks, in order; those after them are not visited

    @property
    def steps(self) -> tuple[Array, Array, Array]:
        """Each block's list, the places of its entries, and their number, with a leading axis of blocks of queries."""
        places = np.arange(self.columns[0].size, dtype=np.int32).reshape(self.columns[0].shape)
        return jnp.asarray(self.columns), jnp.broadcast_to(places, self.columns.shape), jnp.asarray(self.counts)


def visits(mask: Radial, queries: int, keys: int, block_kv: int) -> list[Visits]:
    """The visits of all blocks of queries, with as many keys together as `block_kv` allows.

    All blocks of a list visit as many as its longest, so the blocks with text, which see all, are apart.
    """
    live, text = mask.live(queries, keys), mask.frames * mask.frame_tokens // mask.block_q
    parts = []
    for rows in (slice(0, text), slice(text, len(live))):
        if len(live[rows]):
            columns, counts = lists(live[rows])
            together = min(max(1, block_kv // mask.block_kv), columns.shape[1])
            columns = np.pad(columns, ((0, 0), (0, -columns.shape[1] % together)))
            parts.append(Visits(rows, columns.reshape(len(columns), -1, together), counts))
    return parts


def cut(x: Float[Array, "*B L D"], size: int) -> Float[Array, "*B _L S D"]:
    """x in blocks of `size` tokens, the last of them filled with zeros."""
    return pad_to(x, x.ndim - 2, size).reshape(*x.shape[:-2], -1, size, x.shape[-1])


def shown(live: Bool[Array, " S"] | None, keys: int, size: int) -> Bool[Array, "_B _S"]:
    """Mark the keys that take part in blocks of `size` keys."""
    marks = jnp.ones(keys, bool) if live is None else live
    return pad_to(marks, 0, size).reshape(-1, size)


def even(length: int, block: int) -> tuple[int, int]:
    """The fewest blocks of at most `block` that cover a length, and their even size."""
    blocks = ceil_div(length, block)
    return blocks, ceil_div(length, blocks)


def take(x: Array, start: Array, size: int, axis: int = 0) -> Array:
    """Slices `size` entries from `start` along an axis; an axis of size 1 broadcasts and stays."""
    return x if x.shape[axis] == 1 else jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def precision_of(dtype: DTypeLike) -> str:
    """The precision of products of operands that had this dtype: one pass of a matrix unit is exact for bfloat16."""
    return "highest" if dtype == jnp.float32 else "default"


def product(a: Array, b: Array, *, transposed: bool = False) -> Float32[Array, "..."]:
    """Return a b, or a bᵀ, in float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=precision_of(a.dtype),
        preferred_element_type=jnp.float32,
    )


def iota(shape: tuple[int, int], axis: int) -> Int32[Array, "_L _S"]:
    """The positions along an axis of a matrix."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
