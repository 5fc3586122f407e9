# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo 1.5 in its authors' layout: tensor names, and configs from names, shapes and the authors' configs.

The tables have every name in both directions, so either layout can be read as the other. Sources of the names:

- of the authors: hyvideo/models/transformers/hunyuanvideo_1_5_transformer.py of the official code
- of diffusers: its scripts/convert_hunyuan_video1_5_to_diffusers.py
- of ComfyUI: `process_unet_state_dict` of its comfy/supported_models.py
"""

from collections.abc import Mapping
from typing import Any

from wanjax.converters.configs import Specs, count_modules, shape_of
from wanjax.converters.name_map import NameMap
from wanjax.converters.t5 import t5_json
from wanjax.errors import WanjaxError
from wanjax.models.hunyuanvideo.config import SIZE_480P, SIZE_720P
from wanjax.models.hunyuanvideo.vae_config import VAE_1_5

Pairs = list[tuple[str, str]]
FUSED_NAMES = ("to_qkv", "add_qkv_proj")  # names of fused q, k and v, which diffusers stores separately
COMFYUI_NAMES = (  # a substring of the authors' names, and its spelling in ComfyUI's code and LoRAs
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
GLYPH_EMBEDDING = "shared.weight"
TARGET_SIZES = {"480p": SIZE_480P.target_size, "720p": SIZE_720P.target_size}


def _mlp(author_name: str, diffusers_name: str) -> Pairs:
    return [(f"{author_name}.fc1", f"{diffusers_name}.net.0.proj"), (f"{author_name}.fc2", f"{diffusers_name}.net.2")]


def _stream(block: str, diffusers_name: str, stream: str, names: Mapping[str, str]) -> Pairs:
    return [
        (f"{block}.{stream}_attn_{author_name}", f"{diffusers_name}.attn.{name}") for author_name, name in names.items()
    ]


def _block(block: str, diffusers_name: str) -> Pairs:
    video = {"q": "to_q", "k": "to_k", "v": "to_v", "proj": "to_out.0", "q_norm": "norm_q", "k_norm": "norm_k"}
    text = {
        **{"q": "add_q_proj", "k": "add_k_proj", "v": "add_v_proj", "proj": "to_add_out"},
        **{"q_norm": "norm_added_q", "k_norm": "norm_added_k"},
    }
    return [
        (f"{block}.img_mod.linear", f"{diffusers_name}.norm1.linear"),
        (f"{block}.txt_mod.linear", f"{diffusers_name}.norm1_context.linear"),
        *_stream(block, diffusers_name, "img", video),
        *_stream(block, diffusers_name, "txt", text),
        *_mlp(f"{block}.img_mlp", f"{diffusers_name}.ff"),
        *_mlp(f"{block}.txt_mlp", f"{diffusers_name}.ff_context"),
    ]


def _refiner_block(block: str, diffusers_name: str) -> Pairs:
    return [
        (f"{block}.norm1", f"{diffusers_name}.norm1"),
        (f"{block}.self_attn_qkv", f"{diffusers_name}.attn.to_qkv"),
        (f"{block}.self_attn_proj", f"{diffusers_name}.attn.to_out.0"),
        (f"{block}.norm2", f"{diffusers_name}.norm2"),
        *_mlp(f"{block}.mlp", f"{diffusers_name}.ff"),
        (f"{block}.adaLN_modulation.1", f"{diffusers_name}.norm_out.linear"),
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
        ("double_blocks.{i}.img_attn_qkv", "transformer_blocks.{i}.attn.to_qkv"),  # files for ComfyUI have this tensor
        ("double_blocks.{i}.txt_attn_qkv", "transformer_blocks.{i}.attn.add_qkv_proj"),
        ("final_layer.adaLN_modulation.1", "norm_out.linear"),
        ("final_layer.linear", "proj_out"),
    ],
    swapped=("norm_out.linear",),  # the authors store the shift before the scale, and diffusers after it
)
"""The names in the authors' files, before `UnfusedReader` splits the refiner's fused q, k and v."""


def _to_comfyui(name: str) -> str:
    for author_part, comfyui_part in COMFYUI_NAMES:
        name = name.replace(author_part, comfyui_part)
    return name


LORA = NameMap(
    list(
        dict.fromkeys(
            [
                *TRANSFORMER.pairs,
                *((_to_comfyui(author_name), diffusers_name) for author_name, diffusers_name in TRANSFORMER.pairs),
            ]
        )
    ),
    TRANSFORMER.swapped,
)
"""The names in LoRA files, by the authors or by ComfyUI."""


def _vae_coder(coder: str, levels: str, diffusers_name: str, resampler: str) -> Pairs:
    middle = f"{coder}.mid_block"
    return [
        (f"{coder}.conv_in", f"{coder}.conv_in"),
        (f"{coder}.{levels}.{{i}}.block.{{j}}", f"{coder}.{diffusers_name}.{{i}}.resnets.{{j}}"),
        (f"{coder}.{levels}.{{i}}.{resampler}", f"{coder}.{diffusers_name}.{{i}}.{resampler}rs.0"),
        (f"{coder}.mid.block_1", f"{middle}.resnets.0"),
        (f"{coder}.mid.block_2", f"{middle}.resnets.1"),
        (f"{coder}.mid.attn_1.norm", f"{middle}.attentions.0.norm"),
        *((f"{coder}.mid.attn_1.{x}", f"{middle}.attentions.0.to_{x}") for x in "qkv"),
        (f"{coder}.mid.attn_1.proj_out", f"{middle}.attentions.0.proj_out"),
        (f"{coder}.norm_out", f"{coder}.norm_out"),
        (f"{coder}.conv_out", f"{coder}.conv_out"),
    ]


VAE = NameMap(
    [
        *_vae_coder("encoder", "down", "down_blocks", "downsample"),
        *_vae_coder("decoder", "up", "up_blocks", "upsample"),
    ],
)


def transformer_json(specs: Specs, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Infer diffusers' config.json of a transformer from the shapes of its tensors.

    Args:
        specs: Shapes and dtypes by the authors' names.
        config: The authors' config.json, for values that shapes do not determine. Without this config the resolution is
            480p.

    Raises:
        WanjaxError: A tensor that determines a size is missing.
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
        "num_layers": count_modules(specs, "double_blocks"),
        "num_refiner_layers": count_modules(specs, "txt_in.individual_token_refiner.blocks"),
        "out_channels": shape_of(specs, "final_layer.linear.weight", 2)[0] // (patch_t * patch**2),
        "patch_size": patch,
        "patch_size_t": patch_t,
        "qk_norm": "rms_norm",
        "rope_axes_dim": config.get("rope_dim_list", list(SIZE_480P.rope_channels)),
        "rope_theta": config.get("rope_theta", SIZE_480P.rope_theta),
        "target_size": TARGET_SIZES.get(str(config.get("ideal_resolution")), SIZE_480P.target_size),
        "text_embed_2_dim": shape_of(specs, "byt5_in.fc1.weight", 2)[1],
        "text_embed_dim": shape_of(specs, "txt_in.input_embedder.weight", 2)[1],
        "use_meanflow": "time_r_in.mlp.0.weight" in specs,
    }


def vae_json(specs: Specs, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Infer diffusers' config.json of an autoencoder, with the arguments and errors of `transformer_json`."""
    levels = count_modules(specs, "encoder.down")
    channels = [shape_of(specs, f"encoder.down.{i}.block.0.conv1.conv.weight", 5)[0] for i in range(levels)]
    key = "encoder.down.{}.downsample.conv.conv.weight"
    downsampled = [i for i in range(levels) if key.format(i) in specs]
    if levels - 1 in downsampled:
        raise WanjaxError(
            f"the checkpoint has {key.format(levels - 1)}, but the last level has no downsampling: get the file again"
        )
    channel_factors = [
        channels[i + 1] // shape_of(specs, key.format(i), 5)[0] for i in downsampled
    ]  # 4 if a downsampling halves height and width, 8 if it also halves the frames
    return {
        "_class_name": "AutoencoderKLHunyuanVideo15",
        "block_out_channels": channels,
        "downsample_match_channel": True,
        "in_channels": shape_of(specs, "encoder.conv_in.conv.weight", 5)[1],
        "latent_channels": shape_of(specs, "decoder.conv_in.conv.weight", 5)[1],
        "layers_per_block": count_modules(specs, "encoder.down.0.block"),
        "out_channels": shape_of(specs, "decoder.conv_out.conv.weight", 5)[0],
        "scaling_factor": (config or {}).get("scaling_factor", VAE_1_5.scale),
        "spatial_compression_ratio": 2 ** len(channel_factors),
        "temporal_compression_ratio": 2 ** channel_factors.count(8),
        "upsample_match_channel": True,
    }


def glyph_encoder_json(specs: Specs) -> dict[str, Any]:
    """Infer the config.json of a ByT5 encoder from shapes. Other values come from the published config.json."""
    attention = "encoder.block.0.layer.0.SelfAttention"
    return t5_json(
        ("t5", "T5EncoderModel"),
        embedding=shape_of(specs, GLYPH_EMBEDDING, 2),
        bias=shape_of(specs, f"{attention}.relative_attention_bias.weight", 2),
        query=shape_of(specs, f"{attention}.q.weight", 2),
        mlp=shape_of(specs, "encoder.block.0.layer.1.DenseReluDense.wi_0.weight", 2),
        layers=count_modules(specs, "encoder.block"),
    )
