# SPDX-License-Identifier: Apache-2.0
"""Tiny decoders from files of TAEHV: in place of a model's own decoder, or for previews."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from wanjax.checkpoints import modules
from wanjax.checkpoints.files import Tensors
from wanjax.checkpoints.readers import open_tensors
from wanjax.converters import taehv
from wanjax.errors import WanjaxError
from wanjax.layers.placement import as_shapes, with_shardings
from wanjax.models.taehv import TinyDecoder, TinyDecoderConfig, decode_pictures
from wanjax.sharding import Partitioner


@dataclass(frozen=True)
class DecoderFile:
    """A .pth or .safetensors file with a decoder of TAEHV, of whose tensors the shapes have been read.

    A decoder computes in float32 and keeps its weights so, as the models' own do.
    """

    file: Path
    config: TinyDecoderConfig

    @classmethod
    def of(cls, file: str | Path, channels: int) -> "DecoderFile":
        """Read the sizes of a decoder of latents with this number of channels; raise WanjaxError for another file."""
        opened = open_tensors(file)
        specs = {name: spec for name, spec in opened.specs.items() if name.startswith("decoder.")}
        try:
            config = taehv.config_of(specs)
            if config.latent_channels != channels:
                raise WanjaxError(
                    f"it decodes latents of {config.latent_channels} channels, and the model's have {channels}"
                )
        except WanjaxError as error:
            raise WanjaxError(f"{file} is no tiny decoder for this model: {error}") from error
        return cls(Path(file).expanduser(), config)

    @classmethod
    def in_place_of(cls, vae: Any, file: str | Path) -> "DecoderFile":
        """Read the sizes of a decoder that can take the place of a VAE's, by its config; raise WanjaxError else."""
        decoder = cls.of(file, vae.latent_channels)
        for name, what in (("spatial_factor", "pixels of a side"), ("temporal_factor", "frames")):
            factor, right = getattr(decoder.config, name), getattr(vae, name)
            if factor != right:
                mismatch = f"it makes {factor} {what} of a latent cell, and the model's own makes {right}"
                raise WanjaxError(f"{file} is no tiny decoder for this model: {mismatch}")
        return decoder

    def shapes(self, partitioner: Partitioner) -> TinyDecoder:
        """Return the decoder as shapes with shardings."""
        return with_shardings(_shapes(self.config), partitioner)

    def load(self, partitioner: Partitioner) -> TinyDecoder:
        """Return the decoder; raise WanjaxError for tensors that are missing, left over or of another shape."""
        return self._loaded(self.shapes(partitioner), lambda tensors: tensors)

    def for_previews(self) -> TinyDecoder:
        """Return the decoder on JAX's default device, with one frame for each latent frame; raise as `load`."""
        last = self.config._replace(frame_factors=(1,) * len(self.config.frame_factors))
        return self._loaded(_shapes(last), taehv.last_frames)

    def _loaded(self, shapes: TinyDecoder, cut: Callable[[Any], Any]) -> TinyDecoder:
        opened = open_tensors(self.file)
        names = [name for name in opened.specs if name.startswith("decoder.")]
        try:
            tensors = Tensors(cut({name: opened.read(name) for name in names}))
            return modules.load(shapes, taehv.rules(), tensors)
        except WanjaxError as error:
            raise WanjaxError(f"{self.file} is no tiny decoder for this model: {error}") from error


def _shapes(config: TinyDecoderConfig) -> TinyDecoder:
    make = partial(TinyDecoder, config, dtype=jnp.float32, param_dtype=jnp.float32)
    return as_shapes(lambda rngs: make(rngs=rngs))


TALLEST = 256  # pixels of a picture's height, which decide how many levels double it


class TinyPictures:
    """Pictures of latents by a tiny decoder, computed on JAX's default device."""

    def __init__(self, network: TinyDecoder):
        self.network = network
        graphdef, self._weights = nnx.split(network)

        @jax.jit
        def decode(weights: Any, latents: jax.Array) -> jax.Array:
            return decode_pictures(nnx.merge(graphdef, weights), latents, TALLEST)

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
