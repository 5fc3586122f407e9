# SPDX-License-Identifier: Apache-2.0
"""The image encoder of CLIP, whose features condition a video model.

The encoder is a vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) that was trained together with a text
encoder (Radford et al. 2021, arXiv:2103.00020). Its tokens are a class token and the patches of the image. It has
learned positions, and pre-norm blocks with biases. The reference is transformers' models/clip/modeling_clip.py.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.layers.embeddings import check_images
from wanjax.layers.linear import linear
from wanjax.layers.mlp import gelu
from wanjax.layers.norms import layer_norm
from wanjax.layers.patch import patchify
from wanjax.layers.placement import param
from wanjax.layers.stack import scan_blocks, stack
from wanjax.layers.vision_encoder import VisionBlock, VisionConfig


@dataclass(frozen=True)
class CLIPVisionConfig(VisionConfig):
    """Sizes of the encoder. `layers` does not count the last block, because features are taken before it."""

    @property
    def tokens(self) -> int:
        """The number of tokens: the class token and the patches."""
        return 1 + self.patches**2


CLIP_VIT_H = CLIPVisionConfig(layers=31, heads=16, width=1280, mlp_dim=5120, image_size=224, patch=14, eps=1e-5)


class CLIPVision(nnx.Module):
    """Encode normalised images [B H W 3] as features of the class token and of each patch, before the last block."""

    def __init__(self, config: CLIPVisionConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        width = config.width
        normal = nnx.initializers.normal(stddev=width**-0.5)
        self.patch_embed = linear(3 * config.patch**2, width, (None, "embed"), bias=False, **kw)
        self.class_token = param(normal, (width,), ("embed",), dtype=param_dtype, rngs=rngs)
        self.positions = param(normal, (config.tokens, width), (None, "embed"), dtype=param_dtype, rngs=rngs)
        self.norm = layer_norm(width, config.eps, affine=True, **kw)
        self.blocks = stack(lambda rngs: VisionBlock(config, gelu, **{**kw, "rngs": rngs}), config.layers, rngs)
        self.config = config
        self.dtype = dtype

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B S E"]:
        check_images(images)
        patch = self.config.patch
        x = self.patch_embed(patchify(images[:, None].astype(self.dtype), (1, patch, patch))).astype(jnp.float32)
        class_token = jnp.broadcast_to(self.class_token[...].astype(jnp.float32), (len(x), 1, x.shape[2]))
        x = jnp.concatenate([class_token, x], axis=1) + self.positions[...][None].astype(jnp.float32)
        x = self.norm(x)  # the residual stays in float32, as in the text encoder
        x = scan_blocks(self.blocks, lambda block, x: block(x), x)
        return x.astype(self.dtype)
