# SPDX-License-Identifier: Apache-2.0
"""The conversion table of CLIP's vision tower: config and names in Hugging Face's files."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wanjax.converters.engine import Rule, linear, norm, patches
from wanjax.errors import WanjaxError
from wanjax.models.clip import CLIPVisionConfig

PREFIX = "vision_model."  # newer files lack it


def clip_config(json: Mapping[str, Any]) -> CLIPVisionConfig:
    """Reads the config of the vision tower from a config.json of `CLIPVisionModel`; the last block is left out.

    Raises WanjaxError for another model or activation, or if a size is missing.
    """
    for entry, right in (("model_type", "clip_vision_model"), ("hidden_act", "gelu")):
        if (value := json.get(entry)) != right:
            raise WanjaxError(f"the image encoder's config.json has {entry} {value!r} where {right!r} is right")
    try:
        return CLIPVisionConfig(
            layers=json["num_hidden_layers"] - 1,
            heads=json["num_attention_heads"],
            width=json["hidden_size"],
            mlp_dim=json["intermediate_size"],
            image_size=json["image_size"],
            patch=json["patch_size"],
            eps=json["layer_norm_eps"],
        )
    except KeyError as missing:
        raise WanjaxError(f"the image encoder's config.json has no {missing.args[0]}") from None


def clip_rules(config: CLIPVisionConfig) -> list[Rule]:
    """Returns the rules for every parameter of `CLIPVision`."""
    layer = "encoder.layers.{i}"
    rules = [
        Rule("embeddings.class_embedding", "class_token"),
        Rule("embeddings.position_embedding.weight", "positions"),
        Rule("embeddings.patch_embedding.weight", "patch_embed.kernel", patches((config.patch, config.patch))),
        *norm("pre_layrnorm", "norm", bias=True),
        *norm(f"{layer}.layer_norm1", "blocks.norm1", bias=True),
        *linear(f"{layer}.self_attn.q_proj", "blocks.attn.q"),
        *linear(f"{layer}.self_attn.k_proj", "blocks.attn.k"),
        *linear(f"{layer}.self_attn.v_proj", "blocks.attn.v"),
        *linear(f"{layer}.self_attn.out_proj", "blocks.attn.out"),
        *norm(f"{layer}.layer_norm2", "blocks.norm2", bias=True),
        *linear(f"{layer}.mlp.fc1", "blocks.mlp.up"),
        *linear(f"{layer}.mlp.fc2", "blocks.mlp.down"),
    ]
    return [replace(rule, source=PREFIX + rule.source, aliases=(rule.source,)) for rule in rules]


def clip_unused(config: CLIPVisionConfig) -> list[str]:
    """Returns patterns of the unused keys: the last block, the last norm, and the position indices."""
    unused = (f"encoder.layers.{config.layers}.*", "post_layernorm.*", "embeddings.position_ids")
    return [prefix + key for key in unused for prefix in (PREFIX, "")]
