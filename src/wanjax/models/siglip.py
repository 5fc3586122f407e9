# SPDX-License-Identifier: Apache-2.0
"""The vision tower of SigLIP: turns an image into features that a video model attends to.

A vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) that was trained beside a text tower with a sigmoid
loss (Zhai et al. 2023, arXiv:2303.15343): patches of the image, learned positions, pre-norm blocks with biases, a last
norm. The reference is transformers' models/siglip/modeling_siglip.py.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wanjax.kernels.attention import attention
from wanjax.layers.linear import linear
from wanjax.layers.mlp import MLP, gelu_tanh
from wanjax.layers.norms import layer_norm
from wanjax.layers.patch import patchify
from wanjax.layers.placement import with_axes
from wanjax.layers.stack import scan_blocks, stack


@dataclass(frozen=True)
class SiglipVisionConfig:
    """The sizes of a vision tower."""

    layers: int
    heads: int
    width: int
    mlp_dim: int
    image_size: int
    patch: int
    eps: float

    @property
    def patches(self) -> int:
        """The number of whole patches along an edge of an image."""
        return self.image_size // self.patch

    @property
    def tokens(self) -> int:
        """The number of tokens, one for each patch."""
        return self.patches**2


SIGLIP_SO400M = SiglipVisionConfig(layers=27, heads=16, width=1152, mlp_dim=4304, image_size=384, patch=14, eps=1e-6)


class SelfAttention(nnx.Module):
    """Multi-head attention of every token to every token."""

    def __init__(self, config: SiglipVisionConfig, **kw):
        self.q = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.k = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.v = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.out = linear(config.width, config.width, ("heads", "embed"), **kw)
        self.heads = config.heads

    def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        q, k, v = (project(x).reshape(*x.shape[:2], self.heads, -1) for project in (self.q, self.k, self.v))
        return self.out(attention(q, k, v).reshape(x.shape))


class SiglipBlock(nnx.Module):
    """Self-attention and an MLP, each after a norm and added to a float32 residual."""

    def __init__(self, config: SiglipVisionConfig, **kw):
        width = config.width
        self.norm1 = layer_norm(width, config.eps, affine=True, **kw)
        self.attn = SelfAttention(config, **kw)
        self.norm2 = layer_norm(width, config.eps, affine=True, **kw)
        self.mlp = MLP((width, config.mlp_dim, width), ("embed", "mlp", "embed"), gelu_tanh, **kw)
        self.dtype = kw["dtype"]

    def __call__(self, x: Float32[Array, "B S E"]) -> Float32[Array, "B S E"]:
        x = x + self.attn(self.norm1(x).astype(self.dtype)).astype(jnp.float32)
        return x + self.mlp(self.norm2(x).astype(self.dtype)).astype(jnp.float32)


class SiglipVision(nnx.Module):
    """Encodes normalised images [B H W 3] as features of each patch, with the last norm.

    Pixels beyond the last whole patch, at the bottom and at the right, are not seen.
    """

    def __init__(self, config: SiglipVisionConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        width = config.width
        self.patch_embed = linear(3 * config.patch**2, width, (None, "embed"), **kw)
        init = with_axes(nnx.initializers.normal(stddev=width**-0.5), (None, "embed"))
        self.positions = nnx.Param(init(rngs.params(), (config.tokens, width), param_dtype))
        self.blocks = stack(lambda rngs: SiglipBlock(config, **{**kw, "rngs": rngs}), config.layers, rngs)
        self.norm = layer_norm(width, config.eps, affine=True, **kw)
        self.config = config
        self.dtype = dtype

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B S E"]:
        patch, edge = self.config.patch, self.config.patches * self.config.patch
        pixels = images[:, None, :edge, :edge].astype(self.dtype)
        x = self.patch_embed(patchify(pixels, (1, patch, patch)))[:, : self.config.tokens].astype(jnp.float32)
        x = x + self.positions[...][None].astype(jnp.float32)  # the residual stays in float32, as in the text encoder
        x = scan_blocks(self.blocks, lambda block, x: block(x), x)
        return self.norm(x).astype(self.dtype)
