# SPDX-License-Identifier: Apache-2.0
"""Conversion rules for SigLIP's vision tower: the config and tensor names in Hugging Face's files."""

from collections.abc import Mapping
from typing import Any

from wanjax.converters.vision_encoder import (
    block_weight_rules,
    vision_sizes,
    with_and_without_prefix,
    with_optional_prefix,
)
from wanjax.converters.weight_rules import WeightRule, layer, norm, patches
from wanjax.models.siglip import SiglipVisionConfig


def siglip_config(json: Mapping[str, Any]) -> SiglipVisionConfig:
    """Read the config of the vision tower from a config.json of `SiglipVisionModel`.

    Raises WanjaxError for another model or activation, and KeyError if a size is missing.
    """
    return SiglipVisionConfig(**vision_sizes(json, model="siglip_vision_model", activation="gelu_pytorch_tanh"))


def siglip_weight_rules(config: SiglipVisionConfig) -> list[WeightRule]:
    """Return the rules for every parameter of `SiglipVision`."""
    return with_optional_prefix(
        [
            *layer("embeddings.patch_embedding", "patch_embed", patches((config.patch, config.patch))),
            WeightRule("embeddings.position_embedding.weight", "positions"),
            *block_weight_rules(),
            *norm("post_layernorm", "norm", bias=True),
        ]
    )


def siglip_unused(config: SiglipVisionConfig) -> list[str]:
    """Return patterns of unused keys: the pooling head and the position indices."""
    return with_and_without_prefix(["head.*", "embeddings.position_ids"])
