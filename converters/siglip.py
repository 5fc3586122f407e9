# SPDX-License-Identifier: Apache-2.0
"""The conversion table of SigLIP's vision tower: config and names in Hugging Face's files."""

from collections.abc import Mapping
from typing import Any

from wanjax.converters.vision_encoder import block_rules, either_way, vision_sizes, with_prefix
from wanjax.converters.weight_rules import Rule, layer, norm, patches
from wanjax.models.siglip import SiglipVisionConfig


def siglip_config(json: Mapping[str, Any]) -> SiglipVisionConfig:
    """Read the config of the vision tower from a config.json of `SiglipVisionModel`.

    Raises WanjaxError for another model or activation, KeyError if a size is missing.
    """
    return SiglipVisionConfig(**vision_sizes(json, model="siglip_vision_model", activation="gelu_pytorch_tanh"))


def siglip_rules(config: SiglipVisionConfig) -> list[Rule]:
    """Return the rules for every parameter of `SiglipVision`."""
    return with_prefix(
        [
            *layer("embeddings.patch_embedding", "patch_embed", patches((config.patch, config.patch))),
            Rule("embeddings.position_embedding.weight", "positions"),
            *block_rules(),
            *norm("post_layernorm", "norm", bias=True),
        ]
    )


def siglip_unused(config: SiglipVisionConfig) -> list[str]:
    """Return patterns of the unused keys: the head that pools the tokens, and the position indices."""
    return either_way(["head.*", "embeddings.position_ids"])
