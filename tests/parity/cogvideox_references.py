# SPDX-License-Identifier: Apache-2.0
"""Small random pipelines of diffusers for CogVideoX, saved as checkpoints."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from tests.parity.references import randomise
from tests.support.toy_tokenizer import save_tokenizer

HEIGHT, WIDTH, CHANNELS = 32, 48, 4
LATENTS = HEIGHT // 8, WIDTH // 8
SHARED = {
    "num_attention_heads": 2, "attention_head_dim": 16, "time_embed_dim": 24, "text_embed_dim": 48, "num_layers": 3,
    "max_text_seq_length": 12, "out_channels": CHANNELS, "temporal_compression_ratio": 4,
}  # fmt: skip
VERSION_1_5 = {"patch_size_t": 2, "patch_bias": False, "use_rotary_positional_embeddings": True, "sample_height": 20,
       "sample_width": 20, "sample_frames": 17}  # fmt: skip
VERSION_1_0 = {"sample_height": LATENTS[0], "sample_width": LATENTS[1], "sample_frames": 9}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "cogvideox1.5-5b": VERSION_1_5 | {"in_channels": CHANNELS},
    "cogvideox1.5-5b-i2v": VERSION_1_5 | {"in_channels": 2 * CHANNELS, "ofs_embed_dim": 24},
    "cogvideox-2b": VERSION_1_0 | {"in_channels": CHANNELS},
    "cogvideox-5b": VERSION_1_0 | {"in_channels": CHANNELS, "use_rotary_positional_embeddings": True},
    "cogvideox-5b-i2v": VERSION_1_0 | {"in_channels": 2 * CHANNELS, "use_rotary_positional_embeddings": True,
                               "use_learned_positional_embeddings": True},
}  # fmt: skip
SCHEDULE = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "clip_sample": False,
}  # fmt: skip
SOLVERS = {"ddim": CogVideoXDDIMScheduler, "dpm": CogVideoXDPMScheduler}


def networks(name: str) -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    models = {
        "text_encoder": T5EncoderModel(
            T5Config(
                vocab_size=512, d_model=48, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
                relative_attention_num_buckets=16, relative_attention_max_distance=40, feed_forward_proj="gated-gelu",
            )
        ),
        "transformer": CogVideoXTransformer3DModel(**SHARED | TRANSFORMERS[name]),
        "vae": AutoencoderKLCogVideoX(
            block_out_channels=(8, 16, 16, 24), latent_channels=CHANNELS, layers_per_block=1, norm_num_groups=4,
            down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
            scaling_factor=1.15258426 if name == "cogvideox-2b" else 0.7, sample_height=HEIGHT, sample_width=WIDTH,
            invert_scale_latents="1.5" in name,
        ),
    }  # fmt: skip
    for seed, network in enumerate(models.values()):
        randomise(network.eval(), seed)
    return models


def reference(name: str, solver: str, folder: Path) -> Any:
    """Return diffusers' pipeline, and write its checkpoint to the folder."""
    shift = 3.0 if name == "cogvideox-2b" else 1.0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_tokenizer(folder / "toy"))
    tokenizer.model_max_length = 12
    kind = CogVideoXImageToVideoPipeline if name.endswith("i2v") else CogVideoXPipeline
    pipe = kind(
        tokenizer=tokenizer,
        scheduler=SOLVERS[solver](**SCHEDULE, snr_shift_scale=shift),
        **networks(name),
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder / "checkpoint")
    return pipe
