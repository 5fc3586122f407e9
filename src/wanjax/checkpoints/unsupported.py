# SPDX-License-Identifier: Apache-2.0
"""Models that this library does not read, recognised by their tensors, so that a refusal can name them.

Most are relatives of models that are read: these with further networks inside. Each family has a table of its own.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

UnsupportedModels = Mapping[str, tuple[str, ...]]
"""The beginnings of names, or of their parts after a dot, that each model has. What is more special comes first."""
OTHERS: UnsupportedModels = {
    "LTX-2": ("audio_patchify_proj.", "audio_proj_in.", "audio_adaln_single."),
    "LTX-Video": ("patchify_proj.", "adaln_single.", "caption_projection."),
    "a language model alone": ("layers.0.self_attn.q_proj.", "blk.0.attn_q."),
    "a text encoder alone": ("encoder.block.0.layer.0.SelfAttention.", "text_model.encoder."),
    "an autoencoder alone": ("decoder.conv_in.", "decoder.up.", "decoder.up_blocks."),
}
CHANGE = re.compile(r"\.lora[._]|^lora_|\.hada_w|\.lokr_w|\.diff(?:_[bm])?$")  # in the names of a LoRA's tensors


class UnsupportedModel(NamedTuple):
    """An unsupported model, and the pattern of its tensors, such as `control_adapter.*`."""

    name: str
    tensors: str

    def __str__(self) -> str:
        return f"{self.tensors}, of no model here: it seems to be {self.name}"


def find_unsupported(names: Iterable[str], relatives: UnsupportedModels) -> UnsupportedModel | None:
    """Return the unsupported model that has tensors of these names, or None."""
    names = list(names)
    for name, beginnings in relatives.items():
        for beginning in beginnings:
            if any(re.search(rf"(?:^|\.){re.escape(beginning)}", key) for key in names):
                return UnsupportedModel(name, f"{beginning}*")
    return None


def without_transformer(names: Iterable[str], relatives: UnsupportedModels) -> str:
    """Return the end of a sentence on a file without a known transformer: what it holds, and advice."""
    names = list(names)
    if any(map(CHANGE.search, names)):
        return "is a LoRA: name the model that it changes, and give the file beside it, with --lora"
    if other := find_unsupported(names, {**relatives, **OTHERS}):
        return f"holds {other}"
    return "holds no transformer that is known: give a file or folder that has one"
