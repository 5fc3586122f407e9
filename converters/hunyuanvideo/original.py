# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo 1.5 in its authors' layout: names of tensors, and configs from names, shapes and the authors' configs.

The tables are total in both directions, so a reader of one layout reads the other. Sources:
hyvideo/models/transformers/hunyuanvideo_1_5_transformer.py of the official code for the authors' names, diffusers'
scripts/convert_hunyuan_video1_5_to_diffusers.py for those of diffusers, and `process_unet_state_dict` of ComfyUI's
comfy/supported_models.py for its own.
"""

from collections.abc import Mapping
from typing import Any

from wanjax.converters.configs import Specs, count_of, shape_of
from wanjax.converters.name_map import NameMap
from wanjax.converters.t5 import t5_json
from wanjax.errors import WanjaxError
from wanjax.models.hunyuanvideo.config import SIZE_480P, SIZE_720P
from wanjax.models.hunyuanvideo.vae_config import VAE_1_5

Pairs = list[tuple[str, str]]
FUSED = ("to_qkv", "add_qkv_proj")  # names for q, k and v in one tensor, of which diffusers makes three
COMFYUI = (  # in the authors' names, and in ComfyUI's code and LoRAs
    ("_attn_qkv", "_attn.qkv"),
    ("_attn_proj", "_attn.proj"),
    ("_mod.linear", "_mod.lin"),
    ("mlp.fc1", "mlp.0"),
    ("mlp.fc2", "mlp.2"),
    ("time_in.mlp.0", "time_in.in_layer"),
    ("time_in.mlp.2", "time_in.out_layer"),
    ("t_embedder.mlp.0", "t_embedder.in_layer"),
    ("t_embedder.mlp.2", "t_embedder.out_layer"),
    ("c_embedder.linear_1", "c_embedder.in_layer"),
    ("c_embedder.linear_2", "c_embedder.out_layer"),
)
EMBEDDING = "shared.weight"  # of the glyph encoder
SIZES = {"480p": SIZE_480P.target_size, "720p": SIZE_720P.target_size}


def _mlp(theirs: str, ours: str) -> Pairs:
    return [(f"{theirs}.fc1", f"{ours}.net.0.proj"), (f"{theirs}.fc2", f"{ours}.net.2")]


def _stream(block: str, ours: str, stream: str, names: Mapping[str, str]) -> Pairs:
    return [(f"{block}.{stream}_attn_{theirs}", f"{ours}.attn.{name}") for theirs, name in names.items()]


def _block(block: str, ours: str) -> Pairs:
    video = {"q": "to_q", "k": "to_k", "v": "to_v", "proj": "to_out.0", "q_norm": "norm_q", "k_norm": "norm_k"}
    text = {
        **{"q": "add_q_proj", "k": "add_k_proj", "v": "add_v_proj", "proj": "to_add_out"},
        **{"q_norm": "norm_added_q", "k_norm": "norm_added_k"},
    }
    return [
        (f"{block}.img_mod.linear", f"{ours}.norm1.linear"),
        (f"{block}.txt_mod.linear", f"{ours}.norm1_context.linear"),
        *_stream(block, ours, "img", video),
        *_stream(block, ours, "txt", text),
        *_mlp(f"{block}.img_mlp", f"{ours}.ff"),
        *_mlp(f"{block}.txt_mlp", f"{ours}.ff_context"),
    ]


def _refiner_block(block: str, ours: str) -> Pairs:
    return [
        (f"{block}.norm1", f"{ours}.norm1"),
        (f"{block}.self_attn_qkv", f"{ours}.attn.to_qkv"),
        (f"{block}.self_attn_proj", f"{ours}.attn.to_out.0"),
        (f"{block}.norm2", f"{ours}.norm2"),
        *_mlp(f"{block}.mlp", f"{ours}.ff"),
        (f"{block}.adaLN_modulation.1", f"{ours}.norm_out.linear"),
    ]


TRANSFORMER = NameMap(
    [
        ("img_in.proj", "x_embedder.proj"),
        ("time_in.mlp.0", "time_embed.timestep_embedder.linear_1"),
        ("time_in.mlp.2", "time_embed.timestep_embedder.linear_2"),
        ("time_r_in.mlp.0", "time_embed.timestep_embedder_r.linear_1"),
        ("time_r_in.mlp.2", "time_embed.timestep_embedder_r.linear_2"),
        ("txt_in.t_embedder.mlp.0", "context_embedder.time_text_embed.timestep_embedder.linear_1"),
        ("txt_in.t_embedder.mlp.2", "context_embedder.time_text_embed.timestep_embedder.linear_2"),
        ("txt_in.c_embedder.linear_1", "context_embedder.time_text_embed.text_embedder.linear_1"),
        ("txt_in.c_embedder.linear_2", "context_embedder.time_text_embed.text_embedder.linear_2"),
        ("txt_in.input_embedder", "context_embedder.proj_in"),
        *_refiner_block(
            "txt_in.individual_token_refiner.blocks.{i}", "context_embedder.token_refiner.refiner_blocks.{i}"
        ),
        ("byt5_in.layernorm", "context_embedder_2.norm"),
        *((f"byt5_in.fc{i}", f"context_embedder_2.linear_{i}") for i in (1, 2, 3)),
        ("vision_in.proj.0", "image_embedder.norm_in"),
        ("vision_in.proj.1", "image_embedder.linear_1"),
        ("vision_in.proj.3", "image_embedder.linear_2"),
        ("vision_in.proj.4", "image_embedder.norm_out"),
        ("cond_type_embedding", "cond_type_embed"),
        *_block("double_blocks.{i}", "transformer_blocks.{i}"),
        ("double_blocks.{i}.img_attn_qkv", "transformer_blocks.{i}.attn.to_qkv"),  # in files for ComfyUI
        ("double_blocks.{i}.txt_attn_qkv", "transformer_blocks.{i}.attn.add_qkv_proj"),
        ("final_layer.adaLN_modulation.1", "norm_out.linear"),
        ("final_layer.linear", "proj_out"),
    ],
    exchanged=("norm_out.linear",),  # the authors have the shift first, diffusers the scale
)
"""Names before `Unfused`: the refiner's q, k and v are one tensor."""


def _of_comfyui(name: str) -> str:
    for theirs, new in COMFYUI:
        name = name.replace(theirs, new)
    return name


LORA = NameMap(
    list(dict.fromkeys([*TRANSFORMER.pairs, *((_of_comfyui(theirs), ours) for theirs, ours in TRANSFORMER.pairs)])),
    TRANSFORMER.exchanged,
)
"""Names that LoRA files use: the authors', and those of ComfyUI's code."""


def _half(half: str, levels: str, ours: str, resampler: str) -> Pairs:
    middle = f"{half}.mid_block"
    return [
        (f"{half}.conv_in", f"{half}.conv_in"),
        (f"{half}.{levels}.{{i}}.block.{{j}}", f"{half}.{ours}.{{i}}.resnets.{{j}}"),
        (f"{half}.{levels}.{{i}}.{resampler}", f"{half}.{ours}.{{i}}.{resampler}rs.0"),
        (f"{half}.mid.block_1", f"{middle}.resnets.0"),
        (f"{half}.mid.block_2", f"{middle}.resnets.1"),
        (f"{half}.mid.attn_1.norm", f"{middle}.attentions.0.norm"),
        *((f"{half}.mid.attn_1.{x}", f"{middle}.attentions.0.to_{x}") for x in "qkv"),
        (f"{half}.mid.attn_1.proj_out", f"{middle}.attentions.0.proj_out"),
        (f"{half}.norm_out", f"{half}.norm_out"),
        (f"{half}.conv_out", f"{half}.conv_out"),
    ]


VAE = NameMap(
    [*_half("encoder", "down", "down_blocks", "downsample"), *_half("decoder", "up", "up_blocks", "upsample")],
)


def transformer_json(specs: Specs, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return diffusers' config.json for a transformer with these tensors, by the authors' names.

    config: the authors' config.json, if there is one, for the values that shapes do not determine. Without it the
    resolution is 480p. Raises WanjaxError if a tensor that determines a size is missing.
    """
    config = config or {}
    width, channels_in, patch_t, patch, _ = shape_of(specs, "img_in.proj.weight", 5)
    head_dim = shape_of(specs, "double_blocks.0.img_attn_q_norm.weight", 1)[0]
    return {
        "_class_name": "HunyuanVideo15Transformer3DModel",
        "attention_head_dim": head_dim,
        "image_embed_dim": shape_of(specs, "vision_in.proj.1.weight", 2)[1],
        "in_channels": channels_in,
        "mlp_ratio": shape_of(specs, "double_blocks.0.img_mlp.fc1.weight", 2)[0] / width,
        "num_attention_heads": width // head_dim,
        "num_layers": count_of(specs, "double_blocks"),
        "num_refiner_layers": count_of(specs, "txt_in.individual_token_refiner.blocks"),
        "out_channels": shape_of(specs, "final_layer.linear.weight", 2)[0] // (patch_t * patch**2),
        "patch_size": patch,
        "patch_size_t": patch_t,
        "qk_norm": "rms_norm",
        "rope_axes_dim": config.get("rope_dim_list", list(SIZE_480P.rope_channels)),
        "rope_theta": config.get("rope_theta", SIZE_480P.rope_theta),
        "target_size": SIZES.get(str(config.get("ideal_resolution")), SIZE_480P.target_size),
        "text_embed_2_dim": shape_of(specs, "byt5_in.fc1.weight", 2)[1],
        "text_embed_dim": shape_of(specs, "txt_in.input_embedder.weight", 2)[1],
        "use_meanflow": "time_r_in.mlp.0.weight" in specs,
    }


def vae_json(specs: Specs, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return diffusers' config.json for an autoencoder. Raises the errors of `transformer_json`."""
    levels = count_of(specs, "encoder.down")
    channels = [shape_of(specs, f"encoder.down.{i}.block.0.conv1.conv.weight", 5)[0] for i in range(levels)]
    key = "encoder.down.{}.downsample.conv.conv.weight"
    downs = [i for i in range(levels) if key.format(i) in specs]
    if levels - 1 in downs:
        raise WanjaxError(f"the checkpoint has {key.format(levels - 1)}, where the last level keeps its resolution")
    folded = [channels[i + 1] // shape_of(specs, key.format(i), 5)[0] for i in downs]  # 4 in space, 8 also in time
    return {
        "_class_name": "AutoencoderKLHunyuanVideo15",
        "block_out_channels": channels,
        "downsample_match_channel": True,
        "in_channels": shape_of(specs, "encoder.conv_in.conv.weight", 5)[1],
        "latent_channels": shape_of(specs, "decoder.conv_in.conv.weight", 5)[1],
        "layers_per_block": count_of(specs, "encoder.down.0.block"),
        "out_channels": shape_of(specs, "decoder.conv_out.conv.weight", 5)[0],
        "scaling_factor": (config or {}).get("scaling_factor", VAE_1_5.scale),
        "spatial_compression_ratio": 2 ** len(folded),
        "temporal_compression_ratio": 2 ** folded.count(8),
        "upsample_match_channel": True,
    }


def glyph_encoder_json(specs: Specs) -> dict[str, Any]:
    """Return the config.json of a ByT5 encoder with these tensors; sizes that shapes lack are the published ones."""
    attention = "encoder.block.0.layer.0.SelfAttention"
    return t5_json(
        ("t5", "T5EncoderModel"),
        embedding=shape_of(specs, EMBEDDING, 2),
        bias=shape_of(specs, f"{attention}.relative_attention_bias.weight", 2),
        query=shape_of(specs, f"{attention}.q.weight", 2),
        mlp=shape_of(specs, "encoder.block.0.layer.1.DenseReluDense.wi_0.weight", 2),
        layers=count_of(specs, "encoder.block"),
    )
