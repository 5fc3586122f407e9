# SPDX-License-Identifier: Apache-2.0
"""Conversion rules for HunyuanVideo 1.5's networks in the layout of diffusers: tensors and config.json."""

from collections.abc import Mapping
from typing import Any

from wanjax.converters.configs import check_kind
from wanjax.converters.weight_rules import (
    WeightRule,
    conv,
    embedder,
    feed_forward,
    gamma,
    layer,
    linear,
    norm,
    patches,
    pointwise,
    projections,
    rope_halves,
)
from wanjax.errors import WanjaxError
from wanjax.models.hunyuanvideo.config import TransformerConfig
from wanjax.models.hunyuanvideo.vae_config import VAE_1_5, VAEConfig

# Entries of config.json that select the architecture, and their supported values; the first is the default.
TRANSFORMER_ENTRIES = {
    "_class_name": ("HunyuanVideo15Transformer3DModel",),
    "patch_size": (1,),
    "patch_size_t": (1,),
    "qk_norm": ("rms_norm",),
}
VAE_ENTRIES = {
    "_class_name": ("AutoencoderKLHunyuanVideo15",),
    "in_channels": (3,),
    "out_channels": (3,),
    "downsample_match_channel": (True,),
    "upsample_match_channel": (True,),
}
REFINER_MLP_RATIO = 4  # config.json has neither this size nor the next ones
GLYPH_MLP_DIM = 2048
FREQUENCY_DIM = 256
EPS = 1e-6


def transformer_config(json: Mapping[str, Any]) -> TransformerConfig:
    """Read a transformer's config from `transformer/config.json` of a diffusers folder.

    Raises KeyError if a size is missing, and WanjaxError if sizes contradict each other or the architecture is not
    supported.
    """
    check_kind("transformer", json, TRANSFORMER_ENTRIES)
    width = json["num_attention_heads"] * json["attention_head_dim"]
    config = TransformerConfig(
        layers=json["num_layers"],
        refiner_layers=json["num_refiner_layers"],
        heads=json["num_attention_heads"],
        head_dim=json["attention_head_dim"],
        mlp_dim=round(width * json["mlp_ratio"]),
        refiner_mlp_dim=REFINER_MLP_RATIO * width,
        channels_in=json["in_channels"],
        channels_out=json["out_channels"],
        text_width=json["text_embed_dim"],
        glyph_width=json["text_embed_2_dim"],
        glyph_mlp_dim=GLYPH_MLP_DIM,
        image_width=json["image_embed_dim"],
        frequency_dim=FREQUENCY_DIM,
        rope_channels=tuple(json["rope_axes_dim"]),
        rope_theta=json["rope_theta"],
        eps=EPS,
        uses_meanflow=bool(json.get("use_meanflow", False)),
        target_size=json["target_size"],
    )
    if sum(config.rope_channels) != config.head_dim:
        raise WanjaxError(
            f"the transformer's config.json has rope_axes_dim {list(config.rope_channels)}: give three numbers that "
            f"add up to attention_head_dim {config.head_dim}"
        )
    return config


def transformer_weight_rules(config: TransformerConfig) -> list[WeightRule]:
    """Return the rules for every parameter of the transformer."""
    last = config.layers - 1
    return [
        *layer("x_embedder.proj", "patch_embed", patches((1, 1, 1))),
        *embedder("time_embed.timestep_embedder", "time_embed"),
        *embedder("time_embed.timestep_embedder_r", "next_time_embed"),
        *_refiner("context_embedder", "refiner"),
        *norm("context_embedder_2.norm", "glyph_embed.norm", bias=True),
        *embedder("context_embedder_2", "glyph_embed.mlp"),
        *linear("context_embedder_2.linear_3", "glyph_embed.out"),
        *norm("image_embedder.norm_in", "image_embed.norm1", bias=True),
        *embedder("image_embedder", "image_embed.mlp"),
        *norm("image_embedder.norm_out", "image_embed.norm2", bias=True),
        WeightRule("cond_type_embed.weight", "kinds"),
        *_block("transformer_blocks.{i}", "blocks", config),
        *_block(f"transformer_blocks.{last}", "last_block", config),
        *linear("norm_out.linear", "mod_out"),
        *linear("proj_out", "proj_out"),
    ]


def _refiner(source: str, target: str) -> list[WeightRule]:
    source_block, target_block = f"{source}.token_refiner.refiner_blocks.{{i}}", f"{target}.blocks"
    return [
        *embedder(f"{source}.time_text_embed.timestep_embedder", f"{target}.time_embed"),
        *embedder(f"{source}.time_text_embed.text_embedder", f"{target}.mean_embed"),
        *linear(f"{source}.proj_in", f"{target}.tokens"),
        *norm(f"{source_block}.norm1", f"{target_block}.norm1", bias=True),
        *projections(f"{source_block}.attn", target_block),
        *norm(f"{source_block}.norm2", f"{target_block}.norm2", bias=True),
        *feed_forward(f"{source_block}.ff", f"{target_block}.mlp"),
        *linear(f"{source_block}.norm_out.linear", f"{target_block}.gates"),
    ]


def _block(source: str, target: str, config: TransformerConfig) -> list[WeightRule]:
    """Return the rules of a block.

    RoPE reorders the channels of q and k, for text as for video. All heads share a norm.
    """
    all_heads, one_head = rope_halves(config.heads), rope_halves(1)
    return [
        *linear(f"{source}.norm1.linear", f"{target}.mod"),
        *linear(f"{source}.norm1_context.linear", f"{target}.text_mod"),
        *projections(f"{source}.attn", f"{target}.attn", all_heads),
        *linear(f"{source}.attn.add_q_proj", f"{target}.attn.text_q", rows=all_heads),
        *linear(f"{source}.attn.add_k_proj", f"{target}.attn.text_k", rows=all_heads),
        *linear(f"{source}.attn.add_v_proj", f"{target}.attn.text_v"),
        *linear(f"{source}.attn.to_add_out", f"{target}.attn.text_out"),
        *norm(f"{source}.attn.norm_q", f"{target}.attn.q_norm", rows=one_head),
        *norm(f"{source}.attn.norm_k", f"{target}.attn.k_norm", rows=one_head),
        *norm(f"{source}.attn.norm_added_q", f"{target}.attn.text_q_norm", rows=one_head),
        *norm(f"{source}.attn.norm_added_k", f"{target}.attn.text_k_norm", rows=one_head),
        *feed_forward(f"{source}.ff", f"{target}.mlp"),
        *feed_forward(f"{source}.ff_context", f"{target}.text_mlp"),
    ]


def vae_config(json: Mapping[str, Any]) -> VAEConfig:
    """Read an autoencoder's config from `vae/config.json`. Raises the same errors as `transformer_config`."""
    check_kind("VAE", json, VAE_ENTRIES)
    config = VAEConfig(
        channels=tuple(json["block_out_channels"]),
        res_blocks=json["layers_per_block"],
        latent_channels=json["latent_channels"],
        spatial_factor=json["spatial_compression_ratio"],
        temporal_factor=json["temporal_compression_ratio"],
        scale=json["scaling_factor"],
        max_latent_frames=VAE_1_5.max_latent_frames,
    )
    spatial, temporal = config.num_halving_levels
    factors = config.spatial_factor, config.temporal_factor
    if not (temporal <= spatial < len(config.channels) and factors == (2**spatial, 2**temporal)):
        raise WanjaxError(
            f"the VAE's config.json has compression ratios {factors[0]} in space and {factors[1]} in time: give powers "
            f"of two, the second at most the first, and the first below {2 ** len(config.channels)}"
        )
    return config


def vae_weight_rules(config: VAEConfig) -> list[WeightRule]:
    """Return the rules for every parameter of the autoencoder."""
    return [
        *_vae_coder("encoder", "down_blocks", "downsamplers"),
        *_vae_coder("decoder", "up_blocks", "upsamplers"),
    ]


def _vae_coder(coder: str, levels: str, resamplers: str) -> list[WeightRule]:
    source, target = f"{coder}.mid_block.attentions.0", f"{coder}.mid.attention"
    return [
        *conv(f"{coder}.conv_in.conv", f"{coder}.conv_in"),
        *_res_block(f"{coder}.{levels}.{{i}}.resnets.{{j}}", f"{coder}.levels.{{i}}.res.{{j}}"),
        *conv(f"{coder}.{levels}.{{i}}.{resamplers}.0.conv.conv", f"{coder}.levels.{{i}}.resample.conv"),
        *_res_block(f"{coder}.mid_block.resnets.0", f"{coder}.mid.res1"),
        gamma(f"{source}.norm", f"{target}.norm"),
        *pointwise(f"{source}.to_q", f"{target}.q"),
        *pointwise(f"{source}.to_k", f"{target}.k"),
        *pointwise(f"{source}.to_v", f"{target}.v"),
        *pointwise(f"{source}.proj_out", f"{target}.out"),
        *_res_block(f"{coder}.mid_block.resnets.1", f"{coder}.mid.res2"),
        gamma(f"{coder}.norm_out", f"{coder}.norm_out"),
        *conv(f"{coder}.conv_out.conv", f"{coder}.conv_out"),
    ]


def _res_block(source: str, target: str) -> list[WeightRule]:
    return [
        gamma(f"{source}.norm1", f"{target}.norm1"),
        *conv(f"{source}.conv1.conv", f"{target}.conv1"),
        gamma(f"{source}.norm2", f"{target}.norm2"),
        *conv(f"{source}.conv2.conv", f"{target}.conv2"),
    ]
