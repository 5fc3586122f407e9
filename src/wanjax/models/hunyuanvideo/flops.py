# SPDX-License-Identifier: Apache-2.0
"""Operation counts of a transformer, from its config; a multiplication and an addition are two operations.

Only matrix products count, for the tokens that a step computes, without what a compiler adds.
"""

from collections.abc import Mapping

from wanjax.models.hunyuanvideo.config import TransformerConfig


def forward_flops(config: TransformerConfig, *, video: int, prompt: int, beside: int) -> Mapping[str, int]:
    """Operations of one forward for one video and its text, by part of the transformer; their sum is the total.

    `video`, `prompt` and `beside` are the numbers of tokens of the video, of the prompt, and of quoted text and a
    picture together. The part of the text that is the same at every step is computed once, and is not counted.
    """
    width, tokens = config.width, video + prompt + beside
    time = _linear(1, config.frequency_dim, width) + _linear(1, width, width)
    refiner = 4 * _linear(prompt, width, width) + 4 * prompt * prompt * width + _linear(1, width, 2 * width)
    refiner += 2 * _linear(prompt, width, config.refiner_mlp_dim)
    return {
        "attention": config.layers * 4 * _linear(tokens, width, width) + joint_attention_flops(config, tokens),
        "mlp": config.layers * 2 * _linear(tokens, width, config.mlp_dim),
        "modulation": config.layers * 2 * _linear(1, width, 6 * width) + _linear(1, width, 2 * width),
        "refiner": config.refiner_layers * refiner + time,
        "embeddings": _linear(video, config.channels_in, width) + (2 if config.meanflow else 1) * time,
        "output": _linear(video, width, config.channels_out),
    }


def joint_attention_flops(config: TransformerConfig, tokens: int) -> int:
    """The products of attention, q with k and scores with v, in the blocks of one forward."""
    return config.layers * 4 * tokens * tokens * config.width


def _linear(rows: int, width_in: int, width_out: int) -> int:
    return 2 * rows * width_in * width_out
