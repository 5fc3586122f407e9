# SPDX-License-Identifier: Apache-2.0
"""The image encoder of SigLIP, whose features condition a video model.

The encoder is a vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) that was trained together with a text
encoder by a sigmoid loss (Zhai et al. 2023, arXiv:2303.15343). Its tokens are patches of the image. It has learned
positions, pre-norm blocks with biases, and a final norm. The reference is transformers'
models/siglip/modeling_siglip.py.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wanjax.layers.embeddings import check_images
from wanjax.layers.linear import linear
from wanjax.layers.mlp import gelu_tanh
from wanjax.layers.norms import layer_norm
from wanjax.layers.patch import patchify
from wanjax.layers.placement import param
from wanjax.layers.stack import scan_blocks, stack
from wanjax.layers.vision_encoder import VisionBlock, VisionConfig


@dataclass(frozen=True)
class SiglipVisionConfig(VisionConfig):
    """Sizes of the encoder."""

    @property
    def tokens(self) -> int:
        """The number of tokens, one for each patch."""
        return self.patches**2


SIGLIP_SO400M = SiglipVisionConfig(layers=27, heads=16, width=1152, mlp_dim=4304, image_size=384, patch=14, eps=1e-6)


class SiglipVision(nnx.Module):
    """Encode normalised images [B H W 3] as features of each patch, with the final norm.

    Rows and columns of pixels after the last full patch are cropped.
    """

    def __init__(self, config: SiglipVisionConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        kw: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        width = config.width
        self.patch_embed = linear(3 * config.patch**2, width, (None, "embed"), **kw)
        normal = nnx.initializers.normal(stddev=width**-0.5)
        self.positions = param(normal, (config.tokens, width), (None, "embed"), dtype=param_dtype, rngs=rngs)
        self.blocks = stack(lambda rngs: VisionBlock(config, gelu_tanh, **{**kw, "rngs": rngs}), config.layers, rngs)
        self.norm = layer_norm(width, config.eps, affine=True, **kw)
        self.config = config
        self.dtype = dtype

    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B S E"]:
        check_images(images)
        patch, edge = self.config.patch, self.config.patches * self.config.patch
        pixels = images[:, None, :edge, :edge].astype(self.dtype)
        x = self.patch_embed(patchify(pixels, (1, patch, patch)))[:, : self.config.tokens].astype(jnp.float32)
        x = x + self.positions[...][None].astype(jnp.float32)  # the residual stays in float32, as in the text encoder
        x = scan_blocks(self.blocks, lambda block, x: block(x), x)
        return self.norm(x).astype(self.dtype)
