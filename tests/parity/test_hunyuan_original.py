# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo in its authors' layout: the same weights by either layout's names, and configs read from shapes."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel

from tests.support.words import line_with_words
from wanjax.checkpoints.files import Spec, Tensors
from wanjax.converters.hunyuanvideo import diffusers as tables
from wanjax.converters.hunyuanvideo import original
from wanjax.errors import WanjaxError
from wanjax.models.hunyuanvideo.config import FEW_STEPS_480P, SIZE_720P
from wanjax.models.hunyuanvideo.vae_config import VAE_1_5
from wanjax.pipelines.hunyuanvideo import recognise

SMALL = {
    "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 32, "rope_axes_dim": (8, 12, 12),
    "text_embed_dim": 24, "text_embed_2_dim": 16, "image_embed_dim": 20, "in_channels": 9, "out_channels": 4,
    "mlp_ratio": 2.0, "use_meanflow": True,
}  # fmt: skip
AUTHORS_CONFIG = {"rope_dim_list": [8, 12, 12], "rope_theta": 256, "ideal_resolution": "720p", "use_meanflow": True}
TRANSFORMER_NAMES = {  # in the authors' code
    "img_in.proj.weight",
    "time_in.mlp.2.bias",
    "time_r_in.mlp.0.weight",
    "txt_in.t_embedder.mlp.0.weight",
    "txt_in.c_embedder.linear_2.weight",
    "txt_in.input_embedder.bias",
    "txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight",
    "txt_in.individual_token_refiner.blocks.0.self_attn_proj.bias",
    "txt_in.individual_token_refiner.blocks.0.mlp.fc2.weight",
    "txt_in.individual_token_refiner.blocks.1.adaLN_modulation.1.weight",
    "byt5_in.layernorm.weight",
    "byt5_in.fc3.weight",
    "vision_in.proj.4.bias",
    "cond_type_embedding.weight",
    "double_blocks.2.img_mod.linear.weight",
    "double_blocks.0.txt_attn_q_norm.weight",
    "double_blocks.1.img_attn_proj.weight",
    "double_blocks.1.txt_mlp.fc1.bias",
    "final_layer.adaLN_modulation.1.weight",
    "final_layer.linear.weight",
}
VAE_NAMES = {
    "encoder.conv_in.conv.weight",
    "encoder.down.4.block.1.norm2.gamma",
    "encoder.down.2.downsample.conv.conv.weight",
    "encoder.mid.block_1.conv1.conv.bias",
    "encoder.mid.attn_1.norm.gamma",
    "decoder.mid.attn_1.q.weight",
    "decoder.mid.attn_1.proj_out.bias",
    "decoder.up.4.block.2.conv2.conv.weight",
    "decoder.up.0.upsample.conv.conv.bias",
    "decoder.norm_out.gamma",
}


def tensors_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {key: x.numpy() for key, x in module.state_dict().items()}


def to_authors_layout(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a transformer's tensors in the authors' layout: q, k and v fused in the refiner, shifts first."""
    result = {}
    for key, x in tensors.items():
        if "token_refiner" in key and ".to_q." in key:
            name = key.replace(".to_q.", ".to_qkv.")
            x = np.concatenate([tensors[key.replace(".to_q.", f".to_{part}.")] for part in "qkv"])
        elif "token_refiner" in key and (".to_k." in key or ".to_v." in key):
            continue
        else:
            name = key
        if key.startswith("norm_out."):
            x = np.concatenate([x[len(x) // 2 :], x[: len(x) // 2]])
        result[original.TRANSFORMER.to_authors(name)] = x
    assert None not in result
    return result


def assert_same_tensors(result, expected: Mapping[str, np.ndarray]) -> None:
    assert result.specs.keys() == expected.keys()
    for key, x in expected.items():
        assert result.specs[key].shape == x.shape
        np.testing.assert_array_equal(result.read(key), x)


@pytest.fixture(scope="module")
def transformer() -> HunyuanVideo15Transformer3DModel:
    torch.manual_seed(0)
    return HunyuanVideo15Transformer3DModel(**SMALL, target_size=960).requires_grad_(False)


def test_a_transformer_by_the_authors_names_has_the_same_tensors(transformer):
    authors_tensors = to_authors_layout(tensors_of(transformer))
    assert authors_tensors.keys() >= TRANSFORMER_NAMES
    component = recognise.component("transformer", Tensors(authors_tensors), AUTHORS_CONFIG)
    assert_same_tensors(component.weights, tensors_of(transformer))
    assert tables.transformer_config(component.json) == tables.transformer_config(transformer.config)
    assert all(
        original.TRANSFORMER.to_authors(str(original.TRANSFORMER.to_diffusers(key))) == key for key in authors_tensors
    )


@pytest.mark.parametrize(
    ("sizes", "options", "config"),
    [
        ({"target_size": 960}, {"ideal_resolution": "720p"}, SIZE_720P),
        ({"use_meanflow": True}, None, FEW_STEPS_480P),
    ],
)
def test_published_transformers_are_recognised_by_their_shapes(sizes, options, config):
    with torch.device("meta"):
        keys = HunyuanVideo15Transformer3DModel(**sizes).state_dict()
    shapes = {key: tuple(x.shape) for key, x in keys.items() if "token_refiner" not in key or ".attn." not in key}
    specs = {original.TRANSFORMER.to_authors(key): Spec(shape, np.dtype(np.float32)) for key, shape in shapes.items()}
    assert None not in specs
    assert tables.transformer_config(original.transformer_json(specs, options)) == config


def test_an_autoencoder_by_the_authors_names_has_the_same_tensors():
    sizes = {"block_out_channels": (8, 16, 32), "spatial_compression_ratio": 4, "temporal_compression_ratio": 2}
    reference = AutoencoderKLHunyuanVideo15(**sizes, latent_channels=4).requires_grad_(False)
    authors_tensors = {str(original.VAE.to_authors(key)): x for key, x in tensors_of(reference).items()}
    component = recognise.component("vae", Tensors(authors_tensors), {"scaling_factor": 0.5})
    assert_same_tensors(component.weights, tensors_of(reference))
    assert tables.vae_config(component.json) == replace(tables.vae_config(reference.config), scale=0.5)


def test_the_published_autoencoder_is_recognised_by_its_shapes():
    with torch.device("meta"):
        keys = AutoencoderKLHunyuanVideo15().state_dict()
    specs = {original.VAE.to_authors(key): Spec(tuple(x.shape), np.dtype(np.float32)) for key, x in keys.items()}
    assert None not in specs
    assert len(specs) == len(keys)
    assert specs.keys() >= VAE_NAMES
    assert all(original.VAE.to_authors(str(original.VAE.to_diffusers(key))) == key for key in specs)
    assert tables.vae_config(original.vae_json(specs)) == VAE_1_5


ONE_AXIS = {"img_in.proj.weight": Spec((3,), np.dtype(np.float32))}
ANOTHER_MODEL = {"blocks.0.attn1.to_q.weight": np.zeros((2, 2), np.float32)}
REFUSED_CALLS = [  # calls, and words of their messages
    (lambda: recognise.component("transformer", Tensors(ANOTHER_MODEL)), "transformer weights HunyuanVideo 1.5"),
    (lambda: recognise.component("vae", Tensors(ANOTHER_MODEL)), "vae weights HunyuanVideo 1.5"),
    (lambda: original.transformer_json({}), "img_in.proj.weight size"),
    (lambda: original.transformer_json(ONE_AXIS), "img_in.proj.weight [3] 5 axes"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED_CALLS, ids=[words for _, words in REFUSED_CALLS])
def test_weights_of_another_model_are_refused(call, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        call()
