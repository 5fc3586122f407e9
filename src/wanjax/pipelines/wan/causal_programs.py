# SPDX-License-Identifier: Apache-2.0
"""The extra programs of Wan's models that denoise chunk by chunk."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from wanjax.execution import program
from wanjax.kernels.attention.kv_cache import CacheSlot, KVCache, update_cache
from wanjax.kernels.compiler_options import fast_matmul_options, matmul_options, scan_options
from wanjax.layers.rope import Angles
from wanjax.models.wan.transformer import Context


class CausalInputs(NamedTuple):
    """The inputs of the forward pass for a chunk.

    Args:
        time: The RoPE angles of the chunk's positions in time.
        window: The keys and values of earlier chunks.
        slot: The chunk's slot in the window.
    """

    time: Angles
    window: KVCache
    slot: CacheSlot


class CausalPast(NamedTuple):
    """The state that one chunk of a video passes to the next.

    Args:
        context: The keys and values of the prompt.
        window: The keys and values of earlier chunks.
    """

    context: Context
    window: KVCache


@program(scan_options)
def begin_past(
    graphdef: Any,
    x: Float[Array, "B T H W C"],
    weights: Any,
    text: Float[Array, "B S E"],
    negative: Float[Array, "B S E"] | None = None,
    nag: Float32[Array, "3"] | None = None,
) -> CausalPast:
    """Return the keys and values of encoded prompts, and an empty window.

    Args:
        graphdef: The network's definition.
        x: The latents of a chunk; only their shape is used.
        weights: The network's weights.
        text: The features of the prompts.
        negative: The features of the negative prompts, only with `nag`.
        nag: The scale, tau and alpha of normalized attention guidance; None without it.
    """
    transformer = nnx.merge(graphdef, weights)
    context = transformer.context(text)
    if nag is not None:
        context = context.with_nag(transformer.context(negative), nag)
    return CausalPast(context, transformer.empty_kv_cache(x))


@program(matmul_options, donated=("window",), fast_options=fast_matmul_options)
def renew(
    graphdef: Any,
    window: KVCache,
    x: Float[Array, "B T H W C"],
    weights: Any,
    context: Context,
    time: Angles,
    slot: CacheSlot,
) -> KVCache:
    """Add the keys and values of a finished chunk to the window, by a forward pass at timestep 0.

    Args:
        graphdef: The network's definition.
        window: The window.
        x: The latents of the finished chunk.
        weights: The network's weights.
        context: The keys and values of the prompt.
        time: The RoPE angles of the chunk's positions in time.
        slot: The chunk's slot in the window.
    """
    t = jnp.zeros(len(x), jnp.float32)
    _, cache = nnx.merge(graphdef, weights)(x, t, context, time, window, slot)
    return update_cache(window, cache, slot)
