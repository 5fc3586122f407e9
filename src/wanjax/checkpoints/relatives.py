# SPDX-License-Identifier: Apache-2.0
"""Models that are not read, recognised by the tensors that only they have, so that a refusal can say what a file is.

Most are relatives of models that are read: these with further networks inside. Each family has a table of its own.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

Relatives = Mapping[str, tuple[str, ...]]
"""The beginnings of names, or of their parts after a dot, that each model has. What is more special comes first."""
OTHERS: Relatives = {
    "LTX-2": ("audio_patchify_proj.", "audio_proj_in.", "audio_adaln_single."),
    "LTX-Video": ("patchify_proj.", "adaln_single.", "caption_projection."),
    "a language model alone": ("layers.0.self_attn.q_proj.", "blk.0.attn_q."),
    "a text encoder alone": ("encoder.block.0.layer.0.SelfAttention.", "text_model.encoder."),
    "an autoencoder alone": ("decoder.conv_in.", "decoder.up.", "decoder.up_blocks."),
}
CHANGE = re.compile(r"\.lora[._]|^lora_|\.hada_w|\.lokr_w|\.diff(?:_[bm])?$")  # in the names of a LoRA's tensors


class Relative(NamedTuple):
    """A model that is not read, and the pattern of the tensors by which it is known, such as `control_adapter.*`."""

    name: str
    tensors: str

    def __str__(self) -> str:
        return f"{self.tensors}, of no model here: it seems to be {self.name}"


def relative(names: Iterable[str], known: Relatives) -> Relative | None:
    """Returns the model that tensors of these names are of; None where none of them tells."""
    names = list(names)
    for name, beginnings in known.items():
        for beginning in beginnings:
            if any(re.search(rf"(?:^|\.){re.escape(beginning)}", key) for key in names):
                return Relative(name, f"{beginning}*")
    return None


def without_transformer(names: Iterable[str], known: Relatives) -> str:
    """Returns what a file without a known transformer is, by the names of its tensors, and what to do, in words."""
    names = list(names)
    if any(map(CHANGE.search, names)):
        return "is a LoRA: name the model that it changes, and give the file beside it, with --lora"
    if other := relative(names, {**known, **OTHERS}):
        return f"holds {other}"
    return "holds no transformer that is known: a file or folder that has one is needed"
