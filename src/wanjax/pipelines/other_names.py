# SPDX-License-Identifier: Apache-2.0
"""Names of other libraries: what to give here in their place.

JAX is not imported, so that a mistake is told at once, and by a process that needs no device.
"""

from collections.abc import Collection, Iterable

from wanjax.errors import SettingError, listed, near_names, repr_short
from wanjax.pipelines.settings import Settings, schema

RENAMED = {alias: name for name, setting in schema(Settings).items() for alias in setting.aliases} | {
    "latents": "noise",
    "reference_images": "references",
    "callback_on_step_end": "callback",
}
"""Keywords of diffusers, of models' authors and of ComfyUI that have another name here."""
OTHERWISE = {
    "generator": "seed=42 takes its place",
    "output_type": "a video's frames are uint8, video.to_pil() gives images, and pipe.decode(latents, dtype) floats",
    "return_dict": "a call returns a Video",
    "num_videos_per_prompt": "a call with another seed makes another video",
    "prompt_embeds": "pipe.denoise(encoded) takes what pipe.encode(prompt) returns",
    "negative_prompt_embeds": "pipe.denoise(encoded) takes what pipe.encode(prompt) returns",
    "image_embeds": "pipe.denoise(encoded) takes what pipe.encode(prompt, image=...) returns",
    "max_sequence_length": "it is the model's own",
    "attention_kwargs": "wanjax.load(attention=..., lora=...) takes their place",
    "callback_on_step_end_tensor_inputs": "callback receives a Step with its latents and x0",
    "sampler": "pipe.scheduler sets the solver",
    "sampler_name": "pipe.scheduler sets the solver",
    "sample_solver": "pipe.scheduler sets the solver",
    "scheduler": "pipe.scheduler sets the solver",
    "device": "JAX's devices are used, and wanjax.load(mesh=...) spreads a model over them",
    "device_map": "wanjax.load(mesh=...) spreads a model over devices",
    "variant": "a checkpoint has one variant, and wanjax.load(param_dtype=...) says in which dtype it is kept",
    "cache_dir": "the environment variable HF_HOME says where downloads are kept",
    "token": "`hf auth login` or the environment variable HF_TOKEN says who you are",
    "local_files_only": "the environment variable HF_HUB_OFFLINE=1 keeps from downloading",
    "low_cpu_mem_usage": "a checkpoint is always read one tensor at a time",
    "use_safetensors": "safetensors are used where there are any",
}
"""Keywords of diffusers that have nothing of the kind here, and a sentence on what to give here."""
ELSEWHERE = {
    "from_pretrained": "wanjax.load(MODEL) loads a model",
    "from_single_file": "wanjax.load(FILE) loads a model",
    "save_pretrained": "`wanjax convert MODEL FOLDER` writes a checkpoint",
    "unet": "pipe.transformer is the network that denoises",
    "to": "JAX's devices are used, and wanjax.load(mesh=...) spreads a model over them",
    "device": "pipe.partitioner has the mesh of devices",
    "dtype": "pipe.defaults.dtype is the dtype",
    "enable_model_cpu_offload": "wanjax.load(MODEL, offload=True) frees each network after its stage",
    "enable_sequential_cpu_offload": "wanjax.load(MODEL, offload=True) frees each network after its stage",
    "enable_vae_tiling": "pipe(prompt, tiling=wanjax.Tiling()) decodes tile by tile",
    "enable_vae_slicing": "pipe(prompt, tiling=wanjax.Tiling()) decodes tile by tile",
    "enable_attention_slicing": "attention never holds all its scores",
    "enable_xformers_memory_efficient_attention": "attention never holds all its scores",
    "set_progress_bar_config": "pipe.progress = False hides the progress, and True shows it without a terminal",
    "progress_bar": "pipe.progress = False hides the progress, and True shows it without a terminal",
    "load_lora_weights": "wanjax.load(MODEL, lora='FILE:STRENGTH') merges a LoRA",
    "fuse_lora": "wanjax.load(MODEL, lora='FILE:STRENGTH') merges a LoRA",
    "set_adapters": "wanjax.load(MODEL, lora=['FILE:STRENGTH', ...]) merges LoRAs",
    "encode_prompt": "pipe.encode(prompt) encodes a prompt",
    "config": "pipe.model has the networks' configs, and pipe.defaults the settings",
    "export_to_video": "video.save('NAME.mp4') writes a video",
    "export_to_gif": "video.save('NAME.gif') writes a video",
    "save_video": "video.save('NAME.mp4') writes a video",
    "load_image": "pipe(prompt, image='NAME.png') reads a picture",
    "load_video": "pipe(prompt, video='NAME.mp4') reads a clip",
    "DiffusionPipeline": "wanjax.load(MODEL) loads a model",
}
"""Functions, classes and attributes of diffusers, and a sentence on what to give here."""


def unknown_keyword(name: str, keywords: Iterable[str], *, of_call: Collection[str] = ()) -> SettingError:
    """Return the error for a keyword that a function does not have, with the right name, or a near one, or all.

    Args:
        name: The keyword.
        keywords: Those that there are.
        of_call: Those of a call for videos, where that is another function: the error says that it takes them.
    """
    names = list(keywords)
    near = near_names(name, [*names, *of_call], 1)
    ours = RENAMED.get(name, name)
    if ours not in names and ours in of_call:
        right = f"pipe(prompt, {ours}=...) takes it"
    elif name in RENAMED:
        right = f"use {ours}"
    else:
        hint = near and (f"use {near[0]}" if near[0] in names else f"did you mean pipe(prompt, {near[0]}=...)?")
        right = OTHERWISE.get(name) or hint or f"use {listed(names)}"
    return SettingError(f"{repr_short(name)} is not a keyword here: {right}", name[:40])


def right_name(name: str) -> str | None:
    """Return a sentence on a name that only other libraries have; None for any other name."""
    advice = ELSEWHERE.get("DiffusionPipeline" if name.endswith("Pipeline") else name)
    return advice and f"there is no `{name}` here: {advice}"
