# SPDX-License-Identifier: Apache-2.0
"""Conversion rules for Wan Animate 2's transformer, whose tensors have the shapes of the image-to-video transformer.

Files have the names of the image-to-video transformer, in the authors' layout or diffusers', or the names of diffusers'
WanAnimate2Transformer3DModel. The rules read all of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wanjax.converters.configs import check_kind
from wanjax.converters.name_map import NameMap
from wanjax.converters.wan import diffusers
from wanjax.converters.wan.original import TRANSFORMER
from wanjax.converters.weight_rules import WeightRule
from wanjax.errors import WanjaxError
from wanjax.models.wan.config import AnimateTransformerConfig, ImageTransformerConfig

TRANSFORMER_CLASS = "WanAnimate2Transformer3DModel"
IMAGE_WIDTH = 1280  # the width of CLIP's features, which no config.json has
ENTRIES = {
    "_class_name": (TRANSFORMER_CLASS,),
    "cross_attn_norm": (True,),
    "use_img_emb": (True,),
    "text_len": (512,),
    "refer_stride": (1,),
}
OFFSETS = {"refer_offset_t": 1, "refer_offset_h": 0, "refer_offset_w": -1}
"""The entries of config.json for the clip's first positions, with their defaults."""
ATTENTION_PAIRS = [("blocks.{i}.self_attn", "blocks.{i}.attn1"), ("blocks.{i}.cross_attn", "blocks.{i}.attn2")]
CLASS_NAMES = NameMap([*ATTENTION_PAIRS, *TRANSFORMER.pairs])
"""The names of diffusers' class, paired with those of its image-to-video class: its layers have the authors' names, but
its projections of attention do not."""
LORA_NAMES = NameMap([*TRANSFORMER.pairs, *ATTENTION_PAIRS])


def transformer_config(json: Mapping[str, Any]) -> AnimateTransformerConfig:
    """Read a transformer's config from the `transformer/config.json` of diffusers' class.

    Raises KeyError and WanjaxError as the function of this name in `diffusers` does.
    """
    check_kind("transformer", json, ENTRIES)
    width, heads = json["dim"], json["num_heads"]
    if width % heads:
        raise WanjaxError(f"the transformer's config.json has {heads} heads: give a divisor of its dim, {width}")
    base = diffusers.transformer_config(
        {
            "num_layers": json["num_layers"],
            "num_attention_heads": heads,
            "attention_head_dim": width // heads,
            "ffn_dim": json["ffn_dim"],
            "in_channels": json["in_dim"],
            "out_channels": json["out_dim"],
            "patch_size": json["patch_size"],
            "text_dim": json["text_dim"],
            "freq_dim": json["freq_dim"],
            "eps": json["eps"],
            "image_dim": IMAGE_WIDTH,
            "added_kv_proj_dim": width,
        }
    )
    assert isinstance(base, ImageTransformerConfig)
    offsets = tuple(json.get(name, default) for name, default in OFFSETS.items())
    return AnimateTransformerConfig(**vars(base), clip_offset=offsets)


def transformer_json(image_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of diffusers' class, from that of an image-to-video transformer of the same shapes."""
    return {
        "_class_name": TRANSFORMER_CLASS,
        "cross_attn_norm": True,
        "dim": image_json["num_attention_heads"] * image_json["attention_head_dim"],
        "eps": image_json["eps"],
        "ffn_dim": image_json["ffn_dim"],
        "freq_dim": image_json["freq_dim"],
        "in_dim": image_json["in_channels"],
        "num_heads": image_json["num_attention_heads"],
        "num_layers": image_json["num_layers"],
        "out_dim": image_json["out_channels"],
        "patch_size": image_json["patch_size"],
        "text_dim": image_json["text_dim"],
        "text_len": 512,
        "use_img_emb": True,
        **OFFSETS,
        "refer_stride": 1,
    }


def transformer_weight_rules(config: AnimateTransformerConfig) -> list[WeightRule]:
    """Return the rules for every parameter of the transformer."""
    return [replace(rule, aliases=_aliases(rule.source)) for rule in diffusers.transformer_weight_rules(config)]


def _aliases(source: str) -> tuple[str, ...]:
    """Return the name in diffusers' class of the tensors with a name in its image-to-video class."""
    name = CLASS_NAMES.to_authors(source.replace("blocks.{i}.", "blocks.0."))
    assert name is not None, source
    alias = name.replace("blocks.0.", "blocks.{i}.")
    return () if alias == source else (alias,)
