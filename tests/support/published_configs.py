# SPDX-License-Identifier: Apache-2.0
"""The configs of the published checkpoints' components, and the class of each that model_index.json lists.

They are copies of config.json, scheduler_config.json, guider_config.json and preprocessor_config.json as public
repositories hold them: Ascend's msmodeling (Wan 14B, HunyuanVideo 1.5), painebenjamin/taproot and
MinusZoneAI/ComfyUI-CogVideoX-MZ (CogVideoX), latentslate (Wan 2.2), mindspore-lab/mindone (the autoencoder of
HunyuanVideo 1.5), and FastVideo's, nodetool's and diffusers' on Wan's image encoder. A config that differs
from another in a few entries has only these entries here.
"""

from typing import Any

Config = dict[str, Any]

# text encoders
T5_XXL: Config = {
    "architectures": ["T5EncoderModel"], "classifier_dropout": 0.0, "d_ff": 10240, "d_kv": 64, "d_model": 4096,
    "decoder_start_token_id": 0, "dense_act_fn": "gelu_new", "dropout_rate": 0.1, "eos_token_id": 1,
    "feed_forward_proj": "gated-gelu", "initializer_factor": 1.0, "is_encoder_decoder": True, "is_gated_act": True,
    "layer_norm_epsilon": 1e-06, "model_type": "t5", "num_decoder_layers": 24, "num_heads": 64, "num_layers": 24,
    "output_past": True, "pad_token_id": 0, "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.4", "use_cache": True, "vocab_size": 32128,
}  # fmt: skip
UMT5_XXL = T5_XXL | {
    "architectures": ["UMT5EncoderModel"], "model_type": "umt5", "vocab_size": 256384, "scalable_attention": True,
    "tokenizer_class": "T5Tokenizer", "transformers_version": "4.48.0.dev0",
}  # fmt: skip
GLYPH_BYT5 = T5_XXL | {
    "d_model": 1472, "d_ff": 3584, "num_heads": 6, "num_layers": 12, "num_decoder_layers": 4, "vocab_size": 1510,
    "tokenizer_class": "ByT5Tokenizer", "torch_dtype": "float32",
}  # fmt: skip
_QWEN: Config = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652,
    "vision_end_token_id": 151653, "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 128000, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip
QWEN2_5_VL_TEXT = _QWEN | {
    "architectures": ["Qwen2_5_VLTextModel"], "layer_types": ["full_attention"] * 28, "model_type": "qwen2_5_vl_text",
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}, "sliding_window": None,
}  # fmt: skip
QWEN2_5_VL = _QWEN | {  # the whole model, which the authors of HunyuanVideo have beside their own
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "sliding_window": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip

# image encoders
CLIP_VIT_H: Config = {
    "architectures": ["CLIPVisionModelWithProjection"], "attention_dropout": 0.0, "dropout": 0.0, "hidden_act": "gelu",
    "hidden_size": 1280, "image_size": 224, "initializer_factor": 1.0, "initializer_range": 0.02,
    "intermediate_size": 5120, "layer_norm_eps": 1e-05, "model_type": "clip_vision_model", "num_attention_heads": 16,
    "num_channels": 3, "num_hidden_layers": 32, "patch_size": 14, "projection_dim": 1024, "torch_dtype": "bfloat16",
    "transformers_version": "4.48.1",
}  # fmt: skip
CLIP_PROCESSOR: Config = {
    "crop_size": {"height": 224, "width": 224}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
    "do_rescale": True, "do_resize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "CLIPImageProcessor", "image_std": [0.26862954, 0.26130258, 0.27577711], "resample": 3,
    "rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 224},
}  # fmt: skip
CLIP_PROCESSOR_OLD: Config = {  # of older releases of transformers
    "crop_size": 224, "do_center_crop": True, "do_normalize": True, "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor", "image_mean": CLIP_PROCESSOR["image_mean"],
    "image_std": CLIP_PROCESSOR["image_std"], "resample": 3, "size": 224,
}  # fmt: skip
SIGLIP_SO400M: Config = {
    "_name_or_path": "google/siglip-so400m-patch14-384", "architectures": ["SiglipVisionModel"],
    "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "image_size": 384,
    "intermediate_size": 4304, "layer_norm_eps": 1e-06, "model_type": "siglip_vision_model",
    "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 27, "patch_size": 14,
    "torch_dtype": "bfloat16", "transformers_version": "4.46.3",
}  # fmt: skip
SIGLIP_PROCESSOR: Config = {
    "do_convert_rgb": None, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "SiglipImageProcessor", "image_std": [0.5, 0.5, 0.5], "processor_class": "SiglipProcessor",
    "resample": 3, "rescale_factor": 0.00392156862745098, "size": {"height": 384, "width": 384},
}  # fmt: skip

# Wan
WAN_14B: Config = {
    "_class_name": "WanTransformer3DModel", "_diffusers_version": "0.33.0.dev0", "added_kv_proj_dim": None,
    "attention_head_dim": 128, "cross_attn_norm": True, "eps": 1e-06, "ffn_dim": 13824, "freq_dim": 256,
    "image_dim": None, "in_channels": 16, "num_attention_heads": 40, "num_layers": 40, "out_channels": 16,
    "patch_size": [1, 2, 2], "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024, "text_dim": 4096,
}  # fmt: skip
WAN_1_3B = WAN_14B | {"ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30}
WAN_CAUSAL_1_3B = WAN_1_3B | {"_class_name": "CausalWanTransformer3DModel"}
WAN_I2V_14B = WAN_14B | {"added_kv_proj_dim": 5120, "image_dim": 1280, "in_channels": 36}
WAN_FLF2V_14B = WAN_I2V_14B | {"pos_embed_seq_len": 514}
_VACE: Config = {"_class_name": "WanVACETransformer3DModel", "pos_embed_seq_len": None, "vace_in_channels": 96}
WAN_VACE_1_3B = WAN_1_3B | _VACE | {"_diffusers_version": "0.34.0.dev0", "vace_layers": [*range(0, 30, 2)]}
WAN_VACE_14B = WAN_14B | _VACE | {"vace_layers": [*range(0, 40, 5)]}
WAN_2_2_T2V = WAN_14B | {"_diffusers_version": "0.35.0.dev0", "pos_embed_seq_len": None}
WAN_2_2_I2V = WAN_2_2_T2V | {"in_channels": 36}
WAN_2_2_5B = WAN_2_2_T2V | {
    "ffn_dim": 14336, "in_channels": 48, "out_channels": 48, "num_attention_heads": 24, "num_layers": 30,
}  # fmt: skip
WAN_VAE: Config = {
    "_class_name": "AutoencoderKLWan", "_diffusers_version": "0.35.0.dev0", "attn_scales": [], "base_dim": 96,
    "dim_mult": [1, 2, 4, 4], "dropout": 0.0,
    "latents_mean": [
        -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922,
        -0.9497, 0.2503, -0.2921,
    ],
    "latents_std": [
        2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253,
        2.8251, 1.916,
    ],
    "num_res_blocks": 2, "temperal_downsample": [False, True, True], "z_dim": 16,
}  # fmt: skip
WAN_2_2_VAE = WAN_VAE | {
    "base_dim": 160, "clip_output": False, "decoder_base_dim": 256, "in_channels": 12, "is_residual": True,
    "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "scale_factor_temporal": 4, "z_dim": 48,
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
        0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
        -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
        0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
        0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}  # fmt: skip
UNIPC: Config = {
    "_class_name": "UniPCMultistepScheduler", "_diffusers_version": "0.35.0.dev0", "beta_end": 0.02,
    "beta_schedule": "linear", "beta_start": 0.0001, "disable_corrector": [], "dynamic_thresholding_ratio": 0.995,
    "final_sigmas_type": "zero", "flow_shift": 3.0, "lower_order_final": True, "num_train_timesteps": 1000,
    "predict_x0": True, "prediction_type": "flow_prediction", "rescale_betas_zero_snr": False, "sample_max_value": 1.0,
    "solver_order": 2, "solver_p": None, "solver_type": "bh2", "steps_offset": 0, "thresholding": False,
    "time_shift_type": "exponential", "timestep_spacing": "linspace", "trained_betas": None, "use_beta_sigmas": False,
    "use_dynamic_shifting": False, "use_exponential_sigmas": False, "use_flow_sigmas": True, "use_karras_sigmas": False,
}  # fmt: skip
FLOW_DPM: Config = {
    "_class_name": "DPMSolverMultistepScheduler", "_diffusers_version": "0.36.0.dev0", "algorithm_type": "dpmsolver++",
    "flow_shift": 5.0, "num_train_timesteps": 1000, "prediction_type": "flow_prediction", "solver_order": 2,
    "solver_type": "midpoint", "use_flow_sigmas": True,
}  # fmt: skip
FLOW_EULER: Config = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.36.0.dev0", "num_train_timesteps": 1000,
    "shift": 5.0, "use_dynamic_shifting": False,
}  # fmt: skip
WAN_ANIMATE_2: Config = {
    "_class_name": "WanAnimate2Transformer3DModel", "_diffusers_version": "0.36.0.dev0", "cross_attn_norm": True,
    "dim": 5120, "eps": 1e-06, "ffn_dim": 13824, "freq_dim": 256, "in_dim": 36, "num_heads": 40, "num_layers": 40,
    "out_dim": 16, "patch_size": [1, 2, 2], "refer_offset_h": 0, "refer_offset_t": 1, "refer_offset_w": -1,
    "refer_stride": 1, "text_dim": 4096, "text_len": 512, "use_img_emb": True,
}  # fmt: skip
WAN_ANIMATE: Config = {
    "_class_name": "WanAnimateTransformer3DModel", "_diffusers_version": "0.36.0.dev0", "added_kv_proj_dim": 5120,
    "attention_head_dim": 128, "cross_attn_norm": True, "eps": 1e-06, "face_encoder_hidden_dim": 1024,
    "face_encoder_num_heads": 4, "ffn_dim": 13824, "freq_dim": 256, "image_dim": 1280, "in_channels": 36,
    "inject_face_latents_blocks": 5, "latent_channels": 16, "motion_dim": 20, "motion_encoder_batch_size": 8,
    "motion_encoder_channel_sizes": None, "motion_encoder_dim": 512, "motion_encoder_size": 512,
    "motion_style_dim": 512, "num_attention_heads": 40, "num_layers": 40, "out_channels": 16, "patch_size": [1, 2, 2],
    "pos_embed_seq_len": None, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024, "text_dim": 4096,
}  # fmt: skip
SELF_FORCING: Config = {
    "_class_name": "SelfForcingFlowMatchScheduler", "extra_one_step": True, "inverse_timesteps": False,
    "num_inference_steps": 1000, "num_train_timesteps": 1000, "reverse_sigmas": False, "shift": 5.0, "sigma_max": 1.0,
    "sigma_min": 0.0,
}  # fmt: skip
AUTHORS_WAN: Config = {  # config.json of the authors' folders
    "_class_name": "WanModel", "_diffusers_version": "0.30.0", "dim": 1536, "eps": 1e-06, "ffn_dim": 8960,
    "freq_dim": 256, "in_dim": 16, "model_type": "t2v", "num_heads": 12, "num_layers": 30, "out_dim": 16,
    "text_len": 512,
}  # fmt: skip

# CogVideoX
COGVIDEOX_2B_OLD: Config = {  # of the first release
    "_class_name": "CogVideoXTransformer3DModel", "_diffusers_version": "0.30.0.dev0",
    "activation_fn": "gelu-approximate", "attention_bias": True, "attention_head_dim": 64, "dropout": 0.0,
    "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 16, "max_text_seq_length": 226,
    "norm_elementwise_affine": True, "norm_eps": 1e-05, "num_attention_heads": 30, "num_layers": 30,
    "out_channels": 16, "patch_size": 2, "sample_frames": 49, "sample_height": 60, "sample_width": 90,
    "spatial_interpolation_scale": 1.875, "temporal_compression_ratio": 4, "temporal_interpolation_scale": 1.0,
    "text_embed_dim": 4096, "time_embed_dim": 512, "timestep_activation_fn": "silu",
}  # fmt: skip
COGVIDEOX_2B = COGVIDEOX_2B_OLD | {"use_rotary_positional_embeddings": False}
COGVIDEOX_5B = COGVIDEOX_2B | {
    "num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True,
}  # fmt: skip
COGVIDEOX_5B_I2V = COGVIDEOX_5B | {"in_channels": 32, "use_learned_positional_embeddings": True}
COGVIDEOX_1_5_5B = COGVIDEOX_5B | {
    "patch_bias": False, "patch_size_t": 2, "sample_frames": 81, "sample_height": 300, "sample_width": 300,
    "use_learned_positional_embeddings": False,
}  # fmt: skip
COGVIDEOX_1_5_5B_I2V = COGVIDEOX_1_5_5B | {"in_channels": 32, "ofs_embed_dim": 512}
COGVIDEOX_1_5_5B_I2V_OLD = COGVIDEOX_1_5_5B_I2V | {"sample_height": 96, "sample_width": 170}
COGVIDEOX_VAE: Config = {
    "_class_name": "AutoencoderKLCogVideoX", "_diffusers_version": "0.31.0.dev0", "act_fn": "silu",
    "block_out_channels": [128, 256, 256, 512], "down_block_types": ["CogVideoXDownBlock3D"] * 4, "force_upcast": True,
    "in_channels": 3, "latent_channels": 16, "latents_mean": None, "latents_std": None, "layers_per_block": 3,
    "norm_eps": 1e-06, "norm_num_groups": 32, "out_channels": 3, "sample_height": 480, "sample_width": 720,
    "scaling_factor": 0.7, "shift_factor": None, "temporal_compression_ratio": 4,
    "up_block_types": ["CogVideoXUpBlock3D"] * 4, "use_post_quant_conv": False, "use_quant_conv": False,
}  # fmt: skip
COGVIDEOX_2B_VAE = COGVIDEOX_VAE | {"scaling_factor": 1.15258426}
COGVIDEOX_2B_VAE_OLD = {  # of the first release
    key: value for key, value in COGVIDEOX_2B_VAE.items() if key not in ("sample_height", "sample_width")
} | {"mid_block_add_attention": True, "sample_size": 256}
COGVIDEOX_1_5_VAE = COGVIDEOX_VAE | {"invert_scale_latents": True}
COGVIDEOX_2B_DDIM: Config = {
    "_class_name": "CogVideoXDDIMScheduler", "_diffusers_version": "0.30.0.dev0", "beta_end": 0.012,
    "beta_schedule": "scaled_linear", "beta_start": 0.00085, "clip_sample": False, "clip_sample_range": 1.0,
    "num_train_timesteps": 1000, "prediction_type": "v_prediction", "rescale_betas_zero_snr": True,
    "sample_max_value": 1.0, "set_alpha_to_one": True, "snr_shift_scale": 3.0, "steps_offset": 0,
    "timestep_spacing": "trailing", "trained_betas": None,
}  # fmt: skip
COGVIDEOX_DDIM = COGVIDEOX_2B_DDIM | {"snr_shift_scale": 1.0}

# HunyuanVideo 1.5
HUNYUAN_480P: Config = {
    "_class_name": "HunyuanVideo15Transformer3DModel", "_diffusers_version": "0.36.0.dev0", "attention_head_dim": 128,
    "image_embed_dim": 1152, "in_channels": 65, "mlp_ratio": 4.0, "num_attention_heads": 16, "num_layers": 54,
    "num_refiner_layers": 2, "out_channels": 32, "patch_size": 1, "patch_size_t": 1, "qk_norm": "rms_norm",
    "rope_axes_dim": [16, 56, 56], "rope_theta": 256.0, "target_size": 640, "task_type": "t2v",
    "text_embed_2_dim": 1472, "text_embed_dim": 3584, "use_meanflow": False,
}  # fmt: skip
HUNYUAN_720P = HUNYUAN_480P | {"target_size": 960}
HUNYUAN_FEW_STEPS = HUNYUAN_480P | {"task_type": "i2v", "use_meanflow": True}
HUNYUAN_VAE: Config = {
    "_class_name": "AutoencoderKLHunyuanVideo15", "_diffusers_version": "0.36.0.dev0",
    "block_out_channels": [128, 256, 512, 1024, 1024], "downsample_match_channel": True, "in_channels": 3,
    "latent_channels": 32, "layers_per_block": 2, "out_channels": 3, "scaling_factor": 1.03682,
    "spatial_compression_ratio": 16, "temporal_compression_ratio": 4, "upsample_match_channel": True,
}  # fmt: skip
HUNYUAN_EULER: Config = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.36.0.dev0", "base_image_seq_len": 256,
    "base_shift": 0.5, "invert_sigmas": False, "max_image_seq_len": 4096, "max_shift": 1.15,
    "num_train_timesteps": 1000, "shift": 5.0, "shift_terminal": None, "stochastic_sampling": False,
    "time_shift_type": "exponential", "use_beta_sigmas": False, "use_dynamic_shifting": False,
    "use_exponential_sigmas": False, "use_karras_sigmas": False,
}  # fmt: skip
HUNYUAN_GUIDER: Config = {
    "_class_name": "ClassifierFreeGuidance", "_diffusers_version": "0.36.0.dev0", "enabled": True,
    "guidance_rescale": 0.0, "guidance_scale": 6.0, "start": 0.0, "stop": 1.0, "use_original_formulation": False,
}  # fmt: skip
AUTHORS_HUNYUAN: Config = {  # config.json of the authors' transformers
    "_class_name": "HunyuanVideo_1_5_DiffusionTransformer", "attn_mode": "flash", "attn_param": None,
    "concat_condition": True, "glyph_byT5_v2": True, "guidance_embed": False, "heads_num": 16, "hidden_size": 2048,
    "ideal_resolution": "480p", "ideal_task": "t2v", "in_channels": 32, "is_reshape_temporal_channels": False,
    "mlp_act_type": "gelu_tanh", "mlp_width_ratio": 4, "mm_double_blocks_depth": 54, "mm_single_blocks_depth": 0,
    "out_channels": 32, "patch_size": [1, 1, 1], "qk_norm": True, "qk_norm_type": "rms", "qkv_bias": True,
    "rope_dim_list": [16, 56, 56], "rope_theta": 256, "text_pool_type": None, "text_projection": "single_refiner",
    "text_states_dim": 3584, "text_states_dim_2": None, "use_attention_mask": True, "use_cond_type_embedding": True,
    "use_meanflow": False, "vision_projection": "linear", "vision_states_dim": 1152,
}  # fmt: skip
AUTHORS_HUNYUAN_VAE: Config = {
    "_class_name": "AutoencoderKLConv3D", "_diffusers_version": "0.33.0.dev0",
    "block_out_channels": [128, 256, 512, 1024, 1024], "downsample_match_channel": True, "ffactor_spatial": 16,
    "ffactor_temporal": 4, "in_channels": 3, "latent_channels": 32, "layers_per_block": 2, "out_channels": 3,
    "sample_size": 256, "sample_tsize": 64, "scaling_factor": 1.03682, "shift_factor": None,
    "upsample_match_channel": True,
}  # fmt: skip

# The classes that model_index.json lists
_UMT5 = {"text_encoder": ["transformers", "UMT5EncoderModel"], "tokenizer": ["transformers", "T5TokenizerFast"]}
WAN_CLASSES: Config = {
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    **_UMT5,
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}
WAN_IMAGE_CLASSES: Config = {
    "image_encoder": ["transformers", "CLIPVisionModelWithProjection"],
    "image_processor": ["transformers", "CLIPImageProcessor"],
}
COGVIDEOX_CLASSES: Config = {
    "scheduler": ["diffusers", "CogVideoXDDIMScheduler"],
    "text_encoder": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "T5Tokenizer"],
    "transformer": ["diffusers", "CogVideoXTransformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLCogVideoX"],
}
HUNYUAN_CLASSES: Config = {
    "guider": ["diffusers", "ClassifierFreeGuidance"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "tokenizer_2": ["transformers", "ByT5Tokenizer"],
    "transformer": ["diffusers", "HunyuanVideo15Transformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLHunyuanVideo15"],
}
HUNYUAN_IMAGE_CLASSES: Config = {
    "feature_extractor": ["transformers", "SiglipImageProcessor"],
    "image_encoder": ["transformers", "SiglipVisionModel"],
}
