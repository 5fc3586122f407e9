# SPDX-License-Identifier: Apache-2.0
"""Conversion rules for TAEHV's decoders: names and shapes of their weights.

The reference, taehv.py of madebyollin/taehv, numbers all layers consecutively: each level has three blocks, upsampling
without weights, a convolution that adds frames, and a convolution to the width of the next level.
"""

import math
from collections.abc import Mapping

import numpy as np

from wanjax.converters.weight_rules import ArraySpec, WeightRule, conv
from wanjax.errors import WanjaxError
from wanjax.models.taehv import BLOCKS_PER_LEVEL, TinyDecoderConfig

FIRST_LAYER = 3  # the index of the first level's first layer
LEVEL_LAYERS, LEVELS = 6, 3  # the number of layers in a level, and of levels
LAST_LAYER = FIRST_LAYER + LEVELS * LEVEL_LAYERS + 1
FRAME_WEIGHTS = [
    f"decoder.{FIRST_LAYER + LEVEL_LAYERS * level + BLOCKS_PER_LEVEL + 1}.conv.weight" for level in range(LEVELS)
]
"""The names of the weights of the convolutions that may add frames."""


def config_of(specs: Mapping[str, ArraySpec]) -> TinyDecoderConfig:
    """Infer the sizes of a decoder from its tensors; raise WanjaxError if the file is not a TAEHV decoder."""
    try:
        first, last = (specs[f"decoder.{layer}.weight"].shape for layer in (1, LAST_LAYER))
        output_channels = [
            specs[f"decoder.{FIRST_LAYER + LEVEL_LAYERS * (level + 1) - 1}.weight"].shape[0] for level in range(LEVELS)
        ]
        frame_shapes = [specs[name].shape for name in FRAME_WEIGHTS]
    except KeyError as missing:
        raise WanjaxError(f"it is not a TAEHV decoder: it has no {missing.args[0]}") from None
    patch = math.isqrt(last[0] // 3)
    if 3 * patch**2 != last[0]:
        raise WanjaxError(f"it is not a TAEHV decoder: {last[0]} output channels are not a square patch of pixels")
    frame_factors = tuple(rows // max(channels, 1) for rows, channels, *_ in frame_shapes)
    return TinyDecoderConfig(first[1], (first[0], *output_channels), patch, frame_factors)


def rules() -> list[WeightRule]:
    """Return the rules for every parameter of a decoder."""
    table = [*conv("decoder.1", "conv_in"), *conv(f"decoder.{LAST_LAYER}", "conv_out")]
    for level in range(LEVELS):
        begin, target = FIRST_LAYER + LEVEL_LAYERS * level, f"levels.{level}"
        for block in range(BLOCKS_PER_LEVEL):
            for index in range(3):
                table += conv(f"decoder.{begin + block}.conv.{2 * index}", f"{target}.blocks.{block}.convs.{index}")
        table += conv(f"decoder.{begin + BLOCKS_PER_LEVEL + 1}.conv", f"{target}.mix", bias=False)
        table += conv(f"decoder.{begin + BLOCKS_PER_LEVEL + 2}", f"{target}.out", bias=False)
    return table


def last_frames(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Cut the weights of the convolutions that add frames to the rows of the last frame; keep all other tensors."""
    return {name: x[-x.shape[1] :] if name in FRAME_WEIGHTS else x for name, x in tensors.items()}
