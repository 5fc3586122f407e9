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

BLOCK, SLOTS = 40, 3


@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_a_block_sees_itself_and_the_live_rows(name):
    """What lies in rows not yet written would show, whatever it is."""
    q, k, v = operands(2, 5 * BLOCK, 5 * BLOCK, 2, 2, 8)
    window = KVCache(*(jnp.full_like(x, 1e4) for x in empty_cache(1, 2, SLOTS * BLOCK, 2, 8, jnp.float32)))
    window = jax.tree.map(lambda x: x[0], window)
    run = jax.jit(partial(attention_to_cache, length=BLOCK, implementation=name))
    for block in range(5):
        tokens = slice(block * BLOCK, (block + 1) * BLOCK)
        slot = CacheSlot(jnp.int32(block % SLOTS * BLOCK), jnp.int32(min(block + 1, SLOTS)))
        out, new_rows = run(q[:, tokens], k[:, tokens], v[:, tokens], window, slot)
        seen = slice(max(0, block + 1 - SLOTS) * BLOCK, (block + 1) * BLOCK)
        assert error(out, exact(q[:, tokens], k[:, seen], v[:, seen])) <= BOUND["float32"]
        assert (new_rows.k == k[:, tokens].reshape(2, BLOCK, -1)).all()
        window = insert_chunk(window, new_rows, slot)
    assert run._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]
