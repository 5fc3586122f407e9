# SPDX-License-Identifier: Apache-2.0
"""Layers in 8 bits as ComfyUI stores them."""

import json

import numpy as np


def json_bytes(**entries):
    """Return JSON as an array of bytes, as which a file has it."""
    return np.frombuffer(json.dumps(entries).encode(), np.uint8)


def block_scales(x, rows, columns):
    """Return the largest number of each block of an array, and that array's shape filled with them."""
    out = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    scale, filled = np.zeros(out, np.float32), np.zeros(x.shape, np.float32)
    for i in range(out[0]):
        for j in range(out[1]):
            block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scale[i, j] = filled[block] = np.abs(x[block]).max() / 448
    return scale, filled


def per_row(x):
    return block_scales(x, 1, x.shape[1])


def hadamard(size):
    """Return the orthonormal regular Hadamard matrix, by its definition: Kronecker powers of a block of four rows."""
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    out = np.ones((1, 1))
    while len(out) < size:
        out = np.kron(out, four)
    return out / np.sqrt(size)


def convrot(name, x, group, layout=per_row, **more):
    """Return a layer as ComfyUI stores it in 8-bit integers with rotated groups, and the weight by the rule."""
    turned = (x.astype(np.float64).reshape(len(x), -1, group) @ hadamard(group).T).reshape(x.shape)
    scale, filled = layout(turned.astype(np.float32))
    scale, filled = np.asarray(scale * np.float32(448 / 127)), filled.astype(np.float64) * np.float32(448 / 127)
    rounded = np.clip(np.round(turned / filled), -128, 127).astype(np.int8)
    tensors = {f"{name}.weight": rounded, f"{name}.weight_scale": scale}
    entries = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group} | more
    numbers = (rounded * filled).reshape(len(x), -1, group) @ hadamard(group)
    return tensors, entries, numbers.reshape(x.shape)
