# SPDX-License-Identifier: Apache-2.0
"""The vision tower of CLIP: turns an image into features that a video model attends to.

A vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) that was trained beside a text tower (Radford et al.
2021, arXiv:2103.00020): patches of the image and a class token, learned positions, pre-norm blocks with biases. The
reference is transformers' models/clip/modeling_clip.py.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.kernels.attention import attention
from wanjax.layers.linear import linear
from wanjax.layers.mlp import MLP, gelu
from wanjax.layers.norms import layer_norm
from wanjax.layers.patch import patchify
from wanjax.layers.placement import with_axes
from wanjax.layers.stack import scan_blocks, stack


@dataclass(frozen=True)
class CLIPVisionConfig:
    """The sizes of a vision tower. `layers` counts the blocks that run: features are taken before the last block."""

    layers: int
    heads: int
    width: int
    mlp_dim: int
    image_size: int
    patch: int
    eps: float

    @property
    def tokens(self) -> int:
        """The number of tokens: the class token and the patches."""
        return 1 + (self.image_size // self.patch) ** 2


CLIP_VIT_H = CLIPVisionConfig(layers=31, heads=16, width=1280, mlp_dim=5120, image_size=224, patch=14, eps=1e-5)


class SelfAttention(nnx.Module):
    """Multi-head attention of every token to every token."""

    def __init__(self, config: CLIPVisionConfig, **kw):
        self.q = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.k = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.v = linear(config.width, config.width, ("embed", "heads"), **kw)
        self.out = linear(config.width, config.width, ("heads", "embed"), **kw)
        self.heads = config.heads

    def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        q, k, v = (project(x).reshape(*x.shape[:2], self.heads, -1) for project in (self.q, self.k, self.v))
        return self.out(attention(q, k, v).reshape(x.shape))


class CLIPBlock(nnx.Module):
    """Self-attention and an MLP, each after a norm and added to a float32 residual."""

    def __init__(self, config: CLIPVisionConfig, **kw):
        width = config.width
        self.norm1 = layer_norm(width, config.eps, affine=True, **kw)
        self.attn = SelfAttention(config, **kw)
        self.norm2 = layer_norm(width, config.eps, affine=True, **kw)
        self.mlp = MLP((width, config.mlp_dim, width), ("embed", "mlp", "embed"), gelu, **kw)
        self.dtype = kw["dtype"]

    def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        x = x + self.attn(self.norm1(x).astype(self.dtype)).astype(jnp.float32)
        return x + self.mlp(self.norm2(x).astype(self.dtype)).astype(jnp.float32)


class CLIPVision(nnx.Module):
    """Encodes normalised images [B H W 3]: features of the class token and of each patch, before the last block."""

    def __init__(self, config: CLIPVisionConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        width = config.width
        normal = nnx.initializers.normal(stddev=width**-0.5)
        self.patch_embed = linear(3 * config.patch**2, width, (None, "embed"), bias=False, **kw)
        class_init = with_axes(normal, ("embed",))
        self.class_token = nnx.Param(class_init(rngs.params(), (width,), param_dtype))
        position_init = with_axes(normal, (None, "embed"))
        self.positions = nnx.Param(position_init(rngs.params(), (config.tokens, width), param_dtype))
        self.norm = layer_norm(width, config.eps, affine=True, **kw)
        self.blocks = stack(lambda rngs: CLIPBlock(config, **{**kw, "rngs": rngs}), config.layers, rngs)
        self.config = config
        self.dtype = dtype

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B S E"]:
        patch = self.config.patch
        x = self.patch_embed(patchify(images[:, None].astype(self.dtype), (1, patch, patch))).astype(jnp.float32)
        class_token = jnp.broadcast_to(self.class_token[...].astype(jnp.float32), (len(x), 1, x.shape[2]))
        x = jnp.concatenate([class_token, x], axis=1) + self.positions[...][None].astype(jnp.float32)
        x = self.norm(x)  # the residual stays in float32, as in the text encoder
        x = scan_blocks(self.blocks, lambda block, x: block(x), x)
        return x.astype(self.dtype)
