# SPDX-License-Identifier: Apache-2.0
"""Conversion rules for CogVideoX's transformer in the layout of diffusers: tensors and config.json."""

from collections.abc import Mapping
from typing import Any

from wanjax.converters.configs import check_kind
from wanjax.converters.weight_rules import (
    TRANSPOSE,
    Transform,
    WeightRule,
    channels_last,
    embedder,
    feed_forward,
    layer,
    linear,
    norm,
    patches,
    projections,
    rope_halves,
    squeeze,
)
from wanjax.errors import WanjaxError
from wanjax.models.cogvideox.config import TransformerConfig

# Entries of config.json that select the architecture, and their supported values; the first is the default.
SUPPORTED_ENTRIES = {
    "_class_name": ("CogVideoXTransformer3DModel",),
    "activation_fn": ("gelu-approximate",),
    "attention_bias": (True,),
    "flip_sin_to_cos": (True,),
    "freq_shift": (0,),
    "norm_elementwise_affine": (True,),
    "patch_size_t": (None, 2),
    "temporal_compression_ratio": (4,),
    "timestep_activation_fn": ("silu",),
    "use_learned_positional_embeddings": (False, True),
    "use_rotary_positional_embeddings": (False, True),
}
FIRST_GENERATION = {"patch_bias": (True,), "ofs_embed_dim": (None,)}  # each patch covers one frame
SECOND_GENERATION = {"use_learned_positional_embeddings": (False,), "use_rotary_positional_embeddings": (True,)}


def transformer_config(json: Mapping[str, Any]) -> TransformerConfig:
    """Read a transformer's config from `transformer/config.json` of a diffusers folder.

    Raises KeyError if a size is missing, WanjaxError if the architecture is not supported.
    """
    check_kind("transformer", json, SUPPORTED_ENTRIES)
    frames = json.get("patch_size_t")
    check_kind("transformer", json, SECOND_GENERATION if frames else FIRST_GENERATION)
    size = json["patch_size"]
    scale = json["spatial_interpolation_scale"]
    return TransformerConfig(
        layers=json["num_layers"],
        heads=json["num_attention_heads"],
        head_dim=json["attention_head_dim"],
        channels_in=json["in_channels"],
        channels_out=json["out_channels"],
        patch=(frames or 1, size, size),
        text_width=json["text_embed_dim"],
        text_length=json["max_text_seq_length"],
        time_width=json["time_embed_dim"],
        offset_width=json.get("ofs_embed_dim"),
        eps=json["norm_eps"],
        position_scales=(json["temporal_interpolation_scale"], scale, scale),
        **_positions(json),
    )


def _positions(json: Mapping[str, Any]) -> dict[str, Any]:
    """Read the positional embeddings from config.json; return the config's fields for them."""
    rotary, learned = (json.get(f"use_{kind}_positional_embeddings", False) for kind in ("rotary", "learned"))
    if json.get("patch_size_t"):
        return {"rotary": "counted", "added": None, "trained_grid": None}
    if not rotary:
        if learned:
            raise WanjaxError(
                "the transformer's config.json has learned positions without rotary ones, which is not supported: "
                "give a published config.json"
            )
        return {"rotary": None, "added": "sinusoids", "trained_grid": None}
    frames = (json["sample_frames"] - 1) // json.get("temporal_compression_ratio", 4) + 1
    grid = frames, *(json[f"sample_{side}"] // json["patch_size"] for side in ("height", "width"))
    return {"rotary": "resized", "added": "learned" if learned else None, "trained_grid": grid}


def transformer_weight_rules(config: TransformerConfig) -> list[WeightRule]:
    """Return the rules for every parameter of the transformer."""
    patch, patch_volume = config.patch, config.patch_volume
    patch_transform = (
        patches(patch[1:]) if patch[0] == 1 else TRANSPOSE >> channels_last(patch_volume)
    )  # the first generation has a convolution, the second a dense layer
    return [
        *layer("patch_embed.proj", "patch_embed", patch_transform),
        *linear("patch_embed.text_proj", "text_embed"),
        *[WeightRule("patch_embed.pos_embedding", "added_positions.table", squeeze(0))] * (config.added == "learned"),
        *embedder("time_embedding", "time_embed"),
        *embedder("ofs_embedding", "time_embed.offset") * (config.offset_width is not None),
        *_block("transformer_blocks.{i}", "blocks", config),
        *norm("norm_final", "norm_final", bias=True),
        *linear("norm_out.linear", "out_mod"),
        *norm("norm_out.norm", "norm_out", bias=True),
        *linear("proj_out", "proj_out", rows=channels_last(patch_volume)),
    ]


def _block(source: str, target: str, config: TransformerConfig) -> list[WeightRule]:
    return [
        *linear(f"{source}.norm1.linear", f"{target}.attn_mod"),
        *norm(f"{source}.norm1.norm", f"{target}.norm1", bias=True),
        *_attention(f"{source}.attn1", f"{target}.attn", rope_halves(config.heads), rope_halves(1)),
        *linear(f"{source}.norm2.linear", f"{target}.mlp_mod"),
        *norm(f"{source}.norm2.norm", f"{target}.norm2", bias=True),
        *feed_forward(f"{source}.ff", f"{target}.mlp"),
    ]


def _attention(source: str, target: str, heads: Transform, head: Transform) -> list[WeightRule]:
    """Return the rules of attention. For RoPE, `heads` reorders q and k, and `head` reorders their norms."""
    return [
        *projections(source, target, heads),
        *norm(f"{source}.norm_q", f"{target}.q_norm", bias=True, rows=head),
        *norm(f"{source}.norm_k", f"{target}.k_norm", bias=True, rows=head),
    ]
