# SPDX-License-Identifier: Apache-2.0
"""Operation counts of a transformer, from its config; a multiplication and an addition are two operations.

Only matrix products of real tokens count, neither padding nor what a compiler adds.
"""

from collections.abc import Mapping

from wanjax.models.cogvideox.config import TransformerConfig


def forward_flops(config: TransformerConfig, *, video: int) -> Mapping[str, int]:
    """Operations of one forward for one video and its prompt, by part of the transformer; their sum is the total.

    `video` is the number of the video's tokens.
    """
    width, tokens, time = config.width, video + config.text_length, config.time_width
    embedding = _linear(1, width, time) + _linear(1, time, time)
    if config.offset_width is not None:
        embedding += 2 * _linear(1, config.offset_width, config.offset_width)
    return {
        "attention": config.layers * 4 * _linear(tokens, width, width) + self_attention_flops(config, tokens),
        "mlp": config.layers * 2 * _linear(tokens, width, config.mlp_dim),
        "modulation": config.layers * _linear(1, time, 12 * width) + _linear(1, time, 2 * width),
        "embeddings": _linear(video, config.patch_cells * config.channels_in, width) + embedding,
        "output": _linear(video, width, config.patch_cells * config.channels_out),
    }


def self_attention_flops(config: TransformerConfig, tokens: int) -> int:
    """The products of attention, q with k and scores with v, in the blocks of one forward."""
    return config.layers * 4 * tokens * tokens * config.width


def _linear(rows: int, width_in: int, width_out: int) -> int:
    return 2 * rows * width_in * width_out
