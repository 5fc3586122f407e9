# SPDX-License-Identifier: Apache-2.0
"""Files with a decoder that replaces the decoder of a model's autoencoder.

A file holds a tiny decoder of TAEHV, or an autoencoder such as the pruned LightVAE (lightx2v/Autoencoders). The
autoencoder has the kind and the latents of the model's own autoencoder. Only its decoder runs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from wanjax.checkpoints import modules
from wanjax.checkpoints.files import TensorReader
from wanjax.checkpoints.network_kinds import Network, read_network
from wanjax.checkpoints.readers import open_tensors
from wanjax.errors import WanjaxError
from wanjax.layers.placement import with_shardings
from wanjax.pipelines.family import Family
from wanjax.pipelines.tiny_decoder import TinyDecoderFile
from wanjax.sharding import Partitioner


@dataclass(frozen=True)
class VaeFile:
    """A file with an autoencoder of the same kind as the model's. Its weights are stored in float32.

    Attributes:
        file: The file.
        network: The autoencoder.
        reader: The autoencoder's tensors.
    """

    file: Path
    network: Network
    reader: TensorReader

    def shapes(self, partitioner: Partitioner, dtype: DTypeLike) -> nnx.Module:
        """Return the network with shapes and shardings in place of arrays.

        Args:
            partitioner: The mesh and its rules.
            dtype: The dtype in which the network computes.
        """
        return with_shardings(self.network.abstract(dtype=dtype, param_dtype=jnp.float32), partitioner)

    def load(self, partitioner: Partitioner, dtype: DTypeLike) -> nnx.Module:
        """Load the network; raise WanjaxError if a tensor is missing, unknown or of another shape.

        Args:
            partitioner: The mesh and its rules.
            dtype: The dtype in which the network computes.
        """
        shapes = self.shapes(partitioner, dtype)
        return modules.load(shapes, self.network.rules, self.reader, ignore=self.network.unused)


DecoderFile = TinyDecoderFile | VaeFile


def read_decoder(file: str | Path, vae: Any, family: Family) -> DecoderFile:
    """Find out from the names and shapes of its tensors which decoder a file has.

    Args:
        file: The file.
        vae: The config of the autoencoder whose decoder is replaced.
        family: The family of the model.

    Raises:
        WanjaxError: The file has no decoder, or its decoder needs other latents or makes frames of another size.
    """
    recognised = family.find_autoencoder(open_tensors(file), vae)
    if recognised is None:
        tiny = TinyDecoderFile.read(file, vae.latent_channels)
        _check_fits(file, tiny.config, vae)
        return tiny
    network = read_network(recognised.json["_class_name"], recognised.json, family.networks, str(file))
    _check_fits(file, network.config, vae)
    return VaeFile(Path(file).expanduser(), network, recognised.weights)


def _check_fits(file: str | Path, decoder: Any, vae: Any) -> None:
    """Raise WanjaxError unless a decoder makes frames of the same size as an autoencoder, from the same latents.

    Args:
        file: The decoder's file.
        decoder: The config of the decoder.
        vae: The config of the autoencoder.
    """
    units = {
        "latent_channels": "decodes latents of {} channels, but the model's latents have {}",
        "spatial_factor": "decodes a latent position to {} pixels per side, but the model's own decoder to {}",
        "temporal_factor": "makes {} frames for each latent frame, but the model's own decoder {}",
    }
    for name, mismatch in units.items():
        if (value := getattr(decoder, name)) != (expected := getattr(vae, name)):
            raise WanjaxError(f"{file} holds no decoder for this model: it {mismatch.format(value, expected)}")
