# SPDX-License-Identifier: Apache-2.0
"""Recognition of HunyuanVideo 1.5's components by the names of their tensors.

A file holds the transformer or the VAE, in the layout of the authors, of diffusers or of ComfyUI. The text encoders are
the checkpoints that the authors' code downloads: the full Qwen2.5-VL, and Glyph-SDXL-v2's ByT5. Sources:
checkpoints-download.md and hyvideo/models/text_encoders/ of the official code, and diffusers'
scripts/convert_hunyuan_video1_5_to_diffusers.py.
"""

from collections.abc import Mapping
from typing import Any

from wanjax.checkpoints.dequantized import DequantizedReader
from wanjax.checkpoints.files import TensorReader
from wanjax.checkpoints.gguf_file import GgufFile
from wanjax.checkpoints.layout import (
    TRANSFORMER_PREFIXES,
    VAE_PREFIXES,
    RecognisedComponent,
    has_authors_names,
    split_components,
)
from wanjax.checkpoints.readers import RenamedReader, SwappedHalvesReader, UnfusedReader
from wanjax.checkpoints.unsupported import UnsupportedModels
from wanjax.converters import qwen2_vl
from wanjax.converters.hunyuanvideo import original
from wanjax.errors import WanjaxError, repr_short

IDENTIFYING_KEYS = {  # the tensor that identifies a component: its name in the authors' files, and in diffusers
    "transformer": ("byt5_in.fc1.weight", "context_embedder_2.linear_1.weight"),
    "vae": ("encoder.down.0.block.0.conv1.conv.weight", "encoder.down_blocks.0.resnets.0.conv1.conv.weight"),
}
PREFIXES = {"transformer": TRANSFORMER_PREFIXES, "vae": VAE_PREFIXES}
FULL_MODEL_TYPE, TEXT_MODEL_TYPE = (
    "qwen2_5_vl",
    "qwen2_5_vl_text",
)  # the model_type of Qwen2.5-VL, and the model_type of its language model
UNSUPPORTED: UnsupportedModels = {
    "FramePack": ("clean_x_embedder.",),
    "the first HunyuanVideo": ("txt_in.individual_token_refiner.", "context_embedder.token_refiner."),
}
NON_TEXT_PREFIXES = ("visual.", "model.visual.", "lm_head.")
TEXT_TOWER = "module.text_tower.encoder."  # the prefix of the encoder's tensors in Glyph-SDXL-v2's checkpoint


def component_readers(reader: TensorReader) -> dict[str, TensorReader]:
    """Create a reader for each component in a file; the reader removes the prefix of the component's tensor names."""
    return split_components(reader, IDENTIFYING_KEYS, PREFIXES)


def component(name: str, reader: TensorReader, config: Mapping[str, Any] | None = None) -> RecognisedComponent:
    """Return the transformer or the VAE of a reader that holds only that component, in either layout.

    `config` is the authors' config.json, if any. Raises WanjaxError if tensors of the component are missing or unknown.
    """
    reader, names = DequantizedReader(reader), original.TRANSFORMER if name == "transformer" else original.VAE
    uses_original_names = has_authors_names(name, reader, IDENTIFYING_KEYS[name], "HunyuanVideo 1.5")
    specs = (
        reader.specs
        if uses_original_names
        else {names.to_authors(key) or key: spec for key, spec in reader.specs.items()}
    )
    json = original.transformer_json(specs, config) if name == "transformer" else original.vae_json(specs, config)
    if not uses_original_names:
        return RecognisedComponent(json, reader)
    renamed = RenamedReader(reader, lambda key: names.to_diffusers(key) or key)
    return RecognisedComponent(json, SwappedHalvesReader(UnfusedReader(renamed, original.FUSED_NAMES), names))


def language_model(reader: TensorReader, json: Mapping[str, Any]) -> RecognisedComponent:
    """Return the language model inside a full Qwen2.5-VL checkpoint; `json` is the checkpoint's config.json."""
    text_config = json.get("text_config", json)
    if not isinstance(text_config, Mapping):
        raise WanjaxError(f"the text encoder's config.json has text_config {repr_short(text_config)}: write an object")
    text_json = {**text_config, "architectures": ["Qwen2_5_VLTextModel"]}
    text_json.pop("vision_config", None)
    if json.get("model_type") == FULL_MODEL_TYPE:
        text_json["model_type"] = TEXT_MODEL_TYPE
    return RecognisedComponent(text_json, RenamedReader(DequantizedReader(reader), _text_name))


def gguf_language_model(file: GgufFile) -> RecognisedComponent:
    """Return the language model in a GGUF file of Qwen2.5-VL, as llama.cpp writes it.

    Raises WanjaxError if the file is of another model.
    """
    embedding = file.specs.get("token_embd.weight")
    json = qwen2_vl.gguf_json(file.value, 0 if embedding is None else embedding.shape[0])
    return RecognisedComponent(json, RenamedReader(file, qwen2_vl.GGUF_NAMES.to_diffusers))


def _text_name(key: str) -> str | None:
    return None if key.startswith(NON_TEXT_PREFIXES) else key.removeprefix("model.").removeprefix("language_model.")


def glyph_encoder(reader: TensorReader) -> RecognisedComponent:
    """Return the text encoder inside Glyph-SDXL-v2's byt5_model.pt; the file's other tensors are dropped.

    Raises WanjaxError if a tensor that determines a size is missing.
    """
    prefix = TEXT_TOWER if any(key.startswith(TEXT_TOWER) for key in reader.specs) else ""

    def rename(key: str) -> str | None:
        if not key.startswith(prefix):
            return None
        name = key.removeprefix(prefix)
        return original.GLYPH_EMBEDDING if name == "embed_tokens.weight" else f"encoder.{name}"

    weights = RenamedReader(DequantizedReader(reader), rename)
    return RecognisedComponent(original.glyph_encoder_json(weights.specs), weights)


def glyph_tokens(colours: Mapping[str, int], fonts: Mapping[str, int]) -> list[str]:
    """Return the tokens that Glyph-SDXL-v2 adds to ByT5's, in order, from the tables in its folder `assets`.

    A font's name starts with its language code. Fonts are numbered within a language.
    """
    font_tokens = [f"<{font[:2]}-font-{index}>" for font, index in fonts.items()]
    return list(dict.fromkeys([*(f"<color-{i}>" for i in range(len(colours))), *font_tokens]))
