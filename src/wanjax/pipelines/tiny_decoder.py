# SPDX-License-Identifier: Apache-2.0
"""Tiny decoders from TAEHV files. A tiny decoder replaces a model's own decoder, or makes previews."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
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
class TinyDecoderFile:
    """A .pth or .safetensors file with a TAEHV decoder, and the decoder's config.

    A tiny decoder stores its weights and computes in float32, like the models' own decoders.
    """

    file: Path
    config: TinyDecoderConfig

    @classmethod
    def read(cls, file: str | Path, channels: int) -> "TinyDecoderFile":
        """Read the config of a decoder from the shapes in its file.

        Args:
            file: The file.
            channels: The number of channels of the model's latents.

        Raises:
            WanjaxError: The file has no decoder for such latents.
        """
        tensors_file = open_tensors(file)
        specs = {name: spec for name, spec in tensors_file.specs.items() if name.startswith("decoder.")}
        try:
            config = taehv.config_of(specs)
            if config.latent_channels != channels:
                raise WanjaxError(
                    f"it decodes latents of {config.latent_channels} channels, but the model's latents have {channels}"
                )
        except WanjaxError as error:
            raise WanjaxError(f"{file} is no tiny decoder for this model: {error}") from error
        return cls(Path(file).expanduser(), config)

    def shapes(self, partitioner: Partitioner, dtype: DTypeLike = jnp.float32) -> TinyDecoder:
        """Return the network with shapes and shardings in place of arrays.

        Args:
            partitioner: The mesh and its rules.
            dtype: Ignored, because tiny decoders compute in float32.
        """
        return with_shardings(_shapes(self.config), partitioner)

    def load(self, partitioner: Partitioner, dtype: DTypeLike = jnp.float32) -> TinyDecoder:
        """Load the network; raise WanjaxError if a tensor is missing, unknown or of another shape.

        Args:
            partitioner: The mesh and its rules.
            dtype: Ignored, because tiny decoders compute in float32.
        """
        return self._load(self.shapes(partitioner), lambda tensors: tensors)

    def load_for_previews(self) -> TinyDecoder:
        """Load the decoder for previews, with one frame per latent frame, onto JAX's default device.

        Raises the errors of `load`.
        """
        config = self.config._replace(frame_factors=(1,) * len(self.config.frame_factors))
        return self._load(_shapes(config), taehv.last_frames)

    def _load(self, shapes: TinyDecoder, select: Callable[[Any], Any]) -> TinyDecoder:
        tensors_file = open_tensors(self.file)
        names = [name for name in tensors_file.specs if name.startswith("decoder.")]
        try:
            tensors = Tensors(select({name: tensors_file.read(name) for name in names}))
            return modules.load(shapes, taehv.rules(), tensors)
        except WanjaxError as error:
            raise WanjaxError(f"{self.file} is no tiny decoder for this model: {error}") from error


def _shapes(config: TinyDecoderConfig) -> TinyDecoder:
    make = partial(TinyDecoder, config, dtype=jnp.float32, param_dtype=jnp.float32)
    return as_shapes(lambda rngs: make(rngs=rngs))


MAX_PREVIEW_HEIGHT = 256  # in pixels: fewer levels of the decoder double the size if the preview would be larger


class TinyDecoderPreview:
    """Previews of latents by a tiny decoder, computed on JAX's default device."""

    def __init__(self, network: TinyDecoder):
        self.network = network
        graphdef, self._weights = nnx.split(network)

        @jax.jit
        def decode(weights: Any, latents: jax.Array) -> jax.Array:
            return decode_pictures(nnx.merge(graphdef, weights), latents, MAX_PREVIEW_HEIGHT)

        self._decode = decode

    def pictures(self, latents: Float[Array | np.ndarray, "B C T H W"]) -> UInt8[np.ndarray, "B T _H _W 3"]:
        """Decode one picture for each latent frame of each video."""
        pictures = self._decode(self._weights, jnp.asarray(np.asarray(latents), jnp.float32))
        return np.round(255 * np.asarray(pictures)).astype(np.uint8)


def read_tiny_decoder(file: str | Path, channels: int) -> TinyDecoderPreview:
    """Load a TAEHV decoder for previews.

    Args:
        file: A .pth or .safetensors file.
        channels: The number of channels of the latents.

    Raises:
        WanjaxError: The file has no decoder for such latents.
    """
    return TinyDecoderPreview(TinyDecoderFile.read(file, channels).load_for_previews())
