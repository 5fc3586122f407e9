# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's stages in both libraries, at the widths of CogVideoX-1.5 5B."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from flax import nnx
from transformers import T5Config, T5EncoderModel

from benchmarks.comparison.cases import (
    STEPS,
    Case,
    Sizes,
    Stages,
    convert_reference,
    decode_case,
    encode_function,
    pipeline_of,
    torch_pipeline,
)
from wanjax.pipelines.cogvideox.conditioning import CogVideoXConditioning
from wanjax.pipelines.cogvideox.programs import encode_prompts
from wanjax.schedulers import from_config

MODEL = "cogvideox1.5-5b"
TEXT_LENGTH = 226
TEXT: dict[str, Any] = {
    "vocab_size": 4096, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64, "feed_forward_proj": "gated-gelu"
}  # fmt: skip
TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 48, "attention_head_dim": 64, "patch_size_t": 2, "patch_bias": False, "sample_height": 300,
    "sample_width": 300, "sample_frames": 81, "use_rotary_positional_embeddings": True,
}  # fmt: skip
VAE: dict[str, Any] = {"scaling_factor": 0.7, "invert_scale_latents": True}
SMALL: dict[str, Any] = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}


def text(sizes: Sizes) -> Iterator[Case]:
    """Yield the encoder of T5 v1.1 XXL with few layers and a small vocabulary, on two prompts of 226 tokens."""
    reference = T5EncoderModel(T5Config(num_layers=sizes.layers, **TEXT)).eval()
    graphdef, weights = nnx.split(convert_reference(reference))
    ids = np.random.default_rng(0).integers(2, TEXT["vocab_size"], (2, TEXT_LENGTH))
    ours = encode_function(encode_prompts, graphdef, weights, np.int32(ids))

    def theirs() -> torch.Tensor:
        return reference(torch.from_numpy(ids)).last_hidden_state

    yield Case(f"text encoder, {sizes.layers} layers of T5-XXL, 2 x {TEXT_LENGTH} tokens", 1.0, ours, theirs)


def step(sizes: Sizes) -> Iterator[Case]:
    """Yield the denoising of 17 frames of 256 × 256 (768 tokens and 226 of text) with guidance.

    diffusers computes both prompts in one batch, and wanjax one after the other, which is its default.
    """
    reference = CogVideoXTransformer3DModel(num_layers=sizes.layers, **TRANSFORMER).eval()
    scheduler = CogVideoXDDIMScheduler(
        beta_schedule="scaled_linear", prediction_type="v_prediction", rescale_betas_zero_snr=True,
        timestep_spacing="trailing", snr_shift_scale=1.0, clip_sample=False,
    )  # fmt: skip
    vae = AutoencoderKLCogVideoX(**VAE | SMALL)  # used only for its factors
    diffusers_pipeline = torch_pipeline(CogVideoXPipeline, vae=vae, scheduler=scheduler, transformer=reference)
    same_scheduler = from_config({**scheduler.config, "_class_name": "CogVideoXDDIMScheduler"})
    pipeline = pipeline_of(MODEL, {"transformer": convert_reference(reference)}, scheduler=same_scheduler)
    random = np.random.default_rng(0)
    noise = random.standard_normal((1, 16, 6, 32, 32), np.float32)  # one frame fills the patches, and is dropped
    texts = [random.standard_normal((1, TEXT_LENGTH, 4096), np.float32) for _ in range(2)]

    def ours() -> jax.Array:
        return pipeline.denoise(
            CogVideoXConditioning(*map(jnp.asarray, texts)), noise=jnp.asarray(noise), size=(256, 256), frames=17,
            steps=STEPS, guidance_scale=6.0, follow="diffusers",
        )  # fmt: skip

    def theirs() -> torch.Tensor:
        prompt, negative = (torch.from_numpy(text) for text in texts)
        latents = diffusers_pipeline(
            prompt_embeds=prompt, negative_prompt_embeds=negative, latents=torch.from_numpy(noise).transpose(1, 2),
            height=256, width=256, num_frames=17, num_inference_steps=STEPS, guidance_scale=6.0, output_type="latent",
        ).frames  # fmt: skip
        return latents[:, 1:].transpose(1, 2)

    yield Case(f"step with guidance, {sizes.layers} layers of 1.5 5B, 994 tokens", 1.0, ours, theirs, num_steps=STEPS)


def vae(sizes: Sizes) -> Iterator[Case]:
    """Yield the decoding of a video with CogVideoX's autoencoder."""
    reference: Any = AutoencoderKLCogVideoX(**VAE).eval()
    yield decode_case(MODEL, reference, lambda x: x / reference.config.scaling_factor, sizes, target=0.8)


STAGES: Stages = {"text": text, "step": step, "vae": vae}
