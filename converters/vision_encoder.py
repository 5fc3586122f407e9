# SPDX-License-Identifier: Apache-2.0
"""Shared conversion rules for the vision towers of CLIP and SigLIP: sizes, and the tensors of a block."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wanjax.converters.configs import check_entries
from wanjax.converters.weight_rules import WeightRule, linear, norm

PREFIX = "vision_model."  # newer files do not have this prefix


def vision_sizes(json: Mapping[str, Any], *, model: str, activation: str) -> dict[str, Any]:
    """Read the sizes of a `VisionConfig` from the config.json of a vision tower.

    Raises WanjaxError for another model or activation, and KeyError if a size is missing.
    """
    check_entries("image encoder", json, {"model_type": model, "hidden_act": activation})
    return {
        "layers": json["num_hidden_layers"],
        "heads": json["num_attention_heads"],
        "width": json["hidden_size"],
        "mlp_dim": json["intermediate_size"],
        "image_size": json["image_size"],
        "patch": json["patch_size"],
        "eps": json["layer_norm_eps"],
    }


def block_weight_rules() -> list[WeightRule]:
    """Return the rules for every parameter of the stacked `VisionBlock`s."""
    layer = "encoder.layers.{i}"
    return [
        *norm(f"{layer}.layer_norm1", "blocks.norm1", bias=True),
        *linear(f"{layer}.self_attn.q_proj", "blocks.attn.q"),
        *linear(f"{layer}.self_attn.k_proj", "blocks.attn.k"),
        *linear(f"{layer}.self_attn.v_proj", "blocks.attn.v"),
        *linear(f"{layer}.self_attn.out_proj", "blocks.attn.out"),
        *norm(f"{layer}.layer_norm2", "blocks.norm2", bias=True),
        *linear(f"{layer}.mlp.fc1", "blocks.mlp.up"),
        *linear(f"{layer}.mlp.fc2", "blocks.mlp.down"),
    ]


def with_optional_prefix(rules: Sequence[WeightRule]) -> list[WeightRule]:
    """Return rules that match names with or without the prefix."""
    return [replace(rule, source=PREFIX + rule.source, aliases=(rule.source,)) for rule in rules]


def with_and_without_prefix(patterns: Sequence[str]) -> list[str]:
    """Return patterns that match keys with and without the prefix."""
    return [prefix + pattern for pattern in patterns for prefix in (PREFIX, "")]
