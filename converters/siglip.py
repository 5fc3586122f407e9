# SPDX-License-Identifier: Apache-2.0
"""The conversion table of SigLIP's vision tower: config and names in Hugging Face's files."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wanjax.converters.engine import Rule, linear, norm, patches
from wanjax.errors import WanjaxError
from wanjax.models.siglip import SiglipVisionConfig

PREFIX = "vision_model."  # newer files lack it


def siglip_config(json: Mapping[str, Any]) -> SiglipVisionConfig:
    """Reads the config of the vision tower from a config.json of `SiglipVisionModel`.

    Raises WanjaxError for another model or activation, or if a size is missing.
    """
    for entry, right in (("model_type", "siglip_vision_model"), ("hidden_act", "gelu_pytorch_tanh")):
        if (value := json.get(entry)) != right:
            raise WanjaxError(f"the image encoder's config.json has {entry} {value!r} where {right!r} is right")
    try:
        return SiglipVisionConfig(
            layers=json["num_hidden_layers"],
            heads=json["num_attention_heads"],
            width=json["hidden_size"],
            mlp_dim=json["intermediate_size"],
            image_size=json["image_size"],
            patch=json["patch_size"],
            eps=json["layer_norm_eps"],
        )
    except KeyError as missing:
        raise WanjaxError(f"the image encoder's config.json has no {missing.args[0]}") from None


def siglip_rules(config: SiglipVisionConfig) -> list[Rule]:
    """Returns the rules for every parameter of `SiglipVision`."""
    layer, patch = "encoder.layers.{i}", "embeddings.patch_embedding"
    rules = [
        Rule(f"{patch}.weight", "patch_embed.kernel", patches((config.patch, config.patch))),
        Rule(f"{patch}.bias", "patch_embed.bias"),
        Rule("embeddings.position_embedding.weight", "positions"),
        *norm(f"{layer}.layer_norm1", "blocks.norm1", bias=True),
        *linear(f"{layer}.self_attn.q_proj", "blocks.attn.q"),
        *linear(f"{layer}.self_attn.k_proj", "blocks.attn.k"),
        *linear(f"{layer}.self_attn.v_proj", "blocks.attn.v"),
        *linear(f"{layer}.self_attn.out_proj", "blocks.attn.out"),
        *norm(f"{layer}.layer_norm2", "blocks.norm2", bias=True),
        *linear(f"{layer}.mlp.fc1", "blocks.mlp.up"),
        *linear(f"{layer}.mlp.fc2", "blocks.mlp.down"),
        *norm("post_layernorm", "norm", bias=True),
    ]
    return [replace(rule, source=PREFIX + rule.source, aliases=(rule.source,)) for rule in rules]


def siglip_unused(config: SiglipVisionConfig) -> list[str]:
    """Returns patterns of the unused keys: the head that pools the tokens, and the position indices."""
    return [prefix + key for key in ("head.*", "embeddings.position_ids") for prefix in (PREFIX, "")]
