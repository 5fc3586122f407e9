# SPDX-License-Identifier: Apache-2.0
"""Names that other libraries use, and the names to use in wanjax instead.

This module does not import JAX, so that an error appears at once, even in a process without devices.
"""

from collections.abc import Collection, Iterable

from wanjax.errors import SettingError, comma_list, near_names, repr_short
from wanjax.media.inputs import INPUT_SPECS
from wanjax.pipelines.settings import LOAD_SETTINGS, Settings, schema

RENAMED = {alias: name for name, setting in schema(Settings).items() for alias in setting.aliases} | {
    "latents": "noise",
    "reference_images": "references",
    "callback_on_step_end": "callback",
    "pose_video": "video",
    "face_video": "face",
    "background_video": "background",
    "mask_video": "mask",
}
"""Keywords of diffusers, ComfyUI and models' own code, each with its name in wanjax."""
OUTPUT_NAMES = (
    *("out", "output", "output_path", "output_file", "output_dir", "output_video"),
    *("save", "save_path", "save_file", "save_dir", "filename", "file_name", "file"),
)
KEYWORD_ADVICE = {
    "generator": "use seed=42, and rng='torch' for the numbers of torch.Generator().manual_seed(42)",
    "output_type": "a video's frames are uint8, video.to_pil() gives images, pipe.decode(latents, dtype) floats, "
    "and pipe.denoise(pipe.encode(prompt)) latents",
    "return_dict": "a call returns a Video",
    "n": "one request makes one video, and pipe(prompt, seeds=[1, 2, 3]) several",
    "aspect_ratio": "use size, such as 832x480, width first, or 480p",
    "ratio": "use size, such as 832x480, width first, or 480p",
    "resolution": "use size, such as 832x480, width first, or 480p",
    "num_videos_per_prompt": "use seeds=[1, 2, 3] to make several videos",
    "prompt_embeds": "pass the output of pipe.encode(prompt) to pipe.denoise",
    "negative_prompt_embeds": "pass the output of pipe.encode(prompt) to pipe.denoise",
    "image_embeds": "pass the output of pipe.encode(prompt, image=...) to pipe.denoise",
    "max_sequence_length": "the model determines it",
    "attention_kwargs": "use wanjax.load(attention=..., lora=...) instead",
    "callback_on_step_end_tensor_inputs": "callback receives a Step with its latents and x0",
    "sampler": "pipe.scheduler sets the solver",
    "sampler_name": "pipe.scheduler sets the solver",
    "sample_solver": "pipe.scheduler sets the solver",
    "scheduler": "pipe.scheduler sets the solver",
    "device": "JAX selects the devices, and wanjax.load(mesh=...) shards a model over them",
    "device_map": "wanjax.load(mesh=...) shards a model over devices",
    "variant": "a checkpoint has one variant, and wanjax.load(param_dtype=...) sets the dtype of its weights",
    "cache_dir": "the environment variable HF_HOME sets the folder for downloads",
    "token": "run `hf auth login` or set the environment variable HF_TOKEN",
    "local_files_only": "the environment variable HF_HUB_OFFLINE=1 prevents downloads",
    "quantization_config": "use precision, such as wanjax.load(MODEL, precision='int8-weights')",
    "model_id": "use model",
    "low_cpu_mem_usage": "a checkpoint is always read one tensor at a time",
    "seconds": "use frames; fps frames make a second",
    "duration": "use frames; fps frames make a second",
    **dict.fromkeys(OUTPUT_NAMES, "a call returns a Video, and video.save('NAME.mp4') writes it"),
    "use_safetensors": "safetensors files are always preferred",
}
"""Keywords of diffusers without an equivalent keyword in wanjax, each with advice."""
ONE_VIDEO = "one request makes one video: send a request for each seed"
FIELD_ADVICE = {
    **dict.fromkeys(("n", "count", "num_videos", "num_videos_per_prompt", "seeds", "batch_size"), ONE_VIDEO),
    "prompts": "one request makes one video: send a request for each prompt, as prompt",
    **dict.fromkeys(OUTPUT_NAMES, "a request does not name its file: give --out to the command"),
    "file": "a picture is given as image, and a clip as video; for the name of the result, give --out to the command",
    **dict.fromkeys(("noise", "latents"), "a request has no arrays of noise: use seed"),
}
"""Names that a user may give to a field of a request by mistake, each with advice."""
STAGE_CALLS = {
    **dict.fromkeys((*INPUT_SPECS, "negative_prompt", "resize", "outpaint"), "pipe.encode(prompt, {}=...)"),
    **dict.fromkeys(("seeds", "noise", "callback", "batch_guidance"), "pipe.denoise(conditioning, {}=...)"),
    "tiling": "pipe.decode(latents, {}=...)",
}
"""Keywords of a call that are not settings alone, each with the stage that takes the keyword."""
LOAD_ADVICE = "it is fixed when a model is loaded, so give it to wanjax.load(MODEL, {}=...) or to the command"
LOAD_KEYWORDS = (
    *LOAD_SETTINGS,
    *("attention", "compiler", "decoder", "lora", "mesh", "offload", "param_dtype", "revision", "rules"),
)
"""Keywords of `wanjax.load` that a user may give to a call or to a server by mistake."""
ATTRIBUTE_ADVICE = {
    "from_pretrained": "wanjax.load(MODEL) loads a model",
    "generate": "wanjax.load(MODEL)(prompt) makes a video",
    "text_to_video": "wanjax.load(MODEL)(prompt) makes a video",
    "load_pipeline": "wanjax.load(MODEL) loads a model",
    "load_model": "wanjax.load(MODEL) loads a model",
    "pipeline": "wanjax.load(MODEL) loads a model",
    "train": "the command `wanjax train MODEL DATA --out FOLDER` trains a model",
    "convert": "the command `wanjax convert MODEL FOLDER` writes a checkpoint",
    "plan": "the command `wanjax plan MODEL` estimates memory and time",
    "serve": "the command `wanjax serve` starts a server",
    "batch": "pipe.videos(prompts) makes several videos",
    "models": "the command `wanjax models` lists the models",
    "list_models": "the command `wanjax models` lists the models",
    "info": "the command `wanjax info FILE` shows the settings of a video",
    "save": "video.save('NAME.mp4') writes a video",
    "cuda": "JAX selects the devices, and wanjax.load(mesh=...) shards a model over them",
    "cpu": "the environment variable JAX_PLATFORMS=cpu selects the CPU",
    "eval": "a pipeline only makes videos, and needs no mode",
    "half": "wanjax.load(MODEL, dtype='bfloat16') sets the dtype",
    "compile": "programs are compiled at their first use",
    "from_single_file": "wanjax.load(FILE) loads a model",
    "save_pretrained": "`wanjax convert MODEL FOLDER` writes a checkpoint",
    "unet": "pipe.transformer is the network that denoises",
    "to": "JAX selects the devices, and wanjax.load(mesh=...) shards a model over them",
    "device": "pipe.partitioner has the mesh of devices",
    "dtype": "pipe.defaults.dtype is the dtype",
    "enable_model_cpu_offload": "wanjax.load(MODEL, offload='stages') frees each network after its stage",
    "enable_sequential_cpu_offload": "wanjax.load(MODEL, offload='blocks') keeps the blocks in the host's memory",
    "enable_vae_tiling": "pipe(prompt, tiling=wanjax.Tiling()) decodes tile by tile",
    "enable_vae_slicing": "pipe(prompt, tiling=wanjax.Tiling()) decodes tile by tile",
    "enable_attention_slicing": "attention is always memory-efficient",
    "enable_xformers_memory_efficient_attention": "attention is always memory-efficient",
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
"""Functions, classes and attributes of diffusers, each with advice on what to use in wanjax."""


def unknown_keyword(
    name: str, keywords: Iterable[str], *, of_call: Collection[str] = (), kind: str = "keyword"
) -> SettingError:
    """Create the error for an unknown keyword of a function.

    The error gives the right name, a similar name, or all names.

    Args:
        name: The keyword.
        keywords: The function's keywords.
        of_call: The keywords of `pipe(prompt)`, if the function is not `pipe` itself. If the keyword is one of them,
            the error says so.
        kind: The kind of the name, such as the column of a table.
    """
    names = list(keywords)
    similar = near_names(name, [*names, *of_call], 1)
    our_name = RENAMED.get(name, name)
    if kind != "keyword" and name not in names and name in FIELD_ADVICE:
        advice = FIELD_ADVICE[name]
    elif our_name not in names and our_name in of_call:
        call = STAGE_CALLS.get(our_name, "pipe.settings({}=...)").format(our_name)
        advice = f"give {'it' if our_name == name else our_name} to pipe(prompt, {our_name}=...) or {call}"
    elif name in RENAMED:
        advice = f"use {our_name}"
    else:
        hint = similar and (
            f"use {similar[0]}" if similar[0] in names else f"did you mean pipe(prompt, {similar[0]}=...)?"
        )
        hint = LOAD_ADVICE.format(name) if name in LOAD_KEYWORDS else hint
        advice = KEYWORD_ADVICE.get(name) or hint or f"use {comma_list(names)}"
    return SettingError(f"{repr_short(name)} is not a {kind} here: {advice}", name[:40])


def advice_for(name: str) -> str | None:
    """Describe what to use instead of a name of another library; return None for a name that is not in the tables."""
    advice = ATTRIBUTE_ADVICE.get("DiffusionPipeline" if name.endswith("Pipeline") else name)
    return advice and f"there is no `{name}` here: {advice}"
