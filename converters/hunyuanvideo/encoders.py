# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo 1.5's text encoders as its authors have them downloaded: all of Qwen2.5-VL, and Glyph-SDXL-v2's ByT5.

Sources: checkpoints-download.md and hyvideo/models/text_encoders/ of the official code, and diffusers'
scripts/convert_hunyuan_video1_5_to_diffusers.py.
"""

from collections.abc import Mapping
from typing import Any

from wanjax.checkpoints.files import Reader
from wanjax.checkpoints.layouts import Component
from wanjax.checkpoints.readers import Renamed
from wanjax.converters.configs import Specs, count_of, shape_of

WHOLE, TEXT = "qwen2_5_vl", "qwen2_5_vl_text"  # the model_type of Qwen2.5-VL, and that of its language model
NOT_TEXT = ("visual.", "model.visual.", "lm_head.")
TEXT_TOWER = "module.text_tower.encoder."  # in Glyph-SDXL-v2's checkpoint
EMBEDDING = "shared.weight"


def language_model(reader: Reader, json: Mapping[str, Any]) -> Component:
    """Returns the language model from a checkpoint of all of Qwen2.5-VL, whose config.json is given."""
    text = {**json.get("text_config", json), "architectures": ["Qwen2_5_VLTextModel"]}
    text.pop("vision_config", None)
    if json.get("model_type") == WHOLE:
        text["model_type"] = TEXT
    return Component(text, Renamed(reader, _text_name))


def _text_name(key: str) -> str | None:
    return None if key.startswith(NOT_TEXT) else key.removeprefix("model.").removeprefix("language_model.")


def glyph_encoder(reader: Reader) -> Component:
    """Returns the encoder from Glyph-SDXL-v2's byt5_model.pt; its other tensors are left out.

    Raises WanjaxError if a tensor that determines a size is missing.
    """
    inside = TEXT_TOWER if any(key.startswith(TEXT_TOWER) for key in reader.keys()) else ""  # noqa: SIM118

    def rename(key: str) -> str | None:
        name = key.removeprefix(inside)
        return None if not key.startswith(inside) else EMBEDDING if name == "embed_tokens.weight" else f"encoder.{name}"

    weights = Renamed(reader, rename)
    return Component(_t5_json({key: weights.spec(key) for key in weights.keys()}), weights)  # noqa: SIM118


def _t5_json(specs: Specs) -> dict[str, Any]:
    """Returns the config.json of a ByT5 encoder with these tensors; what shapes do not show is as published."""
    attention = "encoder.block.0.layer.0.SelfAttention"
    vocab_size, width = shape_of(specs, EMBEDDING, 2)
    buckets, heads = shape_of(specs, f"{attention}.relative_attention_bias.weight", 2)
    return {
        "architectures": ["T5EncoderModel"],
        "d_ff": shape_of(specs, "encoder.block.0.layer.1.DenseReluDense.wi_0.weight", 2)[0],
        "d_kv": shape_of(specs, f"{attention}.q.weight", 2)[0] // heads,
        "d_model": width,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": 1e-6,
        "model_type": "t5",
        "num_heads": heads,
        "num_layers": count_of(specs, r"encoder\.block\.([0-9]{1,4})\..*"),
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": buckets,
        "vocab_size": vocab_size,
    }


def glyph_tokens(colours: Mapping[str, int], fonts: Mapping[str, int]) -> list[str]:
    """Returns the tokens that Glyph-SDXL-v2 adds to ByT5's, in order, from the tables in its folder `assets`.

    A font's name begins with its language's code, and its number counts the fonts of that language.
    """
    named = [f"<{font[:2]}-font-{index}>" for font, index in fonts.items()]
    return list(dict.fromkeys([*(f"<color-{i}>" for i in range(len(colours))), *named]))
