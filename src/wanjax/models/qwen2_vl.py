# SPDX-License-Identifier: Apache-2.0
"""The language model of Qwen2.5-VL, which encodes prompts for a video model.

It is a causal transformer (Qwen team 2025, arXiv:2502.13923). Its pre-norm blocks have grouped-query attention (Ainslie
et al. 2023, arXiv:2305.13245) and a gated MLP. The features are the residual stream after the configured number of
blocks, without the final norm. The three positions of a text token, in time, height and width, are equal. The
multimodal rotary embedding of text is therefore the usual rotary embedding. The reference is transformers'
models/qwen2_5_vl/modeling_qwen2_5_vl.py.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from wanjax.kernels.attention import attention
from wanjax.layers.embeddings import check_tokens, token_embed
from wanjax.layers.heads import join_heads
from wanjax.layers.linear import linear
from wanjax.layers.mlp import GatedMLP
from wanjax.layers.norms import rms_norm
from wanjax.layers.rope import Angles, angles, apply_rotary
from wanjax.layers.stack import scan_blocks, stack

CAUSAL = (None, 0)  # the attention window: all earlier keys and no later keys


@dataclass(frozen=True)
class Qwen2VLConfig:
    """Sizes of the language model. `layers` is the number of blocks that are computed. The last blocks of the published
    model are not needed."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_dim: int
    theta: float
    eps: float

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


QWEN2_5_VL_7B = Qwen2VLConfig(
    vocab_size=152064, width=3584, layers=26, heads=28, kv_heads=4, mlp_dim=18944, theta=1e6, eps=1e-6
)


def text_angles(length: int, config: Qwen2VLConfig) -> Angles:
    """Compute the angles of rotary embeddings at the positions 0, 1, ..."""
    return angles(range(length), config.head_dim, config.theta)


class SelfAttention(nnx.Module):
    """Causal grouped-query attention with rotary embeddings. `heads / kv_heads` heads of q share a head of k and v."""

    def __init__(self, config: Qwen2VLConfig, **kw):
        width, kv_width = config.width, config.kv_heads * config.head_dim
        self.q = linear(width, width, ("embed", "heads"), **kw)
        self.k = linear(width, kv_width, ("embed", "heads"), **kw)
        self.v = linear(width, kv_width, ("embed", "heads"), **kw)
        self.out = linear(width, width, ("heads", "embed"), bias=False, **kw)
        self.head_dim = config.head_dim

    def __call__(self, x: Float[Array, "B S E"], angles: Angles) -> Float[Array, "B S E"]:
        q, k, v = (project(x).reshape(*x.shape[:2], -1, self.head_dim) for project in (self.q, self.k, self.v))
        y = attention(apply_rotary(q, angles), apply_rotary(k, angles), v, window=CAUSAL)
        return self.out(join_heads(y))


class Qwen2VLBlock(nnx.Module):
    """Self-attention and a gated MLP. Each has a norm before it, and adds its result to a float32 residual."""

    def __init__(self, config: Qwen2VLConfig, **kw):
        self.norm1 = rms_norm(config.width, config.eps, axis="embed", **kw)
        self.attn = SelfAttention(config, **kw)
        self.norm2 = rms_norm(config.width, config.eps, axis="embed", **kw)
        self.mlp = GatedMLP(config.width, config.mlp_dim, jax.nn.silu, **kw)
        self.dtype = kw["dtype"]

    def __call__(self, x: Float32[Array, "B S E"], angles: Angles) -> Float32[Array, "B S E"]:
        x = x + self.attn(self.norm1(x).astype(self.dtype), angles).astype(jnp.float32)
        return x + self.mlp(self.norm2(x).astype(self.dtype)).astype(jnp.float32)


class Qwen2VLEncoder(nnx.Module):
    """Encode tokens [B S], padded at their end, as features [B S E].

    Attention needs no mask of keys. Causal attention sees no later tokens, so padding affects only the features of
    padding. The features of padding are finite but meaningless.
    """

    def __init__(self, config: Qwen2VLConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.embed = token_embed(config.vocab_size, config.width, param_dtype=param_dtype, rngs=rngs)
        self.blocks = stack(lambda rngs: Qwen2VLBlock(config, rngs=rngs, **kw), config.layers, rngs)
        self.config = config
        self.dtype = dtype

    def __call__(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S E"]:
        """Compute features in the compute dtype."""
        check_tokens(tokens)
        angles = text_angles(tokens.shape[1], self.config)
        # A few channels have numbers that are too large for a lower precision
        x = self.embed(tokens).astype(jnp.float32)
        x = scan_blocks(self.blocks, lambda block, x: block(x, angles), x)
        return x.astype(self.dtype)
