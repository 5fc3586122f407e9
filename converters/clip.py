# SPDX-License-Identifier: Apache-2.0
"""The conversion table of CLIP's vision tower: config and names in Hugging Face's files."""

from collections.abc import Mapping
from typing import Any

from wanjax.converters.vision_encoder import block_rules, either_way, vision_sizes, with_prefix
from wanjax.converters.weight_rules import Rule, layer, norm, patches
from wanjax.models.clip import CLIPVisionConfig


def clip_config(json: Mapping[str, Any]) -> CLIPVisionConfig:
    """Read the config of the vision tower from a config.json of `CLIPVisionModelWithProjection` or `CLIPVisionModel`.

    The last block is left out.

    Raises WanjaxError for another model or activation, KeyError if a size is missing.
    """
    sizes = vision_sizes(json, model="clip_vision_model", activation="gelu")
    return CLIPVisionConfig(**sizes | {"layers": sizes["layers"] - 1})


def clip_rules(config: CLIPVisionConfig) -> list[Rule]:
    """Return the rules for every parameter of `CLIPVision`."""
    return with_prefix(
        [
            Rule("embeddings.class_embedding", "class_token"),
            Rule("embeddings.position_embedding.weight", "positions"),
            *layer("embeddings.patch_embedding", "patch_embed", patches((config.patch, config.patch)), bias=False),
            *norm("pre_layrnorm", "norm", bias=True),
            *block_rules(),
        ]
    )


def clip_unused(config: CLIPVisionConfig) -> list[str]:
    """Return patterns of the unused keys: the last block, all layers after it, and the position indices."""
    tower = either_way([f"encoder.layers.{config.layers}.*", "post_layernorm.*", "embeddings.position_ids"])
    return [*tower, "visual_projection.weight"]
