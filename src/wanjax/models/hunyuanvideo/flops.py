# SPDX-License-Identifier: Apache-2.0
"""Operation counts of a transformer, from its config; a multiplication and an addition are two operations.

Only matrix products count, for the tokens that a step computes, without what a compiler adds.
"""

from collections.abc import Mapping

from wanjax.layers.flops import attention_flops, linear_flops
from wanjax.models.hunyuanvideo.config import TransformerConfig


def forward_flops(config: TransformerConfig, *, video: int, prompt: int, beside: int) -> Mapping[str, int]:
    """Operations of one forward for one video and its text, by part of the transformer; their sum is the total.

    `video`, `prompt` and `beside` are the numbers of tokens of the video, of the prompt, and of quoted text and a
    picture together. The part of the text that is the same at every step is computed once, and is not counted.
    """
    width, tokens = config.width, video + prompt + beside
    time = linear_flops(1, config.frequency_dim, width) + linear_flops(1, width, width)
    refiner = 4 * linear_flops(prompt, width, width) + attention_flops(prompt, prompt, width)
    refiner += 2 * linear_flops(prompt, width, config.refiner_mlp_dim) + linear_flops(1, width, 2 * width)
    return {
        "attention": config.layers * (4 * linear_flops(tokens, width, width) + attention_flops(tokens, tokens, width)),
        "mlp": config.layers * 2 * linear_flops(tokens, width, config.mlp_dim),
        "modulation": config.layers * 2 * linear_flops(1, width, 6 * width) + linear_flops(1, width, 2 * width),
        "refiner": config.refiner_layers * refiner + time,
        "embeddings": linear_flops(video, config.channels_in, width) + (2 if config.meanflow else 1) * time,
        "output": linear_flops(video, width, config.channels_out),
    }
