# SPDX-License-Identifier: Apache-2.0
"""Attention to cached keys, whose number is an argument of the program."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from tests.support.attention import BOUND, exact, operands
from tests.support.compare import error
from wanjax.kernels.attention.api import attention_to_cache
from wanjax.kernels.attention.kv_cache import CacheSlot, KVCache, empty_cache, insert_chunk

CHUNK, SLOTS = 40, 3


@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_a_chunk_attends_to_itself_and_the_written_rows(name):
    """Rows of the cache that are not yet written do not change the result."""
    q, k, v = operands(2, 5 * CHUNK, 5 * CHUNK, 2, 2, 8)
    cache = KVCache(*(jnp.full_like(x, 1e4) for x in empty_cache(1, 2, SLOTS * CHUNK, 2, 8, jnp.float32)))
    cache = jax.tree.map(lambda x: x[0], cache)
    run = jax.jit(partial(attention_to_cache, length=CHUNK, implementation=name))
    for chunk in range(5):
        tokens = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        slot = CacheSlot(jnp.int32(chunk % SLOTS * CHUNK), jnp.int32(min(chunk + 1, SLOTS)))
        out, new_rows = run(q[:, tokens], k[:, tokens], v[:, tokens], cache, slot)
        attended = slice(max(0, chunk + 1 - SLOTS) * CHUNK, (chunk + 1) * CHUNK)
        assert error(out, exact(q[:, tokens], k[:, attended], v[:, attended])) <= BOUND["float32"]
        assert (new_rows.k == k[:, tokens].reshape(2, CHUNK, -1)).all()
        cache = insert_chunk(cache, new_rows, slot)
    assert run._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]
