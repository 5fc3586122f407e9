# SPDX-License-Identifier: Apache-2.0
"""Sparse-linear attention on any platform, a few blocks of queries at a time, and its gradient.

For each block of queries, all selected keys are gathered, and one softmax over them is computed. So memory grows with
the number of selected keys, not with queries times keys. The selection has no gradient. The forward pass saves only the
selection, and the backward pass computes the weights again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from wanjax.kernels.attention.blocks import batch_to_heads, even_blocks, heads_to_batch, matmul_precision, to_blocks
from wanjax.kernels.attention.sparse_linear import (
    LinearAttentionState,
    Projection,
    SparseLinearAttentionConfig,
    choose_blocks,
    linear_attention,
    linear_attention_state,
)
from wanjax.kernels.autodiff import save_for_backward, with_backward
from wanjax.kernels.target import target, uses_bfloat16_instructions
from wanjax.sharding import pad_to

SCORE_BYTES = 128 << 20  # the maximum bytes of scores in memory
SCORE_BYTES_ON_CPU = 4 << 20  # the same for CPUs, where the scores fit in a cache

Forward = Callable[..., tuple[Float[Array, "B L N D"], Int32[Array, "_B _L _S"]]]


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    projection: Projection,
    *,
    sparse: SparseLinearAttentionConfig,
    kv_length: int,
) -> Float[Array, "B L N D"]:
    """Compute the same as the reference, block by block. The gradient is also computed block by block."""
    return with_gradient(
        partial(_forward, sparse=sparse, kv_length=kv_length), q, k, v, projection, sparse=sparse, kv_length=kv_length
    )


def with_gradient(
    forward: Forward,
    q: Array,
    k: Array,
    v: Array,
    projection: Projection,
    *,
    sparse: SparseLinearAttentionConfig,
    kv_length: int,
) -> Float[Array, "B L N D"]:
    """Return the result of `forward(q, k, v, projection)`, with `gradient` of this file as its gradient.

    `forward` returns its result and the selected blocks. The selected blocks have the form that
    `sparse_linear.choose_blocks` returns, for the heads of all examples.
    """

    def fwd(q: Array, k: Array, v: Array, projection: Projection) -> tuple[Array, tuple]:
        out, selected = save_for_backward(forward(q, k, v, projection))
        return out, (q, k, v, projection, selected)

    def bwd(residuals: tuple, g: Array) -> tuple:
        q, k, v, projection, selected = residuals
        *head_gradients, projection_gradient = gradient(
            _flatten_heads(kv_length, q, k, v, g), projection, selected, sparse
        )
        return *(_unflatten_heads(x, q.shape).astype(q.dtype) for x in head_gradients), projection_gradient

    return with_backward(fwd, bwd, q, k, v, projection)


def _forward(
    q, k, v, projection: Projection, *, sparse: SparseLinearAttentionConfig, kv_length: int
) -> tuple[Array, Array]:
    heads = _flatten_heads(kv_length, q, k, v)
    selected = choose_blocks(heads[0], heads[1], sparse)
    return _unflatten_heads(attend(heads, projection, selected, sparse), q.shape), selected


def _flatten_heads(kv_length: int, *arrays: Float[Array, "B L N D"]) -> list[Float[Array, "_B _L D"]]:
    """Merge the heads of all examples into the first axis, and drop the tokens after the first `kv_length`."""
    return [heads_to_batch(x[:, :kv_length]) for x in arrays]


def _unflatten_heads(x: Float[Array, "_B _L D"], shape: tuple[int, ...]) -> Float[Array, "B L N D"]:
    """Invert `_flatten_heads`, and restore the original shape. Tokens after the first `kv_length` are zeros."""
    return pad_to(batch_to_heads(x, shape[2]), 1, shape[1])


class KeyBlocks(NamedTuple):
    """Blocks of keys and values, with methods for attention to lists of blocks."""

    k: Float[Array, "_B _S S D"]
    v: Float[Array, "_B _S S D"]
    kv_length: int
    precision: str

    @classmethod
    def split(cls, k: Float[Array, "_B L D"], v: Float[Array, "_B L D"], block_kv: int, precision: str) -> "KeyBlocks":
        return cls(to_blocks(k, block_kv), to_blocks(v, block_kv), k.shape[1], precision)

    def gather(self, lists: Int32[Array, "_B C _S"]) -> tuple[Float[Array, "_B C S D"], Float[Array, "_B C S D"]]:
        """Return the keys and values of the blocks in each list."""
        k, v = (jax.vmap(lambda blocks, indices: blocks[indices])(x, lists) for x in (self.k, self.v))
        return k.reshape(*lists.shape[:2], -1, k.shape[-1]), v.reshape(*lists.shape[:2], -1, v.shape[-1])

    def valid(self, lists: Int32[Array, "_B C _S"]) -> Bool[Array, "_B C 1 S"]:
        """Return a mask of the valid keys of each list. Keys after the end of the sequence are padding."""
        block_kv = self.k.shape[2]
        positions = lists[..., None] * block_kv + jnp.arange(block_kv)[None, None, None]
        return (positions < self.kv_length).reshape(*lists.shape[:2], 1, -1)

    def weights(
        self, q: Float[Array, "_B C L D"], k: Float[Array, "_B C S D"], lists: Int32[Array, "_B C _S"]
    ) -> tuple[Float32[Array, "_B C L S"], Float32[Array, "_B C L 1"]]:
        """Return the unnormalized softmax weights of the keys of each list, and their sums."""
        logits = q.shape[-1] ** -0.5 * self.einsum("BCLD,BCSD->BCLS", q, k)
        if self.kv_length % self.k.shape[2]:
            logits = jnp.where(self.valid(lists), logits, -jnp.inf)
        weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        return weights, weights.sum(axis=-1, keepdims=True)

    def einsum(self, axes: str, a: Array, b: Array) -> Float32[Array, "..."]:
        """Compute an einsum of operands in the dtype of the keys, with sums in float32."""
        a, b = (x.astype(self.k.dtype) for x in (a, b))
        return jnp.einsum(axes, a, b, precision=self.precision, preferred_element_type=jnp.float32)


def attend(
    heads: Sequence[Float[Array, "_B L D"]],
    projection: Projection,
    selected: Int32[Array, "_B _L _S"],
    sparse: SparseLinearAttentionConfig,
) -> Float[Array, "_B L D"]:
    """Return the sum of the sparse and the linear part. `heads` are q, k and v of the heads of all examples."""
    q, k, v = heads
    dtype, state = q.dtype, linear_attention_state(k, v)
    key_blocks = KeyBlocks.split(_matmul_dtype(k), _matmul_dtype(v), sparse.block_kv, matmul_precision(dtype))

    def attend_blocks(step: tuple[Array, Array]) -> Array:
        q_blocks, lists = step
        k_lists, v_lists = key_blocks.gather(lists)
        weights, weight_sum = key_blocks.weights(q_blocks, k_lists, lists)
        out = key_blocks.einsum("BCLS,BCSD->BCLD", weights, v_lists) / weight_sum
        return (out + _linear_attention(q_blocks, state, projection)).astype(dtype)

    blocks_per_step = _blocks_per_step(selected, sparse, q)
    steps = (
        _group_into_steps(to_blocks(q, sparse.block_q), blocks_per_step),
        _group_into_steps(selected, blocks_per_step),
    )
    return _join_steps(jax.lax.map(attend_blocks, steps), q.shape[1])


def gradient(
    heads: Sequence[Float[Array, "_B L D"]],
    projection: Projection,
    selected: Int32[Array, "_B _L _S"],
    sparse: SparseLinearAttentionConfig,
) -> tuple[Float32[Array, "_B L D"], Float32[Array, "_B L D"], Float32[Array, "_B L D"], Projection]:
    """Return the gradients of q, k, v and the projection. `heads` are q, k, v and the gradient of the result, each for
    the heads of all examples."""
    q, k, v, g = heads
    state, state_vjp = jax.vjp(linear_attention_state, k, v)
    key_blocks = KeyBlocks.split(_matmul_dtype(k), _matmul_dtype(v), sparse.block_kv, matmul_precision(q.dtype))
    head_index, scale = jnp.arange(len(q))[:, None, None], q.shape[2] ** -0.5

    def add_blocks(sums: Any, step: Any) -> tuple[Any, Array]:
        q_blocks, g, lists = step
        k_lists, v_lists = key_blocks.gather(lists)
        weights, weight_sum = key_blocks.weights(q_blocks, k_lists, lists)
        weights /= weight_sum
        dweights = key_blocks.einsum("BCLD,BCSD->BCLS", g, v_lists)
        dlogits = scale * weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True))
        linear_vjp = jax.vjp(_linear_attention, q_blocks, state, projection)[1]
        dq, *linear_gradients = linear_vjp(g.astype(jnp.float32))
        dq = dq.astype(jnp.float32) + key_blocks.einsum("BCLS,BCSD->BCLD", dlogits, k_lists)
        dk, dv = (
            gradient.at[head_index, lists].add(
                key_blocks.einsum("BCLS,BCLD->BCSD", factor, operand).reshape(*lists.shape, *gradient.shape[2:])
            )
            for gradient, factor, operand in zip(sums[:2], (dlogits, weights), (q_blocks, g), strict=True)
        )
        return (dk, dv, *jax.tree.map(jnp.add, sums[2:], tuple(linear_gradients))), dq

    blocks_per_step = _blocks_per_step(selected, sparse, q)
    queries = (_group_into_steps(to_blocks(x, sparse.block_q), blocks_per_step) for x in (q, g))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (state, projection))
    totals = (jnp.zeros(x.shape, jnp.float32) for x in (key_blocks.k, key_blocks.v))
    (dk, dv, dstate, dprojection), dq = jax.lax.scan(
        add_blocks, (*totals, *zeros), (*queries, _group_into_steps(selected, blocks_per_step))
    )
    dk, dv = (
        sparse_part.reshape(*k.shape[:1], -1, k.shape[2])[:, : k.shape[1]] + linear_part.astype(jnp.float32)
        for sparse_part, linear_part in zip((dk, dv), state_vjp(dstate), strict=True)
    )
    return _join_steps(dq, q.shape[1]), dk, dv, dprojection


def _linear_attention(
    q: Float[Array, "_B C L D"], state: LinearAttentionState, projection: Projection
) -> Float32[Array, "_B C L D"]:
    return linear_attention(q.reshape(len(q), -1, q.shape[3]), state, projection).reshape(q.shape)


def _matmul_dtype(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Cast to the dtype in which matrix products are fast: float32 on CPUs without bfloat16 instructions, else the
    dtype of x."""
    return x.astype(jnp.float32) if target(x).platform == "cpu" and not uses_bfloat16_instructions(x) else x


def _blocks_per_step(selected: Int32[Array, "_B _L _S"], sparse: SparseLinearAttentionConfig, q: Array) -> int:
    """Return the number of blocks of queries that are computed together."""
    byte_budget = SCORE_BYTES_ON_CPU if target(q).platform == "cpu" else SCORE_BYTES
    bytes_per_block = 4 * selected.shape[0] * selected.shape[2] * sparse.block_q * sparse.block_kv
    return even_blocks(selected.shape[1], max(1, byte_budget // bytes_per_block))[1]


def _group_into_steps(x: Array, group_size: int) -> Array:
    """Split rows [_B _L ...] into groups of `group_size` on a new first axis. The last group is padded with zeros."""
    return jnp.moveaxis(pad_to(x, 1, group_size).reshape(len(x), -1, group_size, *x.shape[2:]), 1, 0)


def _join_steps(x: Float[Array, "_L _B C S D"], length: int) -> Float[Array, "_B L D"]:
    """Invert `_group_into_steps` and `to_blocks`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, x.shape[4])[:, :length]
