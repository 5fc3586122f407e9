# SPDX-License-Identifier: Apache-2.0
"""The recipe of the bundled model: the configs of its components in the diffusers layout, and their training."""

from dataclasses import dataclass

SIZE, FRAMES = 64, 17

VAE = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 8],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
    "latents_mean": [0.0] * 16,  # replaced by measured values after the VAE's training
    "latents_std": [1.0] * 16,
}

TEXT_ENCODER = {
    "architectures": ["UMT5EncoderModel"],
    "model_type": "umt5",
    "vocab_size": 512,
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}

TRANSFORMER = {
    "_class_name": "WanTransformer3DModel",
    "patch_size": [1, 2, 2],
    "num_attention_heads": 6,
    "attention_head_dim": 32,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 128,
    "freq_dim": 256,
    "ffn_dim": 512,
    "num_layers": 4,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 1024,
    "pos_embed_seq_len": None,
}

SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
    "solver_order": 2,
    "solver_type": "bh2",
    "predict_x0": True,
    "lower_order_final": True,
    "final_sigmas_type": "zero",
    "disable_corrector": [],
}

MODEL_INDEX = {
    "_class_name": "WanPipeline",
    "expand_timesteps": True,  # the first frame may be an input, with timestep 0
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
}


@dataclass(frozen=True)
class Phase:
    """A phase of the VAE's training on crops of clips."""

    steps: int
    batch: int
    frames: int
    size: int


VAE_PHASES = (Phase(2500, 10, 1, 32), Phase(3300, 4, 5, 32), Phase(1400, 4, 9, 32))
"""Training of the whole VAE: images first, then crops of video."""
DECODER_PHASES = (Phase(3000, 4, 9, 32), Phase(1200, 1, 17, 64))
"""Further training of only the decoder, at the end on whole clips."""

CLIPS = 16384  # encoded once before flow matching
FLOW_BATCH = 32
FLOW_STEPS = 14000
PICTURE_STEPS = 5000  # with the first frame as an input for half of each batch

DEFAULTS = {
    "negative_prompt": "",
    "height": SIZE,
    "width": SIZE,
    "frames": FRAMES,
    "fps": 8,
    "steps": 20,
    "guidance_scale": 3.0,
    "flow_shift": 3.0,
}
"""The recommended settings, as in the folder's `generation_config.json`."""
