# SPDX-License-Identifier: Apache-2.0
"""Sparse-linear attention on any platform, a few blocks of queries at a time, and its gradient.

Each block of queries gathers the keys that it keeps, so that one softmax has them all: memory grows with the number of
kept keys, and not with the number of scores. The choice of blocks has no gradient. The gradient computes the weights
again, and needs nothing of the forward pass but the choice.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from wanjax.kernels.attention.blocks import batch_to_heads, even_blocks, heads_to_batch, matmul_precision, to_blocks
from wanjax.kernels.attention.sparse_linear import KeyState, Projection, SparseLinear, choose_blocks, linear, state_of
from wanjax.kernels.autodiff import save_for_backward, with_backward
from wanjax.kernels.target import multiplies_bfloat16, target
from wanjax.sharding import pad_to

SCORES = 128 << 20  # bytes of scores at a time
SCORES_ON_CPU = 4 << 20  # which a cache holds

Forward = Callable[..., tuple[Float[Array, "B L N D"], Int32[Array, "_B _L _S"]]]


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    projection: Projection,
    *,
    sparse: SparseLinear,
    keys: int,
) -> Float[Array, "B L N D"]:
    """Compute what the reference does, and so does its gradient."""
    return with_gradient(partial(_forward, sparse=sparse, keys=keys), q, k, v, projection, sparse=sparse, keys=keys)


def with_gradient(
    forward: Forward, q: Array, k: Array, v: Array, projection: Projection, *, sparse: SparseLinear, keys: int
) -> Float[Array, "B L N D"]:
    """Return the result of `forward(q, k, v, projection)`, which also returns its choice of blocks for the gradient.

    The choice is that of `sparse_linear.choose_blocks`, for the heads of all examples.
    """

    def fwd(q: Array, k: Array, v: Array, projection: Projection) -> tuple[Array, tuple]:
        out, chosen = save_for_backward(forward(q, k, v, projection))
        return out, (q, k, v, projection, chosen)

    def bwd(residuals: tuple, g: Array) -> tuple:
        q, k, v, projection, chosen = residuals
        *of_heads, of_projection = gradient(_heads(keys, q, k, v, g), projection, chosen, sparse)
        return *(_tokens(x, q.shape).astype(q.dtype) for x in of_heads), of_projection

    return with_backward(fwd, bwd, q, k, v, projection)


def _forward(q, k, v, projection: Projection, *, sparse: SparseLinear, keys: int) -> tuple[Array, Array]:
    heads = _heads(keys, q, k, v)
    chosen = choose_blocks(heads[0], heads[1], sparse)
    return _tokens(by_lists(heads, projection, chosen, sparse), q.shape), chosen


def _heads(keys: int, *arrays: Float[Array, "B L N D"]) -> list[Float[Array, "_B _L D"]]:
    """Return the first `keys` tokens of the heads of all examples."""
    return [heads_to_batch(x[:, :keys]) for x in arrays]


def _tokens(x: Float[Array, "_B _L D"], shape: tuple[int, ...]) -> Float[Array, "B L N D"]:
    """Return heads in the shape that they had before `_heads`, with zeros for other tokens."""
    return pad_to(batch_to_heads(x, shape[2]), 1, shape[1])


class Walk(NamedTuple):
    """Blocks of keys and values, and how those of a list are attended to."""

    k: Float[Array, "_B _S S D"]
    v: Float[Array, "_B _S S D"]
    keys: int
    precision: str

    @classmethod
    def over(cls, k: Float[Array, "_B L D"], v: Float[Array, "_B L D"], size: int, precision: str) -> "Walk":
        return cls(to_blocks(k, size), to_blocks(v, size), k.shape[1], precision)

    def gathered(self, lists: Int32[Array, "_B C _S"]) -> tuple[Float[Array, "_B C S D"], Float[Array, "_B C S D"]]:
        """Return the keys and values of each list."""
        k, v = (jax.vmap(lambda blocks, rows: blocks[rows])(x, lists) for x in (self.k, self.v))
        return k.reshape(*lists.shape[:2], -1, k.shape[-1]), v.reshape(*lists.shape[:2], -1, v.shape[-1])

    def seen(self, lists: Int32[Array, "_B C _S"]) -> Bool[Array, "_B C 1 S"]:
        """Mark the keys of each list that take part: memory after the last key is padding."""
        size = self.k.shape[2]
        places = lists[..., None] * size + jnp.arange(size)[None, None, None]
        return (places < self.keys).reshape(*lists.shape[:2], 1, -1)

    def weights(
        self, q: Float[Array, "_B C L D"], k: Float[Array, "_B C S D"], lists: Int32[Array, "_B C _S"]
    ) -> tuple[Float32[Array, "_B C L S"], Float32[Array, "_B C L 1"]]:
        """Return the weights of the keys of each list, not divided, and their sums."""
        logits = q.shape[-1] ** -0.5 * self.product("BCLD,BCSD->BCLS", q, k)
        if self.keys % self.k.shape[2]:
            logits = jnp.where(self.seen(lists), logits, -jnp.inf)
        weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        return weights, weights.sum(axis=-1, keepdims=True)

    def product(self, axes: str, a: Array, b: Array) -> Float32[Array, "..."]:
        """Return a product in float32, of operands in the dtype of the keys."""
        a, b = (x.astype(self.k.dtype) for x in (a, b))
        return jnp.einsum(axes, a, b, precision=self.precision, preferred_element_type=jnp.float32)


def by_lists(
    heads: Sequence[Float[Array, "_B L D"]],
    projection: Projection,
    chosen: Int32[Array, "_B _L _S"],
    sparse: SparseLinear,
) -> Float[Array, "_B L D"]:
    """Return both parts of attention by q, k and v of the heads of all examples, for the chosen blocks of keys."""
    q, k, v = heads
    dtype, state = q.dtype, state_of(k, v)
    walk = Walk.over(_multiplied(k), _multiplied(v), sparse.block_kv, matmul_precision(dtype))

    def some(rows: tuple[Array, Array]) -> Array:
        x, lists = rows
        some_k, some_v = walk.gathered(lists)
        weights, total = walk.weights(x, some_k, lists)
        out = walk.product("BCLS,BCSD->BCLD", weights, some_v) / total
        return (out + _linear(x, state, projection)).astype(dtype)

    count = _count(chosen, sparse, q)
    rows = _together(to_blocks(q, sparse.block_q), count), _together(chosen, count)
    return _joined(jax.lax.map(some, rows), q.shape[1])


def gradient(
    heads: Sequence[Float[Array, "_B L D"]],
    projection: Projection,
    chosen: Int32[Array, "_B _L _S"],
    sparse: SparseLinear,
) -> tuple[Float32[Array, "_B L D"], Float32[Array, "_B L D"], Float32[Array, "_B L D"], Projection]:
    """Return the gradients of q, k, v and the projection. `heads` are q, k, v and the gradient of the result."""
    q, k, v, g = heads
    state, to_keys = jax.vjp(state_of, k, v)
    walk = Walk.over(_multiplied(k), _multiplied(v), sparse.block_kv, matmul_precision(q.dtype))
    each, scale = jnp.arange(len(q))[:, None, None], q.shape[2] ** -0.5

    def some(sums: Any, rows: Any) -> tuple[Any, Array]:
        x, g, lists = rows
        some_k, some_v = walk.gathered(lists)
        weights, total = walk.weights(x, some_k, lists)
        weights /= total
        of_weights = walk.product("BCLD,BCSD->BCLS", g, some_v)
        of_logits = scale * weights * (of_weights - (weights * of_weights).sum(axis=-1, keepdims=True))
        pull = jax.vjp(_linear, x, state, projection)[1]
        of_x, *of_linear = pull(g.astype(jnp.float32))
        of_x = of_x.astype(jnp.float32) + walk.product("BCLS,BCSD->BCLD", of_logits, some_k)
        of_k, of_v = (
            total.at[each, lists].add(walk.product("BCLS,BCLD->BCSD", part, y).reshape(*lists.shape, *total.shape[2:]))
            for total, part, y in zip(sums[:2], (of_logits, weights), (x, g), strict=True)
        )
        return (of_k, of_v, *jax.tree.map(jnp.add, sums[2:], tuple(of_linear))), of_x

    count = _count(chosen, sparse, q)
    queries = (_together(to_blocks(x, sparse.block_q), count) for x in (q, g))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (state, projection))
    totals = (jnp.zeros(x.shape, jnp.float32) for x in (walk.k, walk.v))
    (of_k, of_v, of_state, of_projection), of_q = jax.lax.scan(
        some, (*totals, *zeros), (*queries, _together(chosen, count))
    )
    of_k, of_v = (
        x.reshape(*k.shape[:1], -1, k.shape[2])[:, : k.shape[1]] + more.astype(jnp.float32)
        for x, more in zip((of_k, of_v), to_keys(of_state), strict=True)
    )
    return _joined(of_q, q.shape[1]), of_k, of_v, of_projection


def _linear(q: Float[Array, "_B C L D"], state: KeyState, projection: Projection) -> Float32[Array, "_B C L D"]:
    return linear(q.reshape(len(q), -1, q.shape[3]), state, projection).reshape(q.shape)


def _multiplied(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return operands in the dtype in which products are fast: float32 on CPUs that do not multiply bfloat16."""
    return x.astype(jnp.float32) if target(x).platform == "cpu" and not multiplies_bfloat16(x) else x


def _count(chosen: Int32[Array, "_B _L _S"], sparse: SparseLinear, q: Array) -> int:
    """Return the number of blocks of queries to take at a time."""
    budget = SCORES_ON_CPU if target(q).platform == "cpu" else SCORES
    each = 4 * chosen.shape[0] * chosen.shape[2] * sparse.block_q * sparse.block_kv
    return even_blocks(chosen.shape[1], max(1, budget // each))[1]


def _together(x: Array, count: int) -> Array:
    """Rows [_B _L ...] by `count` at a time, with those groups on the first axis; zeros fill the last."""
    return jnp.moveaxis(pad_to(x, 1, count).reshape(len(x), -1, count, *x.shape[2:]), 1, 0)


def _joined(x: Float[Array, "_L _B C S D"], length: int) -> Float[Array, "_B L D"]:
    """Undoes `_together` and `to_blocks`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, x.shape[4])[:, :length]
