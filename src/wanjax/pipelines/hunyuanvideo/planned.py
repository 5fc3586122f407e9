# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's programs for plans, lowered for arguments that are shapes; each takes the configs of its networks."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wanjax.checkpoints.networks import network_of
from wanjax.compilation import Lowering
from wanjax.models.hunyuanvideo.config import TransformerConfig
from wanjax.models.hunyuanvideo.vae_config import VAEConfig
from wanjax.models.qwen2_vl import Qwen2VLConfig
from wanjax.models.siglip import SiglipVisionConfig
from wanjax.models.t5 import T5Config
from wanjax.pipelines.blueprint import Blueprint
from wanjax.pipelines.guidance import grouping
from wanjax.pipelines.hunyuanvideo import programs
from wanjax.pipelines.hunyuanvideo.conditioning import Text
from wanjax.pipelines.hunyuanvideo.networks import NETWORKS
from wanjax.pipelines.hunyuanvideo.programs import HunyuanVideoDenoiser, Shared
from wanjax.pipelines.hunyuanvideo.text import GLYPH_LENGTH, TEMPLATE_TOKENS, TEXT_LENGTH
from wanjax.pipelines.sampler import Inputs
from wanjax.pipelines.step_cache import StepCache
from wanjax.schedulers import Scheduler


def encode_chats(blueprint: Blueprint, *, text_encoder: Qwen2VLConfig) -> Lowering:
    """Lowers the program that encodes the prompt and the negative prompt."""
    graphdef, weights = blueprint.network(network_of(text_encoder, NETWORKS))
    ids = blueprint.array((2, TEMPLATE_TOKENS + TEXT_LENGTH), jnp.int32)
    mask = blueprint.array((2, TEXT_LENGTH), jnp.bool_)
    return blueprint.lowering(programs.encode_chats, graphdef, ids, mask, weights)


def encode_glyphs(blueprint: Blueprint, *, text_encoder: T5Config) -> Lowering:
    """Lowers the program that encodes the texts that both prompts quote."""
    graphdef, weights = blueprint.network(network_of(text_encoder, NETWORKS))
    ids, mask = (blueprint.array((2, GLYPH_LENGTH), dtype) for dtype in (jnp.int32, jnp.bool_))
    return blueprint.lowering(programs.encode_glyphs, graphdef, ids, mask, weights)


def encode_images(blueprint: Blueprint, *, image_encoder: SiglipVisionConfig) -> Lowering:
    """Lowers the program that encodes a picture as features."""
    graphdef, weights = blueprint.network(network_of(image_encoder, NETWORKS))
    pixels = blueprint.array((1, image_encoder.image_size, image_encoder.image_size, 3), jnp.float32)
    return blueprint.lowering(programs.encode_images, graphdef, pixels, weights)


def context(blueprint: Blueprint, **video: Any) -> Lowering:
    """Lowers the program of the context, which runs once for a video."""
    graphdef, arguments, _ = _context(blueprint, **video)
    return blueprint.lowering(programs.make_context, graphdef, *arguments)


def step(
    blueprint: Blueprint,
    *,
    transformer: TransformerConfig,
    features: int,
    scheduler: Scheduler,
    cache: StepCache,
    reuses: bool,
    dense: bool | None = None,
    **video: Any,
) -> Lowering:
    """Lowers a step of the sampler."""
    networks = {"transformer": transformer, "features": features}
    graphdef, arguments, batch = _context(blueprint, **networks, **video)
    contexts, rope = jax.eval_shape(programs.make_context.traceable(blueprint.partitioner, graphdef), *arguments)
    contexts = jax.tree.map(lambda a: blueprint.array(a.shape, a.dtype, ("batch", *[None] * (a.ndim - 1))), contexts)
    rope = jax.tree.map(lambda table: blueprint.array(table.shape, table.dtype, ("length", None)), rope)
    x, weights, *_ = arguments
    image = blueprint.array((1, 1, *x.shape[2:]), jnp.float32) if features else None
    inputs = Inputs(weights, contexts, Shared(rope, image), batch)
    denoiser = HunyuanVideoDenoiser(graphdef, scheduler, transformer.meanflow, cache=cache, dense=dense)
    return blueprint.step(denoiser, scheduler.schedule(2, shift=1.0), x, inputs, reuses=reuses)


def _context(
    blueprint: Blueprint,
    *,
    transformer: TransformerConfig,
    latents: Sequence[int],
    length: int,
    features: int,
    guided: bool,
    attention: str | None,
    batch_guidance: bool,
) -> tuple[Any, tuple[Any, ...], int]:
    """Returns the static and the other arguments of `make_context`, and a forward's prompts.

    `latents` is the shape [1 C T H W] of the video's latents; `length` is the number of a prompt's tokens, and
    `features` that of a picture's.
    """
    graphdef, weights = blueprint.network(network_of(transformer, NETWORKS), attention=attention)
    batch, channels, *cells = latents
    x = blueprint.array((batch, *cells, channels), jnp.float32)
    forwards, prompts = grouping(guided, batch_guidance, blueprint.partitioner)
    text = Text(
        blueprint.array((prompts, length, transformer.text_width), blueprint.dtype),
        blueprint.array((prompts, length), jnp.bool_),
        blueprint.array((prompts, 0, transformer.glyph_width), blueprint.dtype),
        blueprint.array((prompts, 0), jnp.bool_),
    )
    seen = blueprint.array((1, features, transformer.image_width), blueprint.dtype) if features else None
    return graphdef, (x, weights, (text,) * forwards, seen), prompts


def decode_frames(
    blueprint: Blueprint, *, vae: VAEConfig, size: Sequence[int], at_once: Sequence[int], first: bool
) -> Lowering:
    return blueprint.decode(network_of(vae, NETWORKS), size, at_once, first=first)


def encode_frames(
    blueprint: Blueprint, *, vae: VAEConfig, size: Sequence[int], at_once: Sequence[int], first: bool
) -> Lowering:
    return blueprint.encode(network_of(vae, NETWORKS), size, at_once, first=first)
