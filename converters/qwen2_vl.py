# SPDX-License-Identifier: Apache-2.0
"""Conversion rules for the language model of Qwen2.5-VL: its config, and the names in its files.

The names are those of Hugging Face, and in GGUF files those of llama.cpp.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from wanjax.converters.configs import check_entries, check_kind
from wanjax.converters.name_map import NameMap
from wanjax.converters.weight_rules import WeightRule, linear, norm
from wanjax.errors import WanjaxError
from wanjax.models.qwen2_vl import Qwen2VLConfig

PREFIX = "model."  # some files have this prefix in every key
SKIPPED_BLOCKS = 2  # the features are the output of the block before these
DEFAULT_THETA = 1e6  # the value for a config.json without rope_theta
GGUF_ARCHITECTURE = "qwen2vl"  # of Qwen2-VL and Qwen2.5-VL; the pairs of rows of q and k are not permuted
GGUF_NAMES = NameMap(  # llama.cpp's names (gguf-py/gguf/tensor_mapping.py) and transformers'
    [
        ("token_embd", "embed_tokens"),
        ("blk.{i}.attn_norm", "layers.{i}.input_layernorm"),
        *((f"blk.{{i}}.attn_{x}", f"layers.{{i}}.self_attn.{x}_proj") for x in "qkv"),
        ("blk.{i}.attn_output", "layers.{i}.self_attn.o_proj"),
        ("blk.{i}.ffn_norm", "layers.{i}.post_attention_layernorm"),
        *((f"blk.{{i}}.ffn_{x}", f"layers.{{i}}.mlp.{x}_proj") for x in ("gate", "up", "down")),
        ("output_norm", "norm"),
    ]
)
GGUF_SIZES = {  # entries of config.json, and the fields of a GGUF file after the architecture's name
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


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


def gguf_json(field: Callable[[str], Any], vocab_size: int) -> dict[str, Any]:
    """Build the config.json of the language model in a GGUF file.

    Args:
        field: Returns the value of a field of the file's header, or None.
        vocab_size: The number of rows of the embedding.

    Raises:
        WanjaxError: The file is of another architecture, or lacks a field.
    """
    if (architecture := field("general.architecture")) != GGUF_ARCHITECTURE:
        raise WanjaxError(f"the text encoder's architecture is {architecture!r}: give {GGUF_ARCHITECTURE!r}")
    values = {entry: field(f"{GGUF_ARCHITECTURE}.{name}") for entry, name in GGUF_SIZES.items()}
    if missing := [GGUF_SIZES[entry] for entry, value in values.items() if value is None]:
        raise WanjaxError(f"the text encoder lacks the field {GGUF_ARCHITECTURE}.{missing[0]}: get the file again")
    json = {"model_type": "qwen2_5_vl_text", "hidden_act": "silu", "vocab_size": vocab_size}
    return json | {"architectures": ["Qwen2_5_VLTextModel"]} | values


def qwen2_vl_weight_rules(config: Qwen2VLConfig) -> list[WeightRule]:
    """Return the rules for every parameter of `Qwen2VLEncoder`."""
    layer = "layers.{i}"
    rules = [
        WeightRule("embed_tokens.weight", "embed.embedding"),
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
