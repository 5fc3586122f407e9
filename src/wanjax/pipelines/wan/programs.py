# SPDX-License-Identifier: Apache-2.0
"""Wan's own programs, beside those of all families, and its part of a denoising step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from wanjax.kernels.compiler_options import scanned
from wanjax.layers.rope import Rope
from wanjax.layers.stack import EVERY_BLOCK, BlockCache
from wanjax.pipelines.denoiser import Denoiser
from wanjax.pipelines.guidance import Groups, group
from wanjax.pipelines.wan.conditioning import PictureInputs, Task
from wanjax.programs import program

TEXT_LENGTH = 512
"""The number of tokens of a prompt that Wan reads, padding included."""


class Shared(NamedTuple):
    """The inputs that the forwards for all prompts share: RoPE's tables, and the pictures."""

    rope: Rope
    pictures: PictureInputs


class TimedDenoiser(Denoiser):
    """A denoiser whose network embeds timesteps as all of Wan's transformers do."""

    def embed_timesteps(self, network: Any, times: Float[Array, "B"], plain: bool = False) -> Float[Array, "B _E"]:
        embedded = network.time_embed(times)
        return embedded if plain else network.time_proj(jax.nn.silu(embedded))


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
        blocks: BlockCache = EVERY_BLOCK,
        dense: bool | None = None,
    ) -> Float[Array, "B T H W C"]:
        pictures = jax.tree.map(lambda a: jnp.broadcast_to(a, (len(x), *a.shape[1:])), shared.pictures)
        masks = {"mask": network.mask(network.grid(x))} if dense is False else {}
        return self.task.velocity(network, x, t, prompt, shared.rope, pictures, cache=blocks, **masks)

    def finalize(self, x: Float[Array, "B T H W C"], conditioning: Mapping[str, Any]) -> Float[Array, "B T H W C"]:
        """Puts a given first frame in its place."""
        return self.task.finish(x, picture_inputs(conditioning.get("condition")))


def encode_text(encoder: Any, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Float[Array, "B S E"]:
    """Returns features of the real tokens and exact zeros after them, as Wan's transformer expects."""
    features = encoder(ids, mask)
    return jnp.where(mask[:, :, None], features, jnp.zeros((), features.dtype))


def picture_inputs(condition: Any, features: Any = None) -> PictureInputs:
    """Returns encoded pictures as inputs of the transformer; `condition` is [B C T H W]."""
    latents = None if condition is None else jnp.moveaxis(condition.astype(jnp.float32), 1, -1)
    return PictureInputs(latents, features)


@program(scanned)
def encode_prompts(
    graphdef: Any, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], weights: Any
) -> tuple[Float[Array, "1 S E"], Float[Array, "1 S E"]]:
    """Encodes the prompt and the negative one, as `encode_text`."""
    embeds = encode_text(nnx.merge(graphdef, weights), ids, mask)
    return embeds[:1], embeds[1:]


@program(scanned)
def encode_images(graphdef: Any, images: Float[Array, "B H W 3"], weights: Any) -> Float[Array, "1 S E"]:
    """Returns features of normalised images, joined along the sequence."""
    features = nnx.merge(graphdef, weights)(images)
    return features.reshape(1, -1, features.shape[-1])


@program(scanned)
def resize(size: tuple[int, int], picture: Float[Array, "H W 3"]) -> Float[Array, "_H _W 3"]:
    """Scales a picture bilinearly to a (height, width), without antialiasing, as in the reference."""
    return jax.image.resize(picture, (*size, 3), "linear", antialias=False)


@program(scanned)
def make_condition(
    task: Task, clips: tuple[Float[Array, "1 C _T H W"], ...], mask: Float[np.ndarray | Array, "..."]
) -> Float[Array, "1 _C _T H W"]:
    """Returns the condition of encoded clips and a mask."""
    return task.condition(clips, mask)


@program(scanned)
def make_context(
    static: tuple[Any, Task, Groups],
    x: Float[Array, "B T H W C"],
    weights: Any,
    prompts: tuple[Float[Array, "B S E"], Float[Array, "_B _S E"]],
    condition: Float[Array, "B _C _T H W"] | None,
    features: Float[Array, "_B _S _E"] | None,
    leads: Float32[Array, "3"] | None = None,
) -> tuple[tuple[Any, ...], Shared]:
    """Returns keys and values for each forward, and what all share. static: graphdef, task, groups.

    `leads` are those of the rule of guidance.
    """
    graphdef, task, groups = static
    transformer, pictures = nnx.merge(graphdef, weights), picture_inputs(condition, features)
    contexts = tuple(task.context(transformer, text, pictures) for text in group(prompts, groups))
    if leads is not None:
        negative = task.context(transformer, group((prompts[1], prompts[1]), groups)[0], pictures)
        contexts = (contexts[0].led(negative, leads), *contexts[1:])
    return contexts, Shared(transformer.rope(transformer.grid(x)), pictures)
