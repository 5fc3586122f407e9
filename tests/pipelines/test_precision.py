# SPDX-License-Identifier: Apache-2.0
"""Precisions: the quantized layers, and the difference to float weights."""

from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import wanjax
from tests.support import tiny
from tests.support.compare import error
from tests.support.quick import quick
from wanjax.checkpoints.convert import ConversionToWanjax
from wanjax.checkpoints.files import save_safetensors
from wanjax.layers.linear import Linear
from wanjax.layers.placement import as_shapes
from wanjax.layers.precision import PRECISIONS
from wanjax.layers.quantized import QuantizedLinear, quantize_layers
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import FAMILIES, open_source

TRANSFORMERS = {
    (type(config), getattr(config, "sparse_linear", None) is not None): (kind, config)
    for family in FAMILIES
    for preset in family.presets
    if preset.model
    for config in preset.model.spec.networks.values()
    if (kind := family.network_of(config).kind).full_precision is not None
}
MODELS = {
    "wan": tiny.tiny_checkpoint,
    "wan-vace": tiny.tiny_control_checkpoint,
    "wan-experts": tiny.tiny_experts_checkpoint,
    "wan-causal": tiny.tiny_causal_checkpoint,
    "wan-sparse": tiny.tiny_sparse_linear_checkpoint,
    "cogvideox": tiny.tiny_cogvideox_checkpoint,
    "hunyuanvideo": tiny.tiny_hunyuan_checkpoint,
}
BOUNDS = {"int8-weights": 0.01, "int8": 0.03, "fp8-weights": 0.05, "fp8": 0.05}
SMALL = {"size": (32, 48), "frames": 5, "steps": 2}


def linears(network):
    modules = nnx.iter_modules(network)
    return {".".join(map(str, path)): x for path, x in modules if isinstance(x, Linear | QuantizedLinear)}


def shapes_of(kind, config):
    kw = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    return as_shapes(lambda rngs: kind.modules[type(config)](config, **kw, rngs=rngs))


@pytest.mark.parametrize(
    "key", TRANSFORMERS, ids=lambda key: f"{key[0].__module__.split('.')[2]}-{key[0].__name__}-{key[1]}"
)
def test_most_weights_of_every_transformer_are_quantized(key):
    """Layers that compute in float32, and the first and the last projection, are not quantized."""
    kind, config = TRANSFORMERS[key]
    layers: dict[str, Any] = linears(
        quantize_layers(shapes_of(kind, config), PRECISIONS["int8"], kind.full_precision or ())
    )
    linear_layers = {path for path, layer in layers.items() if isinstance(layer, Linear)}
    assert {"patch_embed", "proj_out"} <= linear_layers
    for path in layers.keys() - linear_layers:
        assert (layers[path].dtype, layers[path].hadamard_size) == (jnp.bfloat16, 256), path
    blocks = {path for path in layers if path.split(".")[0].endswith(("blocks", "block"))}
    assert blocks & linear_layers == {path for path in blocks if path.endswith(("mod", "proj_l"))} < blocks


def test_every_pattern_of_unquantized_layers_matches_a_layer():
    """Kinds of transformers of one family may share a table."""
    for family in FAMILIES:
        kinds = [kind for kind in family.networks if kind.full_precision is not None]
        transformers = [(kind, config) for kind, config in TRANSFORMERS.values() if kind in kinds]
        paths = {path for kind, config in transformers for path in linears(shapes_of(kind, config))}
        for pattern in {pattern for kind in kinds for pattern in kind.full_precision or ()}:
            assert any(fnmatchcase(path, pattern) for path in paths), (family.name, pattern)


def first_latents(pipe, conditioning):
    """Return the latents after the first step."""
    latents = []
    pipe.denoise(conditioning, callback=lambda step: latents.append(np.asarray(step.latents)), **SMALL)
    return latents[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folders = {}

    def folder(model):
        if model not in folders:
            folders[model] = MODELS[model](tmp_path_factory.mktemp(model))
        return folders[model]

    return folder


@pytest.mark.parametrize(
    ("model", "precision"),
    quick(
        [("wan", "int8"), ("cogvideox", "int8-weights")],
        [(m, p) for m in MODELS for p in BOUNDS],
    ),
)
def test_first_latents_are_close_to_those_of_floats(checkpoint, model, precision):
    floats, rounded = (wanjax.load(checkpoint(model), dtype="float32", precision=name) for name in (None, precision))
    conditioning = floats.encode("a red circle", **{k: v for k, v in SMALL.items() if k != "steps"})
    difference = error(first_latents(rounded, conditioning), first_latents(floats, conditioning))
    assert 1e-5 < difference <= BOUNDS[precision]
    assert rounded.defaults.precision == precision


@pytest.mark.parametrize("precision", quick(["int8-weights"], ["int8", "int8-weights"]))
def test_a_lora_has_the_same_effect_on_quantized_weights(checkpoint, precision, tmp_path):
    """The LoRA has the same effect on quantized weights as on float weights."""
    source, lora = checkpoint("wan"), str(tmp_path / "style.safetensors")
    assert ConversionToWanjax(
        open_source(source), tmp_path / "converted", NETWORKS, precision=PRECISIONS[precision]
    ).run()
    base = wanjax.load(source, dtype="float32")
    random, tensors = np.random.default_rng(0), {}
    for module in (f"blocks.{block}.{name}" for block in range(2) for name in ("self_attn.q", "self_attn.o", "ffn.2")):
        sizes = (24, 32 if module.endswith("ffn.2") else 24)
        tensors[f"diffusion_model.{module}.lora_up.weight"] = random.normal(size=(sizes[0], 2))
        tensors[f"diffusion_model.{module}.lora_down.weight"] = random.normal(size=(2, sizes[1]))
    save_safetensors(lora, {key: (0.4 * x).astype(np.float32) for key, x in tensors.items()})
    conditioning = base.encode("a red circle", **{k: v for k, v in SMALL.items() if k != "steps"})
    floats, rounded = (
        first_latents(wanjax.load(folder, lora=lora, dtype="float32"), conditioning)
        for folder in (source, tmp_path / "converted")
    )
    effect = error(floats, first_latents(base, conditioning))
    assert error(rounded, floats) <= BOUNDS[precision]
    assert error(rounded, floats) < 0.3 * effect
