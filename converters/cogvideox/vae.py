# SPDX-License-Identifier: Apache-2.0
"""Conversion rules for CogVideoX's autoencoder: tensors and config.json."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from wanjax.converters.configs import check_kind
from wanjax.converters.weight_rules import WeightRule, conv, norm, pointwise
from wanjax.errors import WanjaxError
from wanjax.models.cogvideox.vae_config import VAEConfig

# Entries of config.json that select the architecture, and their supported values; the first is the default.
SUPPORTED_ENTRIES = {
    "_class_name": ("AutoencoderKLCogVideoX",),
    "in_channels": (3,),
    "out_channels": (3,),
    "act_fn": ("silu",),
    "norm_eps": (1e-6,),
    "shift_factor": (None,),
    "latents_mean": (None,),
    "latents_std": (None,),
    "use_quant_conv": (False,),
    "use_post_quant_conv": (False,),
}
SAMPLE_SIZE = 480, 720  # (height, width) for a config.json without a size, such as the first version of CogVideoX-2b's


def vae_config(json: Mapping[str, Any]) -> VAEConfig:
    """Read an autoencoder's config from `vae/config.json` of a diffusers folder.

    Raises KeyError if a size is missing, WanjaxError if the architecture is not supported.
    """
    check_kind("VAE", json, SUPPORTED_ENTRIES)
    channels, factor = tuple(json["block_out_channels"]), int(json["temporal_compression_ratio"])
    config = VAEConfig(
        channels=channels,
        latent_channels=json["latent_channels"],
        res_blocks=json["layers_per_block"],
        groups=json["norm_num_groups"],
        temporal_factor=factor,
        sample_size=(json.get("sample_height", SAMPLE_SIZE[0]), json.get("sample_width", SAMPLE_SIZE[1])),
        scaling_factor=json["scaling_factor"],
        invert_scale_latents=json.get("invert_scale_latents", False),
    )
    if not channels:
        raise WanjaxError("the VAE's config.json has block_out_channels []: give a width for each level")
    if factor != 2**config.temporal_levels or config.temporal_levels >= len(channels):
        raise WanjaxError(
            f"the VAE's config.json has temporal_compression_ratio {factor}: give a power of two up to "
            f"{config.spatial_factor}"
        )
    return config


def vae_weight_rules(config: VAEConfig) -> list[WeightRule]:
    """Return the rules for every parameter of the autoencoder."""
    return [
        *_shared_weight_rules("encoder"),
        *norm("encoder.norm_out", "encoder.norm_out", bias=True),
        *_res_blocks("encoder.mid_block", "encoder.mid", _plain_norm),
        *_res_blocks("encoder.down_blocks.{i}", "encoder.levels.{i}", _plain_norm),
        *conv("encoder.down_blocks.{i}.downsamplers.0.conv", "encoder.levels.{i}.resample.conv"),
        *_shared_weight_rules("decoder"),
        *_spatial_norm("decoder.norm_out", "decoder.norm_out"),
        *_res_blocks("decoder.mid_block", "decoder.mid", _spatial_norm),
        *_res_blocks("decoder.up_blocks.{i}", "decoder.levels.{i}", _spatial_norm),
        *conv("decoder.up_blocks.{i}.upsamplers.0.conv", "decoder.levels.{i}.resample.conv"),
    ]


def _shared_weight_rules(prefix: str) -> list[WeightRule]:
    return [
        *conv(f"{prefix}.conv_in.conv", f"{prefix}.conv_in"),
        *conv(f"{prefix}.conv_out.conv", f"{prefix}.conv_out"),
    ]


def _res_blocks(source: str, target: str, norms: Callable[[str, str], list[WeightRule]]) -> list[WeightRule]:
    """Return the rules of a level's residual blocks; `norms` builds the rules of one norm."""
    source_block, target_block = f"{source}.resnets.{{j}}", f"{target}.res.{{j}}"
    return [
        *norms(f"{source_block}.norm1", f"{target_block}.norm1"),
        *conv(f"{source_block}.conv1.conv", f"{target_block}.conv1"),
        *norms(f"{source_block}.norm2", f"{target_block}.norm2"),
        *conv(f"{source_block}.conv2.conv", f"{target_block}.conv2"),
        *pointwise(f"{source_block}.conv_shortcut", f"{target_block}.shortcut"),
    ]


_plain_norm = partial(norm, bias=True)


def _spatial_norm(source: str, target: str) -> list[WeightRule]:
    return [
        *norm(f"{source}.norm_layer", f"{target}.norm", bias=True),
        *pointwise(f"{source}.conv_y.conv", f"{target}.scale"),
        *pointwise(f"{source}.conv_b.conv", f"{target}.shift"),
    ]
