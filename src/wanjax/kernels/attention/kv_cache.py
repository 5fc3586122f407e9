# SPDX-License-Identifier: Apache-2.0
"""Attention of a block of tokens to itself and to the keys and values that are kept of earlier blocks.

Kept keys are rows of a window of fixed size. Those of a new block are written at a row, and the rows of the first
blocks then take part; their order does not matter to softmax, so a full window is a ring. There is a branch for each
number of blocks, so that a kernel knows the number of keys when it is compiled, which is faster than a mask.

On several devices each keeps all rows of its own heads, those of `tp`, whatever the rules: queries are exchanged for
heads as in self-attention, and only the new block's keys are sent. The queries of a head are divided over `sp`, whose
devices keep the same rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.kernels.attention.sharded import Placement, heads_to_tokens, tokens_to_heads
from wanjax.sharding import constrain_to, current, pad_to

HEADS_AXIS = "tp"


class KVCache(NamedTuple):
    """Keys and values of a window or of a block, heads side by side; those of stacked blocks have a leading axis.

    Rows of all heads together fill the tiles of a TPU's memory, whatever the number of heads.
    """

    k: Any  # Float[Array, "... B S E"]
    v: Any


class CacheSlot(NamedTuple):
    """The row of the window at which a block's keys are written, and the number of blocks that then take part."""

    row: Any  # Int32[Array, ""]
    blocks: Any


def empty_cache(layers: int, batch: int, rows: int, heads: int, size: int, dtype: DTypeLike) -> KVCache:
    """Returns windows without keys for stacked blocks, sharded as `attention` takes them."""
    devices = current().size(HEADS_AXIS)
    shape = layers, batch, rows, (heads + -heads % devices) * size
    return _stored(KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))


def insert(window: KVCache, block: KVCache, slot: CacheSlot) -> KVCache:
    """Returns the window [... B S E] with the keys and values of a block at its row."""

    def write(x: Array, new: Array) -> Array:
        start = [0] * x.ndim
        start[-2] = slot.row
        return jax.lax.dynamic_update_slice(x, new, [jnp.asarray(n, jnp.int32) for n in start])

    return KVCache(*map(write, window, block))


def update_cache(window: KVCache, block: KVCache, slot: CacheSlot) -> KVCache:
    """Returns the windows [layers B S E] with the keys and values of a block at its row, sharded as before."""
    return _stored(insert(window, block, slot))


def _stored(window: KVCache) -> KVCache:
    """Returns windows [layers B S E], each device with its heads."""
    batch = current().activation(("batch",), window.k.shape[1:2])[0]
    return jax.tree.map(lambda x: constrain_to(x, PartitionSpec(None, batch, None, HEADS_AXIS)), window)


def attention(
    kernel: Callable[..., Array],
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    window: KVCache,
    slot: CacheSlot,
    length: int,
) -> tuple[Float[Array, "B L N D"], KVCache]:
    """Returns the attention of a block's first `length` tokens, and the keys and values that a window keeps of them.

    `kernel(q, k, v, keys=...)` is attention on one device to the first `keys` keys.
    """
    queries, partitioner = q.shape[1], current()
    q, k, v = (pad_to(x, 1, partitioner.size(("sp", "tp"))) for x in (q, k, v))
    at = Placement.of(q, partitioner)
    devices = partitioner.size(HEADS_AXIS) if at.heads is None else 1

    def attend(q, k, v, window: KVCache, slot: CacheSlot) -> tuple[Array, KVCache]:
        heads = q.shape[2]
        q, k, v = (tokens_to_heads(x, devices) for x in (q, k, v))
        if partitioner.size("sp") > 1:
            k, v = (jax.lax.all_gather(x, "sp", axis=1, tiled=True) for x in (k, v))
        block = KVCache(*(x.reshape(*x.shape[:2], -1)[:, :length] for x in (k, v)))
        out = _seen(kernel, q, insert(window, block, slot), slot, length)
        return heads_to_tokens(out, heads, devices), block

    tokens, cache = PartitionSpec(*at), PartitionSpec(at.batch, None, HEADS_AXIS)
    cache = KVCache(cache, cache)
    specs = (tokens, tokens, tokens, cache, CacheSlot(PartitionSpec(), PartitionSpec()))
    out, block = partitioner.shard_map(attend, specs, (tokens, cache))(q, k, v, window, slot)
    return out[:, :queries], block


def _seen(
    kernel: Callable[..., Array], q: Float[Array, "B L N D"], window: KVCache, slot: CacheSlot, length: int
) -> Float[Array, "B L N D"]:
    """Returns the attention to the blocks that take part; the branch of a full window, the slowest, is the first.

    Branches take and give heads side by side: apart, each would be copied to other tiles of a TPU's memory.
    """
    slots, heads = window.k.shape[1] // length, q.shape[2]

    def attend(blocks: int, *joined: Array) -> Array:
        apart = (x.reshape(*x.shape[:2], heads, -1) for x in joined)
        out = kernel(*apart, keys=blocks * length)
        return out.reshape(*out.shape[:2], -1)

    branches = [partial(attend, blocks) for blocks in range(slots, 0, -1)]
    joined = q.reshape(*q.shape[:2], -1)
    return jax.lax.switch(slots - slot.blocks, branches, joined, *window).reshape(q.shape)
