# SPDX-License-Identifier: Apache-2.0
"""Wan's own programs, beside those of all families, and its part of a denoising step."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from wanjax.compilation import program
from wanjax.kernels.compiler_options import scanned
from wanjax.layers.embeddings import sinusoid
from wanjax.layers.rope import Rope, seeing_all
from wanjax.layers.stack import Through, through_all
from wanjax.pipelines.sampler import Denoiser
from wanjax.pipelines.wan.conditioning import PictureInputs, Task

TEXT_LENGTH = 512
"""The number of tokens of a prompt that Wan reads, padding included."""


class Shared(NamedTuple):
    """The inputs that the forwards for all prompts share: RoPE's tables, and the pictures."""

    rope: Rope
    pictures: PictureInputs


class TimedDenoiser(Denoiser):
    """A denoiser whose network embeds timesteps as all of Wan's transformers do."""

    def embed_times(self, network: Any, times: Float[Array, "B"]) -> Float[Array, "B _E"]:
        return network.time_proj(jax.nn.silu(network.time_embed(sinusoid(times, network.config.frequency_dim))))


@dataclass(frozen=True)
class WanDenoiser(TimedDenoiser):
    """Wan's transformer with its task; predicts the velocity of latents."""

    task: Task

    def predict(
        self,
        network: Any,
        x: Float[Array, "B T H W C"],
        t: Float[Array, "B"],
        prompt: Any,
        shared: Shared,
        through: Through = through_all,
    ) -> Float[Array, "B T H W C"]:
        pictures = jax.tree.map(lambda a: jnp.broadcast_to(a, (len(x), *a.shape[1:])), shared.pictures)
        rope = seeing_all(shared.rope) if self.dense else shared.rope
        return self.task.velocity(partial(network, through=through), x, t, prompt, rope, pictures)


def encode_text(encoder: Any, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Float[Array, "B S E"]:
    """Returns features of the real tokens and exact zeros after them, as Wan's transformer expects."""
    features = encoder(ids, mask)
    return jnp.where(mask[:, :, None], features, jnp.zeros((), features.dtype))


@program(scanned)
def encode_prompts(
    graphdef: Any, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], weights: Any
) -> Float[Array, "B S E"]:
    """Encodes both prompts, as `encode_text`."""
    return encode_text(nnx.merge(graphdef, weights), ids, mask)


@program(scanned)
def encode_images(graphdef: Any, images: Float[Array, "B H W 3"], weights: Any) -> Float[Array, "B S E"]:
    """Returns features of normalised images."""
    return nnx.merge(graphdef, weights)(images)


@program(scanned)
def make_context(
    static: tuple[Any, Task],
    x: Float[Array, "B T H W C"],
    weights: Any,
    prompts: tuple[Float[Array, "_B S E"], ...],
    pictures: PictureInputs,
) -> tuple[tuple[Any, ...], Rope]:
    """Returns cross-attention's keys and values for each prompt, and RoPE's tables. static: graphdef, task."""
    graphdef, task = static
    transformer = nnx.merge(graphdef, weights)
    contexts = tuple(task.context(transformer, text, pictures) for text in prompts)
    return contexts, transformer.rope(transformer.grid(x))
