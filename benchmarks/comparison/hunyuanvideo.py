# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's stages in both libraries, at the widths of HunyuanVideo-1.5."""

from collections.abc import Iterator
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from flax import nnx
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

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
from wanjax.converters.qwen2_vl import SKIPPED_BLOCKS
from wanjax.pipelines.hunyuanvideo.conditioning import HunyuanVideoConditioning
from wanjax.pipelines.hunyuanvideo.programs import encode_chats
from wanjax.pipelines.hunyuanvideo.text import GLYPH_LENGTH, NUM_TEMPLATE_TOKENS, TEXT_LENGTH

MODEL = "hunyuanvideo1.5-480p-t2v"
VIDEO: dict[str, Any] = {"height": 256, "width": 256, "frames": 17}  # of a step
PROMPTS = {"short": 20, "long": TEXT_LENGTH}  # tokens
CHAT = NUM_TEMPLATE_TOKENS + TEXT_LENGTH
TEXT: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}  # fmt: skip
TRANSFORMER: dict[str, Any] = {}  # the defaults are the published sizes
VAE: dict[str, Any] = {}
SMALL: dict[str, Any] = {"block_out_channels": (8, 16, 16, 32, 32), "layers_per_block": 1}


def text(sizes: Sizes) -> Iterator[Case]:
    """Yield Qwen2.5-VL's language model with few layers and a small vocabulary, on two prompts of the full length."""
    config = Qwen2_5_VLTextConfig(num_hidden_layers=sizes.layers + SKIPPED_BLOCKS, **TEXT)
    reference: Any = Qwen2_5_VLTextModel(config).eval()
    graphdef, weights = nnx.split(convert_reference(reference))
    del reference.layers[sizes.layers :]  # the features are taken before the last blocks, which neither library runs
    ids = np.random.default_rng(0).integers(2, TEXT["vocab_size"], (2, CHAT))
    mask = np.ones((2, TEXT_LENGTH), bool)
    ours = encode_function(encode_chats, graphdef, weights, np.int32(ids), mask)
    reference.norm = torch.nn.Identity()

    def theirs() -> torch.Tensor:
        return reference(input_ids=torch.from_numpy(ids), use_cache=False).last_hidden_state[:, NUM_TEMPLATE_TOKENS:]

    yield Case(f"text encoder, {sizes.layers} layers of Qwen2.5-VL, 2 x {CHAT} tokens", 1.0, ours, theirs)


def step(sizes: Sizes) -> Iterator[Case]:
    """Yield the denoising of a small video (1,280 tokens) with guidance, for a short and for a long prompt.

    diffusers computes all 1,985 tokens of prompt, quoted text and picture, including padding. wanjax removes most of
    the padding.
    """
    reference: Any = HunyuanVideo15Transformer3DModel(num_layers=sizes.layers, **TRANSFORMER).eval()
    vae = AutoencoderKLHunyuanVideo15(**VAE | SMALL)  # used only for its factors
    diffusers_pipeline = torch_pipeline(
        HunyuanVideo15Pipeline, vae=vae, transformer=reference, scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0), text_encoder_2=None, tokenizer_2=None,
    )  # fmt: skip
    transformer = convert_reference(reference)
    pipeline = pipeline_of(MODEL, {"transformer": transformer}, transformer=transformer.config)
    random, config = np.random.default_rng(0), reference.config
    settings = pipeline.settings(steps=STEPS, guidance_scale=6.0, **VIDEO)
    noise = random.standard_normal(pipeline.model.spec.noise_shape(settings), np.float32)
    glyphs = np.zeros((1, GLYPH_LENGTH, config.text_embed_2_dim), np.float32), np.zeros((1, GLYPH_LENGTH), np.int32)
    for count in PROMPTS.values():
        mask = (np.arange(TEXT_LENGTH) < count).astype(np.int32)[None]
        words = [random.standard_normal((1, TEXT_LENGTH, config.text_embed_dim), np.float32) for _ in range(2)]
        network_inputs = [(x * mask[:, :, None], mask, *glyphs) for x in words]

        def ours(network_inputs: Any = network_inputs) -> jax.Array:
            encoded = HunyuanVideoConditioning(*(jnp.asarray(x) for text in network_inputs for x in text))
            return pipeline.denoise(encoded, noise=jnp.asarray(noise), **settings.to_json())

        def theirs(network_inputs: Any = network_inputs) -> torch.Tensor:
            names = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")
            texts = {
                f"{prefix}{name}": torch.from_numpy(x)
                for prefix, text in zip(("", "negative_"), network_inputs, strict=True)
                for name, x in zip(names, text, strict=True)
            }
            return diffusers_pipeline(
                **texts, latents=torch.from_numpy(noise), height=settings.height, width=settings.width,
                num_frames=settings.frames, num_inference_steps=STEPS, output_type="latent",
            ).frames  # fmt: skip

        tokens = f"{prod(noise.shape[2:]):,} tokens and a prompt of {count}"
        name = f"step with guidance, {sizes.layers} layers of 1.5, {tokens}"
        yield Case(name, 1.0, ours, theirs, num_steps=STEPS)


def vae(sizes: Sizes) -> Iterator[Case]:
    """Yield the decoding of a video with HunyuanVideo's autoencoder."""
    reference: Any = AutoencoderKLHunyuanVideo15(**VAE).eval()
    yield decode_case(MODEL, reference, lambda x: x / reference.config.scaling_factor, sizes, target=0.8)


STAGES: Stages = {"text": text, "step": step, "vae": vae}
