# SPDX-License-Identifier: Apache-2.0
"""Wan's transformer over a whole sequence under any mask of its frames, in plain NumPy and float64."""

import math

import numpy as np
from flax import nnx


def velocity(model, latents, t, text, frame_mask):
    """Return the velocity of latents [T H W C] whose frames have the timesteps t [T], for a prompt [S E].

    Frame i attends to frame j where `frame_mask[i, j]`.
    """
    config = model.config
    weights = {
        tuple(map(str, path)): np.asarray(x.get_value(), np.float64) for path, x in nnx.to_flat_state(nnx.state(model))
    }

    def get(*path):
        return weights[path]

    def linear(x, *path):
        return x @ get(*path, "kernel") + get(*path, "bias")

    frames, height, width, _ = latents.shape
    _, ph, pw = config.patch
    rows, columns = height // ph, width // pw
    patches = latents.astype(np.float64).reshape(frames, rows, ph, columns, pw, -1).transpose(0, 1, 3, 2, 4, 5)
    x = linear(patches.reshape(frames * rows * columns, -1), "patch_embed")
    frame_of_token = np.repeat(np.arange(frames), rows * columns)
    text = linear(gelu(linear(text.astype(np.float64), "text_embed", "up")), "text_embed", "down")
    half = config.frequency_dim // 2
    angles = np.asarray(t, np.float64)[:, None] * 10000.0 ** (-np.arange(half) / half)
    time = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    time = linear(silu(linear(time, "time_embed", "up")), "time_embed", "down")  # [T E]
    mod = linear(silu(time), "time_proj").reshape(frames, 6, -1)
    rope = rope_tables(config, frames, rows, columns)
    mask = np.asarray(frame_mask)[frame_of_token][:, frame_of_token]

    for layer in range(config.layers):
        x = block(weights, layer, config, x, (mod, frame_of_token), text, rope, mask)

    shift, scale = (get("table")[None] + time[:, None]).transpose(1, 0, 2)
    y = layer_norm(x, config.eps) * (1 + scale[frame_of_token]) + shift[frame_of_token]
    y = linear(y, "proj_out").reshape(frames, rows, columns, ph, pw, -1)
    return y.transpose(0, 1, 3, 2, 4, 5).reshape(frames, height, width, -1)


def block(weights, layer, config, x, modulation, text, rope, mask):
    """Return the tokens after a block. `modulation` is that of each frame, and the frame of each token."""

    def get(*path):
        return weights["blocks", *path][layer]

    def linear(x, *path):
        return x @ get(*path, "kernel") + get(*path, "bias")

    mod, frame_of_token = modulation
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (mod + get("table")[None]).transpose(1, 0, 2)[
        :, frame_of_token
    ]
    y = layer_norm(x, config.eps) * (1 + scale) + shift
    q, k = (rms(linear(y, "self_attn", n), config.eps) * get("self_attn", f"{n}_norm", "scale") for n in "qk")
    q, k = (rotated(heads(a, config.heads), *rope) for a in (q, k))
    y = attention(q, k, heads(linear(y, "self_attn", "v"), config.heads), mask)
    x = x + gate * linear(y, "self_attn", "out")
    y = layer_norm(x, config.eps) * get("norm2", "scale") + get("norm2", "bias")
    q = rms(linear(y, "cross_attn", "q"), config.eps) * get("cross_attn", "q_norm", "scale")
    k = rms(linear(text, "cross_attn", "k"), config.eps) * get("cross_attn", "k_norm", "scale")
    q, k, v = (heads(a, config.heads) for a in (q, k, linear(text, "cross_attn", "v")))
    x = x + linear(attention(q, k, v, np.ones((len(x), len(text)), bool)), "cross_attn", "out")
    y = layer_norm(x, config.eps) * (1 + mlp_scale) + mlp_shift
    return x + mlp_gate * linear(gelu(linear(y, "mlp", "up")), "mlp", "down")


def rope_tables(config, frames, rows, columns):
    """Return the cosine and sine [L P] of each token's angles."""
    positions = np.stack(np.meshgrid(np.arange(frames), np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    angles = [
        positions[..., axis].reshape(-1, 1) * 10000.0 ** (-np.arange(0, channels, 2) / channels)
        for axis, channels in enumerate(config.rope_channels)
    ]
    angles = np.concatenate(angles, axis=1)
    return np.cos(angles)[:, None], np.sin(angles)[:, None]


def rotated(x, cos, sin):
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(q, k, v, mask):
    scores = np.einsum("lnd,snd->nls", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(mask[None], scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("nls,snd->lnd", scores / scores.sum(axis=-1, keepdims=True), v).reshape(len(q), -1)


def heads(x, count):
    return x.reshape(len(x), count, -1)


def layer_norm(x, eps):
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + eps)


def rms(x, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
