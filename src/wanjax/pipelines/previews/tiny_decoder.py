# SPDX-License-Identifier: Apache-2.0
"""Previews by a tiny decoder, whose file is given: sharper than colours by a linear map, and still cheap."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from wanjax.models.taehv import TinyDecoder, pictures
from wanjax.pipelines.decoders import DecoderFile

TALLEST = 256  # pixels of a picture's height, which decide how many levels double it


class TinyPictures:
    """Pictures of latents by a tiny decoder, computed on JAX's default device."""

    def __init__(self, network: TinyDecoder):
        self.network = network
        graphdef, self._weights = nnx.split(network)

        @jax.jit
        def decode(weights: Any, latents: jax.Array) -> jax.Array:
            return pictures(nnx.merge(graphdef, weights), latents, TALLEST)

        self._decode = decode

    def pictures(self, latents: Float[Array | np.ndarray, "B C T H W"]) -> UInt8[np.ndarray, "B T _H _W 3"]:
        """Return a picture of each latent frame of each video."""
        pictures = self._decode(self._weights, jnp.asarray(np.asarray(latents), jnp.float32))
        return np.round(255 * np.asarray(pictures)).astype(np.uint8)


def read_tiny_decoder(file: str | Path, channels: int) -> TinyPictures:
    """Read a decoder of TAEHV from a .pth or .safetensors file, for latents with this number of channels.

    Raises WanjaxError if it is not one, or if it is that of other latents.
    """
    return TinyPictures(DecoderFile.of(file, channels).for_previews())
