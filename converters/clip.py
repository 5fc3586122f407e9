# SPDX-License-Identifier: Apache-2.0
"""Conversion rules for CLIP's vision tower: the config and tensor names in Hugging Face's files."""

from collections.abc import Mapping
from typing import Any

from wanjax.converters.vision_encoder import (
    block_weight_rules,
    vision_sizes,
    with_and_without_prefix,
    with_optional_prefix,
)
from wanjax.converters.weight_rules import WeightRule, layer, norm, patches
from wanjax.models.clip import CLIPVisionConfig


def clip_config(json: Mapping[str, Any]) -> CLIPVisionConfig:
    """Read a config.json of `CLIPVisionModelWithProjection` or `CLIPVisionModel`. The result leaves out the last block.

    Raises WanjaxError for another model or activation, and KeyError if a size is missing.
    """
    sizes = vision_sizes(json, model="clip_vision_model", activation="gelu")
    return CLIPVisionConfig(**sizes | {"layers": sizes["layers"] - 1})


def clip_weight_rules(config: CLIPVisionConfig) -> list[WeightRule]:
    """Return the rules for every parameter of `CLIPVision`."""
    return with_optional_prefix(
        [
            WeightRule("embeddings.class_embedding", "class_token"),
            WeightRule("embeddings.position_embedding.weight", "positions"),
            *layer("embeddings.patch_embedding", "patch_embed", patches((config.patch, config.patch)), bias=False),
            *norm("pre_layrnorm", "norm", bias=True),
            *block_weight_rules(),
        ]
    )


def clip_unused(config: CLIPVisionConfig) -> list[str]:
    """Return patterns of unused keys: the last block, all layers after it, and the position indices."""
    patterns = with_and_without_prefix(
        [f"encoder.layers.{config.layers}.*", "post_layernorm.*", "embeddings.position_ids"]
    )
    return [*patterns, "visual_projection.weight"]
