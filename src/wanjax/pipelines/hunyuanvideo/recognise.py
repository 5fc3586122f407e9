# SPDX-License-Identifier: Apache-2.0
"""Recognition of HunyuanVideo 1.5's components by the names of their tensors.

A file holds the transformer or the VAE, in the authors' layout, that of diffusers, or ComfyUI's. The text encoders are
those that the authors have downloaded: all of Qwen2.5-VL, and Glyph-SDXL-v2's ByT5. Sources: checkpoints-download.md
and hyvideo/models/text_encoders/ of the official code, and diffusers'
scripts/convert_hunyuan_video1_5_to_diffusers.py.
"""

from collections.abc import Mapping
from typing import Any

from wanjax.checkpoints.dequantized import Dequantized
from wanjax.checkpoints.files import Reader
from wanjax.checkpoints.layout import (
    TRANSFORMER_PREFIXES,
    VAE_PREFIXES,
    RecognisedComponent,
    has_authors_names,
    split_components,
)
from wanjax.checkpoints.readers import Exchanged, Renamed, Unfused
from wanjax.checkpoints.unsupported import UnsupportedModels
from wanjax.converters.hunyuanvideo import original
from wanjax.errors import WanjaxError, repr_short

TELLING = {  # tensors that only this component has: the authors' name, and that of diffusers
    "transformer": ("byt5_in.fc1.weight", "context_embedder_2.linear_1.weight"),
    "vae": ("encoder.down.0.block.0.conv1.conv.weight", "encoder.down_blocks.0.resnets.0.conv1.conv.weight"),
}
PREFIXES = {"transformer": TRANSFORMER_PREFIXES, "vae": VAE_PREFIXES}
WHOLE, TEXT = "qwen2_5_vl", "qwen2_5_vl_text"  # the model_type of Qwen2.5-VL, and that of its language model
RELATIVES: UnsupportedModels = {
    "FramePack": ("clean_x_embedder.",),
    "the first HunyuanVideo": ("txt_in.individual_token_refiner.", "context_embedder.token_refiner."),
}
NOT_TEXT = ("visual.", "model.visual.", "lm_head.")
TEXT_TOWER = "module.text_tower.encoder."  # in Glyph-SDXL-v2's checkpoint


def parts(reader: Reader) -> dict[str, Reader]:
    """Return the components that a single file holds, by their names in it without a prefix."""
    return split_components(reader, TELLING, PREFIXES)


def component(name: str, reader: Reader, config: Mapping[str, Any] | None = None) -> RecognisedComponent:
    """Return the transformer or the VAE from a reader that holds nothing else, by either layout's names.

    config: the authors' config.json, if there is one. Raises WanjaxError if the tensors are not the component's.
    """
    reader, names = Dequantized(reader), original.TRANSFORMER if name == "transformer" else original.VAE
    authors = has_authors_names(name, reader, TELLING[name], "HunyuanVideo 1.5")
    specs = reader.specs if authors else {names.theirs(key) or key: spec for key, spec in reader.specs.items()}
    json = original.transformer_json(specs, config) if name == "transformer" else original.vae_json(specs, config)
    if not authors:
        return RecognisedComponent(json, reader)
    renamed = Renamed(reader, lambda key: names.ours(key) or key)
    return RecognisedComponent(json, Exchanged(Unfused(renamed, original.FUSED), names))


def language_model(reader: Reader, json: Mapping[str, Any]) -> RecognisedComponent:
    """Return the language model from a checkpoint of all of Qwen2.5-VL, whose config.json is given."""
    inner = json.get("text_config", json)
    if not isinstance(inner, Mapping):
        raise WanjaxError(f"the text encoder's config.json has text_config {repr_short(inner)}: write an object")
    text = {**inner, "architectures": ["Qwen2_5_VLTextModel"]}
    text.pop("vision_config", None)
    if json.get("model_type") == WHOLE:
        text["model_type"] = TEXT
    return RecognisedComponent(text, Renamed(Dequantized(reader), _text_name))


def _text_name(key: str) -> str | None:
    return None if key.startswith(NOT_TEXT) else key.removeprefix("model.").removeprefix("language_model.")


def glyph_encoder(reader: Reader) -> RecognisedComponent:
    """Return the encoder from Glyph-SDXL-v2's byt5_model.pt; its other tensors are left out.

    Raises WanjaxError if a tensor that determines a size is missing.
    """
    inside = TEXT_TOWER if any(key.startswith(TEXT_TOWER) for key in reader.specs) else ""

    def rename(key: str) -> str | None:
        if not key.startswith(inside):
            return None
        name = key.removeprefix(inside)
        return original.EMBEDDING if name == "embed_tokens.weight" else f"encoder.{name}"

    weights = Renamed(Dequantized(reader), rename)
    return RecognisedComponent(original.glyph_encoder_json(weights.specs), weights)


def glyph_tokens(colours: Mapping[str, int], fonts: Mapping[str, int]) -> list[str]:
    """Return the tokens that Glyph-SDXL-v2 adds to ByT5's, in order, from the tables in its folder `assets`.

    A font's name begins with its language's code, and its number counts the fonts of that language.
    """
    named = [f"<{font[:2]}-font-{index}>" for font, index in fonts.items()]
    return list(dict.fromkeys([*(f"<color-{i}>" for i in range(len(colours))), *named]))
