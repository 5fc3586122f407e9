# SPDX-License-Identifier: Apache-2.0
"""Wan's programs for plans, lowered for arguments that are shapes; each takes the configs of its networks."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wanjax.checkpoints.networks import network_of
from wanjax.compilation import Lowering
from wanjax.models.clip import CLIPVisionConfig
from wanjax.models.t5 import T5Config
from wanjax.models.wan.config import ImageTransformerConfig, TransformerConfig, VAEConfig
from wanjax.pipelines.blueprint import Blueprint
from wanjax.pipelines.guidance import grouping
from wanjax.pipelines.sampler import Inputs
from wanjax.pipelines.step_cache import StepCache
from wanjax.pipelines.wan import programs
from wanjax.pipelines.wan.conditioning import PictureInputs, Task
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.pipelines.wan.programs import TEXT_LENGTH, Shared, WanDenoiser
from wanjax.schedulers import Scheduler

KEYS = (None, "batch", None, "heads")  # the axes of cross-attention's keys, which are replicated or split by heads


def encode_prompts(blueprint: Blueprint, *, text_encoder: T5Config) -> Lowering:
    """Lowers the program that encodes the prompt and the negative prompt."""
    graphdef, weights = blueprint.network(network_of(text_encoder, NETWORKS))
    ids, mask = (blueprint.array((2, TEXT_LENGTH), dtype) for dtype in (jnp.int32, jnp.bool_))
    return blueprint.lowering(programs.encode_prompts, graphdef, ids, mask, weights)


def encode_images(blueprint: Blueprint, *, image_encoder: CLIPVisionConfig, images: int) -> Lowering:
    """Lowers the program that encodes `images` pictures."""
    graphdef, weights = blueprint.network(network_of(image_encoder, NETWORKS))
    pixels = blueprint.array((images, image_encoder.image_size, image_encoder.image_size, 3), jnp.float32)
    return blueprint.lowering(programs.encode_images, graphdef, pixels, weights)


def context(blueprint: Blueprint, **video: Any) -> Lowering:
    """Lowers the program of the context, which runs once for each transformer."""
    static, arguments, _, _ = _context(blueprint, **video)
    return blueprint.lowering(programs.make_context, static, *arguments)


def step(
    blueprint: Blueprint,
    *,
    scheduler: Scheduler,
    cache: StepCache,
    reuses: bool,
    dense: bool | None = None,
    **video: Any,
) -> Lowering:
    """Lowers a step of the sampler."""
    static, arguments, heads, batch = _context(blueprint, **video)
    contexts, rope = jax.eval_shape(programs.make_context.traceable(blueprint.partitioner, static), *arguments)
    (graphdef, task), (x, weights, _, pictures) = static, arguments

    def keys(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return blueprint.array(a.shape, a.dtype, KEYS, like=(*a.shape[:3], heads))

    contexts = jax.tree.map(keys, contexts)
    rope = jax.tree.map(lambda table: blueprint.array(table.shape, table.dtype, ("length", None)), rope)
    inputs = Inputs(weights, contexts, Shared(rope, pictures), batch)
    denoiser = WanDenoiser(graphdef, scheduler, task, cache=cache, dense=dense)
    return blueprint.step(denoiser, scheduler.schedule(2, shift=1.0), x, inputs, reuses=reuses)


def _context(
    blueprint: Blueprint,
    *,
    transformer: TransformerConfig,
    task: Task,
    latents: Sequence[int],
    condition: int,
    features: int,
    guided: bool,
    attention: str | None,
    batch_guidance: bool,
) -> tuple[tuple[Any, Task], tuple[Any, ...], int, int]:
    """Returns the static and the other arguments of `make_context`, the number of heads, and a forward's prompts.

    `latents` is the shape [1 C T H W] of the video's latents; `condition` is the number of channels beside them, and
    `features` the number of picture tokens.
    """
    graphdef, weights = blueprint.network(network_of(transformer, NETWORKS), attention=attention)
    batch, channels, *cells = latents
    x = blueprint.array((batch, *cells, channels), jnp.float32)
    forwards, prompts = grouping(guided, batch_guidance, blueprint.partitioner)
    text = blueprint.array((prompts, TEXT_LENGTH, transformer.text_width), blueprint.dtype)
    beside = blueprint.array((batch, *cells, condition), jnp.float32) if condition else None
    seen = None
    if isinstance(transformer, ImageTransformerConfig):
        seen = blueprint.array((1, features, transformer.image_width), jnp.float32)
    arguments = (x, weights, (text,) * forwards, PictureInputs(beside, seen))
    return (graphdef, task), arguments, transformer.heads, prompts


def decode_frames(
    blueprint: Blueprint, *, vae: VAEConfig, size: Sequence[int], at_once: Sequence[int], first: bool
) -> Lowering:
    return blueprint.decode(network_of(vae, NETWORKS), size, at_once, first=first)


def encode_frames(
    blueprint: Blueprint, *, vae: VAEConfig, size: Sequence[int], at_once: Sequence[int], first: bool
) -> Lowering:
    return blueprint.encode(network_of(vae, NETWORKS), size, at_once, first=first)
