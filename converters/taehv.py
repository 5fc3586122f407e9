# SPDX-License-Identifier: Apache-2.0
"""The conversion table of TAEHV's decoders: names and shapes of their weights.

Layers are numbered through in the reference, taehv.py of madebyollin/taehv: each level has three blocks, a doubling
without weights, a convolution that adds frames, and one to the next level.
"""

import math
from collections.abc import Mapping

import numpy as np

from wanjax.converters.weight_rules import Described, Rule, conv
from wanjax.errors import WanjaxError
from wanjax.models.taehv import BLOCKS_PER_LEVEL, TinyDecoderConfig

FIRST, LEVEL, LEVELS = 3, 6, 3  # the number of the first level's first layer; layers of a level; levels
LAST = FIRST + LEVELS * LEVEL + 1
ADDING = [f"decoder.{FIRST + LEVEL * level + BLOCKS_PER_LEVEL + 1}.conv.weight" for level in range(LEVELS)]
"""The weights of the layers that may add frames."""


def config_of(specs: Mapping[str, Described]) -> TinyDecoderConfig:
    """Read the sizes of a decoder off its tensors; raise WanjaxError if it is no TAEHV decoder."""
    try:
        first, last = (specs[f"decoder.{layer}.weight"].shape for layer in (1, LAST))
        outs = [specs[f"decoder.{FIRST + LEVEL * (level + 1) - 1}.weight"].shape[0] for level in range(LEVELS)]
        grown = [specs[name].shape for name in ADDING]
    except KeyError as missing:
        raise WanjaxError(f"it has no {missing.args[0]}, which a decoder of TAEHV has") from None
    patch = math.isqrt(last[0] // 3)
    if 3 * patch**2 != last[0]:
        raise WanjaxError(f"its last layer makes {last[0]} channels of a cell, which are no square of pixels")
    growing = tuple(rows // max(channels, 1) for rows, channels, *_ in grown)
    return TinyDecoderConfig(first[1], (first[0], *outs), patch, growing)


def rules() -> list[Rule]:
    """Return the rules for every parameter of a decoder."""
    table = [*conv("decoder.1", "conv_in"), *conv(f"decoder.{LAST}", "conv_out")]
    for level in range(LEVELS):
        begin, ours = FIRST + LEVEL * level, f"levels.{level}"
        for block in range(BLOCKS_PER_LEVEL):
            for place in range(3):
                table += conv(f"decoder.{begin + block}.conv.{2 * place}", f"{ours}.blocks.{block}.convs.{place}")
        table += conv(f"decoder.{begin + BLOCKS_PER_LEVEL + 1}.conv", f"{ours}.mix", bias=False)
        table += conv(f"decoder.{begin + BLOCKS_PER_LEVEL + 2}", f"{ours}.out", bias=False)
    return table


def last_frames(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors; layers that add frames keep only the rows of the last frame."""
    return {name: x[-x.shape[1] :] if name in ADDING else x for name, x in tensors.items()}
