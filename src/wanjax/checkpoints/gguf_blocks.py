# SPDX-License-Identifier: Apache-2.0
"""Dequantise the blocks of most GGUF files, several times as fast as the package `gguf` does.

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
    """Dequantise blocks of 32 numbers: a scale, and 32 signed bytes."""
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _read_float16(blocks[:, :2])


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Dequantise blocks of 256 numbers in eight groups: scales and minima, and 128 bytes. Every 32 bytes have two
    groups: one in the lower four bits, and one in the upper four bits."""
    _scale_groups(_four_bits(blocks[:, 16:], pairs=1), blocks, out)


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Dequantise as `_q4_k`, with a fifth bit for each number. The fifth bits are in 32 bytes before the other bytes:
    bit g of byte i belongs to number i in group g."""
    numbers = _four_bits(blocks[:, 48:], pairs=1).reshape(-1, 8, 32)
    fifth_bits = np.ascontiguousarray(blocks[:, 16:48])
    for group in range(8):
        numbers[:, group] |= (fifth_bits << 4 - group if group < 5 else fifth_bits >> group - 4) & 16
    _scale_groups(numbers, blocks, out)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Dequantise blocks of 256 numbers, in two halves of four groups of 32. A number has four lower and two upper bits,
    and is stored plus 32. A block has 16 scales.

    A half has 64 bytes of lower bits: groups 0 and 1 are in the lower four bits of the bytes, and groups 2 and 3 in the
    upper four bits. A half has 32 bytes of upper bits: bits 2g and 2g + 1 of byte i belong to number i in group g.
    Every 16 numbers have a scale of one byte. The factor at the end of the block multiplies all scales.
    """
    numbers = _four_bits(blocks[:, :128], pairs=2).reshape(-1, 2, 4, 32)
    upper_bits = np.ascontiguousarray(blocks[:, 128:192]).reshape(-1, 2, 32)
    for group in range(4):
        numbers[:, :, group] |= (upper_bits << 4 - 2 * group if group < 3 else upper_bits >> 2) & 48
    numbers -= 32  # as int8, these bytes are negative numbers
    out[...] = numbers.reshape(out.shape).view(np.int8)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8) * _read_float16(blocks[:, 208:])
    values_by_scale = out.reshape(-1, 16, 16)
    values_by_scale *= scales[..., None]


def _four_bits(packed: np.ndarray, *, pairs: int) -> np.ndarray:
    """Unpack the four-bit halves of bytes [blocks, bytes]. For every `pairs` · 32 bytes, the lower halves come first,
    then the upper halves."""
    packed = np.ascontiguousarray(packed).reshape(len(packed), -1, pairs * 32)
    return np.stack([packed & 15, packed >> 4], axis=2)


def _scale_groups(numbers: np.ndarray, blocks: np.ndarray, out: np.ndarray) -> None:
    """Multiply the uint8 numbers of eight groups by their scales, and subtract their minima.

    A block begins with a factor for the scales and a factor for the minima. Then 12 bytes have eight scales and eight
    minima of 6 bits each. The first four bytes have the first four scales. The next four bytes have the first four
    minima. The last four bytes have the lower four bits of the other scales and minima. The upper two bits of the first
    eight bytes have their upper two bits.
    """
    factors = _read_float16(blocks[:, :4])
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=1)
    out[...] = numbers.reshape(out.shape)
    groups = out.reshape(-1, 8, 32)
    groups *= (scales.astype(np.float32) * factors[:, :1])[..., None]
    groups -= (minima.astype(np.float32) * factors[:, 1:])[..., None]


FAST_DEQUANTIZERS: Mapping[str, Dequantise] = {"Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
