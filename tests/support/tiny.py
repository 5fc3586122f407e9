# SPDX-License-Identifier: Apache-2.0
"""Very small checkpoints of random weights, in the layout of diffusers."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from tests.support.toy_chat_tokenizer import save_chat_tokenizer
from tests.support.toy_tokenizer import save_tokenizer
from wanjax import registry
from wanjax.checkpoints import modules
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.checkpoints.network_kinds import read_network

TEXT_WIDTH = 16
LATENT_CHANNELS = 4
TEXT_LENGTH = 24

TRANSFORMER = {
    "_class_name": "WanTransformer3DModel",
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 32,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "patch_size": [1, 2, 2],
    "text_dim": TEXT_WIDTH,
    "freq_dim": 16,
    "eps": 1e-6,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
}
ANIMATE_TRANSFORMER = {
    "_class_name": "WanAnimate2Transformer3DModel",
    "num_layers": 2,
    "num_heads": 2,
    "dim": 24,
    "ffn_dim": 32,
    "in_dim": 2 * LATENT_CHANNELS + 4,
    "out_dim": LATENT_CHANNELS,
    "patch_size": [1, 2, 2],
    "text_dim": TEXT_WIDTH,
    "freq_dim": 16,
    "eps": 1e-6,
}
POSE_TRANSFORMER = {
    "_class_name": "WanAnimateTransformer3DModel",
    "in_channels": 2 * LATENT_CHANNELS + 4,
    "latent_channels": LATENT_CHANNELS,
    "image_dim": 16,
    "added_kv_proj_dim": 24,
    "pos_embed_seq_len": None,
    "motion_encoder_channel_sizes": {"16": 4, "8": 6, "4": 5},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 3,
    "motion_encoder_dim": 7,
    "face_encoder_hidden_dim": 6,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 1,
}
VAE = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 4,
    "z_dim": LATENT_CHANNELS,
    "dim_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [1.1, 0.9, 1.2, 1.0],
}
TEXT_ENCODER = {
    "architectures": ["UMT5EncoderModel"],
    "model_type": "umt5",
    "vocab_size": 512,
    "d_model": TEXT_WIDTH,
    "num_heads": 2,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "gated-gelu",
}
CLIP = "CLIPVisionModelWithProjection"
IMAGE_ENCODER = {
    "architectures": [CLIP],
    "model_type": "clip_vision_model",
    "projection_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 14,
    "patch_size": 7,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
IMAGE_PROCESSOR = {
    "size": {"shortest_edge": 14},
    "crop_size": {"height": 14, "width": 14},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.3, 0.3, 0.3],
}
SMALL = {"height": 32, "width": 32, "frames": 9, "steps": 1, "guidance_scale": 1.0}
SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "num_train_timesteps": 1000,
    "solver_order": 2,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}
INDEX = {
    "_class_name": "WanPipeline",
    "_diffusers_version": "0.35.0",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}

COGVIDEOX_TRANSFORMER = {
    "_class_name": "CogVideoXTransformer3DModel",
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "patch_size": 2,
    "patch_size_t": 2,
    "patch_bias": False,
    "text_embed_dim": TEXT_WIDTH,
    "max_text_seq_length": TEXT_LENGTH,
    "time_embed_dim": 24,
    "norm_eps": 1e-5,
    "use_rotary_positional_embeddings": True,
    "spatial_interpolation_scale": 1.875,
    "temporal_interpolation_scale": 1.0,
    "sample_frames": 9,
    "sample_height": 20,
    "sample_width": 20,
}
COGVIDEOX_VAE = {
    "_class_name": "AutoencoderKLCogVideoX",
    "block_out_channels": [4, 8, 8, 8],
    "latent_channels": LATENT_CHANNELS,
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "temporal_compression_ratio": 4,
    "sample_height": 32,
    "sample_width": 48,
    "scaling_factor": 0.7,
    "invert_scale_latents": True,
}
COGVIDEOX_SCHEDULER = {
    "_class_name": "CogVideoXDDIMScheduler",
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "snr_shift_scale": 1.0,
    "timestep_spacing": "trailing",
}
COGVIDEOX_INDEX = {
    "_class_name": "CogVideoXPipeline",
    "_diffusers_version": "0.35.0",
    "scheduler": ["diffusers", "CogVideoXDDIMScheduler"],
    "text_encoder": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "T5Tokenizer"],
    "transformer": ["diffusers", "CogVideoXTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLCogVideoX"],
}
HUNYUAN_CHAT_ENCODER = {
    "model_type": "qwen2_5_vl_text",
    "hidden_act": "silu",
    "vocab_size": 400,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,  # one of them runs
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
HUNYUAN_IMAGE_ENCODER = {
    "model_type": "siglip_vision_model",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 14,
    "patch_size": 7,
    "layer_norm_eps": 1e-6,
}
HUNYUAN_TRANSFORMER = {
    "_class_name": "HunyuanVideo15Transformer3DModel",
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "mlp_ratio": 2.0,
    "in_channels": 2 * LATENT_CHANNELS + 1,
    "out_channels": LATENT_CHANNELS,
    "text_embed_dim": 24,
    "text_embed_2_dim": TEXT_WIDTH,
    "image_embed_dim": 16,
    "rope_axes_dim": [4, 6, 6],
    "rope_theta": 256.0,
    "target_size": 48,
}
HUNYUAN_VAE = {
    "_class_name": "AutoencoderKLHunyuanVideo15",
    "block_out_channels": [4, 8, 8, 16, 16],
    "layers_per_block": 1,
    "latent_channels": LATENT_CHANNELS,
    "spatial_compression_ratio": 16,
    "temporal_compression_ratio": 4,
    "scaling_factor": 1.3,
}
HUNYUAN_GUIDER = {"_class_name": "ClassifierFreeGuidance"}
HUNYUAN_SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0}
PICTURE_COMPONENTS = ("feature_extractor", "image_encoder")
HUNYUAN_INDEX = {
    "feature_extractor": ["transformers", "SiglipImageProcessor"],
    "guider": ["diffusers", "ClassifierFreeGuidance"],
    "image_encoder": ["transformers", "SiglipVisionModel"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "tokenizer_2": ["transformers", "ByT5Tokenizer"],
    "transformer": ["diffusers", "HunyuanVideo15Transformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLHunyuanVideo15"],
}


@contextmanager
def compile_cache(folder: Path) -> Iterator[Path]:
    """Cache compiled programs in the folder, so that each program is compiled once."""
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # else JAX keeps using the previous folder
    try:
        yield folder
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def tiny_checkpoint(folder: Path) -> Path:
    """Write the checkpoint of a text-to-video model, equal at every call; return its folder."""
    return _checkpoint(folder, INDEX, TRANSFORMER)


def tiny_sparse_linear_checkpoint(folder: Path) -> Path:
    """Write the checkpoint of a text-to-video model that was trained with sparse-linear attention."""
    return _checkpoint(folder, INDEX, TRANSFORMER | {"sparse_linear": True})


def tiny_image_checkpoint(folder: Path, *, last: bool = False) -> Path:
    """Write the checkpoint of an image-to-video model, or of first and last frame; its videos are small."""
    sizes = {"in_channels": 2 * LATENT_CHANNELS + 4, "image_dim": 16, "added_kv_proj_dim": 24}
    index = INDEX | {"_class_name": "WanImageToVideoPipeline", "image_encoder": ["transformers", CLIP]}
    index["image_processor"] = ["transformers", "CLIPImageProcessor"]
    _save(folder / "image_encoder", CLIP, IMAGE_ENCODER, "model")
    weights = folder / "image_encoder" / "model.safetensors"
    projection = np.ones((IMAGE_ENCODER["projection_dim"], IMAGE_ENCODER["hidden_size"]), np.float32)
    save_safetensors(weights, {**load_safetensors(weights), "visual_projection.weight": projection})
    _write_json(folder / "image_processor" / "preprocessor_config.json", IMAGE_PROCESSOR)
    _write_json(folder / "generation_config.json", SMALL)
    return _checkpoint(folder, index, TRANSFORMER | sizes | {"pos_embed_seq_len": 10 if last else None})


def tiny_animate_checkpoint(folder: Path, *, layers: int = 2) -> Path:
    """Write the checkpoint of a model that follows a driving clip; its default videos are small."""
    tiny_checkpoint(folder)
    classes = {
        "transformer": ["diffusers", "WanAnimate2Transformer3DModel"],
        "image_encoder": ["transformers", CLIP],
        "image_processor": ["transformers", "CLIPImageProcessor"],
        "scheduler": ["diffusers", "DPMSolverMultistepScheduler"],
    }
    wide = {
        "hidden_size": 1280,
        "num_attention_heads": 16,
    }  # the width of the published encoder, which no config states
    _save(folder / "image_encoder", CLIP, IMAGE_ENCODER | wide, "model")
    _write_json(folder / "image_processor" / "preprocessor_config.json", IMAGE_PROCESSOR)
    _save(folder / "transformer", "WanAnimate2Transformer3DModel", ANIMATE_TRANSFORMER | {"num_layers": layers})
    _write_json(folder / "scheduler" / "scheduler_config.json", {**SCHEDULER, "_class_name": classes["scheduler"][1]})
    _write_json(folder / "model_index.json", INDEX | {"_class_name": "WanAnimate2Pipeline"} | classes)
    _write_json(folder / "generation_config.json", {**SMALL, "height": 48, "width": 64, "resize": "pad"})
    return folder


def tiny_pose_checkpoint(folder: Path) -> Path:
    """Write the checkpoint of a model that follows a pose clip and a face; its default videos are small."""
    tiny_image_checkpoint(folder)
    kind = POSE_TRANSFORMER["_class_name"]
    _save(folder / "transformer", kind, TRANSFORMER | POSE_TRANSFORMER)
    index = json.loads((folder / "model_index.json").read_text())
    _write_json(
        folder / "model_index.json", index | {"_class_name": "WanAnimatePipeline", "transformer": ["diffusers", kind]}
    )
    _write_json(folder / "generation_config.json", {**SMALL, "height": 48, "width": 64, "resize": "pad", "fps": 30})
    return folder


def tiny_control_checkpoint(folder: Path) -> Path:
    """Write the checkpoint of a VACE model; its default videos are small."""
    sizes = {
        "_class_name": "WanVACETransformer3DModel",
        "vace_layers": [0],
        "vace_in_channels": 2 * LATENT_CHANNELS + 64,
    }
    transformer = ["diffusers", "WanVACETransformer3DModel"]
    _write_json(folder / "generation_config.json", SMALL)
    return _checkpoint(
        folder, INDEX | {"_class_name": "WanVACEPipeline", "transformer": transformer}, TRANSFORMER | sizes
    )


def tiny_causal_checkpoint(folder: Path) -> Path:
    """Write the checkpoint of a causal model: chunks of two latent frames, and a window of two chunks."""
    kind, solver = "CausalWanTransformer3DModel", "SelfForcingFlowMatchScheduler"
    blocks = {"_class_name": kind, "num_frames_per_block": 2, "local_attn_size": -1, "sliding_window_num_frames": 4}
    parts = {"transformer": ["diffusers", kind], "scheduler": ["diffusers", solver]}
    _checkpoint(folder, INDEX | {"_class_name": "WanCausalDMDPipeline"} | parts, TRANSFORMER | blocks)
    levels = {"num_inference_steps": 1000, "shift": 5.0, "sigma_min": 0.0, "extra_one_step": True, "training": True}
    _write_json(folder / "scheduler" / "scheduler_config.json", {"_class_name": solver} | levels)
    _write_json(folder / "generation_config.json", SMALL | {"frames": 29, "steps": 4})
    return folder


def tiny_experts_checkpoint(folder: Path) -> Path:
    """Write the checkpoint of a model with two transformers, which differ in their weights."""
    tiny_checkpoint(folder)
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    file = folder / "transformer_2" / "diffusion_pytorch_model.safetensors"
    save_safetensors(file, {name: np.array(x) + 1 for name, x in load_safetensors(file).items()})
    index = INDEX | {"transformer_2": INDEX["transformer"], "boundary_ratio": 0.875}
    _write_json(folder / "model_index.json", index)
    return folder


def tiny_residual_checkpoint(folder: Path) -> Path:
    """Write a checkpoint with Wan 2.2's autoencoder, whose videos may begin from a picture."""
    tiny_checkpoint(folder)
    residual = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
    _save(folder / "vae", "AutoencoderKLWan", VAE | residual)
    _write_json(folder / "model_index.json", INDEX | {"expand_timesteps": True})
    return folder


def tiny_cogvideox_checkpoint(folder: Path, **transformer: Any) -> Path:
    """Write the checkpoint of a CogVideoX model; the keywords override entries of its transformer's config."""
    _save(folder / "text_encoder", "T5EncoderModel", TEXT_ENCODER | {"model_type": "t5"}, "model")
    _save(folder / "transformer", "CogVideoXTransformer3DModel", COGVIDEOX_TRANSFORMER | transformer)
    _save(folder / "vae", "AutoencoderKLCogVideoX", COGVIDEOX_VAE)
    save_tokenizer(folder / "tokenizer", model_max_length=TEXT_LENGTH)
    _write_json(folder / "scheduler" / "scheduler_config.json", COGVIDEOX_SCHEDULER)
    with_picture = transformer.get("in_channels", LATENT_CHANNELS) > LATENT_CHANNELS
    kind = {"_class_name": "CogVideoXImageToVideoPipeline"} if with_picture else {}
    _write_json(folder / "model_index.json", COGVIDEOX_INDEX | kind)
    _write_json(folder / "generation_config.json", SMALL)
    return folder


def tiny_hunyuan_checkpoint(folder: Path, *, pictured: bool = False, **transformer: Any) -> Path:
    """Write the checkpoint of a HunyuanVideo model; the keywords override entries of its transformer's config."""
    _save(folder / "text_encoder", "Qwen2_5_VLTextModel", HUNYUAN_CHAT_ENCODER, "model")
    _save(folder / "text_encoder_2", "T5EncoderModel", TEXT_ENCODER | {"model_type": "t5"}, "model")
    _save(folder / "transformer", "HunyuanVideo15Transformer3DModel", HUNYUAN_TRANSFORMER | transformer)
    _save(folder / "vae", "AutoencoderKLHunyuanVideo15", HUNYUAN_VAE)
    save_chat_tokenizer(folder / "tokenizer")
    save_byte_tokenizer(folder / "tokenizer_2")
    _write_json(folder / "guider" / "guider_config.json", HUNYUAN_GUIDER | {"guidance_scale": 3.0})
    _write_json(folder / "scheduler" / "scheduler_config.json", HUNYUAN_SCHEDULER | {"shift": 9.0})
    index = {name: kind for name, kind in HUNYUAN_INDEX.items() if pictured or name not in PICTURE_COMPONENTS}
    if pictured:
        _save(folder / "image_encoder", "SiglipVisionModel", HUNYUAN_IMAGE_ENCODER, "model")
        size = {"size": {"height": 14, "width": 14}}
        _write_json(folder / "feature_extractor" / "preprocessor_config.json", IMAGE_PROCESSOR | size)
    kind = "HunyuanVideo15ImageToVideoPipeline" if pictured else "HunyuanVideo15Pipeline"
    _write_json(folder / "model_index.json", {"_class_name": kind} | index)
    _write_json(folder / "generation_config.json", {"height": 32, "width": 48, "frames": 5, "steps": 2})
    return folder


def save_byte_tokenizer(folder: Path) -> None:
    """Write the folder of ByT5's tokenizer: its tokens are bytes, and it has no others."""
    _write_json(folder / "tokenizer_config.json", {"extra_ids": 0})


def _checkpoint(folder: Path, index: dict[str, Any], transformer: dict[str, Any]) -> Path:
    _save(folder / "text_encoder", "UMT5EncoderModel", TEXT_ENCODER, "model")
    _save(folder / "transformer", transformer["_class_name"], transformer)
    _save(folder / "vae", "AutoencoderKLWan", VAE)
    save_tokenizer(folder / "tokenizer", model_max_length=TEXT_LENGTH)
    _write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    _write_json(folder / "model_index.json", index)
    return folder


def _save(folder: Path, kind: str, config: dict[str, Any], name: str = "diffusion_pytorch_model") -> None:
    """Write a network with the class name that diffusers or transformers gives it."""
    _write_json(folder / "config.json", config)
    network = read_network(kind, config, registry.kinds())
    random = np.random.default_rng(0)
    graphdef, state = nnx.split(network.abstract(dtype=jnp.float32, param_dtype=jnp.float32))
    # drawn by NumPy, because compiling JAX's initialisers takes half a minute
    weights = jax.tree.map(lambda x: random.normal(0, 0.15, x.shape).astype(np.float32), state)
    modules.export(nnx.merge(graphdef, weights), network.rules, folder / f"{name}.safetensors")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")
