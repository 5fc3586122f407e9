# SPDX-License-Identifier: Apache-2.0
"""The encoder of T5 v1.1 and UMT5, which encodes prompts for a video model.

The encoder has pre-norm blocks of self-attention and a gated MLP, without biases. Positions are encoded only by a
learned bias on the attention logits. Distances from query to key are grouped into buckets, and each bucket has a bias.
The logits are not scaled; the initialisers compensate for this. In UMT5, every layer has its own table of position
biases. The code follows Raffel et al. 2020 (arXiv:1910.10683), Shazeer 2020 (arXiv:2002.05202) for the gated MLP, and
Chung et al. 2023 (arXiv:2304.09151) for UMT5.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from wanjax.kernels.attention import attention
from wanjax.layers.embeddings import check_tokens, token_embed
from wanjax.layers.heads import join_heads, split_heads
from wanjax.layers.linear import linear
from wanjax.layers.mlp import GatedMLP, gelu_tanh
from wanjax.layers.norms import rms_norm
from wanjax.layers.placement import param
from wanjax.layers.stack import scan_blocks, stack

normal = nnx.initializers.normal


@dataclass(frozen=True)
class T5Config:
    """Sizes of a T5 encoder. With `shared_bias`, all layers share one table of position biases (T5 v1.1)."""

    vocab_size: int
    width: int
    heads: int
    head_dim: int
    mlp_dim: int
    layers: int
    buckets: int
    max_distance: int
    eps: float
    shared_bias: bool


UMT5_XXL = T5Config(
    vocab_size=256384,
    width=4096,
    heads=64,
    head_dim=64,
    mlp_dim=10240,
    layers=24,
    buckets=32,
    max_distance=128,
    eps=1e-6,
    shared_bias=False,
)
T5_XXL = replace(UMT5_XXL, vocab_size=32128, shared_bias=True)
GLYPH_BYT5 = T5Config(
    vocab_size=1510,  # vocabulary sizes: bytes, and names of colours and fonts
    width=1472,
    heads=6,
    head_dim=64,
    mlp_dim=3584,
    layers=12,
    buckets=32,
    max_distance=128,
    eps=1e-6,
    shared_bias=True,
)


def distance_buckets(distance: Int[np.ndarray, "..."], buckets: int, max_distance: int) -> Int[np.ndarray, "..."]:
    """Return the bucket of each distance. A distance is the key's position minus the query's position.

    Half of the buckets are for keys after the query. In each half, the first buckets contain one distance each. The
    next buckets grow geometrically up to `max_distance`, and the last bucket contains all larger distances.
    """
    half = buckets // 2
    num_exact = half // 2
    abs_distance = np.abs(distance)
    # float32 as in the reference, so that distances at the edges of buckets fall into the same buckets
    growth = np.log(np.maximum(abs_distance, 1).astype(np.float32) / np.float32(num_exact))
    fraction = growth / np.float32(math.log(max_distance / num_exact))
    geometric = np.minimum(num_exact + (fraction * np.float32(half - num_exact)).astype(int), half - 1)
    return np.where(distance > 0, half, 0) + np.where(abs_distance < num_exact, abs_distance, geometric)


class PositionBias(nnx.Module):
    """A bias on the logits of each head. It depends on the bucket of the distance from query to key."""

    def __init__(self, config: T5Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        shape, init = (config.buckets, config.heads), normal(config.width**-0.5)
        self.table = param(init, shape, (None, "heads"), dtype=param_dtype, rngs=rngs)
        self.max_distance = config.max_distance

    def __call__(self, length: int) -> Float32[Array, "1 N S S"]:
        """Compute the biases of self-attention over `length` tokens."""
        table = self.table[...].astype(jnp.float32)
        position = np.arange(length)
        buckets = distance_buckets(position[None, :] - position[:, None], table.shape[0], self.max_distance)
        return jnp.take(table.T, buckets, axis=1)[None]


class SelfAttention(nnx.Module):
    """Multi-head attention with unscaled logits and a position bias."""

    def __init__(self, config: T5Config, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        width, inner = config.width, config.heads * config.head_dim
        dense = partial(linear, bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        # the initial queries are divided by the square root of the head size, because logits are not scaled
        self.q = dense(width, inner, ("embed", "heads"), kernel_init=normal((width * config.head_dim) ** -0.5))
        self.k = dense(width, inner, ("embed", "heads"), kernel_init=normal(width**-0.5))
        self.v = dense(width, inner, ("embed", "heads"), kernel_init=normal(width**-0.5))
        self.o = dense(inner, width, ("heads", "embed"), kernel_init=normal(inner**-0.5))
        self.heads = config.heads

    def __call__(
        self, x: Float[Array, "B S E"], mask: Bool[Array, "B S"] | None, bias: Float32[Array, "1 N S S"] | None
    ) -> Float[Array, "B S E"]:
        q, k, v = (split_heads(project(x), self.heads) for project in (self.q, self.k, self.v))
        y = attention(q, k, v, key_mask=mask, bias=bias, scale=1.0)
        return self.o(join_heads(y))


class T5Block(nnx.Module):
    """Self-attention and a gated MLP. Each has a norm before it, and adds its result to a float32 residual."""

    def __init__(self, config: T5Config, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.norm1 = rms_norm(config.width, config.eps, axis="embed", **dtypes)
        self.attn = SelfAttention(config, **dtypes)
        self.position_bias = None if config.shared_bias else PositionBias(config, param_dtype=param_dtype, rngs=rngs)
        self.norm2 = rms_norm(config.width, config.eps, axis="embed", **dtypes)
        # tanh GELU and small initial kernels, as in the reference
        inits = normal(config.width**-0.5), normal(config.mlp_dim**-0.5)
        self.mlp = GatedMLP(config.width, config.mlp_dim, gelu_tanh, inits=inits, **dtypes)

    def __call__(
        self,
        x: Float[Array, "B S E"],
        mask: Bool[Array, "B S"] | None,
        shared_bias: Float32[Array, "1 N S S"] | None,
    ) -> Float[Array, "B S E"]:
        bias = shared_bias if self.position_bias is None else self.position_bias(x.shape[1])
        x = x + self.attn(self.norm1(x), mask, bias).astype(jnp.float32)
        return x + self.mlp(self.norm2(x)).astype(jnp.float32)


class T5Encoder(nnx.Module):
    """Encode tokens [B S] as features [B S E], with the final norm."""

    def __init__(self, config: T5Config, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        self.embed = token_embed(config.vocab_size, config.width, param_dtype=param_dtype, rngs=rngs)
        self.position_bias = PositionBias(config, param_dtype=param_dtype, rngs=rngs) if config.shared_bias else None
        self.blocks = stack(lambda rngs: T5Block(config, rngs=rngs, **dtypes), config.layers, rngs)
        self.norm = rms_norm(config.width, config.eps, axis="embed", rngs=rngs, **dtypes)
        self.config = config
        self.dtype = dtype

    def __call__(
        self, tokens: Int[Array, "B S"], mask: Bool[Array, "B S"] | Int[Array, "B S"] | None = None
    ) -> Float[Array, "B S E"]:
        """Compute features in the compute dtype.

        `mask` is True for real tokens. Tokens attend only to real tokens. The features of other tokens are meaningless.
        """
        check_tokens(tokens)
        mask = None if mask is None else mask.astype(bool)
        bias = None if self.position_bias is None else self.position_bias(tokens.shape[1])
        x = self.embed(tokens).astype(jnp.float32)  # the residual has numbers that are too large for a lower precision
        x = scan_blocks(self.blocks, lambda block, x: block(x, mask, bias), x)
        return self.norm(x).astype(self.dtype)
