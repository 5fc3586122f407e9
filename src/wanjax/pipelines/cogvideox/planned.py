# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's programs for plans, lowered for arguments that are shapes; each takes the configs of its networks."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wanjax.checkpoints.networks import network_of
from wanjax.compilation import Lowering
from wanjax.models.cogvideox.config import TransformerConfig
from wanjax.models.cogvideox.positions import Positions
from wanjax.models.cogvideox.vae_config import VAEConfig
from wanjax.models.t5 import T5Config
from wanjax.pipelines.blueprint import Blueprint
from wanjax.pipelines.cogvideox import programs
from wanjax.pipelines.cogvideox.networks import NETWORKS
from wanjax.pipelines.cogvideox.programs import CogVideoXDenoiser, Shared
from wanjax.pipelines.guidance import grouping
from wanjax.pipelines.sampler import Inputs
from wanjax.pipelines.step_cache import StepCache
from wanjax.schedulers import Scheduler

TOKENS = ("batch", "length", "embed")


def encode_prompts(blueprint: Blueprint, *, text_encoder: T5Config, length: int) -> Lowering:
    """Lowers the program that encodes the prompt and the negative prompt."""
    graphdef, weights = blueprint.network(network_of(text_encoder, NETWORKS))
    return blueprint.lowering(programs.encode_prompts, graphdef, blueprint.array((2, length), jnp.int32), weights)


def context(blueprint: Blueprint, **video: Any) -> Lowering:
    """Lowers the program of the context, which runs once for a video."""
    graphdef, arguments, _, _ = _context(blueprint, **video)
    return blueprint.lowering(programs.make_context, graphdef, *arguments)


def step(blueprint: Blueprint, *, scheduler: Scheduler, cache: StepCache, reuses: bool, **video: Any) -> Lowering:
    """Lowers a step of the sampler."""
    graphdef, arguments, image, batch = _context(blueprint, **video)
    contexts, positions = jax.eval_shape(programs.make_context.traceable(blueprint.partitioner, graphdef), *arguments)
    contexts = jax.tree.map(lambda a: blueprint.array(a.shape, a.dtype, ("batch", None, None)), contexts)
    rope = jax.tree.map(lambda a: blueprint.array(a.shape, a.dtype, ("length", None)), positions.rope)
    added = jax.tree.map(lambda a: blueprint.array(a.shape, a.dtype, TOKENS), positions.added)
    x, weights, _ = arguments
    inputs = Inputs(weights, contexts, Shared(Positions(rope, added), image), batch)
    denoiser = CogVideoXDenoiser(graphdef, scheduler, cache=cache)
    return blueprint.step(denoiser, scheduler.schedule(2), x, inputs, reuses=reuses)


def _context(
    blueprint: Blueprint,
    *,
    transformer: TransformerConfig,
    latents: Sequence[int],
    pictured: bool,
    guided: bool,
    attention: str | None,
    batch_guidance: bool,
) -> tuple[Any, tuple[Any, ...], Any, int]:
    """Returns the static and the other arguments of `make_context`, the latents of an image, and a forward's prompts.

    `latents` is the shape [1 C T H W] of the latents that are denoised.
    """
    graphdef, weights = blueprint.network(network_of(transformer, NETWORKS), attention=attention)
    batch, channels, *cells = latents
    x = blueprint.array((batch, *cells, channels), jnp.float32)
    forwards, prompts = grouping(guided, batch_guidance, blueprint.partitioner)
    text = blueprint.array((prompts, transformer.text_length, transformer.text_width), blueprint.dtype)
    image = blueprint.array((batch, 1, *cells[1:], channels), jnp.float32) if pictured else None
    return graphdef, (x, weights, (text,) * forwards), image, prompts


def decode_frames(
    blueprint: Blueprint, *, vae: VAEConfig, size: Sequence[int], at_once: Sequence[int], first: bool
) -> Lowering:
    return blueprint.decode(network_of(vae, NETWORKS), size, at_once, first=first)


def encode_frames(
    blueprint: Blueprint, *, vae: VAEConfig, size: Sequence[int], at_once: Sequence[int], first: bool
) -> Lowering:
    return blueprint.encode(network_of(vae, NETWORKS), size, at_once, first=first)
