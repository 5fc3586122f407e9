# SPDX-License-Identifier: Apache-2.0
"""The gradient of attention by blocks of queries and keys, on any platform.

Scores are laid out keys × queries, so that of the five products one alone transposes them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.attention.blocks import Config, cut, grid, over, precision_of, seen, shown, take, visits
from wanjax.kernels.attention.masks import Window, finite_max
from wanjax.kernels.attention.radial import Radial


class Queries(NamedTuple):
    """Queries times the scale, the gradients of their results, their log-sum-exps, and their deltas."""

    x: Float32[Array, "L D"]
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
    """Return the gradients of q, k and v; the arguments are those of `gradient.from_result`."""
    batch, length, heads, size = q.shape
    kv_heads, dtype = k.shape[2], q.dtype
    q, g, lse, delta = (x.reshape(batch, length, kv_heads, -1, *x.shape[3:]) for x in (q, g, lse, delta))
    # over examples, then heads of k, then the heads of q that share one
    head = partial(_head, window=window, scale=scale, dtype=dtype, config=config)
    for axes in ((1, None, None, 1, 1, 1, None), (1, 1, 1, 1, 1, 1, None), (0,) * 7):
        head = over(head, axes, batched=config.batched)
    dq, dk, dv = head(q, k, v, g, lse, delta, key_mask)  # [B K G L D], and twice [B K G S D]
    dq = jnp.moveaxis(dq.reshape(batch, heads, length, size), 1, 2).astype(dtype)
    dk, dv = (jnp.moveaxis(x.sum(axis=2), 1, 2).astype(dtype) for x in (dk, dv))
    return dq, dk, dv


def _head(
    q: Float[Array, "L D"],
    k: Float[Array, "S D"],
    v: Float[Array, "S D"],
    g: Float[Array, "L D"],
    lse: Float32[Array, " L"],
    delta: Float32[Array, " L"],
    live: Bool[Array, " S"] | None,
    *,
    window: Window | Radial | None,
    scale: float,
    dtype: DTypeLike,
    config: Config,
) -> Gradients:
    """One head of one example. Queries are padded by such without a gradient, which changes no result."""
    q, k, v, g = (x.astype(jnp.float32) for x in (q, k, v, g))
    queries = Queries(scale * q, g, finite_max(lse)[:, None], delta[:, None])
    if isinstance(window, Radial):
        gradients = _radial(queries, k, v, live, window, precision_of(dtype), config)
    else:
        gradients = _blocks(queries, k, v, live, window, precision_of(dtype), config)
    return gradients._replace(q=scale * gradients.q)


def _blocks(
    queries: Queries, k: Array, v: Array, live: Array | None, window: Window | None, precision: str, config: Config
) -> Gradients:
    """The gradients of scaled queries, keys and values of one head."""
    length = len(queries.x)
    walk = grid(length, len(k), window, config)
    rows = Queries(*(walk.padded(x).reshape(walk.blocks, walk.rows, -1) for x in queries))

    def block(totals: tuple[Array, Array], at: tuple[Queries, Array]) -> tuple[tuple[Array, Array], Array]:
        row, start = at

        def add(done: Gradients, begin: Array, count: int) -> Gradients:
            marks = seen(live, window, start, walk.rows, begin, count)
            more = _pair(row, take(k, begin, count), take(v, begin, count), marks, precision)
            return Gradients(done.q + more.q, _added(done.k, begin, more.k), _added(done.v, begin, more.v))

        first, others = walk.begins(start)
        done = add(Gradients(jnp.zeros_like(row.x), *totals), first, walk.ragged)
        if len(others):  # as in `chunked`
            done, _ = jax.lax.scan(lambda done, begin: (add(done, begin, walk.columns), None), done, others)
        return (done.k, done.v), done.q

    (dk, dv), dq = jax.lax.scan(block, (jnp.zeros_like(k), jnp.zeros_like(v)), (rows, walk.starts))
    return Gradients(dq.reshape(-1, dq.shape[2])[:length], dk, dv)


def _added(total: Array, begin: Array, part: Array) -> Array:
    """Add a part to the rows from `begin` on."""
    if len(part) == len(total):
        return total + part
    return jax.lax.dynamic_update_slice_in_dim(total, take(total, begin, len(part)) + part, begin, 0)


def _radial(
    queries: Queries, k: Array, v: Array, live: Array | None, mask: Radial, precision: str, config: Config
) -> Gradients:
    """The same under a radial mask, by the blocks of keys that each block of queries visits."""
    length, keys, size = len(queries.x), len(k), mask.block_kv
    rows = Queries(*(cut(x, mask.block_q) for x in queries))
    k, v, marks = cut(k, size), cut(v, size), shown(live, keys, size)

    def block(totals: tuple[Array, Array], at: tuple[Any, ...]) -> tuple[tuple[Array, Array], Array]:
        row, columns, places, count = at

        def add(done: Gradients, at: tuple[Array, Array]) -> tuple[Gradients, None]:
            columns, places = at
            some_k, some_v = (array[columns].reshape(-1, array.shape[2]) for array in (k, v))
            seen = marks[columns] & (places < count)[:, None]
            more = _pair(row, some_k, some_v, seen.reshape(1, -1), precision)
            dk, dv = (
                total.at[columns].add(part.reshape(len(columns), size, -1))
                for total, part in ((done.k, more.k), (done.v, more.v))
            )
            return Gradients(done.q + more.q, dk, dv), None

        done, _ = jax.lax.scan(add, Gradients(jnp.zeros_like(row.x), *totals), (columns, places))
        return (done.k, done.v), done.q

    totals, dqs = (jnp.zeros_like(k), jnp.zeros_like(v)), []
    for part in visits(mask, length, keys, config.block_kv):
        some = Queries(*(x[part.rows] for x in rows))
        totals, dq = jax.lax.scan(block, totals, (some, *part.steps))
        dqs.append(dq)
    whole = Gradients(jnp.concatenate(dqs), *totals)
    return Gradients(*(x.reshape(-1, x.shape[2])[:n] for x, n in zip(whole, (length, keys, keys), strict=True)))


def _pair(
    row: Queries, k: Float32[Array, "S D"], v: Float32[Array, "S D"], seen: Bool[Array, "_L S"] | None, precision: str
) -> Gradients:
    """What a block of keys adds to the gradients of a block of scaled queries, of the keys and of their values."""
    matmul = partial(jnp.matmul, precision=precision)
    logits = matmul(k, row.x.T)  # [S L]
    if seen is not None:
        logits = jnp.where(seen.T, logits, -jnp.inf)
    weights = jnp.exp(logits - row.lse.T)
    of_logits = weights * (matmul(v, row.g.T) - row.delta.T)
    return Gradients(matmul(of_logits.T, k), matmul(of_logits, row.x), matmul(weights, row.g))
