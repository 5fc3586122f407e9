# SPDX-License-Identifier: Apache-2.0
"""Models that are not read, recognised by the tensors that only they have, so that a refusal can say what a file is.

Most are relatives of the models that are read: these with further networks inside. Names are those of the publishers'
code, and of ComfyUI's and Kijai's files.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

RELATIVES: Mapping[str, tuple[str, ...]] = {
    "Wan Dancer": ("music_injector.", "music_projection.", "music_encoder.", "patch_embedding_global."),
    "Wan Fun Control with a camera": ("control_adapter.",),
    "Wan Fun Control": ("ref_conv.",),
    "Wan S2V": ("casual_audio_encoder.", "audio_injector.", "trainable_cond_mask.", "frame_packer."),
    "Wan Animate": ("face_adapter.", "face_encoder.", "motion_encoder.", "pose_patch_embedding."),
    "SCAIL-2": ("patch_embedding_mask.",),
    "SCAIL": ("patch_embedding_pose.",),
    "HuMo": ("audio_proj.audio_proj_glob", "audio_cross_attn_wrapper."),
    "LongCat-Video": ("blocks.0.cross_attn.kv_linear.", "blocks.0.adaLN_modulation."),
    "MultiTalk or InfiniteTalk": ("audio_proj.proj1.", "multitalk_audio_proj.", "audio_cross_attn."),
    "FantasyTalking": ("cross_attn.processor.", "proj_model."),
    "Uni3C": ("controlnet_patch_embedding.", "controlnet_blocks."),
    "the VACE part of a Wan model alone": ("vace_patch_embedding.",),
    "FramePack": ("clean_x_embedder.",),
    "the first HunyuanVideo": ("txt_in.individual_token_refiner.", "context_embedder.token_refiner."),
    "LTX-2": ("audio_patchify_proj.", "audio_proj_in.", "audio_adaln_single."),
    "LTX-Video": ("patchify_proj.", "adaln_single.", "caption_projection."),
    "CogVideoX's transformer alone": ("patch_embed.text_proj.", "mixins.patch_embed."),
    "a language model alone": ("layers.0.self_attn.q_proj.", "blk.0.attn_q."),
    "a text encoder alone": ("encoder.block.0.layer.0.SelfAttention.", "text_model.encoder."),
    "an autoencoder alone": ("decoder.conv_in.", "decoder.up.", "decoder.up_blocks."),
}
"""The beginnings of the names, or of their parts after a dot, that each has; what is more special comes first."""
CHANGE = re.compile(r"\.lora[._]|^lora_|\.hada_w|\.lokr_w|\.diff(?:_[bm])?$")  # in the names of a LoRA's tensors
CHANNELS = {20: "SCAIL", 32: "Wan Fun Control with a camera", 48: "Wan Fun Control", 52: "Wan Fun Control"}
"""The models whose patches have so many channels, for latents of 16."""


class Relative(NamedTuple):
    """A model that is not read, and the pattern of the tensors by which it is known, such as `control_adapter.*`."""

    name: str
    tensors: str


def relative(names: Iterable[str]) -> Relative | None:
    """Returns the model that tensors of these names are of; None where none of them tells."""
    names = list(names)
    for name, beginnings in RELATIVES.items():
        for beginning in beginnings:
            if any(re.search(rf"(?:^|\.){re.escape(beginning)}", key) for key in names):
                return Relative(name, f"{beginning}*")
    return None


def told(names: Iterable[str]) -> str:
    """Returns what a file without a known transformer is, by the names of its tensors, and what to do, in words."""
    names = list(names)
    if any(map(CHANGE.search, names)):
        return "is a LoRA: name the model that it changes, and give the file beside it, with --lora"
    if found := relative(names):
        return f"holds {found.tensors}, of no model here: it seems to be {found.name}"
    return "holds no transformer that is known: a file or folder that has one is needed"
