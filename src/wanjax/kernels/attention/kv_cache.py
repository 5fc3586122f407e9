# SPDX-License-Identifier: Apache-2.0
"""Attention of a chunk of tokens to itself and to the cached keys and values of earlier chunks.

The cache has a fixed number of rows, one for each token. A new chunk is written at a row, and the first chunks are then
valid; softmax does not depend on their order, so a full cache is a ring buffer. There is a branch for each number of
chunks: a kernel compiled for that number of keys is faster than one with a mask.

On several devices, heads are sharded over `tp` whatever the rules, and each device holds all rows of its heads. Queries
are exchanged for heads as in self-attention, and only the new chunk's keys are sent. The queries of a head are sharded
over `sp`, where the cache is replicated.
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
    """Keys and values of the cache or of a chunk, with heads concatenated; stacked blocks add a leading axis.

    With heads side by side, rows fill the tiles of a TPU's memory, whatever the number of heads.
    """

    k: Any  # Float[Array, "... B S E"]
    v: Any


class CacheSlot(NamedTuple):
    """The row at which a chunk is written, and the number of chunks that are then valid."""

    row: Any  # Int32[Array, ""]
    chunks: Any


def empty_cache(layers: int, batch: int, rows: int, heads: int, head_dim: int, dtype: DTypeLike) -> KVCache:
    """Return empty caches for stacked blocks, sharded as `attention` takes them."""
    num_devices = current().size(HEADS_AXIS)
    shape = layers, batch, rows, (heads + -heads % num_devices) * head_dim
    return _shard_cache(KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))


def insert(cache: KVCache, chunk: KVCache, slot: CacheSlot) -> KVCache:
    """Return the cache [... B S E] with the keys and values of a chunk at its row."""

    def write(x: Array, new: Array) -> Array:
        start = [0] * x.ndim
        start[-2] = slot.row
        return jax.lax.dynamic_update_slice(x, new, [jnp.asarray(n, jnp.int32) for n in start])

    return KVCache(*map(write, cache, chunk))


def update_cache(cache: KVCache, chunk: KVCache, slot: CacheSlot) -> KVCache:
    """Return the caches [layers B S E] with the keys and values of a chunk at its row, sharded as before."""
    return _shard_cache(insert(cache, chunk, slot))


def _shard_cache(cache: KVCache) -> KVCache:
    """Shard caches [layers B S E] by heads."""
    batch = current().activation(("batch",), cache.k.shape[1:2])[0]
    return jax.tree.map(lambda x: constrain_to(x, PartitionSpec(None, batch, None, HEADS_AXIS)), cache)


def attention(
    kernel: Callable[..., Array],
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    cache: KVCache,
    slot: CacheSlot,
    length: int,
) -> tuple[Float[Array, "B L N D"], KVCache]:
    """Return the attention of a chunk's first `length` tokens, and its keys and values for the cache.

    `kernel(q, k, v, keys=...)` is attention on one device to the first `keys` keys.
    """
    queries, partitioner = q.shape[1], current()
    q, k, v = (pad_to(x, 1, partitioner.size(("sp", "tp"))) for x in (q, k, v))
    placement = Placement.of(q, partitioner)
    num_devices = partitioner.size(HEADS_AXIS) if placement.heads is None else 1

    def attend(q, k, v, cache: KVCache, slot: CacheSlot) -> tuple[Array, KVCache]:
        heads = q.shape[2]
        q, k, v = (tokens_to_heads(x, num_devices) for x in (q, k, v))
        if partitioner.size("sp") > 1:
            k, v = (jax.lax.all_gather(x, "sp", axis=1, tiled=True) for x in (k, v))
        chunk = KVCache(*(x.reshape(*x.shape[:2], -1)[:, :length] for x in (k, v)))
        out = _attend_to_chunks(kernel, q, insert(cache, chunk, slot), slot, length)
        return heads_to_tokens(out, heads, num_devices), chunk

    tokens_spec, cache_spec = PartitionSpec(*placement), PartitionSpec(placement.batch, None, HEADS_AXIS)
    cache_spec = KVCache(cache_spec, cache_spec)
    specs = (tokens_spec, tokens_spec, tokens_spec, cache_spec, CacheSlot(PartitionSpec(), PartitionSpec()))
    out, chunk = partitioner.shard_map(attend, specs, (tokens_spec, cache_spec))(q, k, v, cache, slot)
    return out[:, :queries], chunk


def _attend_to_chunks(
    kernel: Callable[..., Array], q: Float[Array, "B L N D"], cache: KVCache, slot: CacheSlot, length: int
) -> Float[Array, "B L N D"]:
    """Return the attention to the valid chunks. The branch of a full cache, the slowest, comes first.

    Operands and results of branches have heads side by side: with an axis of heads, each branch would copy them to
    other tiles of a TPU's memory.
    """
    capacity, heads = cache.k.shape[1] // length, q.shape[2]

    def attend(chunks: int, *flat: Array) -> Array:
        split = (x.reshape(*x.shape[:2], heads, -1) for x in flat)
        out = kernel(*split, keys=chunks * length)
        return out.reshape(*out.shape[:2], -1)

    branches = [partial(attend, chunks) for chunks in range(capacity, 0, -1)]
    flat = q.reshape(*q.shape[:2], -1)
    return jax.lax.switch(capacity - slot.chunks, branches, flat, *cache).reshape(q.shape)
