# SPDX-License-Identifier: Apache-2.0
"""Files of Wan Animate: the authors' names, also as ComfyUI prefixes them, and diffusers' names."""

import functools
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support.tiny import tiny_pose_checkpoint
from tests.support.words import line_with_words
from wanjax.checkpoints import modules
from wanjax.checkpoints.files import Tensors, save_safetensors
from wanjax.checkpoints.network_kinds import network, read_network
from wanjax.converters.wan import original, pose
from wanjax.errors import WanjaxError
from wanjax.models.wan.config import POSE_14B, PoseTransformerConfig
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.registry import open_source

JSON = {
    "_class_name": "WanAnimateTransformer3DModel", "patch_size": [1, 2, 2], "in_channels": 36, "latent_channels": 16,
    "out_channels": 16, "num_attention_heads": 1, "attention_head_dim": 24, "ffn_dim": 16, "freq_dim": 8, "text_dim": 8,
    "num_layers": 4, "eps": 1e-6, "image_dim": 16, "added_kv_proj_dim": 24, "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads", "pos_embed_seq_len": None, "inject_face_latents_blocks": 2,
    "motion_encoder_size": 512, "motion_style_dim": 6, "motion_dim": 3, "motion_encoder_dim": 7,
    "motion_encoder_channel_sizes": {str(4 << i): 9 - i for i in range(8)}, "face_encoder_hidden_dim": 4,
    "face_encoder_num_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    """Return random tensors by diffusers' names."""
    random = np.random.default_rng(0)
    specs = read_network(JSON["_class_name"], JSON, NETWORKS).specs
    return {name: random.normal(size=spec.shape).astype(np.float32) for name, spec in specs.items()}


def with_names_of_the_authors(tensors: dict[str, np.ndarray], prefix: str = "") -> dict[str, np.ndarray]:
    """Return tensors in the authors' layout, independently of the library: names, fused keys and values, filters."""
    renamed: dict[str, np.ndarray] = {}
    for name, x in tensors.items():
        if match := re.fullmatch(r"motion_encoder\.res_blocks\.(\d)\.(\w+?)(\.act_fn)?\.(weight|bias)", name):
            index = {"conv1": 0, "conv2": 1, "conv_skip": 1}[match[2]] + (match[3] is not None)
            part = match[2].replace("conv_", "")
            key = f"motion_encoder.enc.net_app.convs.{int(match[1]) + 1}.{part}.{index}.{match[4]}"
        elif match := re.fullmatch(r"face_adapter\.(\d)\.(\w+)\.(weight|bias)", name):
            parts = {"to_q": "linear1_q", "to_k": "k", "to_v": "v", "to_out": "linear2"}
            part = (parts | {"norm_q": "q_norm", "norm_k": "k_norm"})[match[2]]
            key = f"face_adapter.fuser_blocks.{match[1]}.{part}.{match[3]}"
        elif match := re.fullmatch(r"face_encoder\.(conv\w+)\.(weight|bias)", name):
            key = f"face_encoder.{match[1]}.conv.{match[2]}"
        elif name.startswith("motion_encoder.motion_network."):
            key = name.replace("motion_network", "enc.fc")
        else:
            key = (
                {
                    "motion_encoder.conv_in.weight": "motion_encoder.enc.net_app.convs.0.0.weight",
                    "motion_encoder.conv_in.act_fn.bias": "motion_encoder.enc.net_app.convs.0.1.bias",
                    "motion_encoder.conv_out.weight": "motion_encoder.enc.net_app.convs.8.weight",
                    "motion_encoder.motion_synthesis_weight": "motion_encoder.dec.direction.weight",
                }.get(name)
                or original.TRANSFORMER.to_authors(name)
                or name
            )
        renamed[key] = x[None, :, None, None] if "act_fn" in name else x
    for key in [key for key in renamed if re.search(r"fuser_blocks\.\d\.k\.", key)]:
        fused = np.concatenate([renamed.pop(key), renamed.pop(key.replace(".k.", ".v."))])
        renamed[key.replace(".k.", ".linear1_kv.")] = fused
    for i in range(1, 8):
        for layer in ("conv2", "skip"):
            renamed[f"motion_encoder.enc.net_app.convs.{i}.{layer}.0.kernel"] = np.ones((4, 4), np.float32)
    return {prefix + key: x for key, x in renamed.items()}


def weights(source: Any) -> list[np.ndarray]:
    """Return the parameters of a checkpoint's transformer."""
    kind = network(source, "transformer", NETWORKS)
    assert isinstance(kind.config, PoseTransformerConfig)
    abstract = kind.abstract(dtype=jnp.float32, param_dtype=jnp.float32)
    return list(map(np.asarray, jax.tree.leaves(modules.load(abstract, kind.rules, source["transformer"].weights()))))


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", None])
def test_files_of_the_authors_and_of_diffusers_give_equal_weights(tensors, tmp_path, prefix):
    file = tmp_path / "wan_animate.safetensors"
    save_safetensors(file, tensors if prefix is None else with_names_of_the_authors(tensors, prefix))
    source = open_source(file)
    assert source.index["_class_name"] == "WanAnimatePipeline"
    assert {"image_encoder", "image_processor"} <= source.index.keys()
    scheduler = source["scheduler"].config()
    assert (scheduler["_class_name"], scheduler["flow_shift"]) == ("UniPCMultistepScheduler", 5.0)
    expected = read_network(JSON["_class_name"], JSON, NETWORKS)
    config = network(source, "transformer", NETWORKS).config
    assert asdict(config) | {"head_dim": 24, "heads": 1} == asdict(expected.config)
    abstract = expected.abstract(dtype=jnp.float32, param_dtype=jnp.float32)
    exact_weights = jax.tree.leaves(modules.load(abstract, expected.rules, Tensors(tensors)))
    for result, exact in zip(weights(source), exact_weights, strict=True):
        np.testing.assert_array_equal(result, exact)


def test_a_folder_of_the_authors_is_read(tensors, tmp_path):
    (tmp_path / "config.json").write_text('{"_class_name": "WanAnimateModel", "num_heads": 1, "eps": 1e-06}')
    save_safetensors(tmp_path / "diffusion_pytorch_model.safetensors", with_names_of_the_authors(tensors))
    source = open_source(tmp_path)
    assert source.index["_class_name"] == "WanAnimatePipeline"
    assert len(weights(source)) == len(
        jax.tree.leaves(
            read_network(JSON["_class_name"], JSON, NETWORKS).abstract(dtype=jnp.float32, param_dtype=jnp.float32)
        )
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inject_face_latents_blocks": 3}, "inject_face_latents_blocks 3 divisor 4"),
        ({"motion_encoder_size": 500}, "motion_encoder_size 500 power of two"),
        ({"image_dim": None, "added_kv_proj_dim": None}, "image_dim"),
        ({"pos_embed_seq_len": 514}, "pos_embed_seq_len 514"),
        ({"motion_dim": 0}, "motion_dim 0"),
    ],
)
def test_invalid_configs_are_refused(changes, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read_network(JSON["_class_name"], JSON | changes, NETWORKS)


def test_a_config_may_omit_sizes():
    """The channels of the motion encoder have published defaults; one number of channels follows from the other."""
    changes = {"motion_encoder_channel_sizes": None, "in_channels": None}
    config = read_network(JSON["_class_name"], JSON | changes, NETWORKS).config
    assert (config.motion_channels, config.channels_in) == (POSE_14B.motion_channels, 36)
    assert pose.transformer_config(JSON | changes | {"motion_encoder_size": 1024}).motion_channels[0] == 16


def test_a_lora_may_change_adapters_of_the_face(tmp_path):
    """The names are those of the authors."""
    random = np.random.default_rng(0)
    folder = tiny_pose_checkpoint(tmp_path / "model")
    layers = {"blocks.1.cross_attn.k_img": (24, 24), "face_adapter.fuser_blocks.1.linear1_q": (24, 24)}
    factors = {
        f"diffusion_model.{layer}.lora_{name}.weight": random.normal(size=shape).astype(np.float32)
        for layer, (rows, columns) in layers.items()
        for name, shape in (("A", (2, columns)), ("B", (rows, 2)))
    }
    save_safetensors(tmp_path / "lora.safetensors", factors)
    base = wanjax.load(folder, dtype="float32").transformer
    merged = wanjax.load(folder, lora=tmp_path / "lora.safetensors", dtype="float32").transformer
    for layer, stack in (("image_k", "blocks.cross_attn"), ("q", "face_adapters")):
        before, after = (np.asarray(submodule(x, f"{stack}.{layer}").kernel[...]) for x in (base, merged))
        name = next(name for name in layers if name.startswith(stack.partition(".")[0].removesuffix("s")))
        product = factors[f"diffusion_model.{name}.lora_B.weight"] @ factors[f"diffusion_model.{name}.lora_A.weight"]
        np.testing.assert_array_equal(before[0], after[0])
        np.testing.assert_allclose(after[1] - before[1], product.T, atol=1e-5)


def submodule(module: Any, path: str) -> Any:
    """Return the part of a module at a path of names with dots between them."""
    return functools.reduce(getattr, path.split("."), module)


def test_a_file_without_the_face_encoder_is_refused(tensors, tmp_path):
    file: Path = tmp_path / "wan_animate.safetensors"
    part = {name: x for name, x in tensors.items() if not name.startswith("face_encoder.")}
    save_safetensors(file, with_names_of_the_authors(part))
    with pytest.raises(WanjaxError, match=line_with_words("face_encoder")):
        open_source(file)
