# SPDX-License-Identifier: Apache-2.0
"""Small models of each family: published architectures with small widths, two layers and random weights.

The weights depend only on their published names. The weights are therefore the same on every machine, and stay the same
when the code changes. A small model has the published model's head size, because the head size decides which kernels a
device uses.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from wanjax import registry
from wanjax.checkpoints import modules
from wanjax.checkpoints.files import Spec
from wanjax.kernels.attention import AUTO
from wanjax.loading import abstract_pipeline
from wanjax.media.inputs import InputSpec
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings
from wanjax.registry import ModelDescription
from wanjax.sharding import Partitioner

TEXT_ENCODER = {"vocab_size": 512, "width": 64, "mlp_dim": 128, "layers": 2, "heads": 2}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "text_encoder": TEXT_ENCODER | {"kv_heads": 1},
    "text_encoder_2": TEXT_ENCODER,
    "image_encoder": {"width": 64, "mlp_dim": 128, "layers": 2, "heads": 2, "image_size": 28},
    "transformer": {
        "layers": 2, "refiner_layers": 1, "heads": 2, "mlp_dim": 256, "refiner_mlp_dim": 256, "text_width": 64,
        "glyph_width": 64, "glyph_mlp_dim": 64, "image_width": 64, "time_width": 64,
        "face_size": 32, "motion_channels": (16, 16, 16, 16), "motion_width": 32, "face_width": 32, "face_stride": 1,
    },
    "vae": {"width": 16, "decoder_width": 16, "res_blocks": 1, "groups": 8},
}  # fmt: skip
"""Replacements for entries of networks' configs. Entries that a config does not have are ignored."""
CHANNELS_DIVISOR = 16  # replaces the tuple of channels in an autoencoder's config

VIDEO: Mapping[str, Any] = {"height": 128, "width": 192, "frames": 9, "steps": 2, "seed": 0}


@cache
def model_names() -> list[str]:
    """Select published models that together have every kind of network and attention."""
    kinds_by_model: dict[str, frozenset[type]] = {}
    for preset in registry.presets().values():
        if preset.model is not None:
            spec = preset.model.spec
            kinds_by_model[preset.name] = frozenset(
                map(type, (*spec.networks.values(), spec.resolve_attention(AUTO).sparse))
            )
    all_kinds = kinds_by_model.values()
    maximal = {kinds for kinds in all_kinds if not any(kinds < others for others in all_kinds)}
    first_model = {kinds: name for name, kinds in reversed(kinds_by_model.items())}
    return [name for name, kinds in kinds_by_model.items() if kinds in maximal and first_model[kinds] == name]


def describe_small_model(name: str, dtype: str) -> ModelDescription:
    """Create the description of a small version of a published model, with the settings of a short video."""
    description = registry.model_description(name)
    model, networks = description.model, description.model.spec.networks
    small_configs = {
        entry.name: shrink(entry.name, getattr(model, entry.name)) for entry in fields(model) if entry.name in networks
    }
    settings = description.settings.updated({**VIDEO, "dtype": dtype, "vae_dtype": dtype})
    if model.spec.is_chunked:  # two chunks
        settings = settings.updated({"frames": 1 + model.vae.temporal_factor * (2 * model.spec.chunk_frames - 1)})
    return replace(description, model=replace(model, **small_configs), settings=settings)


def shrink(name: str, config: Any) -> Any:
    """Reduce the width and the number of layers in the config of a network."""
    entries = {entry.name for entry in fields(config)}
    sizes = {entry: size for entry, size in SIZES[name].items() if entry in entries}
    if "channels" in entries:
        sizes["channels"] = tuple(channels // CHANNELS_DIVISOR for channels in config.channels)
    return replace(config, **sizes)


def small_pipeline(name: str, partitioner: Partitioner, dtype: str = "float32") -> Pipeline:
    """Make a pipeline of a small model with random weights."""
    description = describe_small_model(name, dtype)
    pipe = abstract_pipeline(description, partitioner, param_dtype=dtype)
    pipe.progress = False
    shapes = pipe.components.abstract()
    for component, config in description.model.spec.networks.items():
        network = description.family.network_of(config)
        weights = RandomWeights(network.specs)
        loaded_network = modules.load(shapes.get(component), network.rules, weights, ignore=network.unused)
        pipe.components.override(component, loaded_network)
    return pipe


class RandomWeights:
    """Random tensors in place of a checkpoint. The name of a tensor seeds the generator of its numbers."""

    def __init__(self, specs: Mapping[str, Spec]):
        self.specs = specs

    def read(self, key: str) -> np.ndarray:
        shape = self.specs[key].shape
        deviation = 0.5 if len(shape) < 2 else 1 / math.sqrt(math.prod(shape[1:]))  # keeps activations near 1
        return random_array(key, shape, deviation)


def random_array(name: str, shape: tuple[int, ...], deviation: float = 1.0) -> np.ndarray:
    """Draw normally distributed float32 numbers, seeded by a name.

    The numbers are the same on every machine and in every release of NumPy.
    """
    random = np.random.RandomState(zlib.crc32(name.encode()))
    return (deviation * random.standard_normal(shape)).astype(np.float32)


def random_inputs(inputs: tuple[InputSpec, ...], settings: Settings) -> dict[str, Any]:
    """Create images and clips of random colours for the inputs of a model, in the size of the video."""
    image_shape = (*settings.size, 3)

    def random_colours(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.clip(128 + 50 * random_array(name, shape), 0, 255).astype(np.uint8)

    pictures: dict[str, Any] = {}
    for spec in inputs:
        if spec.kind in ("clip", "mask"):
            pictures[spec.name] = random_colours(spec.name, (settings.frames, *image_shape))
        else:
            image = random_colours(spec.name, image_shape)
            pictures[spec.name] = [image] if spec.kind == "images" else image
    return pictures


def run_stages(pipe: Pipeline) -> dict[str, np.ndarray]:
    """Make a video of random inputs; return the results of its stages: encodings, latents and frames."""
    settings = pipe.defaults
    input_specs = tuple(spec for spec in pipe.model.spec.inputs if spec.required or spec.name == "video")
    conditioning = pipe.encode("a prompt", size=settings.size, **random_inputs(input_specs, settings))
    latents = pipe.denoise(conditioning)
    frames = pipe.decode(latents, jnp.float32)
    encodings = [np.asarray(x, np.float64).ravel() for x in conditioning if isinstance(x, jnp.ndarray)]
    return {"encode": np.concatenate(encodings), "denoise": np.asarray(latents), "decode": np.asarray(frames)}
