# SPDX-License-Identifier: Apache-2.0
"""The programs of Wan's models that make a video block by block, lowered for arguments that are shapes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wanjax.checkpoints.networks import network_of
from wanjax.compilation import Lowering
from wanjax.kernels.attention.kept import Place, window_sharding
from wanjax.models.wan.causal import turns_at
from wanjax.models.wan.config import CausalTransformerConfig
from wanjax.pipelines.blueprint import Blueprint
from wanjax.pipelines.sampler import Inputs
from wanjax.pipelines.wan import causal_programs as programs
from wanjax.pipelines.wan.networks import NETWORKS
from wanjax.pipelines.wan.planned import KEYS
from wanjax.pipelines.wan.programs import TEXT_LENGTH
from wanjax.schedulers import Scheduler


def begin_past(blueprint: Blueprint, **block: Any) -> Lowering:
    """Lowers the program of the prompt's keys and values, and of an empty window."""
    return blueprint.lowering(programs.begin_past, *_begun(blueprint, **block))


def block_step(blueprint: Blueprint, *, scheduler: Scheduler, **block: Any) -> Lowering:
    """Lowers a step of the sampler for a block."""
    graphdef, x, weights, text = _begun(blueprint, **block)
    past, sight = _sight(blueprint, graphdef, x, weights, text, **block)
    inputs = Inputs(weights, (past.context,), sight, x.shape[0])
    denoiser = programs.CausalWanDenoiser(graphdef, scheduler)
    return blueprint.step(denoiser, scheduler.schedule(2, shift=1.0), x, inputs, reuses=False)


def renew(blueprint: Blueprint, **block: Any) -> Lowering:
    """Lowers the pass over a finished block."""
    graphdef, x, weights, text = _begun(blueprint, **block)
    past, (time, window, place) = _sight(blueprint, graphdef, x, weights, text, **block)
    return blueprint.lowering(programs.renew, graphdef, window, x, weights, past.context, time, place)


def _begun(
    blueprint: Blueprint, *, transformer: CausalTransformerConfig, latents: Sequence[int], attention: str | None
) -> tuple[Any, ...]:
    """Returns the arguments of `begin_past`; `latents` is the shape [1 C T H W] of a block."""
    graphdef, weights = blueprint.network(network_of(transformer, NETWORKS), attention=attention)
    batch, channels, *cells = latents
    x = blueprint.array((batch, *cells, channels), jnp.float32)
    text = blueprint.array((batch, TEXT_LENGTH, transformer.text_width), blueprint.dtype)
    return graphdef, x, weights, text


def _sight(
    blueprint: Blueprint, graphdef: Any, *arguments: Any, transformer: CausalTransformerConfig, **block: Any
) -> tuple[programs.Past, programs.Sight]:
    """Returns what blocks share and what one is given, as shapes with shardings."""
    context, window = jax.eval_shape(programs.begin_past.traceable(blueprint.partitioner, graphdef), *arguments)

    def keys(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return blueprint.array(a.shape, a.dtype, KEYS, like=(*a.shape[:3], transformer.heads))

    def kept(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=window_sharding(blueprint.partitioner, a.shape))

    past = programs.Past(jax.tree.map(keys, context), jax.tree.map(kept, window))
    time = jax.tree.map(lambda a: blueprint.array(a.shape, a.dtype), turns_at(transformer, 0))
    place = Place(*(blueprint.array((), jnp.int32) for _ in range(2)))
    return past, programs.Sight(time, past.window, place)
