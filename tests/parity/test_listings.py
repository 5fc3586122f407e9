# SPDX-License-Identifier: Apache-2.0
"""Names, shapes, sizes and configs that the library expects in published files, against listings of these files."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.parity import hunyuan_authors
from tests.support import published_configs as published
from tests.support.documents import ROOT
from tests.support.listings import FILES, LISTED, file_size, names_hash
from tests.support.published import TensorShapes, authors_image_encoder_file
from wanjax.checkpoints.network_kinds import network_of, read_network
from wanjax.converters.name_map import NameMap
from wanjax.converters.wan import original
from wanjax.models import clip, qwen2_vl, siglip, t5
from wanjax.models.cogvideox import config as cogvideox
from wanjax.models.cogvideox import vae_config as cogvideox_vae
from wanjax.models.hunyuanvideo import config as hunyuan
from wanjax.models.hunyuanvideo import vae_config as hunyuan_vae
from wanjax.models.wan import config as wan
from wanjax.pipelines.image_processor import ImageProcessor, StretchingImageProcessor
from wanjax.registry import kinds, model_description, presets
from wanjax.schedulers import DDIM, Consistency, FlowEuler, UniPC, from_config, shift_of

NETWORKS: dict[str, Any] = {
    **{name: getattr(wan, name) for name in ("T2V_1_3B", "T2V_14B", "I2V_14B", "FLF2V_14B", "I2V_A14B", "TI2V_5B")},
    **{name: getattr(wan, name) for name in ("VACE_1_3B", "VACE_14B", "VAE_2_1", "VAE_2_2")},
    "FUN_1_3B_INP": wan.INP_1_3B,
    "FUN_1_3B_CONTROL": replace(wan.INP_1_3B, channels_in=48),
    "FUN_14B_CONTROL": replace(wan.I2V_14B, channels_in=48),
    "UMT5_XXL": t5.UMT5_XXL,
    "CLIP_VIT_H": clip.CLIP_VIT_H,
    "COGVIDEOX_VAE": cogvideox_vae.VAE_5B,
    "HUNYUAN_480P": hunyuan.SIZE_480P,
    "HUNYUAN_FEW_STEPS": hunyuan.FEW_STEPS_480P,
    "HUNYUAN_VAE": hunyuan_vae.VAE_1_5,
}


def keys_of(network: str) -> TensorShapes:
    """Return the names in diffusers and the shapes that a network of the library reads."""
    return keys_by(NETWORKS[network])


@cache
def keys_by(config: Any) -> TensorShapes:
    return {name: spec.shape for name, spec in network_of(config, kinds()).specs.items()}


def authors_keys(network: str) -> TensorShapes:
    """Return the same by the authors' names."""
    keys = keys_of(network)
    if network in ("HUNYUAN_480P", "HUNYUAN_FEW_STEPS"):
        tensors = {name: np.broadcast_to(np.int8(0), shape) for name, shape in keys.items()}
        return {name: x.shape for name, x in hunyuan_authors.authors_transformer(tensors).items()}
    if network == "HUNYUAN_VAE":
        return {hunyuan_authors.rename_key(name, hunyuan_authors.VAE_RENAMES): shape for name, shape in keys.items()}
    return {str(names_of(network).to_authors(name)): shape for name, shape in keys.items()}


def names_of(network: str) -> NameMap:
    if network.startswith("VAE"):
        sizes = {"dim_mult": range(4), "num_res_blocks": 2, "is_residual": network == "VAE_2_2"}
        return original.vae_names(sizes)
    return original.TEXT_ENCODER if network == "UMT5_XXL" else original.TRANSFORMER


@pytest.mark.parametrize("file", FILES)
def test_names_shapes_and_bytes_are_those_of_the_published_file(file):
    listed = FILES[file]
    if listed["network"] == "CLIP_VIT_H":  # the file has more tensors than the network: see test_repositories.py
        keys = authors_image_encoder_file()
    elif listed.get("layout") == "diffusers":
        keys = keys_of(listed["network"])
    else:
        keys = {listed.get("prefix", "") + name: shape for name, shape in authors_keys(listed["network"]).items()}
    assert len(keys) == listed["tensors"]
    assert names_hash(keys) == listed["md5"]
    if "bytes" in listed:
        metadata = None if listed.get("bare") else {"format": "pt"}
        assert file_size(keys, listed["dtype"], metadata=metadata) == listed["bytes"]
    if "bytes of all" in listed:
        assert 4 * sum(map(math.prod, keys.values())) == listed["bytes of all"]


def test_the_config_of_the_test_folder_equals_the_published_file():
    """Compare the texts byte for byte."""
    text = json.dumps(published.AUTHORS_WAN, indent=2, sort_keys=True).encode() + b"\n"
    listed = LISTED["configs"]["Wan-AI/Wan2.1-T2V-1.3B/config.json"]
    assert (len(text), hashlib.sha256(text).hexdigest()) == (listed["bytes"], listed["sha256"])


CONFIGS = [
    ("T5EncoderModel", "T5_XXL", t5.T5_XXL),
    ("UMT5EncoderModel", "UMT5_XXL", t5.UMT5_XXL),
    ("T5EncoderModel", "GLYPH_BYT5", t5.GLYPH_BYT5),
    ("Qwen2_5_VLTextModel", "QWEN2_5_VL_TEXT", qwen2_vl.QWEN2_5_VL_7B),
    ("CLIPVisionModelWithProjection", "CLIP_VIT_H", clip.CLIP_VIT_H),
    ("SiglipVisionModel", "SIGLIP_SO400M", siglip.SIGLIP_SO400M),
    ("WanTransformer3DModel", "WAN_14B", wan.T2V_14B),
    ("WanTransformer3DModel", "WAN_1_3B", wan.T2V_1_3B),
    ("CausalWanTransformer3DModel", "WAN_CAUSAL_1_3B", wan.CAUSAL_1_3B),
    ("WanTransformer3DModel", "WAN_I2V_14B", wan.I2V_14B),
    ("WanTransformer3DModel", "WAN_FLF2V_14B", wan.FLF2V_14B),
    ("WanVACETransformer3DModel", "WAN_VACE_1_3B", wan.VACE_1_3B),
    ("WanVACETransformer3DModel", "WAN_VACE_14B", wan.VACE_14B),
    ("WanTransformer3DModel", "WAN_2_2_T2V", wan.T2V_14B),
    ("WanTransformer3DModel", "WAN_2_2_I2V", wan.I2V_A14B),
    ("WanTransformer3DModel", "WAN_2_2_5B", wan.TI2V_5B),
    ("AutoencoderKLWan", "WAN_VAE", wan.VAE_2_1),
    ("AutoencoderKLWan", "WAN_2_2_VAE", wan.VAE_2_2),
    ("CogVideoXTransformer3DModel", "COGVIDEOX_2B_OLD", cogvideox.T2V_2B),
    ("CogVideoXTransformer3DModel", "COGVIDEOX_2B", cogvideox.T2V_2B),
    ("CogVideoXTransformer3DModel", "COGVIDEOX_5B", cogvideox.T2V_5B),
    ("CogVideoXTransformer3DModel", "COGVIDEOX_5B_I2V", cogvideox.I2V_5B),
    ("CogVideoXTransformer3DModel", "COGVIDEOX_1_5_5B", cogvideox.T2V_1_5_5B),
    ("CogVideoXTransformer3DModel", "COGVIDEOX_1_5_5B_I2V", cogvideox.I2V_1_5_5B),
    ("CogVideoXTransformer3DModel", "COGVIDEOX_1_5_5B_I2V_OLD", cogvideox.I2V_1_5_5B),
    ("AutoencoderKLCogVideoX", "COGVIDEOX_VAE", cogvideox_vae.VAE_5B),
    ("AutoencoderKLCogVideoX", "COGVIDEOX_2B_VAE", cogvideox_vae.VAE_2B),
    ("AutoencoderKLCogVideoX", "COGVIDEOX_2B_VAE_OLD", cogvideox_vae.VAE_2B),
    ("AutoencoderKLCogVideoX", "COGVIDEOX_1_5_VAE", cogvideox_vae.VAE_1_5),
    ("HunyuanVideo15Transformer3DModel", "HUNYUAN_480P", hunyuan.SIZE_480P),
    ("HunyuanVideo15Transformer3DModel", "HUNYUAN_720P", hunyuan.SIZE_720P),
    ("HunyuanVideo15Transformer3DModel", "HUNYUAN_FEW_STEPS", hunyuan.FEW_STEPS_480P),
    ("AutoencoderKLHunyuanVideo15", "HUNYUAN_VAE", hunyuan_vae.VAE_1_5),
]


@pytest.mark.parametrize(("kind", "name", "expected"), CONFIGS, ids=[name for _, name, _ in CONFIGS])
def test_a_published_config_is_read_as_that_of_the_preset(kind, name, expected):
    assert read_network(kind, getattr(published, name), kinds()).config == expected


# The entries of a class in its first release of diffusers (0.30.0, 0.33.0, 0.34.0 and 0.36.0), which its first files
# have. In later releases, the other entries have defaults.
FIRST_ENTRIES = {
    "CogVideoXTransformer3DModel": """num_attention_heads attention_head_dim in_channels out_channels flip_sin_to_cos
        freq_shift time_embed_dim text_embed_dim num_layers dropout attention_bias sample_width sample_height
        sample_frames patch_size temporal_compression_ratio max_text_seq_length activation_fn timestep_activation_fn
        norm_elementwise_affine norm_eps spatial_interpolation_scale temporal_interpolation_scale""",
    "AutoencoderKLCogVideoX": """in_channels out_channels down_block_types up_block_types block_out_channels
        latent_channels layers_per_block act_fn norm_eps norm_num_groups temporal_compression_ratio sample_size
        scaling_factor shift_factor latents_mean latents_std force_upcast use_quant_conv use_post_quant_conv""",
    "WanTransformer3DModel": """patch_size num_attention_heads attention_head_dim in_channels out_channels text_dim
        freq_dim ffn_dim num_layers cross_attn_norm qk_norm eps image_dim added_kv_proj_dim rope_max_seq_len""",
    "AutoencoderKLWan": """base_dim z_dim dim_mult num_res_blocks attn_scales temperal_downsample dropout latents_mean
        latents_std""",
    "WanVACETransformer3DModel": """patch_size num_attention_heads attention_head_dim in_channels out_channels text_dim
        freq_dim ffn_dim num_layers cross_attn_norm qk_norm eps image_dim added_kv_proj_dim rope_max_seq_len
        pos_embed_seq_len vace_layers vace_in_channels""",
    "HunyuanVideo15Transformer3DModel": """in_channels out_channels num_attention_heads attention_head_dim num_layers
        num_refiner_layers mlp_ratio patch_size patch_size_t qk_norm text_embed_dim text_embed_2_dim image_embed_dim
        rope_theta rope_axes_dim target_size task_type""",
    "AutoencoderKLHunyuanVideo15": """in_channels out_channels latent_channels block_out_channels layers_per_block
        spatial_compression_ratio temporal_compression_ratio downsample_match_channel upsample_match_channel
        scaling_factor""",
}  # fmt: skip
FIRST_MODELS = ["COGVIDEOX_2B", "COGVIDEOX_2B_VAE", "WAN_14B", "WAN_I2V_14B", "WAN_VAE", "WAN_VACE_14B", "HUNYUAN_480P"]
FIRST_MODELS += ["HUNYUAN_VAE"]


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [pytest.param(*case, id=case[1]) for case in CONFIGS if case[1] in FIRST_MODELS],
)
def test_a_config_of_the_first_release_is_read(kind, name, expected):
    """Entries that were added to a class later have diffusers' defaults."""
    entries = {key: value for key, value in getattr(published, name).items() if key in FIRST_ENTRIES[kind].split()}
    assert read_network(kind, {"_class_name": kind} | entries, kinds()).config == expected


@pytest.mark.parametrize(
    ("name", "expected", "shift"),
    [
        ("UNIPC", UniPC(), 3.0),
        ("SELF_FORCING", Consistency(), 5.0),
        ("COGVIDEOX_2B_DDIM", DDIM(snr_shift=3.0), None),
        ("COGVIDEOX_DDIM", DDIM(snr_shift=1.0), None),
        ("HUNYUAN_EULER", FlowEuler(), 5.0),
    ],
)
def test_a_published_scheduler_is_read(name, expected, shift):
    config = getattr(published, name)
    assert (from_config(config), shift_of(config)) == (expected, shift)


CLIP_STATISTICS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("CLIP_PROCESSOR", ImageProcessor, ImageProcessor(224, (224, 224), *CLIP_STATISTICS)),
        ("CLIP_PROCESSOR_OLD", ImageProcessor, ImageProcessor(224, (224, 224), *CLIP_STATISTICS)),
        (
            "SIGLIP_PROCESSOR",
            StretchingImageProcessor,
            StretchingImageProcessor((384, 384), Image.Resampling.BICUBIC, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ),
    ],
)
def test_a_published_preprocessor_is_read(tmp_path, name, kind, expected):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(getattr(published, name)))
    assert kind.load(tmp_path) == expected


DEFAULTS = {name: values for listed in LISTED["defaults"] for name, values in listed["models"].items()}


@pytest.mark.parametrize("name", DEFAULTS)
def test_default_settings_are_those_of_the_authors(name):
    """tests/test_presets.py and test_cogvideox_published.py test the other models."""
    assert {field: getattr(presets()[name].defaults, field) for field in DEFAULTS[name]} == DEFAULTS[name]


def reference_cells(networks: Mapping[str, Any]) -> list[str]:
    """Return the reference of each of a model's networks and its number of tensors, as docs/models.md lists them."""
    listed = [keys_of(listed["network"]) for listed in FILES.values()]
    cells = {}
    for component, config in networks.items():
        keys = keys_by(config)
        cells[component] = f"{'listed' if keys in listed else 'class'}, {len(keys)}"
    columns = [["transformer"], ["vae"], ["text_encoder", "text_encoder_2"], ["image_encoder"]]
    return ["; ".join(cells[name] for name in names if name in cells) for names in columns]


def test_the_page_of_models_lists_every_reference():
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    section = text[text.index("## Names and shapes") : text.index("## Prices on v6e-8")]
    rows: dict[str, list[str]] = {}
    for names, cells in re.findall(r"^\| (`.+?`) \| (.+) \|$", section, re.MULTILINE):
        for name in re.findall("`(.+?)`", names):
            assert name not in rows, name
            rows[name] = [cell.strip() for cell in cells.split("|")]
    models = [name for name, preset in presets().items() if not preset.bundled]
    assert rows == {name: reference_cells(model_description(name).model.spec.networks) for name in models}
    assert f"{len(FILES)} files" in section
    assert f"{len(CONFIGS)} configs" in section
    assert f"{len(models)} models" in section
