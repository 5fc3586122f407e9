# SPDX-License-Identifier: Apache-2.0
"""How many operations a transformer takes, by its shape alone; a multiplication and an addition are two.

What is counted is products, of tokens that are real: fillings, and what a compiler adds, are no use to anyone.
"""

from collections.abc import Mapping
from math import prod

from wanjax.models.wan.config import ControlTransformerConfig, ImageTransformerConfig, TransformerConfig


def forward_flops(config: TransformerConfig, *, tokens: int, text: int, image: int = 0) -> Mapping[str, int]:
    """Of one forward of one video with its context, by the part of the transformer; their sum is the whole.

    `tokens` are those of the video, `text` and `image` those that its cross-attention sees.
    """
    width, cells = config.width, prod(config.patch)
    block = _block(config, tokens, text, image)
    flops = {part: config.layers * count for part, count in block.items()}
    flops["embeddings"] = (
        _linear(tokens, cells * config.channels_in, width)
        + _linear(1, config.frequency_dim, width)
        + _linear(1, width, width)
        + _linear(1, width, 6 * width)
    )
    flops["output"] = _linear(tokens, width, cells * config.channels_out)
    if isinstance(config, ControlTransformerConfig):
        hint = _linear(tokens, width, width)
        flops["control"] = config.control_blocks * (sum(block.values()) + hint)
        flops["embeddings"] += _linear(tokens, cells * config.control_channels, width) + _linear(tokens, width, width)
    return flops


def context_flops(config: TransformerConfig, *, text: int, image: int = 0) -> int:
    """Of the context of one prompt, and of its images, which is made once for all forwards."""
    width, blocks = config.width, config.layers
    flops = _linear(text, config.text_width, width) + _linear(text, width, width)
    if isinstance(config, ImageTransformerConfig):
        flops += _linear(image, config.image_width, config.image_width) + _linear(image, config.image_width, width)
    if isinstance(config, ControlTransformerConfig):
        blocks += config.control_blocks
    return flops + blocks * 2 * _linear(text + image, width, width)


def _block(config: TransformerConfig, tokens: int, text: int, image: int) -> dict[str, int]:
    width = config.width
    return {
        "self_attention": 4 * _linear(tokens, width, width) + _attention(tokens, tokens, width),
        "cross_attention": (2 * _linear(tokens, width, width) + _attention(tokens, text + image, width)),
        "mlp": 2 * _linear(tokens, width, config.mlp_dim),
    }


def _linear(rows: int, width_in: int, width_out: int) -> int:
    return 2 * rows * width_in * width_out


def _attention(queries: int, keys: int, width: int) -> int:
    """The products of q with k and of the scores with v, over all heads."""
    return 4 * queries * keys * width
