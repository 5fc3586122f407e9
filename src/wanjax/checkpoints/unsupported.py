# SPDX-License-Identifier: Apache-2.0
"""Recognise unsupported models by their tensors, so that an error message can name them.

Most unsupported models are variants of supported models with additional networks. Each family of models has its own
table.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from wanjax.errors import WanjaxError

UnsupportedModels = Mapping[str, tuple[str, ...]]
"""For each model, the prefixes that identify it. A prefix matches at the start of a tensor's name, or after a dot. A
specific model comes before a general model."""
OTHER_MODELS: UnsupportedModels = {
    "LTX-2": ("audio_patchify_proj.", "audio_proj_in.", "audio_adaln_single."),
    "LTX-Video": ("patchify_proj.", "adaln_single.", "caption_projection."),
    "a language model alone": ("layers.0.self_attn.q_proj.", "blk.0.attn_q."),
    "a text encoder alone": ("encoder.block.0.layer.0.SelfAttention.", "text_model.encoder."),
    "an autoencoder alone": ("decoder.conv_in.", "decoder.up.", "decoder.up_blocks."),
}
# Matches names of tensors in LoRA files
LORA_KEY = re.compile(r"\.lora[._]|^lora_|\.hada_w|\.lokr_w|\.diff(?:_[bm])?$")


class UnsupportedModel(NamedTuple):
    """An unsupported model, and the pattern of tensor names by which it was recognised, such as `control_adapter.*`."""

    name: str
    tensors: str

    def __str__(self) -> str:
        return f"{self.tensors}, which no supported model has: it seems to be {self.name}"


def find_unsupported(names: Iterable[str], unsupported_models: UnsupportedModels) -> UnsupportedModel | None:
    """Return the unsupported model that has tensors of these names, or None."""
    names = list(names)
    for name, prefixes in unsupported_models.items():
        for prefix in prefixes:
            if any(re.search(rf"(?:^|\.){re.escape(prefix)}", key) for key in names):
                return UnsupportedModel(name, f"{prefix}*")
    return None


class LoraAsModelError(WanjaxError):
    """A LoRA's file is given as a model."""


def check_no_lora(path: Path, names: Iterable[str]) -> None:
    """Raise LoraAsModelError if a file with tensors of these names is a LoRA."""
    if any(map(LORA_KEY.search, names)):
        raise LoraAsModelError(
            f"{path} is a LoRA, not a model: give the model that it changes, and this file with --lora"
        )


def describe_without_transformer(names: Iterable[str], unsupported_models: UnsupportedModels) -> str:
    """Return the end of an error message about a file without a known transformer: its content, and advice."""
    names = list(names)
    if model := find_unsupported(names, {**unsupported_models, **OTHER_MODELS}):
        return f"contains {model}"
    return "contains no known transformer: give a file or folder with one"
