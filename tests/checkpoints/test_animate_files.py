# SPDX-License-Identifier: Apache-2.0
"""Files of Wan Animate 2 have the tensors of image to video, so other marks distinguish them."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.comfy_files import convrot, json_bytes
from tests.support.published import animate_keys, transformer_keys
from wanjax.checkpoints import modules
from wanjax.checkpoints.files import Tensors, save_safetensors
from wanjax.checkpoints.network_kinds import network, read_network
from wanjax.converters.wan import animate, original
from wanjax.models.wan.config import AnimateTransformerConfig
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import inspect_checkpoint, open_source

JSON = {
    "_class_name": "WanAnimate2Transformer3DModel", "patch_size": [1, 2, 2], "in_dim": 36, "dim": 24, "ffn_dim": 16,
    "freq_dim": 8, "text_dim": 8, "out_dim": 16, "num_heads": 1, "num_layers": 2, "eps": 1e-6,
}  # fmt: skip
HEADER = {"config": json.dumps({"transformer": {"model_type": "animate2"}})}


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    """Return random tensors by the names of diffusers' image-to-video class."""
    random = np.random.default_rng(0)
    specs = read_network(JSON["_class_name"], JSON, NETWORKS).specs
    return {name: random.normal(size=spec.shape).astype(np.float32) for name, spec in specs.items()}


def with_names_of_the_authors(tensors: dict[str, np.ndarray], level: str = ".") -> dict[str, np.ndarray]:
    names = {name: original.TRANSFORMER.to_authors(name) or "" for name in tensors}
    return {re.sub(r"(blocks\.\d+)\.", rf"\1{level}", names[name]): x for name, x in tensors.items()}


def weights(source: Any) -> list[np.ndarray]:
    """Return the parameters of a checkpoint's transformer."""
    kind = network(source, "transformer", NETWORKS)
    assert isinstance(kind.config, AnimateTransformerConfig)
    abstract = kind.abstract(dtype=jnp.float32, param_dtype=jnp.float32)
    return list(map(np.asarray, jax.tree.leaves(modules.load(abstract, kind.rules, source["transformer"].weights()))))


@pytest.mark.parametrize(
    ("name", "header", "level", "scheduler"),
    [
        ("bf16.safetensors", HEADER, ".", "DPMSolverMultistepScheduler"),
        ("wan_animate_2_bf16.safetensors", {}, ".", "DPMSolverMultistepScheduler"),
        ("model_distill_bf16.safetensors", HEADER, ".", "FlowMatchEulerDiscreteScheduler"),
        ("bf16_distillation.safetensors", {}, ".block.", "FlowMatchEulerDiscreteScheduler"),
    ],
)
def test_a_file_is_recognised_by_its_header_blocks_or_name(tensors, tmp_path, name, header, level, scheduler):
    save_safetensors(tmp_path / name, with_names_of_the_authors(tensors, level), header)
    source = open_source(tmp_path / name)
    assert source.index["_class_name"] == "WanAnimate2Pipeline"
    assert source["scheduler"].config()["_class_name"] == scheduler
    reader = Tensors(tensors)
    expected = read_network(JSON["_class_name"], JSON, NETWORKS)
    abstract = expected.abstract(dtype=jnp.float32, param_dtype=jnp.float32)
    exact_weights = jax.tree.leaves(modules.load(abstract, expected.rules, reader))
    for result, exact in zip(weights(source), exact_weights, strict=True):
        np.testing.assert_array_equal(result, exact)


def test_integers_with_rotated_groups_are_dequantized(tmp_path):
    """Comfy-Org's smaller file has the linear layers of the blocks in 8 bits (ConvRot)."""
    config = JSON | {"dim": 64, "ffn_dim": 128, "freq_dim": 64, "text_dim": 64}
    kind = read_network(JSON["_class_name"], config, NETWORKS)
    random, exact_tensors, tensors = np.random.default_rng(0), {}, {}
    for name, spec in kind.specs.items():
        x = random.normal(size=spec.shape).astype(np.float32)
        [stored] = with_names_of_the_authors({name: x})
        if x.ndim == 2 and re.fullmatch(r"blocks\.\d+\.(self_attn|cross_attn|ffn)\..*weight", stored):
            layer = stored.removesuffix(".weight")
            integers, entries, x = convrot(layer, x, 64)
            tensors |= integers | {f"{layer}.comfy_quant": json_bytes(**entries)}
        else:
            tensors[stored] = x
        exact_tensors[name] = x.astype(np.float32)
    assert sum(x.dtype == np.int8 for x in tensors.values()) == 24  # 12 layers of each block
    save_safetensors(tmp_path / "wan_animate_2_distill_int8_convrot.safetensors", tensors, HEADER)
    source = open_source(tmp_path / "wan_animate_2_distill_int8_convrot.safetensors")
    assert source["scheduler"].config()["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    abstract = kind.abstract(dtype=jnp.float32, param_dtype=jnp.float32)
    exact_weights = jax.tree.leaves(modules.load(abstract, kind.rules, Tensors(exact_tensors)))
    for result, exact in zip(weights(source), exact_weights, strict=True):
        np.testing.assert_allclose(result, exact, rtol=2**-9, atol=1e-6 * np.abs(exact).max())


def test_a_file_without_a_mark_is_image_to_video(tensors, tmp_path):
    save_safetensors(tmp_path / "wan_i2v.safetensors", with_names_of_the_authors(tensors), {"config": "{}"})
    assert open_source(tmp_path / "wan_i2v.safetensors").index["_class_name"] == "WanImageToVideoPipeline"


def write_published(folder: Path, tensors: dict[str, np.ndarray], scheduler: dict[str, Any]) -> Path:
    """Write a transformer and a scheduler as diffusers publishes them."""
    config = animate.transformer_config(JSON)
    names = dict(zip(tensors_in_order(tensors, config), animate_keys(config), strict=True))
    for part in ("transformer", "scheduler", "vae"):
        (folder / part).mkdir(parents=True)
    classes = {"transformer": ["diffusers", JSON["_class_name"]], "scheduler": ["diffusers", scheduler["_class_name"]]}
    index = {"_class_name": "WanAnimate2Pipeline", "vae": ["diffusers", "AutoencoderKLWan"], **classes}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "transformer" / "config.json").write_text(json.dumps(JSON))
    vae = {
        "_class_name": "AutoencoderKLWan", "base_dim": 4, "z_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1,
        "attn_scales": [], "temperal_downsample": [False, True, True], "latents_mean": [0.1] * 16,
        "latents_std": [1.1] * 16,
    }  # fmt: skip
    (folder / "vae" / "config.json").write_text(json.dumps(vae))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    save_safetensors(file, {names[name]: x for name, x in tensors.items()})
    return folder


def tensors_in_order(tensors: dict[str, np.ndarray], config: AnimateTransformerConfig) -> list[str]:
    """Return the original names of the tensors in the order of `animate_keys`."""
    assert transformer_keys(config).keys() == tensors.keys()
    return list(transformer_keys(config))


@pytest.mark.parametrize(
    ("scheduler", "distilled", "steps"),
    [
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}, True, 10),
        (
            {
                "_class_name": "DPMSolverMultistepScheduler", "flow_shift": 5.0, "use_flow_sigmas": True,
                "prediction_type": "flow_prediction",
            },
            False, 40,
        ),
    ],
)  # fmt: skip
def test_diffusers_folders_are_distinguished_by_their_scheduler(tensors, tmp_path, scheduler, distilled, steps):
    folder = write_published(tmp_path / "checkpoint", tensors, scheduler)
    checkpoint = inspect_checkpoint(folder)
    assert checkpoint.model.distilled == distilled
    assert (checkpoint.settings.steps, checkpoint.settings.fps) == (steps, 24)
    save_safetensors(tmp_path / "animate_2.safetensors", with_names_of_the_authors(tensors))
    expected = weights(open_source(tmp_path / "animate_2.safetensors"))
    for result, exact in zip(weights(checkpoint.source), expected, strict=True):
        np.testing.assert_array_equal(result, exact)
