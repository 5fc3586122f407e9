# SPDX-License-Identifier: Apache-2.0
"""Recognition of the components in a file by the names of its tensors, in the authors' layout or diffusers' layout.

Files for ComfyUI prefix every name and may hold several components.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from wanjax.checkpoints.dequantized import DequantizedReader
from wanjax.checkpoints.files import TensorReader
from wanjax.checkpoints.layout import (
    TRANSFORMER_PREFIXES,
    VAE_PREFIXES,
    RecognisedComponent,
    has_authors_names,
    split_components,
)
from wanjax.checkpoints.readers import (
    RenamedReader,
    ReshapedReader,
    UnfusedReader,
    squeeze_leading,
    unflatten_patches,
)
from wanjax.checkpoints.torch_file import GENERATORS
from wanjax.checkpoints.unsupported import UnsupportedModels, find_unsupported
from wanjax.converters import t5
from wanjax.converters.name_map import NameMap
from wanjax.converters.wan import animate, original, pose
from wanjax.errors import WanjaxError
from wanjax.models.wan.config import VAEConfig

IDENTIFYING_KEYS = {  # tensors that identify a component, by their names in the authors' files and in other files
    "transformer": ("time_projection.1.weight", "condition_embedder.time_proj.weight"),
    "vae": ("encoder.conv1.weight", "encoder.conv_in.weight"),
    "text_encoder": ("token_embedding.weight", "shared.weight", "enc.blk.0.attn_rel_b.weight"),  # the last: llama.cpp
    "image_encoder": ("visual.pos_embedding", "vision_model.embeddings.position_embedding.weight"),
}
# The prefix of EMA weights in files such as guandeh17/Self-Forcing's. CausVid's bidirectional models have no EMA.
EMA_PREFIX = "generator_ema."
CAUSVID_NAME = "CausVid-bidirectional"  # the model name of a generator without EMA weights
DISTILLED_PREFIXES = tuple(
    f"{table}.model.{wrapper}" for table in GENERATORS for wrapper in ("_fsdp_wrapped_module.", "")
)
PREFIXES = {
    "transformer": (*TRANSFORMER_PREFIXES, *DISTILLED_PREFIXES),
    "vae": VAE_PREFIXES,
    "text_encoder": ("", "text_encoders.umt5xxl.transformer."),
    "image_encoder": ("",),
}
PATCH_SIZE = (1, 2, 2)  # the patch of all Wan transformers, for a file that stores the patch embedding as a matrix
UNSUPPORTED: UnsupportedModels = {  # by tensor names in the publishers' code, or in files by ComfyUI and Kijai
    "Wan Dancer": ("music_injector.", "music_projection.", "music_encoder.", "patch_embedding_global."),
    "Wan Fun Control with a camera": ("control_adapter.",),
    "Wan Fun Control": ("ref_conv.",),
    "Wan S2V": ("casual_audio_encoder.", "audio_injector.", "trainable_cond_mask.", "frame_packer."),
    "SCAIL-2": ("patch_embedding_mask.",),
    "SCAIL": ("patch_embedding_pose.",),
    "HuMo": ("audio_proj.audio_proj_glob", "audio_cross_attn_wrapper."),
    "LongCat-Video": ("blocks.0.cross_attn.kv_linear.", "blocks.0.adaLN_modulation."),
    "MultiTalk or InfiniteTalk": ("audio_proj.proj1.", "multitalk_audio_proj.", "audio_cross_attn."),
    "FantasyTalking": ("cross_attn.processor.", "proj_model."),
    "Uni3C": ("controlnet_patch_embedding.", "controlnet_blocks."),
    "only the VACE part of a model": ("vace_patch_embedding.",),
}
UNSUPPORTED_CHANNELS = {20: "SCAIL", 32: "Wan Fun Control with a camera", 48: "Wan Fun Control", 52: "Wan Fun Control"}
"""Unsupported models with Wan 2.1's latents, by the number of input channels of their patch embedding."""
LATENT_CHANNELS, MASK_CHANNELS = 16, 4  # the number of channels of Wan 2.1's latents, and of a mask
SUPPORTED = "Wan's text to video, image to video, first and last frame, Fun InP, VACE, Animate and Animate 2"
ANIMATE_BLOCK = re.compile(r"(?<=blocks\.)(\d+)\.block\.")  # the names of blocks in the authors' files of Animate 2
POSE_KEY = "pose_patch_embedding.weight"  # only the transformer of Animate has it
FIXED_FILTER = re.compile(r"motion_encoder\.enc\.net_app\.convs\.\d+\.(?:conv2|skip)\.0\.kernel")
ACTIVATION_BIAS = re.compile(r"motion_encoder\.enc\.net_app\.convs\.\d+\.(?:\w+\.)?\d\.bias")
"""Tensors in the authors' files of Animate: the weights of a fixed filter, and biases [1 C 1 1]."""
TOKENIZER_KEYS = ("spiece_model",)  # tokenizers that are stored with a text encoder's weights


def components(reader: TensorReader) -> dict[str, RecognisedComponent]:
    """List the components in a file. Raises WanjaxError if one of them is incomplete or not Wan's."""
    recognised = {
        name: component(name, component_reader)
        for name, component_reader in split_components(reader, IDENTIFYING_KEYS, PREFIXES).items()
    }
    if "transformer" in recognised and is_animate(reader):
        recognised["transformer"] = as_animate(recognised["transformer"])
    if "transformer" in recognised and any(key.startswith(EMA_PREFIX) for key in reader.specs):
        recognised["transformer"].json["_class_name"] = "CausalWanTransformer3DModel"
    return recognised


def find_autoencoder(reader: TensorReader, vae: VAEConfig) -> RecognisedComponent | None:
    """Find an autoencoder in a file, such as LightVAE. The result gets the latents' statistics of the autoencoder
    `vae`.

    Args:
        reader: The file.
        vae: The autoencoder whose latents the new autoencoder decodes.

    Returns:
        The autoencoder; None if the file has none.
    """
    recognised = components(reader).get("vae")
    if recognised is None:
        return None
    statistics = {"latents_mean": list(vae.latents_mean), "latents_std": list(vae.latents_std)}
    return recognised._replace(json=recognised.json | statistics)


def is_animate(reader: TensorReader) -> bool:
    """Return True if the header of a file, or an additional level in its tensor names, shows the transformer of Animate
    2.

    The shapes and the other names are those of image to video.
    """
    try:
        config = json.loads(getattr(reader, "metadata", {}).get("config", "{}"))
        model_type = config["transformer"]["model_type"]
    except (ValueError, LookupError, TypeError):
        model_type = None
    return model_type == "animate2" or any(map(ANIMATE_BLOCK.search, reader.specs))


def as_animate(transformer: RecognisedComponent) -> RecognisedComponent:
    """Return an image-to-video transformer as the transformer of Animate 2, which has the same tensors."""
    return transformer._replace(json=animate.transformer_json(transformer.json))


def is_generator(reader: TensorReader) -> bool:
    """Return True if a file comes from a distillation run and holds the run's generator without EMA weights."""
    return any(key.startswith("generator.") for key in reader.specs) and not any(
        key.startswith(EMA_PREFIX) for key in reader.specs
    )


def component(name: str, reader: TensorReader, config: Mapping[str, Any] | None = None) -> RecognisedComponent:
    """Return the component of a reader that holds only that component, in either layout.

    `config` is the authors' config.json, if any. Raises WanjaxError if tensors of the component are missing or unknown.
    """
    reader = DequantizedReader(reader)
    uses_original_names = has_authors_names(name, reader, IDENTIFYING_KEYS[name], "Wan")
    match name:
        case "transformer":
            reader = RenamedReader(reader, lambda key: ANIMATE_BLOCK.sub(r"\1.", key))
            names, reader = original.TRANSFORMER, unflatten_patches(reader, "patch_embedding.weight", PATCH_SIZE)
            if follows_poses := POSE_KEY in reader.specs:
                names, reader = pose.NAMES, _animate_transformer(reader) if uses_original_names else reader
            _check_supported(reader, names.to_diffusers if uses_original_names else names.to_authors)
            json = original.transformer_json(_specs_by_original_names(reader, names, uses_original_names), config)
            if follows_poses:
                specs = {names.to_diffusers(key) or key: spec for key, spec in reader.specs.items()}
                json = pose.transformer_json(json, specs if uses_original_names else reader.specs)
            _check_channels(reader, json["in_channels"], json["out_channels"])
        case "vae":
            json, names = _vae_config_and_names(reader, uses_original_names)
        case "text_encoder":
            reader, names = RenamedReader(reader, _text_encoder_name), original.TEXT_ENCODER
            json = original.text_encoder_json(_specs_by_original_names(reader, names, uses_original_names))
        case _:
            reader, names = _vision_tower(reader) if uses_original_names else reader, original.IMAGE_ENCODER
            json = original.image_encoder_json(_specs_by_original_names(reader, names, uses_original_names))
    return RecognisedComponent(
        json, RenamedReader(reader, lambda key: names.to_diffusers(key) or key) if uses_original_names else reader
    )


def _text_encoder_name(key: str) -> str | None:
    """Translate a name of llama.cpp; drop the tokenizer's tensors."""
    return None if key in TOKENIZER_KEYS else t5.GGUF_NAMES.to_diffusers(key) or key


def _check_supported(reader: TensorReader, names: Callable[[str], str | None]) -> None:
    """Raise WanjaxError if the transformer has tensors that belong to an unsupported model."""
    if unsupported := find_unsupported((key for key in reader.specs if names(key) is None), UNSUPPORTED):
        raise WanjaxError(f"{_path_text(reader)} has {unsupported}; supported models are {SUPPORTED}")


def _check_channels(reader: TensorReader, patches: int, latents: int) -> None:
    """Raise WanjaxError unless a patch has as many channels as the latents, or as the latents with a condition."""
    with_condition = 2 * latents + MASK_CHANNELS
    if patches not in (latents, with_condition):
        guess = (
            f"it seems to be {UNSUPPORTED_CHANNELS[patches]}; "
            if patches in UNSUPPORTED_CHANNELS and latents == LATENT_CHANNELS
            else ""
        )
        problem = f"the patches of {_path_text(reader)} have {patches} channels, not {latents} or {with_condition}"
        raise WanjaxError(f"{problem}: {guess}supported models are {SUPPORTED}")


def _path_text(reader: TensorReader) -> str:
    paths = getattr(reader, "paths", [])
    return str(paths[0]) if paths else "the transformer"


def _specs_by_original_names(reader: TensorReader, names: NameMap, uses_original_names: bool) -> dict[str, Any]:
    """Return the specs of a component's tensors, under the names that the authors gave them."""
    return {key if uses_original_names else names.to_authors(key) or key: spec for key, spec in reader.specs.items()}


def _vae_config_and_names(reader: TensorReader, uses_original_names: bool) -> tuple[dict[str, Any], NameMap]:
    """Return an autoencoder's config and name map. The names depend on the config.

    The diffusers layout is only recognised for the published autoencoders.
    """
    if uses_original_names:
        json = original.vae_json(reader.specs)
        return json, original.vae_names(json)
    is_residual = any(".downsampler." in key for key in reader.specs)
    names = original.vae_names({"dim_mult": range(4), "num_res_blocks": 2, "is_residual": is_residual})
    return original.vae_json(_specs_by_original_names(reader, names, uses_original_names=False)), names


def _animate_transformer(reader: TensorReader) -> TensorReader:
    """Return Animate's transformer, whose tensors get the shapes that diffusers uses. Fixed filters are left out."""
    learned_tensors = RenamedReader(reader, lambda key: None if FIXED_FILTER.fullmatch(key) else key)
    biases = [key for key in learned_tensors.specs if ACTIVATION_BIAS.fullmatch(key)]
    flat_biases = ReshapedReader(learned_tensors, lambda key, shape: shape[1:2] if key in biases else shape)
    return UnfusedReader(flat_biases, ("linear1_kv",))


def _vision_tower(reader: TensorReader) -> TensorReader:
    """Return CLIP's vision tower, whose tensors get the shapes that transformers uses."""
    vision_only = RenamedReader(reader, lambda key: key if key.startswith("visual.") and key != "visual.head" else None)
    return UnfusedReader(squeeze_leading(vision_only, ("visual.cls_embedding", "visual.pos_embedding")))
