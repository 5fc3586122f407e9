# SPDX-License-Identifier: Apache-2.0
"""Recognition of the components in a file by the names of its tensors, in the authors' or the diffusers layout.

Files for ComfyUI prefix every name, and may hold several components.
"""

from collections.abc import Callable, Mapping
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
from wanjax.checkpoints.readers import Renamed, Unfused, flattened, unflattened
from wanjax.checkpoints.torch_file import GENERATORS
from wanjax.checkpoints.unsupported import UnsupportedModels, find_unsupported
from wanjax.converters.name_map import NameMap
from wanjax.converters.wan import original
from wanjax.errors import WanjaxError

TELLING = {  # tensors that only this component has: the authors' name, and that of diffusers or transformers
    "transformer": ("time_projection.1.weight", "condition_embedder.time_proj.weight"),
    "vae": ("encoder.conv1.weight", "encoder.conv_in.weight"),
    "text_encoder": ("token_embedding.weight", "shared.weight"),
    "image_encoder": ("visual.pos_embedding", "vision_model.embeddings.position_embedding.weight"),
}
# In files of guandeh17/Self-Forcing and its like; CausVid's models of whole videos have no mean.
CAUSAL = "generator_ema."
CAUSVID = "CausVid-bidirectional"  # what a run's generator without a mean is known as
DISTILLED_PREFIXES = tuple(
    f"{table}.model.{wrapper}" for table in GENERATORS for wrapper in ("_fsdp_wrapped_module.", "")
)
PREFIXES = {
    "transformer": (*TRANSFORMER_PREFIXES, *DISTILLED_PREFIXES),
    "vae": VAE_PREFIXES,
    "text_encoder": ("", "text_encoders.umt5xxl.transformer."),
    "image_encoder": ("",),
}
PATCH = (1, 2, 2)  # of all transformers of Wan; trainers that project patches keep flat kernels
RELATIVES: UnsupportedModels = {  # by the names in their publishers' code, and in ComfyUI's and Kijai's files
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
    "the VACE part of a model alone": ("vace_patch_embedding.",),
}
CHANNELS = {20: "SCAIL", 32: "Wan Fun Control with a camera", 48: "Wan Fun Control", 52: "Wan Fun Control"}
"""Relatives by the channels of their patches, for latents of Wan 2.1."""
LATENTS, MASK = 16, 4  # channels of Wan 2.1's latents, and of a mask beside any
READ = "Wan's text to video, image to video, first and last frame, Fun InP and VACE"
TOKENIZERS = ("spiece_model",)  # stored with the weights of text encoders


def components(reader: Reader) -> dict[str, RecognisedComponent]:
    """Return the components that a file holds. Raises WanjaxError if one of them is incomplete or not Wan's."""
    recognised = {name: component(name, part) for name, part in split_components(reader, TELLING, PREFIXES).items()}
    if "transformer" in recognised and any(key.startswith(CAUSAL) for key in reader.specs):
        recognised["transformer"].json["_class_name"] = "CausalWanTransformer3DModel"
    return recognised


def is_generator(reader: Reader) -> bool:
    """Return whether a file is of a run that distils a model, and holds its generator and no mean of it."""
    return any(key.startswith("generator.") for key in reader.specs) and not any(
        key.startswith(CAUSAL) for key in reader.specs
    )


def component(name: str, reader: Reader, config: Mapping[str, Any] | None = None) -> RecognisedComponent:
    """Return a component from a reader that holds nothing else, in either layout.

    config: the authors' config.json, if there is one. Raises WanjaxError if the tensors are not the component's.
    """
    reader = Dequantized(reader)
    authors = has_authors_names(name, reader, TELLING[name], "Wan")
    match name:
        case "transformer":
            names, reader = original.TRANSFORMER, unflattened(reader, "patch_embedding.weight", PATCH)
            _check_own(reader, names.ours if authors else names.theirs)
            json = original.transformer_json(_theirs(reader, names, authors), config)
            _check_channels(reader, json["in_channels"], json["out_channels"])
        case "vae":
            json, names = _vae(reader, authors)
        case "text_encoder":
            reader, names = Renamed(reader, lambda key: None if key in TOKENIZERS else key), original.TEXT_ENCODER
            json = original.text_encoder_json(_theirs(reader, names, authors))
        case _:
            reader, names = _vision(reader) if authors else reader, original.IMAGE_ENCODER
            json = original.image_encoder_json(_theirs(reader, names, authors))
    return RecognisedComponent(json, Renamed(reader, lambda key: names.ours(key) or key) if authors else reader)


def _check_own(reader: Reader, names: Callable[[str], str | None]) -> None:
    """Raise WanjaxError where tensors that the transformer does not have are those of a relative of Wan's."""
    if other := find_unsupported((key for key in reader.specs if names(key) is None), RELATIVES):
        raise WanjaxError(f"{_place(reader)} has {other}, and {READ} are read")


def _check_channels(reader: Reader, patches: int, latents: int) -> None:
    """Raise WanjaxError unless patches have the channels of latents, or those of a condition with them too."""
    alone, with_condition = latents, 2 * latents + MASK
    if patches not in (alone, with_condition):
        kind = f"it seems to be {CHANNELS[patches]}, and " if patches in CHANNELS and latents == LATENTS else ""
        what = f"the patches of {_place(reader)} have {patches} channels, not {alone} or {with_condition}"
        raise WanjaxError(f"{what}: {kind}{READ} are read")


def _place(reader: Reader) -> str:
    paths = getattr(reader, "paths", [])
    return str(paths[0]) if paths else "the transformer"


def _theirs(reader: Reader, names: NameMap, authors: bool) -> dict[str, Any]:
    """Return the specs of the tensors by the authors' names."""
    return {key if authors else names.theirs(key) or key: spec for key, spec in reader.specs.items()}


def _vae(reader: Reader, authors: bool) -> tuple[dict[str, Any], NameMap]:
    """Return an autoencoder's config and its names.

    The names depend on the config. For the diffusers layout they are those of the published autoencoders.
    """
    if authors:
        json = original.vae_json(reader.specs)
        return json, original.vae_names(json)
    nested = any(".downsampler." in key for key in reader.specs)
    names = original.vae_names({"dim_mult": range(4), "num_res_blocks": 2, "is_residual": nested})
    return original.vae_json(_theirs(reader, names, authors=False)), names


def _vision(reader: Reader) -> Reader:
    """Return CLIP's vision tower, with its tensors in the shapes that transformers uses."""
    seeing = Renamed(reader, lambda key: key if key.startswith("visual.") and key != "visual.head" else None)
    return Unfused(flattened(seeing, ("visual.cls_embedding", "visual.pos_embedding")))
