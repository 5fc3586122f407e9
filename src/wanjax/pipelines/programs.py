# SPDX-License-Identifier: Apache-2.0
"""The programs that a Wan pipeline runs on its devices, as functions of arrays.

`compiled` makes an executable of one. The first argument is always what is known when it is compiled.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from wanjax.kernels.attention.target import Target, target_of
from wanjax.layers.conv import VIDEO, convolution_compiler_options
from wanjax.layers.linear import product_compiler_options, scan_compiler_options
from wanjax.models.wan.vae import to_cells, to_pixels
from wanjax.pipelines.guidance import guide
from wanjax.pipelines.text import encode_text
from wanjax.sharding import Layout, constrain, replicate, use


@cache
def compiled(function: Callable, donated: tuple[int, ...] = (), layout: Layout | None = None) -> Callable:
    """`function` for the devices of a layout; the buffers of the donated arguments are taken over."""
    options = compiler_options(function, None if layout is None else target_of(layout.mesh.devices.flat[0]))
    return jax.jit(laid_out(function, layout), static_argnums=0, donate_argnums=donated, compiler_options=options)


def compiler_options(function: Callable, on: Target | None) -> dict[str, Any]:
    """What the compiler is asked for where it makes an executable of a function here; `on` None: what JAX runs on."""
    if function in (decode_frames, decode_to_frames, encode_frames):
        return convolution_compiler_options(on)
    return (product_compiler_options if function is guided_step else scan_compiler_options)(on)


def laid_out(function: Callable, layout: Layout | None) -> Callable:
    """`function`, which is traced with its arrays laid out so."""

    def run(*arguments: Any) -> Any:
        with use(layout):
            return function(*arguments)

    return run


def encode_prompts(static, ids, mask, weights):
    """Features of tokens [B S]; zeros where the mask is false."""
    (graphdef,) = static
    return encode_text(nnx.merge(graphdef, weights), ids, mask)


def encode_images(static, images, weights):
    """Features of normalised images [B H W 3]."""
    (graphdef,) = static
    return nnx.merge(graphdef, weights)(images)


def make_context(static, x, weights, prompts, condition):
    """What no step changes: what cross-attention asks of each of `prompts`, and RoPE's tables for latents such as x."""
    graphdef, task = static
    transformer = nnx.merge(graphdef, weights)
    contexts = tuple(task.context(transformer, text, condition) for text in prompts)
    return contexts, transformer.rope(transformer.grid(x))


def _velocity(task, transformer, x, timestep, context, rope, condition):
    """The velocity of the latents [1 T H W C] under a condition for each of the prompts that `context` is of."""
    batch = jax.tree.leaves(context)[0].shape[1]  # of [layers B S E]
    x, condition = jax.tree.map(lambda a: jnp.broadcast_to(a, (batch, *a.shape[1:])), (x, condition))
    return task.velocity(transformer, x, jnp.full((batch,), timestep), context, rope, condition).astype(jnp.float32)


def guided_step(static, x, state, weights, contexts, rope, condition, guidance_scale, schedule):
    """The one step of a schedule along the guided velocity; also the predicted clean latents, and if all is finite."""
    graphdef, scheduler, task = static
    transformer = nnx.merge(graphdef, weights)
    timestep = schedule.timesteps[0]
    velocities = jnp.concatenate(
        [_velocity(task, transformer, x, timestep, context, rope, condition) for context in contexts]
    )
    velocity = velocities[:1] if len(velocities) == 1 else guide(velocities[:1], velocities[1:], guidance_scale)
    velocity = replicate(velocity)
    x0 = scheduler.x0(schedule, 0, velocity, x)
    x, state = scheduler.step(schedule, state, 0, velocity, x)
    return *replicate((x, state, x0)), jnp.isfinite(x).all()


def decode_frames(static, z, cache, weights):
    """Cells of pixels of a chunk of latents, about [-1, 1]."""
    (graphdef,) = static
    x, cache = nnx.merge(graphdef, weights).decode_cells(constrain(z, VIDEO), cache)
    return constrain(x, VIDEO), _spread_out(cache)


def encode_frames(static, x, cache, weights):
    """Latents of a chunk of cells of pixels in [-1, 1]."""
    (graphdef,) = static
    z, cache = nnx.merge(graphdef, weights).encode_cells(constrain(x, VIDEO), cache)
    return constrain(z, VIDEO), _spread_out(cache)


def _spread_out(cache):
    """What an autoencoder keeps from chunk to chunk, laid out as its frames are."""
    return jax.tree.map(lambda x: constrain(x, VIDEO), cache)


def decode_to_frames(static, z, cache, weights):
    """Frames of a chunk of latents as they leave the devices."""
    graphdef, dtype, patch = static
    x, cache = decode_frames((graphdef,), z, cache, weights)
    return to_frames((dtype, patch), x), cache


def to_frames(static, x):
    """Cells of pixels as they leave the devices: bytes, or floats in [0, 1], whole, so that any process has them."""
    dtype, patch = static
    frames = jnp.clip(to_pixels(x, patch) * 0.5 + 0.5, 0.0, 1.0)
    frames = jnp.round(frames * 255.0).astype(dtype) if dtype == jnp.uint8 else frames.astype(dtype)
    return replicate(constrain(frames, VIDEO)[0])  # bytes are sent, where bytes are asked for


def from_frames(static, frames):
    """Bytes, or floats in [0, 1], as cells of pixels in [-1, 1]."""
    (patch,) = static
    x = frames.astype(jnp.float32) / 255.0 if frames.dtype == jnp.uint8 else frames.astype(jnp.float32)
    return to_cells(x[None] * 2.0 - 1.0, patch)
