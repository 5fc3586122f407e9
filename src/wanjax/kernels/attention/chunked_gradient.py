# SPDX-License-Identifier: Apache-2.0
"""The gradient of attention by blocks of queries and keys, on any platform.

The scores have the shape keys × queries. In this shape, only one of the five matrix products has to transpose them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.attention.blocks import (
    Config,
    block_grid,
    block_lists,
    key_mask_blocks,
    map_axis,
    matmul_precision,
    slice_axis,
    to_blocks,
    visible_keys,
)
from wanjax.kernels.attention.masks import Window, finite_max
from wanjax.kernels.attention.radial import Radial


class QueryBlock(NamedTuple):
    """A block of scaled queries, with the arguments of `gradient_by_blocks` that belong to these queries."""

    q: Float32[Array, "L D"]
    g: Float32[Array, "L D"]
    lse: Float32[Array, "L 1"]
    delta: Float32[Array, "L 1"]


class Gradients(NamedTuple):
    """The gradients of one head's queries, keys and values."""

    q: Float32[Array, "L D"]
    k: Float32[Array, "S D"]
    v: Float32[Array, "S D"]


def gradient_by_blocks(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    g: Float[Array, "B L N D"],
    lse: Float32[Array, "B L N"],
    delta: Float32[Array, "B L N"],
    key_mask: Bool[Array, "B S"] | None,
    *,
    window: Window | Radial | None,
    scale: float,
    config: Config,
) -> tuple[Float[Array, "B L N D"], Float[Array, "B S K D"], Float[Array, "B S K D"]]:
    """Return the gradients of q, k and v. `gradient.from_result` explains the arguments."""
    batch, length, heads, head_dim = q.shape
    kv_heads, dtype = k.shape[2], q.dtype
    q, g, lse, delta = (x.reshape(batch, length, kv_heads, -1, *x.shape[3:]) for x in (q, g, lse, delta))
    # map over examples, then over heads of k, then over the heads of q that share a head of k
    one_head = partial(_one_head_gradients, window=window, scale=scale, dtype=dtype, config=config)
    for axes in ((1, None, None, 1, 1, 1, None), (1, 1, 1, 1, 1, 1, None), (0,) * 7):
        one_head = map_axis(one_head, axes, batched=config.batched)
    dq, dk, dv = one_head(q, k, v, g, lse, delta, key_mask)  # dq [B K G L D], dk [B K G S D], dv [B K G S D]
    dq = jnp.moveaxis(dq.reshape(batch, heads, length, head_dim), 1, 2).astype(dtype)
    dk, dv = (jnp.moveaxis(x.sum(axis=2), 1, 2).astype(dtype) for x in (dk, dv))
    return dq, dk, dv


def _one_head_gradients(
    q: Float[Array, "L D"],
    k: Float[Array, "S D"],
    v: Float[Array, "S D"],
    g: Float[Array, "L D"],
    lse: Float32[Array, " L"],
    delta: Float32[Array, " L"],
    key_mask: Bool[Array, " S"] | None,
    *,
    window: Window | Radial | None,
    scale: float,
    dtype: DTypeLike,
    config: Config,
) -> Gradients:
    """Compute the gradients of one head of one example. Padded queries add nothing, because the gradients of their
    results are zero."""
    q, k, v, g = (x.astype(jnp.float32) for x in (q, k, v, g))
    queries = QueryBlock(scale * q, g, finite_max(lse)[:, None], delta[:, None])
    if isinstance(window, Radial):
        gradients = _radial_gradients(queries, k, v, key_mask, window, matmul_precision(dtype), config)
    else:
        gradients = _dense_gradients(queries, k, v, key_mask, window, matmul_precision(dtype), config)
    return gradients._replace(q=scale * gradients.q)


def _dense_gradients(
    queries: QueryBlock,
    k: Array,
    v: Array,
    key_mask: Array | None,
    window: Window | None,
    precision: str,
    config: Config,
) -> Gradients:
    """Return the gradients of scaled queries, keys and values of one head."""
    length = len(queries.q)
    grid = block_grid(length, len(k), window, config)
    query_blocks = QueryBlock(*(grid.pad_queries(x).reshape(grid.q_blocks, grid.block_q, -1) for x in queries))

    def scan_block(sums: tuple[Array, Array], entry: tuple[QueryBlock, Array]) -> tuple[tuple[Array, Array], Array]:
        query_block, q_start = entry

        def add(gradients: Gradients, kv_start: Array, num_keys: int) -> Gradients:
            visible = visible_keys(key_mask, window, q_start, grid.block_q, kv_start, num_keys)
            contribution = _block_gradients(
                query_block, slice_axis(k, kv_start, num_keys), slice_axis(v, kv_start, num_keys), visible, precision
            )
            return Gradients(
                gradients.q + contribution.q,
                _add_at(gradients.k, kv_start, contribution.k),
                _add_at(gradients.v, kv_start, contribution.v),
            )

        first_start, later_starts = grid.key_starts(q_start)
        gradients = add(Gradients(jnp.zeros_like(query_block.q), *sums), first_start, grid.first_block_kv)
        if len(later_starts):  # under `jax.disable_jit`, a scan of zero steps is an error
            gradients, _ = jax.lax.scan(
                lambda gradients, kv_start: (add(gradients, kv_start, grid.block_kv), None), gradients, later_starts
            )
        return (gradients.k, gradients.v), gradients.q

    (dk, dv), dq = jax.lax.scan(scan_block, (jnp.zeros_like(k), jnp.zeros_like(v)), (query_blocks, grid.q_starts))
    return Gradients(dq.reshape(-1, dq.shape[2])[:length], dk, dv)


def _add_at(total: Array, start: Array, part: Array) -> Array:
    """Add `part` to the rows of `total` from `start` on."""
    if len(part) == len(total):
        return total + part
    return jax.lax.dynamic_update_slice_in_dim(total, slice_axis(total, start, len(part)) + part, start, 0)


def _radial_gradients(
    queries: QueryBlock, k: Array, v: Array, key_mask: Array | None, mask: Radial, precision: str, config: Config
) -> Gradients:
    """Compute the gradients under a radial mask. For each block of queries, only the visible blocks of keys are
    computed."""
    length, num_keys, block_kv = len(queries.q), len(k), mask.block_kv
    query_blocks = QueryBlock(*(to_blocks(x, mask.block_q) for x in queries))
    k, v, valid = to_blocks(k, block_kv), to_blocks(v, block_kv), key_mask_blocks(key_mask, num_keys, block_kv)

    def scan_block(sums: tuple[Array, Array], entry: tuple[Any, ...]) -> tuple[tuple[Array, Array], Array]:
        query_block, kv_blocks, list_positions, count = entry

        def add(gradients: Gradients, step: tuple[Array, Array]) -> tuple[Gradients, None]:
            kv_blocks, list_positions = step
            k_part, v_part = (blocks[kv_blocks].reshape(-1, blocks.shape[2]) for blocks in (k, v))
            visible = valid[kv_blocks] & (list_positions < count)[:, None]
            contribution = _block_gradients(query_block, k_part, v_part, visible.reshape(1, -1), precision)
            dk, dv = (
                gradient.at[kv_blocks].add(part.reshape(len(kv_blocks), block_kv, -1))
                for gradient, part in ((gradients.k, contribution.k), (gradients.v, contribution.v))
            )
            return Gradients(gradients.q + contribution.q, dk, dv), None

        gradients, _ = jax.lax.scan(add, Gradients(jnp.zeros_like(query_block.q), *sums), (kv_blocks, list_positions))
        return (gradients.k, gradients.v), gradients.q

    sums, dqs = (jnp.zeros_like(k), jnp.zeros_like(v)), []
    for lists in block_lists(mask, length, num_keys, config.block_kv):
        query_subset = QueryBlock(*(x[lists.q_blocks] for x in query_blocks))
        sums, dq = jax.lax.scan(scan_block, sums, (query_subset, *lists.arrays))
        dqs.append(dq)
    padded = Gradients(jnp.concatenate(dqs), *sums)
    return Gradients(
        *(x.reshape(-1, x.shape[2])[:n] for x, n in zip(padded, (length, num_keys, num_keys), strict=True))
    )


def _block_gradients(
    query_block: QueryBlock,
    k: Float32[Array, "S D"],
    v: Float32[Array, "S D"],
    visible: Bool[Array, "_L S"] | None,
    precision: str,
) -> Gradients:
    """Return the contribution of a block of scaled queries and a block of keys to the gradients of q, k and v."""
    matmul = partial(jnp.matmul, precision=precision)
    logits = matmul(k, query_block.q.T)  # [S L]
    if visible is not None:
        logits = jnp.where(visible.T, logits, -jnp.inf)
    weights = jnp.exp(logits - query_block.lse.T)
    dlogits = weights * (matmul(v, query_block.g.T) - query_block.delta.T)
    return Gradients(matmul(dlogits.T, k), matmul(dlogits, query_block.q), matmul(weights, query_block.g))
