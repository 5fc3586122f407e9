# SPDX-License-Identifier: Apache-2.0
"""The vision tower of CLIP as Hugging Face stores it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wanjax.converters.engine import Rule, linear, norm, patches
from wanjax.errors import WanjaxError
from wanjax.models.vision import CLIPVisionConfig

PREFIX = "vision_model."  # which newer files lack


def clip_config(json: Mapping[str, Any]) -> CLIPVisionConfig:
    """The vision tower, but for its last block, that a config.json of `CLIPVisionModel` describes.

    Raises WanjaxError where it is another model, has another activation, or lacks a size.
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
    """Every parameter of `CLIPVision`."""
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
    """Patterns of the keys that files hold beside these: the last block, the last norm, and positions as numbers."""
    unused = (f"encoder.layers.{config.layers}.*", "post_layernorm.*", "embeddings.position_ids")
    return [prefix + key for key in unused for prefix in (PREFIX, "")]
