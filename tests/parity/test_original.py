# SPDX-License-Identifier: Apache-2.0
"""The original layout's names and configs against diffusers' conversion, in both directions."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel, WanVACETransformer3DModel
from diffusers.loaders import single_file_utils
from transformers import UMT5Config, UMT5EncoderModel

from tests.support.published import transformer_keys
from tests.support.words import line_with_words
from wanjax.checkpoints.files import Spec
from wanjax.converters.wan import diffusers as wan
from wanjax.converters.wan import original
from wanjax.errors import WanjaxError
from wanjax.models.wan.config import (
    FLF2V_14B,
    I2V_14B,
    I2V_A14B,
    T2V_1_3B,
    T2V_14B,
    TI2V_5B,
    VACE_1_3B,
    VACE_14B,
    VAE_2_2,
)

# narrower and with fewer blocks than the published ones, which have the same names in each block
PLAIN = {"num_layers": 4, "num_attention_heads": 2, "ffn_dim": 96, "text_dim": 16}
IMAGE = PLAIN | {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 256}
TRANSFORMERS = {
    "t2v": (WanTransformer3DModel, PLAIN),
    "i2v": (WanTransformer3DModel, IMAGE),
    "flf2v": (WanTransformer3DModel, IMAGE | {"pos_embed_seq_len": 514}),
    "i2v without CLIP": (WanTransformer3DModel, PLAIN | {"in_channels": 36}),
    "ti2v": (WanTransformer3DModel, PLAIN | {"in_channels": 48, "out_channels": 48}),
    "vace": (WanVACETransformer3DModel, PLAIN | {"vace_layers": [0, 2], "vace_in_channels": 96}),
}
VAE_2_2_SIZES = {
    **{"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12},
    **{"out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16},
    **{"latents_mean": [0.1] * 48, "latents_std": [1.0] * 48},
}


def shapes(module):
    return {key: Spec(tuple(weight.shape), np.dtype(np.float32)) for key, weight in module.state_dict().items()}


def make_on_meta(kind, sizes):
    with torch.device("meta"):
        return kind(**sizes)


def to_authors_names(names, specs):
    """Return the tensors by the authors' names; check that the renaming is invertible."""
    renamed = {key: names.to_authors(key) for key in specs}
    assert None not in renamed.values()
    assert len(set(renamed.values())) == len(renamed)
    assert all(names.to_diffusers(authors_name) == key for key, authors_name in renamed.items())
    return {authors_name: specs[key] for key, authors_name in renamed.items()}


@pytest.fixture(params=TRANSFORMERS, scope="module")
def transformer(request):
    return make_on_meta(*TRANSFORMERS[request.param])


def test_names_of_a_transformer_are_those_that_diffusers_converts(transformer):
    specs = shapes(transformer)
    authors_specs = to_authors_names(original.TRANSFORMER, specs)
    renamed = single_file_utils.convert_wan_transformer_to_diffusers(dict(authors_specs))
    if "img_emb.emb_pos" in renamed:  # diffusers' script renames it, its loader of single files does not
        renamed["condition_embedder.image_embedder.pos_embed"] = renamed.pop("img_emb.emb_pos")
    assert renamed == specs


@pytest.mark.parametrize(
    "config",
    [T2V_1_3B, T2V_14B, I2V_14B, FLF2V_14B, I2V_A14B, TI2V_5B, VACE_1_3B, VACE_14B],
    ids=["1.3B", "14B", "I2V", "FLF2V", "I2V A14B", "TI2V 5B", "VACE 1.3B", "VACE 14B"],
)
def test_every_tensor_of_the_published_transformers_has_an_authors_name(config):
    specs = {key: Spec(shape, np.dtype(np.float32)) for key, shape in transformer_keys(config).items()}
    json = original.transformer_json(to_authors_names(original.TRANSFORMER, specs))
    assert wan.transformer_config(json) == config


def test_the_config_of_a_transformer_is_read_from_its_shapes(transformer):
    json = original.transformer_json(to_authors_names(original.TRANSFORMER, shapes(transformer)))
    expected = dict(transformer.config) | {"_class_name": type(transformer).__name__}
    assert {key: tuple(x) if isinstance(x, list) else x for key, x in json.items()} == {
        key: tuple(expected[key]) if isinstance(expected[key], list) else expected[key] for key in json
    }
    assert shapes(make_on_meta(type(transformer), {k: v for k, v in json.items() if k[0] != "_"})) == shapes(
        transformer
    )


def test_settings_without_shapes_come_from_the_original_config():
    sizes = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 8, "text_dim": 16}
    module = make_on_meta(WanTransformer3DModel, sizes)
    json = original.transformer_json(
        to_authors_names(original.TRANSFORMER, shapes(module)), {"num_heads": 2, "eps": 1e-5, "dim": 24}
    )
    assert (json["num_attention_heads"], json["attention_head_dim"], json["eps"]) == (2, 12, 1e-5)


@pytest.mark.parametrize("sizes", [{}, {"base_dim": 8, "dim_mult": [1, 2, 2], "num_res_blocks": 1}])
def test_names_of_the_autoencoder_are_those_that_diffusers_converts(sizes):
    sizes = sizes | ({"temperal_downsample": [True, False]} if sizes else {})
    module = make_on_meta(AutoencoderKLWan, sizes)
    specs = shapes(module)
    authors_specs = to_authors_names(original.vae_names(module.config), specs)
    if not sizes:  # diffusers renames only the published autoencoder
        assert single_file_utils.convert_wan_vae_to_diffusers(dict(authors_specs)) == specs
    json = original.vae_json(authors_specs)
    assert {key: tuple(x) if isinstance(x, list) else x for key, x in json.items() if key[0] != "_"} == {
        key: tuple(x) if isinstance(x := module.config[key], list) else x for key in json if key[0] != "_"
    }


def test_every_tensor_of_wan_2_2_s_autoencoder_has_an_authors_name():
    module = make_on_meta(AutoencoderKLWan, VAE_2_2_SIZES)
    specs = shapes(module)
    authors_specs = to_authors_names(original.vae_names(module.config), specs)
    assert {  # the names in wan/modules/vae2_2.py of the official code
        "encoder.downsamples.0.downsamples.2.resample.1.weight",
        "encoder.downsamples.1.downsamples.2.time_conv.weight",
        "encoder.downsamples.3.downsamples.1.residual.6.weight",
        "decoder.upsamples.0.upsamples.3.time_conv.weight",
        "decoder.upsamples.2.upsamples.3.resample.1.bias",
        "decoder.upsamples.3.upsamples.2.residual.0.gamma",
    } <= authors_specs.keys()
    json = original.vae_json(authors_specs)
    assert wan.vae_config(json) == VAE_2_2
    json |= {"latents_mean": [0.1] * 48, "latents_std": [1.0] * 48}
    assert {key: module.config[key] for key in json if key[0] != "_"} == {k: v for k, v in json.items() if k[0] != "_"}


def test_every_tensor_of_the_text_encoder_has_an_authors_name():
    sizes = {"vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    module = make_on_meta(UMT5EncoderModel, {"config": UMT5Config(**sizes, feed_forward_proj="gated-gelu")})
    specs = shapes(module)
    del specs["encoder.embed_tokens.weight"]  # the same tensor as `shared.weight`
    authors_specs = to_authors_names(original.TEXT_ENCODER, specs)
    assert {  # the names in wan/modules/t5.py of the official code
        "token_embedding.weight",
        "blocks.23.attn.o.weight",
        "blocks.0.ffn.gate.0.weight",
        "blocks.7.pos_embedding.embedding.weight",
        "norm.weight",
    } <= authors_specs.keys()
    json = original.text_encoder_json(authors_specs)
    assert {key: getattr(module.config, key) for key in json if key != "architectures"} == {
        key: value for key, value in json.items() if key != "architectures"
    }


def specs_of(**shapes):
    return {key: Spec(shape, np.dtype(np.float32)) for key, shape in shapes.items()}


def with_heads(heads):
    specs = to_authors_names(original.TRANSFORMER, shapes(make_on_meta(WanTransformer3DModel, PLAIN)))
    return original.transformer_json(specs, {"num_heads": heads})


READERS = [
    (original.transformer_json, "patch_embedding.weight"),
    (original.vae_json, "encoder.conv1.weight"),
    (original.text_encoder_json, "token_embedding.weight"),
]
LATENTS = {"encoder.conv1.weight": (8, 3, 3, 3, 3), "conv2.weight": (7, 7, 1, 1, 1)}
REFUSED_TENSORS = [  # a reader, tensors that determine no config, and words of the message
    *((read, {}, f"{key} size") for read, key in READERS),
    *((read, specs_of(**{key: (3,)}), f"{key} [3]") for read, key in READERS),
    (original.vae_json, specs_of(**LATENTS), "7 latent channels 16 48"),
    *((with_heads, heads, "num_heads 256") for heads in (0, 5, "2", 2.0)),  # which do not divide the width
]


@pytest.mark.parametrize(("read", "options", "words"), REFUSED_TENSORS)
def test_tensors_that_determine_no_config_are_refused(read, options, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read(options)


def test_names_of_other_models_are_not_renamed():
    for name in ("double_blocks.0.img_attn.qkv.weight", "blocks.0.attn1.to_q.weight", "blocks.x.self_attn.q.weight"):
        assert original.TRANSFORMER.to_diffusers(name) is None
