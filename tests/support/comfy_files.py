# SPDX-License-Identifier: Apache-2.0
"""Layers in 8 bits as ComfyUI stores them."""

import json

import numpy as np


def json_bytes(**entries):
    """Return JSON as the array of bytes that a file stores."""
    return np.frombuffer(json.dumps(entries).encode(), np.uint8)


def block_scales(x, rows, columns):
    """Return the scale of each block, max|x| / 448, and these scales repeated to the shape of the array."""
    blocks = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    scale, full_scale = np.zeros(blocks, np.float32), np.zeros(x.shape, np.float32)
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scale[i, j] = full_scale[block] = np.abs(x[block]).max() / 448
    return scale, full_scale


def per_row(x):
    return block_scales(x, 1, x.shape[1])


def hadamard(size):
    """Return the orthonormal regular Hadamard matrix: a Kronecker power of a 4x4 block."""
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    out = np.ones((1, 1))
    while len(out) < size:
        out = np.kron(out, four)
    return out / np.sqrt(size)


def convrot(name, x, group, scales_of=per_row, **more):
    """Return a layer as ComfyUI stores it in 8-bit integers with rotated groups, and its dequantized weight."""
    rotated = (x.astype(np.float64).reshape(len(x), -1, group) @ hadamard(group).T).reshape(x.shape)
    scale, full_scale = scales_of(rotated.astype(np.float32))
    scale, full_scale = np.asarray(scale * np.float32(448 / 127)), full_scale.astype(np.float64) * np.float32(448 / 127)
    rounded = np.clip(np.round(rotated / full_scale), -128, 127).astype(np.int8)
    tensors = {f"{name}.weight": rounded, f"{name}.weight_scale": scale}
    entries = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group} | more
    dequantized = (rounded * full_scale).reshape(len(x), -1, group) @ hadamard(group)
    return tensors, entries, dequantized.reshape(x.shape)
