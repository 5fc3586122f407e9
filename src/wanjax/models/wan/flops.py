# SPDX-License-Identifier: Apache-2.0
"""Operation counts of a transformer, from its config; a multiplication and an addition are two operations.

Only matrix products of real tokens count, neither padding nor what a compiler adds.
"""

from collections.abc import Mapping

from wanjax.layers.flops import attention_flops, linear_flops
from wanjax.models.wan.config import ControlTransformerConfig, TransformerConfig


def forward_flops(config: TransformerConfig, *, tokens: int, text: int, image: int = 0) -> Mapping[str, int]:
    """Operations of one forward for one video and its context, by part of the transformer; their sum is the total.

    `tokens` is the number of tokens of the video; `text` and `image` are those of its cross-attention.
    """
    width, cells = config.width, config.patch_cells
    block = _block(config, tokens, text, image)
    flops = {part: config.layers * count for part, count in block.items()}
    flops["embeddings"] = (
        linear_flops(tokens, cells * config.channels_in, width)
        + linear_flops(1, config.frequency_dim, width)
        + linear_flops(1, width, width)
        + linear_flops(1, width, 6 * width)
    )
    flops["output"] = linear_flops(tokens, width, cells * config.channels_out)
    if isinstance(config, ControlTransformerConfig):
        hint = linear_flops(tokens, width, width)  # as many as those of the projection of the sum
        flops["control"] = config.control_blocks * (sum(block.values()) + hint)
        flops["embeddings"] += linear_flops(tokens, cells * config.control_channels, width) + hint
    return flops


def _block(config: TransformerConfig, tokens: int, text: int, image: int) -> dict[str, int]:
    width = config.width
    return {
        "self_attention": 4 * linear_flops(tokens, width, width) + attention_flops(tokens, tokens, width),
        "cross_attention": (2 * linear_flops(tokens, width, width) + attention_flops(tokens, text + image, width)),
        "mlp": 2 * linear_flops(tokens, width, config.mlp_dim),
    }
