# SPDX-License-Identifier: Apache-2.0
"""Dequantise the blocks that most GGUF files consist of, several times as fast as the package `gguf` does.

The layouts are those of ggml (`ggml/src/ggml-common.h`). Each function takes bytes [blocks, bytes of a block], writes
float32 [blocks, numbers of a block], and gives the same numbers as the package, bit for bit.
"""

from collections.abc import Callable, Mapping

import numpy as np

Dequantise = Callable[[np.ndarray, np.ndarray], None]


def _read_float16(x: np.ndarray) -> np.ndarray:
    """Return the float16 numbers in these bytes of each block, as float32."""
    return np.ascontiguousarray(x).view(np.float16).astype(np.float32)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """32 numbers: a scale, and 32 signed bytes."""
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _read_float16(blocks[:, :2])


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """256 numbers in eight groups: scales and minima, and 128 bytes. The halves of 32 bytes are two groups."""
    _scale_groups(_four_bits(blocks[:, 16:], pairs=1), blocks, out)


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """As Q4_K, with the fifth bits in 32 bytes before the others: bit g of byte i is that of number i in group g."""
    numbers = _four_bits(blocks[:, 48:], pairs=1).reshape(-1, 8, 32)
    fifth_bits = np.ascontiguousarray(blocks[:, 16:48])
    for group in range(8):
        numbers[:, group] |= (fifth_bits << 4 - group if group < 5 else fifth_bits >> group - 4) & 16
    _scale_groups(numbers, blocks, out)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """256 numbers in two halves of four groups of 32, minus 32: four lower bits, two upper bits, and 16 scales.

    A half has 64 bytes of lower bits: their lower halves are groups 0 and 1, their upper halves 2 and 3. A half has 32
    bytes of upper bits: bits 2g and 2g + 1 of byte i are those of number i in group g. Each 16 numbers have a scale of
    one byte, and a factor at the end of the block is for all scales.
    """
    numbers = _four_bits(blocks[:, :128], pairs=2).reshape(-1, 2, 4, 32)
    upper_bits = np.ascontiguousarray(blocks[:, 128:192]).reshape(-1, 2, 32)
    for group in range(4):
        numbers[:, :, group] |= (upper_bits << 4 - 2 * group if group < 3 else upper_bits >> 2) & 48
    numbers -= 32  # below zero, these bytes are those of negative numbers
    out[...] = numbers.reshape(out.shape).view(np.int8)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8) * _read_float16(blocks[:, 208:])
    values_by_scale = out.reshape(-1, 16, 16)
    values_by_scale *= scales[..., None]


def _four_bits(packed: np.ndarray, *, pairs: int) -> np.ndarray:
    """Unpack the halves of bytes [blocks, bytes]: those of `pairs` · 32 bytes are as many lower, then upper halves."""
    packed = np.ascontiguousarray(packed).reshape(len(packed), -1, pairs * 32)
    return np.stack([packed & 15, packed >> 4], axis=2)


def _scale_groups(numbers: np.ndarray, blocks: np.ndarray, out: np.ndarray) -> None:
    """Write the numbers of eight groups, uint8, times their scales and minus their minima.

    A block begins with a factor for the scales and one for the minima. Then eight scales and eight minima have 6 bits
    each. Of the 12 bytes, the first four have the first four scales, and the next four the first four minima. The last
    four have the lower halves of the others, whose two upper bits are those of the first eight bytes.
    """
    factors = _read_float16(blocks[:, :4])
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=1)
    out[...] = numbers.reshape(out.shape)
    groups = out.reshape(-1, 8, 32)
    groups *= (scales.astype(np.float32) * factors[:, :1])[..., None]
    groups -= (minima.astype(np.float32) * factors[:, 1:])[..., None]


FAST: Mapping[str, Dequantise] = {"Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
