# SPDX-License-Identifier: Apache-2.0
"""Wan in its authors' layout, which ComfyUI also uses: tensor names, and configs inferred from names and shapes.

The tables are total in both directions, so either layout can be read as the other. Sources:
wan/modules/{model,vace_model,vae,t5,clip}.py of the official Wan 2.1 and 2.2 for the authors' names, diffusers'
scripts/convert_wan_to_diffusers.py for diffusers' names, and turbodiffusion/SLA/core.py of thu-ml/TurboDiffusion for
the projection of sparse-linear attention.
"""

import math
from collections.abc import Mapping
from typing import Any

from wanjax.converters.configs import Specs, count_modules, shape_of
from wanjax.converters.name_map import NameMap
from wanjax.converters.t5 import t5_json
from wanjax.converters.wan.diffusers import HEAD_DIM
from wanjax.errors import WanjaxError, repr_short
from wanjax.models.wan.config import VAE_2_1, VAE_2_2

Pairs = list[tuple[str, str]]
CLIP_HEAD_DIM = 80  # the head size of CLIP's ViT-H, Wan's image encoder
SPARSE_LINEAR = "blocks.0.self_attn.attn_op.local_attn.proj_l.weight"  # models with sparse-linear attention have it
STATISTICS = {
    config.latent_channels: config for config in (VAE_2_1, VAE_2_2)
}  # the published mean and std of latents, which the authors' files lack


def _block(block: str) -> Pairs:
    """Return the names of a transformer block.

    The norm before the MLP is norm2 for the authors and norm3 for diffusers.
    """
    attention = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
    image = {"k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}
    return [
        *(
            (f"{block}.self_attn.{author_name}", f"{block}.attn1.{diffusers_name}")
            for author_name, diffusers_name in attention.items()
        ),
        (f"{block}.self_attn.attn_op.local_attn.proj_l", f"{block}.attn1.proj_l"),
        *(
            (f"{block}.cross_attn.{author_name}", f"{block}.attn2.{diffusers_name}")
            for author_name, diffusers_name in (attention | image).items()
        ),
        (f"{block}.norm3", f"{block}.norm2"),
        (f"{block}.ffn.0", f"{block}.ffn.net.0.proj"),
        (f"{block}.ffn.2", f"{block}.ffn.net.2"),
        (f"{block}.modulation", f"{block}.scale_shift_table"),
    ]


TRANSFORMER = NameMap(
    [
        ("patch_embedding", "patch_embedding"),
        ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
        ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
        ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
        ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
        ("time_projection.1", "condition_embedder.time_proj"),
        ("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
        ("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
        ("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
        ("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
        ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),
        *_block("blocks.{i}"),
        ("vace_patch_embedding", "vace_patch_embedding"),
        *_block("vace_blocks.{i}"),
        ("vace_blocks.{i}.before_proj", "vace_blocks.{i}.proj_in"),
        ("vace_blocks.{i}.after_proj", "vace_blocks.{i}.proj_out"),
        ("head.head", "proj_out"),
        ("head.modulation", "scale_shift_table"),
    ]
)

TEXT_ENCODER = NameMap(
    [
        ("token_embedding", "shared"),
        ("blocks.{i}.norm1", "encoder.block.{i}.layer.0.layer_norm"),
        *((f"blocks.{{i}}.attn.{x}", f"encoder.block.{{i}}.layer.0.SelfAttention.{x}") for x in "qkvo"),
        (
            "blocks.{i}.pos_embedding.embedding",
            "encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias",
        ),
        ("blocks.{i}.norm2", "encoder.block.{i}.layer.1.layer_norm"),
        ("blocks.{i}.ffn.gate.0", "encoder.block.{i}.layer.1.DenseReluDense.wi_0"),
        ("blocks.{i}.ffn.fc1", "encoder.block.{i}.layer.1.DenseReluDense.wi_1"),
        ("blocks.{i}.ffn.fc2", "encoder.block.{i}.layer.1.DenseReluDense.wo"),
        ("norm", "encoder.final_layer_norm"),
    ]
)

IMAGE_ENCODER = NameMap(
    [
        ("visual.cls_embedding", "vision_model.embeddings.class_embedding"),
        ("visual.patch_embedding", "vision_model.embeddings.patch_embedding"),
        ("visual.pos_embedding", "vision_model.embeddings.position_embedding.weight"),
        ("visual.pre_norm", "vision_model.pre_layrnorm"),
        ("visual.transformer.{i}.norm1", "vision_model.encoder.layers.{i}.layer_norm1"),
        *(
            (f"visual.transformer.{{i}}.attn.to_{x}", f"vision_model.encoder.layers.{{i}}.self_attn.{x}_proj")
            for x in "qkv"
        ),
        ("visual.transformer.{i}.attn.proj", "vision_model.encoder.layers.{i}.self_attn.out_proj"),
        ("visual.transformer.{i}.norm2", "vision_model.encoder.layers.{i}.layer_norm2"),
        ("visual.transformer.{i}.mlp.0", "vision_model.encoder.layers.{i}.mlp.fc1"),
        ("visual.transformer.{i}.mlp.2", "vision_model.encoder.layers.{i}.mlp.fc2"),
        ("visual.post_norm", "vision_model.post_layernorm"),
    ]
)
"""The names after `UnfusedReader` splits q, k, v. wanjax does not use CLIP's text encoder and final projection."""


def _res_block(author_name: str, diffusers_name: str) -> Pairs:
    layers = (("residual.0", "norm1"), ("residual.2", "conv1"), ("residual.3", "norm2"), ("residual.6", "conv2"))
    return [
        *((f"{author_name}.{author_layer}", f"{diffusers_name}.{layer}") for author_layer, layer in layers),
        (f"{author_name}.shortcut", f"{diffusers_name}.conv_shortcut"),
    ]


def _resample(author_name: str, diffusers_name: str) -> Pairs:
    return [
        (f"{author_name}.resample.1", f"{diffusers_name}.resample.1"),
        (f"{author_name}.time_conv", f"{diffusers_name}.time_conv"),
    ]


def vae_names(config: Mapping[str, Any]) -> NameMap:
    """Return the names of the autoencoder with this config.json in the layout of diffusers."""
    levels, blocks = len(config["dim_mult"]), config["num_res_blocks"]
    level_pairs = _nested_levels if config["is_residual"] else _flat_levels
    return NameMap(
        [
            *(pair for coder in ("encoder", "decoder") for pair in _shared_names(coder)),
            *level_pairs(levels, blocks),
            ("conv1", "quant_conv"),
            ("conv2", "post_quant_conv"),
        ]
    )


def _shared_names(coder: str) -> Pairs:
    return [
        (f"{coder}.conv1", f"{coder}.conv_in"),
        *_res_block(f"{coder}.middle.0", f"{coder}.mid_block.resnets.0"),
        (f"{coder}.middle.1", f"{coder}.mid_block.attentions.0"),
        *_res_block(f"{coder}.middle.2", f"{coder}.mid_block.resnets.1"),
        (f"{coder}.head.0", f"{coder}.norm_out"),
        (f"{coder}.head.2", f"{coder}.conv_out"),
    ]


def _flat_levels(levels: int, blocks: int) -> Pairs:
    """Return the names of Wan 2.1's levels.

    The authors number blocks and resamplers in one list. diffusers uses such a list in the encoder, but numbers the
    decoder's blocks and resamplers by level.
    """
    pairs: Pairs = []
    for i in range(levels * (blocks + 1) - 1):
        author_name, diffusers_name = f"encoder.downsamples.{i}", f"encoder.down_blocks.{i}"
        pairs += (
            _resample(author_name, diffusers_name)
            if i % (blocks + 1) == blocks
            else _res_block(author_name, diffusers_name)
        )
    for level in range(levels):
        first, diffusers_name = level * (blocks + 2), f"decoder.up_blocks.{level}"
        for j in range(blocks + 1):
            pairs += _res_block(f"decoder.upsamples.{first + j}", f"{diffusers_name}.resnets.{j}")
        pairs += _resample(f"decoder.upsamples.{first + blocks + 1}", f"{diffusers_name}.upsamplers.0")
    return pairs


def _nested_levels(levels: int, blocks: int) -> Pairs:
    """Return the names of Wan 2.2's levels. Each level numbers its blocks and resampler in one list."""
    pairs: Pairs = []
    for level in range(levels):
        coders = (
            (f"encoder.downsamples.{level}.downsamples", f"encoder.down_blocks.{level}", "downsampler", blocks),
            (f"decoder.upsamples.{level}.upsamples", f"decoder.up_blocks.{level}", "upsampler", blocks + 1),
        )
        for author_name, diffusers_name, resampler, count in coders:
            for j in range(count):
                pairs += _res_block(f"{author_name}.{j}", f"{diffusers_name}.resnets.{j}")
            pairs += _resample(f"{author_name}.{count}", f"{diffusers_name}.{resampler}")
    return pairs


def transformer_json(specs: Specs, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Infer diffusers' config.json of a transformer from the shapes of its tensors.

    Args:
        specs: Shapes and dtypes by the authors' names.
        config: The config.json of the authors or of diffusers, for values that shapes do not determine.

    Raises:
        WanjaxError: A tensor that determines a size is missing.
    """
    config = config or {}
    width, channels_in, *patch = shape_of(specs, "patch_embedding.weight", 5)
    layers = count_modules(specs, "blocks")
    num_vace_blocks = count_modules(specs, "vace_blocks")
    has_image_encoder = "img_emb.proj.1.weight" in specs
    heads = config.get("num_heads", config.get("num_attention_heads", max(width // HEAD_DIM, 1)))
    if type(heads) is not int or heads < 1 or width % heads:
        raise WanjaxError(f"the transformer's config.json has num_heads {heads!r}: give a divisor of {width}")
    vace_layers = config.get("vace_layers") or list(range(0, layers, max(layers // max(num_vace_blocks, 1), 1)))
    if not isinstance(vace_layers, list):
        raise WanjaxError(
            f"the transformer's config.json has vace_layers {repr_short(vace_layers)}: give a list of layers"
        )
    json: dict[str, Any] = {
        "_class_name": "WanVACETransformer3DModel" if num_vace_blocks else "WanTransformer3DModel",
        "added_kv_proj_dim": width if has_image_encoder else None,
        "attention_head_dim": width // heads,
        "cross_attn_norm": True,
        "eps": config.get("eps", 1e-6),
        "ffn_dim": shape_of(specs, "blocks.0.ffn.0.weight", 2)[0],
        "freq_dim": shape_of(specs, "time_embedding.0.weight", 2)[1],
        "image_dim": shape_of(specs, "img_emb.proj.1.weight", 2)[1] if has_image_encoder else None,
        "in_channels": channels_in,
        "num_attention_heads": heads,
        "num_layers": layers,
        "out_channels": shape_of(specs, "head.head.weight", 2)[0] // (patch[0] * patch[1] * patch[2]),
        "patch_size": patch,
        "pos_embed_seq_len": shape_of(specs, "img_emb.emb_pos", 3)[1] if "img_emb.emb_pos" in specs else None,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
        "text_dim": shape_of(specs, "text_embedding.0.weight", 2)[1],
    }
    if SPARSE_LINEAR in specs:
        json["sparse_linear"] = True
    if num_vace_blocks:
        json["vace_layers"] = vace_layers
        json["vace_in_channels"] = shape_of(specs, "vace_patch_embedding.weight", 5)[1]
    return json


def vae_json(specs: Specs) -> dict[str, Any]:
    """Infer diffusers' config.json of an autoencoder. Raises the same errors as `transformer_json`."""
    base_width, channels = shape_of(specs, "encoder.conv1.weight", 5)[:2]
    latent_channels = shape_of(specs, "conv2.weight", 5)[0]
    if latent_channels not in STATISTICS:
        supported = " or ".join(map(str, STATISTICS))
        raise WanjaxError(
            f"the autoencoder has {latent_channels} latent channels: the mean and std are known only for {supported}"
        )
    is_residual = any(key.startswith("encoder.downsamples.0.downsamples.") for key in specs)
    json = _nested_json(specs, channels) if is_residual else _flat_json(specs)
    mean, std = STATISTICS[latent_channels].latents_mean, STATISTICS[latent_channels].latents_std
    return json | {
        "_class_name": "AutoencoderKLWan",
        "attn_scales": [],
        "base_dim": base_width,
        "dim_mult": [width // base_width for width in json["dim_mult"]],
        "dropout": 0.0,
        "is_residual": is_residual,
        "latents_mean": list(mean),
        "latents_std": list(std),
        "z_dim": latent_channels,
    }


def _flat_json(specs: Specs) -> dict[str, Any]:
    """Infer the levels of Wan 2.1's autoencoder. All levels but the last end in a resampler."""
    count = count_modules(specs, "encoder.downsamples")
    resamplers = [i for i in range(count) if f"encoder.downsamples.{i}.resample.1.weight" in specs]
    blocks = resamplers[0] if resamplers else count
    widths = [shape_of(specs, f"encoder.downsamples.{i - 1}.residual.6.weight", 5)[0] for i in (*resamplers, count)]
    return {
        "dim_mult": widths,
        "num_res_blocks": blocks,
        "temperal_downsample": [f"encoder.downsamples.{i}.time_conv.weight" in specs for i in resamplers],
    }


def _nested_json(specs: Specs, channels: int) -> dict[str, Any]:
    """Infer the levels of Wan 2.2's autoencoder."""
    levels = count_modules(specs, "encoder.downsamples")
    prefix = "encoder.downsamples.{}.downsamples"
    blocks = count_modules(specs, prefix.format(levels - 1))
    width_keys = [f"{prefix.format(level)}.{blocks - 1}.residual.6.weight" for level in range(levels)]
    time_conv_keys = [f"{prefix.format(level)}.{blocks}.time_conv.weight" for level in range(levels - 1)]
    patch = round((channels / 3) ** 0.5)
    return {
        "decoder_base_dim": shape_of(specs, "decoder.head.0.gamma", 4)[0],
        "dim_mult": [shape_of(specs, key, 5)[0] for key in width_keys],
        "in_channels": channels,
        "num_res_blocks": blocks,
        "out_channels": shape_of(specs, "decoder.head.2.weight", 5)[0],
        "patch_size": patch,
        "scale_factor_spatial": patch * 2 ** (levels - 1),
        "scale_factor_temporal": 2 ** sum(key in specs for key in time_conv_keys),
        "temperal_downsample": [key in specs for key in time_conv_keys],
    }


def text_encoder_json(specs: Specs) -> dict[str, Any]:
    """Infer the config.json of a UMT5 encoder. Raises the same errors as `transformer_json`."""
    return t5_json(
        ("umt5", "UMT5EncoderModel"),
        embedding=shape_of(specs, "token_embedding.weight", 2),
        bias=shape_of(specs, "blocks.0.pos_embedding.embedding.weight", 2),
        query=shape_of(specs, "blocks.0.attn.q.weight", 2),
        mlp=shape_of(specs, "blocks.0.ffn.fc1.weight", 2),
        layers=count_modules(specs, "blocks"),
    )


def image_encoder_json(specs: Specs) -> dict[str, Any]:
    """Infer the config.json of a CLIP vision tower.

    Its positions must have no batch axis. Raises the same errors as `transformer_json`.
    """
    width, _, patch, _ = shape_of(specs, "visual.patch_embedding.weight", 4)
    tokens = shape_of(specs, "visual.pos_embedding", 2)[0]
    return {
        "architectures": ["CLIPVisionModel"],
        "hidden_act": "gelu",
        "hidden_size": width,
        "image_size": patch * math.isqrt(tokens - 1),
        "intermediate_size": shape_of(specs, "visual.transformer.0.mlp.0.weight", 2)[0],
        "layer_norm_eps": 1e-5,
        "model_type": "clip_vision_model",
        "num_attention_heads": width // CLIP_HEAD_DIM,
        "num_hidden_layers": count_modules(specs, "visual.transformer"),
        "patch_size": patch,
    }
