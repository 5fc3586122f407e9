# SPDX-License-Identifier: Apache-2.0
"""Attention of a chunk of tokens to itself and to the cached keys and values of earlier chunks.

The cache has a fixed number of rows, one for each token. A new chunk is written at the row in `CacheSlot`. The valid
rows are the first rows of the cache. Softmax does not depend on the order of keys, so a full cache is used as a ring
buffer. The program has a branch for each number of valid chunks, because a kernel that is compiled for a fixed number
of keys is faster than a kernel with a mask.

On several devices, the cache is always sharded by heads over `tp`, and each device has all rows of its heads. As in
self-attention, tokens are exchanged for heads, and only the keys of the new chunk are sent. Over `sp`, the queries of a
head are sharded, and the cache is replicated.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.kernels.attention.sharded import QueryPlacement, heads_to_tokens, tokens_to_heads
from wanjax.sharding import constrain_to, current_partitioner, pad_to

HEADS_AXIS = "tp"


class KVCache(NamedTuple):
    """Keys and values of the cache or of a chunk. For stacked blocks, there is a leading axis of blocks.

    Heads are concatenated in the channels, so that rows fill the tiles of a TPU's memory for any number of heads.
    """

    k: Any  # Float[Array, "... B S E"]
    v: Any


class CacheSlot(NamedTuple):
    """The row at which a chunk is written, and the number of chunks that are valid after the write."""

    row: Any  # Int32[Array, ""]
    num_chunks: Any


def empty_cache(layers: int, batch: int, rows: int, heads: int, head_dim: int, dtype: DTypeLike) -> KVCache:
    """Return a cache of zeros for each block of a stack, with the sharding that `attention` expects."""
    num_devices = current_partitioner().axis_size(HEADS_AXIS)
    shape = layers, batch, rows, (heads + -heads % num_devices) * head_dim
    return _shard_cache(KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))


def insert_chunk(cache: KVCache, chunk: KVCache, slot: CacheSlot) -> KVCache:
    """Write the keys and values of a chunk at the slot's row, and return the new cache [... B S E]."""

    def write(cached: Array, new_rows: Array) -> Array:
        start = [0] * cached.ndim
        start[-2] = slot.row
        return jax.lax.dynamic_update_slice(cached, new_rows, [jnp.asarray(n, jnp.int32) for n in start])

    return KVCache(*map(write, cache, chunk))


def update_cache(cache: KVCache, chunk: KVCache, slot: CacheSlot) -> KVCache:
    """Write a chunk as `insert_chunk` does, in the caches [layers B S E] of all blocks, with unchanged sharding."""
    return _shard_cache(insert_chunk(cache, chunk, slot))


def _shard_cache(cache: KVCache) -> KVCache:
    """Shard caches [layers B S E] by heads."""
    batch = current_partitioner().activation_spec(("batch",), cache.k.shape[1:2])[0]
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
    """Return the attention of a chunk's first `length` tokens, and the chunk's keys and values for the cache.

    On one device, `kernel(q, k, v, kv_length=...)` computes the attention to the first `kv_length` keys.
    """
    queries, partitioner = q.shape[1], current_partitioner()
    q, k, v = (pad_to(x, 1, partitioner.axis_size(("sp", "tp"))) for x in (q, k, v))
    placement = QueryPlacement.of(q, partitioner)
    num_devices = partitioner.axis_size(HEADS_AXIS) if placement.heads is None else 1

    def attend(q, k, v, cache: KVCache, slot: CacheSlot) -> tuple[Array, KVCache]:
        heads = q.shape[2]
        q, k, v = (tokens_to_heads(x, num_devices) for x in (q, k, v))
        if partitioner.axis_size("sp") > 1:
            k, v = (jax.lax.all_gather(x, "sp", axis=1, tiled=True) for x in (k, v))
        chunk = KVCache(*(x.reshape(*x.shape[:2], -1)[:, :length] for x in (k, v)))
        out = _attend_to_chunks(kernel, q, insert_chunk(cache, chunk, slot), slot, length)
        return heads_to_tokens(out, heads, num_devices), chunk

    tokens_spec, cache_spec = PartitionSpec(*placement), PartitionSpec(placement.batch, None, HEADS_AXIS)
    cache_spec = KVCache(cache_spec, cache_spec)
    specs = (tokens_spec, tokens_spec, tokens_spec, cache_spec, CacheSlot(PartitionSpec(), PartitionSpec()))
    out, chunk = partitioner.shard_map(attend, specs, (tokens_spec, cache_spec))(q, k, v, cache, slot)
    return out[:, :queries], chunk


def _attend_to_chunks(
    kernel: Callable[..., Array], q: Float[Array, "B L N D"], cache: KVCache, slot: CacheSlot, length: int
) -> Float[Array, "B L N D"]:
    """Return the attention to the valid chunks. The first branch is the slowest one, for a full cache.

    The operands and results of branches have concatenated heads. With an axis of heads, each branch would copy the
    arrays to other tiles of a TPU's memory.
    """
    max_chunks, heads = cache.k.shape[1] // length, q.shape[2]

    def attend(chunks: int, *flat: Array) -> Array:
        split = (x.reshape(*x.shape[:2], heads, -1) for x in flat)
        out = kernel(*split, kv_length=chunks * length)
        return out.reshape(*out.shape[:2], -1)

    branches = [partial(attend, chunks) for chunks in range(max_chunks, 0, -1)]
    flat = q.reshape(*q.shape[:2], -1)
    return jax.lax.switch(max_chunks - slot.num_chunks, branches, flat, *cache).reshape(q.shape)
