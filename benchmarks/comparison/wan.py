# SPDX-License-Identifier: Apache-2.0
"""Wan's stages in both libraries, at the widths of Wan 2.1 1.3B."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from flax import nnx
from transformers import UMT5Config, UMT5EncoderModel

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
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.pipelines.wan.programs import encode_prompts
from wanjax.schedulers import from_config
from wanjax.training.objective import Batch, denoising_error

MODEL = "wan2.1-t2v-1.3b"
TEXT: dict[str, Any] = {
    "vocab_size": 4096, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64, "feed_forward_proj": "gated-gelu"
}  # fmt: skip
TRANSFORMER: dict[str, Any] = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "text_dim": 4096}
VAE: dict[str, Any] = {}  # diffusers' own defaults


def text(sizes: Sizes) -> Iterator[Case]:
    """Yield the encoder of UMT5-XXL with few layers and a small vocabulary, on two prompts of 512 tokens (60 real)."""
    reference = UMT5EncoderModel(UMT5Config(num_layers=sizes.layers, **TEXT)).eval()
    graphdef, weights = nnx.split(convert_reference(reference))
    ids = np.random.default_rng(0).integers(2, TEXT["vocab_size"], (2, 512))
    mask = np.tile(np.arange(512) < 60, (2, 1))
    ours = encode_function(encode_prompts, graphdef, weights, np.int32(ids), mask)

    def theirs() -> torch.Tensor:
        features = reference(torch.from_numpy(ids), torch.from_numpy(mask).long()).last_hidden_state
        return features * torch.from_numpy(mask)[..., None]

    yield Case(f"text encoder, {sizes.layers} layers of UMT5-XXL, 2 x 512 tokens", 1.0, ours, theirs)


def step(sizes: Sizes) -> Iterator[Case]:
    """Yield the denoising of a video, by default of 1,280 tokens, with and without guidance."""
    reference = WanTransformer3DModel(num_layers=sizes.layers, **TRANSFORMER).eval().to(getattr(torch, sizes.dtype))
    height, width, frames = sizes.denoised_size
    latent = (frames + 3) // 4, height // 8, width // 8
    tokens = latent[0] * (latent[1] // 2) * (latent[2] // 2)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    vae = AutoencoderKLWan(base_dim=8)  # used only for its sizes
    diffusers_pipeline = torch_pipeline(WanPipeline, vae=vae, scheduler=scheduler, transformer=reference)
    same_scheduler = from_config({**scheduler.config, "_class_name": "UniPCMultistepScheduler"})
    transformer = convert_reference(reference, sizes.dtype)
    pipeline = pipeline_of(MODEL, {"transformer": transformer}, scheduler=same_scheduler)
    random = np.random.default_rng(0)
    noise = random.standard_normal((1, 16, *latent), np.float32)
    texts = [random.standard_normal((1, 512, 4096), np.float32) for _ in range(2)]

    def ours(scale: float) -> jax.Array:
        return pipeline.denoise(
            WanConditioning(*map(jnp.asarray, texts)), noise=jnp.asarray(noise), size=(height, width), frames=frames,
            steps=STEPS, guidance_scale=scale, flow_shift=3.0, sigmas="diffusers",
        )  # fmt: skip

    def theirs(scale: float) -> torch.Tensor:
        prompt, negative = (torch.from_numpy(text).to(reference.dtype) for text in texts)
        return diffusers_pipeline(
            prompt_embeds=prompt, negative_prompt_embeds=negative, latents=torch.from_numpy(noise), height=height,
            width=width, num_frames=frames, num_inference_steps=STEPS, guidance_scale=scale, output_type="latent",
        ).frames  # fmt: skip

    for scale, guidance in ((1.0, "without guidance"), (5.0, "with guidance")):
        tokens = latent[0] * (latent[1] // 2) * (latent[2] // 2)
        name = (
            f"step {guidance}, {sizes.layers} layers of 1.3B, {width}x{height}x{frames}, {tokens} tokens, {sizes.dtype}"
        )
        yield Case(name, 1.0, partial(ours, scale), partial(theirs, scale), num_steps=STEPS)


def vae(sizes: Sizes) -> Iterator[Case]:
    """Yield the decoding of a video with Wan 2.1's autoencoder."""
    reference: Any = AutoencoderKLWan(**VAE).eval()
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (reference.config.latents_mean, reference.config.latents_std)
    )
    yield decode_case(MODEL, reference, lambda x: x * std + mean, sizes, target=0.7)


def train(sizes: Sizes) -> Iterator[Case]:
    """Yield the gradients of all weights on 17 frames of 256 × 256. Both libraries recompute the activations."""
    reference: Any = WanTransformer3DModel(num_layers=sizes.layers, **TRANSFORMER).train()
    reference.enable_gradient_checkpointing()
    pipeline = pipeline_of(MODEL, {"transformer": convert_reference(reference)})
    graphdef, weights = nnx.split(pipeline.transformer)
    random = np.random.default_rng(0)
    clean, noise = (random.standard_normal((1, 16, 5, 32, 32), np.float32) for _ in range(2))
    text, level = random.standard_normal((1, 512, 4096), np.float32), 0.6

    @jax.jit
    def gradients(weights: Any, batch: Batch, noise: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            return denoising_error(
                pipeline, nnx.merge(graphdef, weights), batch, jnp.full(1, level), noise, jax.random.key(0)
            )

        return jax.grad(loss)(weights)

    def ours() -> jax.Array:
        batch = Batch(jnp.asarray(clean), WanConditioning(jnp.asarray(text), jnp.asarray(text)))
        our_gradients = gradients(weights, batch, jnp.moveaxis(jnp.asarray(noise), 1, -1))
        return our_gradients["patch_embed"]["kernel"][...]

    def theirs() -> torch.Tensor:
        x0, x1 = torch.from_numpy(clean), torch.from_numpy(noise)
        reference.zero_grad()
        with torch.enable_grad():
            x, t = (1 - level) * x0 + level * x1, torch.full((1,), 1000 * level)
            prediction = reference(x, t, torch.from_numpy(text), return_dict=False)[0]
            torch.mean((prediction - (x1 - x0)) ** 2).backward()
        return reference.patch_embedding.weight.grad.permute(2, 3, 4, 1, 0).flatten(0, 3)

    yield Case(f"gradients of all weights, {sizes.layers} layers of 1.3B, 1280 tokens", 1.0, ours, theirs)


STAGES: Stages = {"text": text, "step": step, "vae": vae, "train": train}
