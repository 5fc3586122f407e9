# SPDX-License-Identifier: Apache-2.0
"""Operation counts of a transformer, from its config; a multiplication and an addition are two operations.

Only matrix products of real tokens count, neither padding nor what a compiler adds.
"""

from collections.abc import Mapping

from wanjax.layers.flops import attention_flops, linear_flops
from wanjax.models.cogvideox.config import TransformerConfig


def forward_flops(config: TransformerConfig, *, video: int) -> Mapping[str, int]:
    """Operations of one forward for one video and its prompt, by part of the transformer; their sum is the total.

    `video` is the number of the video's tokens.
    """
    width, tokens, time = config.width, video + config.text_length, config.time_width
    embedding = linear_flops(1, width, time) + linear_flops(1, time, time)
    if config.offset_width is not None:
        embedding += 2 * linear_flops(1, config.offset_width, config.offset_width)
    return {
        "attention": config.layers * (4 * linear_flops(tokens, width, width) + attention_flops(tokens, tokens, width)),
        "mlp": config.layers * 2 * linear_flops(tokens, width, config.mlp_dim),
        "modulation": config.layers * linear_flops(1, time, 12 * width) + linear_flops(1, time, 2 * width),
        "embeddings": linear_flops(video, config.patch_cells * config.channels_in, width) + embedding,
        "output": linear_flops(video, width, config.patch_cells * config.channels_out),
    }
