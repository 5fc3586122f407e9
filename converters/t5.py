# SPDX-License-Identifier: Apache-2.0
"""Conversion rules for T5 v1.1 and UMT5 encoders: the config and tensor names in Hugging Face's and GGUF files."""

from collections.abc import Mapping
from typing import Any

from wanjax.converters.configs import check_entries
from wanjax.converters.name_map import NameMap
from wanjax.converters.transforms import Shape
from wanjax.converters.weight_rules import WeightRule, linear, norm
from wanjax.errors import WanjaxError
from wanjax.models.t5 import T5Config

GGUF_NAMES = NameMap(  # llama.cpp's names (gguf-py/gguf/tensor_mapping.py) and transformers'
    [
        ("token_embd", "shared"),
        ("enc.blk.{i}.attn_norm", "encoder.block.{i}.layer.0.layer_norm"),
        *((f"enc.blk.{{i}}.attn_{x}", f"encoder.block.{{i}}.layer.0.SelfAttention.{x}") for x in "qkvo"),
        ("enc.blk.{i}.attn_rel_b", "encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias"),
        ("enc.blk.{i}.ffn_norm", "encoder.block.{i}.layer.1.layer_norm"),
        ("enc.blk.{i}.ffn_gate", "encoder.block.{i}.layer.1.DenseReluDense.wi_0"),
        ("enc.blk.{i}.ffn_up", "encoder.block.{i}.layer.1.DenseReluDense.wi_1"),
        ("enc.blk.{i}.ffn_down", "encoder.block.{i}.layer.1.DenseReluDense.wo"),
        ("enc.output_norm", "encoder.final_layer_norm"),
    ]
)


def t5_config(json: Mapping[str, Any]) -> T5Config:
    """Read the encoder's config from a config.json of `T5EncoderModel` or `UMT5EncoderModel`.

    Raises WanjaxError for another model or MLP, and KeyError if a size is missing.
    """
    kind = json.get("model_type")
    if kind not in ("t5", "umt5"):
        raise WanjaxError(f"the text encoder's config.json has model_type {kind!r}: give 't5' or 'umt5'")
    check_entries("text encoder", json, {"feed_forward_proj": "gated-gelu"})
    return T5Config(
        vocab_size=json["vocab_size"],
        width=json["d_model"],
        heads=json["num_heads"],
        head_dim=json["d_kv"],
        mlp_dim=json["d_ff"],
        layers=json["num_layers"],
        buckets=json["relative_attention_num_buckets"],
        max_distance=json.get("relative_attention_max_distance", 128),  # older files do not have this entry
        eps=json["layer_norm_epsilon"],
        shared_bias=kind == "t5",
    )


def t5_json(
    kind: tuple[str, str], *, embedding: Shape, bias: Shape, query: Shape, mlp: Shape, layers: int
) -> dict[str, Any]:
    """Build the config.json of an encoder from shapes of its tensors. Other entries have the published values.

    Args:
        kind: The model's type, and the name of its class in the library transformers.
        embedding: Shape of the token embedding.
        bias: Shape of the table of relative position biases.
        query: Shape of a query projection.
        mlp: Shape of the MLP's first projection.
        layers: The number of blocks.
    """
    (vocab_size, width), (num_buckets, heads) = embedding, bias
    return {
        "architectures": [kind[1]],
        "d_ff": mlp[0],
        "d_kv": query[0] // heads,
        "d_model": width,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": 1e-6,
        "model_type": kind[0],
        "num_heads": heads,
        "num_layers": layers,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": num_buckets,
        "vocab_size": vocab_size,
    }


def t5_weight_rules(config: T5Config) -> list[WeightRule]:
    """Return the rules for every parameter of `T5Encoder`; the tied embedding may be stored under two names."""
    attention, mlp = "encoder.block.{i}.layer.0", "encoder.block.{i}.layer.1"
    bias = "SelfAttention.relative_attention_bias.weight"
    return [
        WeightRule("shared.weight", "embed.embedding", aliases=("encoder.embed_tokens.weight",)),
        *norm(f"{attention}.layer_norm", "blocks.norm1"),
        *linear(f"{attention}.SelfAttention.q", "blocks.attn.q", bias=False),
        *linear(f"{attention}.SelfAttention.k", "blocks.attn.k", bias=False),
        *linear(f"{attention}.SelfAttention.v", "blocks.attn.v", bias=False),
        *linear(f"{attention}.SelfAttention.o", "blocks.attn.o", bias=False),
        WeightRule(f"encoder.block.0.layer.0.{bias}", "position_bias.table")
        if config.shared_bias
        else WeightRule(f"{attention}.{bias}", "blocks.position_bias.table"),
        *norm(f"{mlp}.layer_norm", "blocks.norm2"),
        *linear(f"{mlp}.DenseReluDense.wi_0", "blocks.mlp.gate", bias=False),
        *linear(f"{mlp}.DenseReluDense.wi_1", "blocks.mlp.up", bias=False),
        *linear(f"{mlp}.DenseReluDense.wo", "blocks.mlp.down", bias=False),
        *norm("encoder.final_layer_norm", "norm"),
    ]
