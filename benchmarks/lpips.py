# SPDX-License-Identifier: Apache-2.0
"""LPIPS, a learned distance of pictures: Zhang et al., The Unreasonable Effectiveness of Deep Features, 2018.

The weights are one file of safetensors: AlexNet's `features.N.weight` and `.bias` as torchvision names them, and the
five `linN.model.1.weight` of the lpips package's alex.pth.
"""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from wanjax.checkpoints.files import load_safetensors

SHIFT = np.array([[[[-0.030, -0.088, -0.188]]]], np.float32)
SCALE = np.array([[[[0.458, 0.448, 0.450]]]], np.float32)
LAYERS = {0: (4, 2), 3: (1, 2), 6: (1, 1), 8: (1, 1), 10: (1, 1)}  # stride and padding of AlexNet's convolutions
POOLED_LAYERS = (3, 6)  # max-pooling of 3 × 3 with stride 2 precedes these


@cache
def _weights(file: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(weight, np.float32) for name, weight in load_safetensors(file).items()}


@jax.jit
def _features(x: Float[Array, "B H W 3"], weights: dict[str, Array]) -> list[Float[Array, "B _H _W _C"]]:
    """Return the features after each convolution, each of length 1 along the channels."""
    features, x = [], (x - SHIFT) / SCALE
    for layer, (stride, padding) in LAYERS.items():
        if layer in POOLED_LAYERS:
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")
        x = jax.lax.conv_general_dilated(
            x,
            weights[f"features.{layer}.weight"],
            (stride, stride),
            [(padding, padding)] * 2,
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
        )
        x = jax.nn.relu(x + weights[f"features.{layer}.bias"][None, None, None])
        features.append(x / (jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True)) + 1e-10))
    return features


def lpips(first: UInt8[np.ndarray, "T H W 3"], second: UInt8[np.ndarray, "T H W 3"], file: Path) -> float:
    """Return the mean distance of frames."""
    weights = _weights(file)
    features = [_features(jnp.asarray(frames, jnp.float32) / 127.5 - 1, weights) for frames in (first, second)]
    total = 0.0
    for number, (x, y) in enumerate(zip(*features, strict=True)):
        channel_weights = weights[f"lin{number}.model.1.weight"].reshape(-1)
        total += float(((x - y) ** 2 @ channel_weights).mean())
    return total
