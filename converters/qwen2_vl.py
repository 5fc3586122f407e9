# SPDX-License-Identifier: Apache-2.0
"""Conversion rules for the language model of Qwen2.5-VL: the config and tensor names in Hugging Face's files."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wanjax.converters.configs import check_entries, check_kind
from wanjax.converters.weight_rules import Rule, linear, norm
from wanjax.models.qwen2_vl import Qwen2VLConfig

PREFIX = "model."  # some files have this prefix in every key
SKIPPED_BLOCKS = 2  # the features are the output of the block before these
DEFAULT_THETA = 1e6  # the value for a config.json without rope_theta


def qwen2_vl_config(json: Mapping[str, Any]) -> Qwen2VLConfig:
    """Read the encoder's config from a config.json of `Qwen2_5_VLTextModel`. The result leaves out the last two blocks.

    Raises WanjaxError for another model, activation, attention or rotary embedding, and KeyError if a size is missing.
    """
    rope = json.get("rope_parameters") or json.get("rope_scaling") or {}
    check_entries("text encoder", json, {"model_type": "qwen2_5_vl_text", "hidden_act": "silu"})
    check_kind("text encoder", json, {"use_sliding_window": (False, None)})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    check_kind("text encoder", {"rope_type": rope_type}, {"rope_type": ("default", "mrope")})
    return Qwen2VLConfig(
        vocab_size=json["vocab_size"],
        width=json["hidden_size"],
        layers=json["num_hidden_layers"] - SKIPPED_BLOCKS,
        heads=json["num_attention_heads"],
        kv_heads=json["num_key_value_heads"],
        mlp_dim=json["intermediate_size"],
        theta=float(rope.get("rope_theta") or json.get("rope_theta") or DEFAULT_THETA),
        eps=json["rms_norm_eps"],
    )


def qwen2_vl_rules(config: Qwen2VLConfig) -> list[Rule]:
    """Return the rules for every parameter of `Qwen2VLEncoder`."""
    layer = "layers.{i}"
    rules = [
        Rule("embed_tokens.weight", "embed.embedding"),
        *norm(f"{layer}.input_layernorm", "blocks.norm1"),
        *linear(f"{layer}.self_attn.q_proj", "blocks.attn.q"),
        *linear(f"{layer}.self_attn.k_proj", "blocks.attn.k"),
        *linear(f"{layer}.self_attn.v_proj", "blocks.attn.v"),
        *linear(f"{layer}.self_attn.o_proj", "blocks.attn.out", bias=False),
        *norm(f"{layer}.post_attention_layernorm", "blocks.norm2"),
        *linear(f"{layer}.mlp.gate_proj", "blocks.mlp.gate", bias=False),
        *linear(f"{layer}.mlp.up_proj", "blocks.mlp.up", bias=False),
        *linear(f"{layer}.mlp.down_proj", "blocks.mlp.down", bias=False),
    ]
    return [replace(rule, aliases=(PREFIX + rule.source,)) for rule in rules]


def qwen2_vl_unused(config: Qwen2VLConfig) -> list[str]:
    """Return patterns of unused keys: the last blocks and the final norm."""
    blocks = (f"layers.{config.layers + i}.*" for i in range(SKIPPED_BLOCKS))
    return [prefix + key for key in (*blocks, "norm.weight") for prefix in ("", PREFIX)]
