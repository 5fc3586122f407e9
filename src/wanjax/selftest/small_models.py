# SPDX-License-Identifier: Apache-2.0
"""Small models of each family: a published model's architecture, narrow and of two layers, with random weights.

The weights depend on their published names and on nothing else, so that they are the same on every machine and stay
the same when the code is rearranged. Heads keep their published size, which decides which kernels a device uses.
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
from wanjax.registry import Outline
from wanjax.sharding import Partitioner

TEXT = {"vocab_size": 512, "width": 64, "mlp_dim": 128, "layers": 2, "heads": 2}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "text_encoder": TEXT | {"kv_heads": 1},
    "text_encoder_2": TEXT,
    "image_encoder": {"width": 64, "mlp_dim": 128, "layers": 2, "heads": 2, "image_size": 28},
    "transformer": {
        "layers": 2, "refiner_layers": 1, "heads": 2, "mlp_dim": 256, "refiner_mlp_dim": 256, "text_width": 64,
        "glyph_width": 64, "glyph_mlp_dim": 64, "image_width": 64, "time_width": 64,
    },
    "vae": {"width": 16, "decoder_width": 16, "res_blocks": 1, "groups": 8},
}  # fmt: skip
"""Entries of the configs of networks, where a network has them."""
CHANNELS = 16  # the divisor of an autoencoder's channels where they are given level by level

VIDEO: Mapping[str, Any] = {"height": 128, "width": 192, "frames": 9, "steps": 2, "seed": 0}


@cache
def model_names() -> list[str]:
    """Return the published models whose small ones are run: together they have every kind of network and attention."""
    parts: dict[str, frozenset[type]] = {}
    for preset in registry.presets().values():
        if preset.model is not None:
            spec = preset.model.spec
            parts[preset.name] = frozenset(map(type, (*spec.networks.values(), spec.attention(AUTO).sparse)))
    largest = {kinds for kinds in parts.values() if not any(kinds < others for others in parts.values())}
    first = {kinds: name for name, kinds in reversed(parts.items())}
    return [name for name, kinds in parts.items() if kinds in largest and first[kinds] == name]


def small_outline(name: str, dtype: str) -> Outline:
    """Return the outline of a published model, narrow and shallow, with the settings of a short video."""
    outline = registry.outline(name)
    model, networks = outline.model, outline.model.spec.networks
    small = {
        entry.name: shrunk(entry.name, getattr(model, entry.name)) for entry in fields(model) if entry.name in networks
    }
    settings = outline.settings.updated({**VIDEO, "dtype": dtype, "vae_dtype": dtype})
    if model.spec.streams:  # two chunks
        settings = settings.updated({"frames": 1 + model.vae.temporal_factor * (2 * model.spec.chunk_frames - 1)})
    return replace(outline, model=replace(model, **small), settings=settings)


def shrunk(name: str, config: Any) -> Any:
    """Return the config of a network, narrow and shallow."""
    entries = {entry.name for entry in fields(config)}
    sizes = {entry: size for entry, size in SIZES[name].items() if entry in entries}
    if "channels" in entries:
        sizes["channels"] = tuple(channels // CHANNELS for channels in config.channels)
    return replace(config, **sizes)


def small_pipeline(name: str, partitioner: Partitioner, dtype: str = "float32") -> Pipeline:
    """Return the pipeline of a small model with random weights."""
    outline = small_outline(name, dtype)
    pipe = abstract_pipeline(outline, partitioner, param_dtype=dtype)
    pipe.progress = False
    shapes = pipe.components.abstract()
    for component, config in outline.model.spec.networks.items():
        network = outline.family.network_of(config)
        weights = RandomWeights(network.specs)
        filled = modules.load(shapes.get(component), network.rules, weights, ignore=network.unused)
        pipe.components.override(component, filled)
    return pipe


class RandomWeights:
    """A checkpoint's tensors, each drawn from a generator of its own, which its name seeds."""

    def __init__(self, specs: Mapping[str, Spec]):
        self.specs = specs

    def read(self, key: str) -> np.ndarray:
        shape = self.specs[key].shape
        spread = 0.5 if len(shape) < 2 else 1 / math.sqrt(math.prod(shape[1:]))  # which keeps what passes of its size
        return random_array(key, shape, spread)


def random_array(name: str, shape: tuple[int, ...], spread: float = 1.0) -> np.ndarray:
    """Return normal numbers in float32 that depend on a name: on every machine the same, in every release of NumPy."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    return (spread * random.standard_normal(shape)).astype(np.float32)


def random_inputs(inputs: tuple[InputSpec, ...], settings: Settings) -> dict[str, Any]:
    """Return pictures and clips of random colours for the inputs that a model takes, of the video's own size."""
    still = (*settings.size, 3)

    def colours(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.clip(128 + 50 * random_array(name, shape), 0, 255).astype(np.uint8)

    pictures: dict[str, Any] = {}
    for one in inputs:
        if one.kind in ("clip", "mask"):
            pictures[one.name] = colours(one.name, (settings.frames, *still))
        else:
            pictures[one.name] = [colours(one.name, still)] if one.kind == "images" else colours(one.name, still)
    return pictures


def stages(pipe: Pipeline) -> dict[str, np.ndarray]:
    """Return what each stage of a video of random inputs leaves: the encodings, the latents and the frames."""
    settings = pipe.defaults
    needed = tuple(one for one in pipe.model.spec.inputs if one.required or one.name == "video")
    conditioning = pipe.encode("a prompt", size=settings.size, **random_inputs(needed, settings))
    latents = pipe.denoise(conditioning)
    frames = pipe.decode(latents, jnp.float32)
    encodings = [np.asarray(x, np.float64).ravel() for x in conditioning if isinstance(x, jnp.ndarray)]
    return {"encode": np.concatenate(encodings), "denoise": np.asarray(latents), "decode": np.asarray(frames)}
