# SPDX-License-Identifier: Apache-2.0
"""The conversion table of CogVideoX's autoencoder: names and shapes of its weights, and config.json."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from wanjax.converters.configs import check_kind
from wanjax.converters.weight_rules import Rule, conv, norm, pointwise
from wanjax.errors import WanjaxError
from wanjax.models.cogvideox.vae_config import VAEConfig

# Entries of config.json that select the architecture, and their supported values; the first is that of a missing entry.
KIND = {
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
SAMPLE_SIZE = 480, 720  # (height, width) of a config that lacks it, such as the first of CogVideoX-2b


def vae_config(json: Mapping[str, Any]) -> VAEConfig:
    """Read an autoencoder's config from `vae/config.json` of a diffusers folder.

    Raises KeyError if a size is missing, WanjaxError if the architecture is not supported.
    """
    check_kind("VAE", json, KIND)
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
            f"{config.spatial_factor}, one halving for each change of resolution"
        )
    return config


def vae_rules(config: VAEConfig) -> list[Rule]:
    """Return the rules for every parameter of the autoencoder."""
    return [
        *_ends("encoder"),
        *norm("encoder.norm_out", "encoder.norm_out", bias=True),
        *_res_blocks("encoder.mid_block", "encoder.mid", _plain_norm),
        *_res_blocks("encoder.down_blocks.{i}", "encoder.levels.{i}", _plain_norm),
        *conv("encoder.down_blocks.{i}.downsamplers.0.conv", "encoder.levels.{i}.resample.conv"),
        *_ends("decoder"),
        *_spatial_norm("decoder.norm_out", "decoder.norm_out"),
        *_res_blocks("decoder.mid_block", "decoder.mid", _spatial_norm),
        *_res_blocks("decoder.up_blocks.{i}", "decoder.levels.{i}", _spatial_norm),
        *conv("decoder.up_blocks.{i}.upsamplers.0.conv", "decoder.levels.{i}.resample.conv"),
    ]


def _ends(half: str) -> list[Rule]:
    return [
        *conv(f"{half}.conv_in.conv", f"{half}.conv_in"),
        *conv(f"{half}.conv_out.conv", f"{half}.conv_out"),
    ]


def _res_blocks(source: str, target: str, norms: Callable[[str, str], list[Rule]]) -> list[Rule]:
    """Return the rules of a level's residual blocks; `norms` returns the rules of one norm."""
    theirs, ours = f"{source}.resnets.{{j}}", f"{target}.res.{{j}}"
    return [
        *norms(f"{theirs}.norm1", f"{ours}.norm1"),
        *conv(f"{theirs}.conv1.conv", f"{ours}.conv1"),
        *norms(f"{theirs}.norm2", f"{ours}.norm2"),
        *conv(f"{theirs}.conv2.conv", f"{ours}.conv2"),
        *pointwise(f"{theirs}.conv_shortcut", f"{ours}.shortcut"),
    ]


_plain_norm = partial(norm, bias=True)


def _spatial_norm(source: str, target: str) -> list[Rule]:
    return [
        *norm(f"{source}.norm_layer", f"{target}.norm", bias=True),
        *pointwise(f"{source}.conv_y.conv", f"{target}.scale"),
        *pointwise(f"{source}.conv_b.conv", f"{target}.shift"),
    ]
