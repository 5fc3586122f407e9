# SPDX-License-Identifier: Apache-2.0
"""The parts that the vision transformers of CLIP and SigLIP share: the config and the pre-norm block.

The architecture is that of Dosovitskiy et al. 2020, arXiv:2010.11929.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from wanjax.kernels.attention import attention
from wanjax.layers.heads import join_heads, split_heads
from wanjax.layers.linear import linear
from wanjax.layers.mlp import MLP
from wanjax.layers.norms import layer_norm


@dataclass(frozen=True)
class VisionConfig:
    """The config of a vision transformer. `layers` is the number of blocks that are computed."""

    layers: int
    heads: int
    width: int
    mlp_dim: int
    image_size: int
    patch: int
    eps: float

    @property
    def patches(self) -> int:
        """The number of full patches along a side of an image."""
        return self.image_size // self.patch


class SelfAttention(nnx.Module):
    """Multi-head self-attention."""

    def __init__(self, config: VisionConfig, **kw):
        self.q = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.k = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.v = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.out = linear(config.width, config.width, ("heads", "embed"), **kw)
        self.heads = config.heads

    def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        q, k, v = (split_heads(project(x), self.heads) for project in (self.q, self.k, self.v))
        return self.out(join_heads(attention(q, k, v)))


class VisionBlock(nnx.Module):
    """A pre-norm transformer block with a float32 residual."""

    def __init__(self, config: VisionConfig, activation: Callable[[Array], Array], **kw):
        width = config.width
        self.norm1 = layer_norm(width, config.eps, affine=True, **kw)
        self.attn = SelfAttention(config, **kw)
        self.norm2 = layer_norm(width, config.eps, affine=True, **kw)
        self.mlp = MLP((width, config.mlp_dim, width), ("embed", "mlp", "embed"), activation, **kw)
        self.dtype = kw["dtype"]

    def __call__(self, x: Float32[Array, "B S E"]) -> Float32[Array, "B S E"]:
        x = x + self.attn(self.norm1(x).astype(self.dtype)).astype(jnp.float32)
        return x + self.mlp(self.norm2(x).astype(self.dtype)).astype(jnp.float32)
