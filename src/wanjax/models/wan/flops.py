# SPDX-License-Identifier: Apache-2.0
"""Operation counts of a transformer, from its config; a multiplication and an addition are two operations.

Only matrix products of real tokens count, neither padding nor what a compiler adds.
"""

from collections.abc import Mapping

from wanjax.models.wan.config import ControlTransformerConfig, TransformerConfig


def forward_flops(config: TransformerConfig, *, tokens: int, text: int, image: int = 0) -> Mapping[str, int]:
    """Operations of one forward for one video and its context, by part of the transformer; their sum is the total.

    `tokens` is the number of tokens of the video; `text` and `image` are those of its cross-attention.
    """
    width, cells = config.width, config.patch_cells
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


def self_attention_flops(config: TransformerConfig, tokens: int) -> int:
    """The products of self-attention, q with k and scores with v, in the blocks of one forward."""
    return config.layers * _attention(tokens, tokens, config.width)


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
    """Operations of q kᵀ and of the weights times v, over all heads."""
    return 4 * queries * keys * width
