# SPDX-License-Identifier: Apache-2.0
"""Helpers of the implementations: the order of heads in memory, loops over heads, and blocks of queries and keys."""

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
from wanjax.kernels.attention.radial import Radial, column_lists
from wanjax.sharding import pad_to


@dataclass(frozen=True)
class Config:
    """Maximum sizes of blocks. All blocks of a sequence have about the same size.

    Attributes:
        block_q: The maximum number of queries in a block.
        block_kv: The maximum number of keys in a block.
        batched: If True, all heads of all examples are computed at once, which is faster on an accelerator. If False,
            heads are computed one after another, so that the scores of a block fit in a CPU's cache.
    """

    block_q: int
    block_kv: int
    batched: bool

    def __post_init__(self):
        if self.block_q < 1 or self.block_kv < 1:
            raise WanjaxError(f"blocks of {self.block_q} queries and {self.block_kv} keys: each must be at least 1")


def map_axis(f: Callable, axes: Sequence[int | None], *, batched: bool) -> Callable:
    """Map f over one axis of each argument: by vmap if `batched`, else in a loop. An argument is broadcast if its axis
    is None or has size 1.
    """

    def mapped(*arguments: Array | None) -> tuple[Array, ...]:
        xs, in_axes = list(arguments), list(axes)
        for i, (x, axis) in enumerate(zip(arguments, axes, strict=True)):
            if x is None or (axis is not None and x.shape[axis] == 1):
                xs[i], in_axes[i] = x if x is None else x.squeeze(axis), None
        sizes = {
            x.shape[in_axis] for x, in_axis in zip(xs, in_axes, strict=True) if x is not None and in_axis is not None
        }
        if not sizes:
            return jax.tree.map(lambda y: y[None], f(*xs))
        if batched:
            return jax.vmap(f, in_axes)(*xs)
        return jax.lax.map(
            lambda index: f(*map(partial(_index_if_batched, index), xs, in_axes)), jnp.arange(sizes.pop())
        )

    return mapped


def heads_to_batch(x: Float[Array, "B L N D"]) -> Float[Array, "_B L D"]:
    """Merge the heads of all examples into the first axis."""
    return jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], x.shape[3])


def batch_to_heads(x: Float[Array, "_B L D"], heads: int) -> Float[Array, "B L N D"]:
    """Invert `heads_to_batch`. `heads` is the number of heads of an example."""
    return jnp.moveaxis(x.reshape(-1, heads, *x.shape[1:]), 1, 2)


def to_rows(x: Float[Array, "B L N D"]) -> Float[Array, "_B L _D"]:
    """Reshape x for a TPU kernel. If the head size is a multiple of the lanes, the heads of a token stay side by side,
    as projections write them. Otherwise the heads are merged into the first axis, as in `heads_to_batch`.
    """
    return x.reshape(*x.shape[:2], -1) if x.shape[3] % LANES == 0 else heads_to_batch(x)


def from_rows(x: Float[Array, "_B L _D"], heads: int, size: int) -> Float[Array, "B L N D"]:
    """Invert `to_rows`."""
    return x.reshape(*x.shape[:2], heads, size) if size % LANES == 0 else batch_to_heads(x, heads)


def _index_if_batched(index: Array, x: Array | None, axis: int | None) -> Array | None:
    if x is None or axis is None:
        return x
    xla_casts_all_entries = x.dtype == jnp.bfloat16 and jax.__version_info__ < (0, 11)
    return (_entry_in_float32 if xla_casts_all_entries else _take_index)(x, index, axis)


def _take_index(x: Array, index: Array, axis: int) -> Array:
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _entry_in_float32(x: BFloat16[Array, "..."], index: Array, axis: int) -> Float32[Array, "..."]:
    """Index x, and cast the entry to float32.

    Up to jax 0.10, XLA on CPUs would cast all entries to float32 before the loop. To avoid this, the function indexes
    integers: the bits of a bfloat16 are the upper half of the bits of the same value in float32.
    """
    bits = _take_index(jax.lax.bitcast_convert_type(x, jnp.uint16), index, axis)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


@_entry_in_float32.defjvp
def _entry_in_float32_jvp(axis: int, values: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _entry_in_float32(*values, axis), _take_index(tangents[0], values[1], axis).astype(jnp.float32)


class BlockGrid(NamedTuple):
    """Blocks of `block_q` queries, and the blocks of `block_kv` keys that each of them attends to.

    For a block of queries, `span` neighbouring keys are computed. The first block of these keys may be shorter than
    the others, so that no key is padding.
    """

    q_blocks: int
    block_q: int
    left: int  # the maximum number of visible keys before a query
    span: int
    num_keys: int
    block_kv: int
    kv_blocks: int

    @property
    def first_block_kv(self) -> int:
        """The number of keys in the first block."""
        return self.span - (self.kv_blocks - 1) * self.block_kv

    def key_starts(self, q_start: Array) -> tuple[Array, Array]:
        """Return the position of the first key of each block of keys, for the block of queries from `q_start` on: the
        position for the first block, and an array of positions for the other blocks."""
        first = jnp.clip(q_start - self.left, 0, self.num_keys - self.span)
        return first, first + self.first_block_kv + self.block_kv * jnp.arange(self.kv_blocks - 1, dtype=q_start.dtype)

    @property
    def q_starts(self) -> Array:
        """Return the first query of each block."""
        return self.block_q * jnp.arange(self.q_blocks)

    def pad_queries(self, x: Array) -> Array:
        """Pad the queries of x with zeros, so that they form whole blocks."""
        return pad_to(x, 0, self.q_blocks * self.block_q)


def block_grid(num_queries: int, num_keys: int, window: Window | None, config: Config) -> BlockGrid:
    """Return blocks of about the same size for these numbers of queries and keys."""
    q_blocks, block_q = even_blocks(num_queries, config.block_q)
    left, right = (num_keys if side is None else side for side in window or (None, None))
    span = min(num_keys, block_q + left + right)
    kv_blocks, block_kv = even_blocks(span, config.block_kv)
    return BlockGrid(q_blocks, block_q, left, span, num_keys, block_kv, kv_blocks)


def visible_keys(
    key_mask: Bool[Array, " S"] | None,
    window: Window | None,
    q_start: Array,
    num_queries: int,
    kv_start: Array,
    num_keys: int,
) -> Bool[Array, "_L _S"] | None:
    """Return a mask of the visible keys, for the queries from `q_start` on and the keys from `kv_start` on. None means
    that all keys are visible."""
    valid = None if key_mask is None else slice_axis(key_mask, kv_start, num_keys)[None, :]
    if window is None:
        return valid
    in_window_mask = in_window(q_start + jnp.arange(num_queries), kv_start + jnp.arange(num_keys), window)
    return in_window_mask if valid is None else in_window_mask & valid


class BlockLists(NamedTuple):
    """For a range of blocks of queries: the lists of the blocks of keys that are visible under a radial mask.

    A step of the computation takes a few blocks of a list.
    """

    q_blocks: slice  # indices of the blocks of queries
    kv_blocks: Int32[np.ndarray, "_B _T _S"]  # for each block of queries and each step, the indices of blocks of keys
    counts: Int32[np.ndarray, " _B"]  # the length of each list; later entries are padding

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Return for each block of queries: its list, the position of each entry in the list, and the list's length."""
        list_positions = np.arange(self.kv_blocks[0].size, dtype=np.int32).reshape(self.kv_blocks[0].shape)
        return (
            jnp.asarray(self.kv_blocks),
            jnp.broadcast_to(list_positions, self.kv_blocks.shape),
            jnp.asarray(self.counts),
        )


def block_lists(mask: Radial, num_queries: int, num_keys: int, block_kv: int) -> list[BlockLists]:
    """List the visible blocks of keys of each block of queries. A step of the computation takes up to `block_kv` keys.

    The lists in one `BlockLists` are padded to the longest list. Queries of text see all keys, so their blocks have a
    separate `BlockLists`.
    """
    block_mask, first_text_block = (
        mask.block_mask(num_queries, num_keys),
        mask.frames * mask.frame_tokens // mask.block_q,
    )
    all_lists = []
    for q_blocks in (slice(0, first_text_block), slice(first_text_block, len(block_mask))):
        if len(block_mask[q_blocks]):
            kv_blocks, counts = column_lists(block_mask[q_blocks])
            blocks_per_step = min(max(1, block_kv // mask.block_kv), kv_blocks.shape[1])
            kv_blocks = np.pad(kv_blocks, ((0, 0), (0, -kv_blocks.shape[1] % blocks_per_step)))
            all_lists.append(BlockLists(q_blocks, kv_blocks.reshape(len(kv_blocks), -1, blocks_per_step), counts))
    return all_lists


def to_blocks(x: Float[Array, "*B L D"], size: int) -> Float[Array, "*B _L S D"]:
    """Split x into blocks of `size` tokens. The last block is padded with zeros."""
    return pad_to(x, x.ndim - 2, size).reshape(*x.shape[:-2], -1, size, x.shape[-1])


def key_mask_blocks(key_mask: Bool[Array, " S"] | None, num_keys: int, size: int) -> Bool[Array, "_B _S"]:
    """Split a key mask into blocks of `size` keys. Padding is False. None stands for a mask of all keys."""
    valid = jnp.ones(num_keys, bool) if key_mask is None else key_mask
    return pad_to(valid, 0, size).reshape(-1, size)


def mean_logits(q: Float[Array, "B L N D"], key_mean: Float32[Array, "B K D"], scale: float) -> Float32[Array, "B L N"]:
    """Return the logits of the mean key. If the keys are centred, each logit of a query is smaller by this number."""
    (batch, queries, heads, head_dim), kv_heads = q.shape, key_mean.shape[1]
    grouped_q = q.astype(jnp.float32).reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("BLKND,BKD->BLKN", grouped_q, key_mean, precision="highest")
    return scale * logits.reshape(batch, queries, heads)


def even_blocks(length: int, max_size: int) -> tuple[int, int]:
    """Return the smallest number of blocks of at most `max_size` that cover a length, and the size of a block."""
    count = ceil_div(length, max_size)
    return count, ceil_div(length, count)


def slice_axis(x: Array, start: Array, size: int, axis: int = 0) -> Array:
    """Slice `size` entries from `start` along an axis. An axis of size 1 is not sliced, because it broadcasts."""
    return x if x.shape[axis] == 1 else jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def matmul_precision(dtype: DTypeLike) -> str:
    """Return the precision of matrix products for operands of this dtype. For bfloat16 a single pass is exact."""
    return "highest" if dtype == jnp.float32 else "default"


def matmul(a: Array, b: Array, *, transposed: bool = False) -> Float32[Array, "..."]:
    """Return a b, or a bᵀ, in float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=matmul_precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def iota(shape: tuple[int, int], axis: int) -> Int32[Array, "_L _S"]:
    """Return the positions along an axis of a matrix."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
