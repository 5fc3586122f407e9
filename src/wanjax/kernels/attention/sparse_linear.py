# SPDX-License-Identifier: Apache-2.0
"""Sparse-linear attention: softmax attention to a few blocks of keys, plus linear attention to all keys.

The method follows Zhang et al., SLA: Beyond Sparsity in Diffusion Transformers via Fine-Tunable Sparse-Linear
Attention, 2025, arXiv:2509.24006: turbodiffusion/SLA of its authors. The blocks of keys are selected separately for
each head, by the products of the mean queries and the mean keys of blocks. The features of linear attention are
softmaxes over the channels of a head. A learned projection is applied to the result of linear attention. Then the
result of the sparse part is added. This file has the definition and the reference implementation.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from wanjax.errors import WanjaxError
from wanjax.kernels.alignment import ceil_div
from wanjax.kernels.attention import reference
from wanjax.kernels.attention.blocks import batch_to_heads, heads_to_batch, to_blocks
from wanjax.sharding import pad_to

SUM_EPSILON = 1e-5  # added to the sum of linear attention's weights


@dataclass(frozen=True)
class SparseLinearAttentionConfig:
    """The options of sparse-linear attention.

    Attributes:
        top: The fraction of the blocks of keys to which a block of queries attends, but at least one block. The default
            is the value in the authors' commands. For better quality, the authors recommend 0.15.
        block_q: Queries of a block. The last block of a sequence may be shorter.
        block_kv: Keys of a block. The last block may be shorter.
    """

    top: float = 0.1
    block_q: int = 128
    block_kv: int = 64

    def __post_init__(self):
        if not 0 < self.top <= 1:
            raise WanjaxError(f"top={self.top}: give a share of the blocks of keys above 0, at most 1")
        for name in ("block_q", "block_kv"):
            if getattr(self, name) < 1:
                raise WanjaxError(f"{name}={getattr(self, name)}: give a number of tokens from 1 on")

    @classmethod
    def parse(cls, text: str) -> "SparseLinearAttentionConfig":
        """Parse text such as `top=0.1` or `top=0.25,block_q=8,block_kv=4`. Raises WanjaxError if the text is
        malformed."""
        types, options = {field.name: type(field.default) for field in fields(cls)}, {}
        for entry in text.split(",") if text else []:
            name, _, value = entry.partition("=")
            try:
                if name in options or not value.isascii():
                    raise ValueError
                options[name] = types[name](value)
            except (KeyError, ValueError):
                raise WanjaxError(
                    f"sparse-linear attention cannot read {text!r}: write it as top=0.1,block_q=128,block_kv=64"
                ) from None
        return cls(**options)

    def __str__(self) -> str:
        """Return the text that `parse` reads, without default values."""
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return ",".join(f"{name}={value}" for name, value, default in values if value != default)

    def top_k(self, num_keys: int) -> int:
        """Return the number of blocks of keys to which each block of queries attends, for a number of keys."""
        return max(1, int(self.top * ceil_div(num_keys, self.block_kv)))


class Projection(NamedTuple):
    """The learned projection of the linear part's result. All heads of a layer share it."""

    kernel: Float[Array, "D D"]
    bias: Float[Array, " D"]


class LinearAttentionState(NamedTuple):
    """The state of linear attention for each head: the sums Σ φ(k)ᵀ v and Σ φ(k) over the keys."""

    values: Float32[Array, "_B D D"]
    weights: Float32[Array, "_B D"]


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    projection: Projection,
    *,
    sparse: SparseLinearAttentionConfig,
    kv_length: int,
) -> Float[Array, "B L N D"]:
    """Return the sum of the sparse and the linear part for the first `kv_length` tokens, and zeros for later tokens.

    This function is the reference. It computes in float32, and rounds once to the operands' dtype. The sparse part is
    attention with logits scaled by 1 / √D. Blocks that are not selected are masked.
    """
    length, heads, dtype = *q.shape[1:3], q.dtype
    q, k, v = (x[:, :kv_length] for x in (q, k, v))
    merged_q, merged_k, merged_v = map(heads_to_batch, (q, k, v))
    block_indices = jnp.arange(ceil_div(kv_length, sparse.block_kv))
    selected = (choose_blocks(merged_q, merged_k, sparse)[..., None] == block_indices[None, None, None]).any(axis=2)
    q_block_index, kv_block_index = (jnp.arange(kv_length) // size for size in (sparse.block_q, sparse.block_kv))
    bias = jnp.where(selected[:, q_block_index][:, :, kv_block_index], 0.0, -jnp.inf).reshape(
        -1, heads, kv_length, kv_length
    )
    float32_operands = (x.astype(jnp.float32) for x in (q, k, v))
    options: dict[str, Any] = {"key_mask": None, "window": None, "scale": q.shape[3] ** -0.5, "config": None}
    out: Any = reference.attention(*float32_operands, bias=bias, **options)
    out += batch_to_heads(linear_attention(merged_q, linear_attention_state(merged_k, merged_v), projection), heads)
    return pad_to(out, 1, length).astype(dtype)


def choose_blocks(
    q: Float[Array, "_B L D"], k: Float[Array, "_B L D"], sparse: SparseLinearAttentionConfig
) -> Int32[Array, "_B _L _S"]:
    """Return, for each block of queries, the indices of the selected blocks of keys in ascending order.

    The blocks with the largest products of block means are selected. Of blocks with equal products, the first one is
    selected. Before the product, the mean of all keys is subtracted from the block means of the keys, and the means are
    rounded to the operands' dtype.
    """
    centered_means = block_means(k, sparse.block_kv) - k.mean(axis=1, keepdims=True, dtype=jnp.float32)
    means = [x.astype(q.dtype) for x in (block_means(q, sparse.block_q), centered_means)]
    scores = jnp.einsum("BLD,BSD->BLS", *means, precision="highest", preferred_element_type=jnp.float32)
    return jnp.sort(jax.lax.top_k(scores, sparse.top_k(k.shape[1]))[1], axis=2)


def block_means(x: Float[Array, "_B L D"], size: int) -> Float32[Array, "_B _L D"]:
    """Return the mean of each block of `size` tokens. The last block may have fewer tokens."""
    length = x.shape[1]
    counts = np.minimum(size, length - np.arange(0, length, size)).astype(np.float32)
    return to_blocks(x, size).sum(axis=2, dtype=jnp.float32) / counts[None, :, None]


def linear_attention_state(k: Float[Array, "_B L D"], v: Float[Array, "_B L D"]) -> LinearAttentionState:
    """Return the state of linear attention after these keys and values, in float32."""
    features = jax.nn.softmax(k.astype(jnp.float32), axis=2)
    values = jnp.einsum("BLD,BLE->BDE", features, v.astype(jnp.float32), precision="highest")
    return LinearAttentionState(values, features.sum(axis=1))


def linear_attention(
    q: Float[Array, "_B L D"], state: LinearAttentionState, projection: Projection
) -> Float32[Array, "_B L D"]:
    """Return the linear attention of queries to the keys that are summed in a state, after its projection, in
    float32."""
    features = jax.nn.softmax(q.astype(jnp.float32), axis=2)
    weight = SUM_EPSILON + jnp.einsum("BLD,BD->BL", features, state.weights, precision="highest")
    y = jnp.einsum("BLD,BDE->BLE", features, state.values, precision="highest") / weight[..., None]
    kernel, bias = (x.astype(jnp.float32) for x in projection)
    return jnp.matmul(y, kernel, precision="highest") + bias[None, None]
