# SPDX-License-Identifier: Apache-2.0
"""The traced part of Wan's models: one transformer, given the condition of a video in the way of each task."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from wanjax.layers.rope import Rope
from wanjax.layers.stack import EVERY_BLOCK, BlockCache
from wanjax.pipelines.denoiser import Denoiser

Video = Float[Array, "B T H W C"]
Velocity = Float[Array, "B T H W _C"]  # for the latents' channels, without those of a condition


class Shared(NamedTuple):
    """The inputs that the forwards for all prompts share.

    Args:
        rope: RoPE's tables.
        condition: The encoded condition, [B T H W C]; None without one.
    """

    rope: Rope
    condition: Any = None


def as_latents(condition: Any) -> Any:
    """Return an encoded condition [B C T H W] as the transformer is given it, [B T H W C] in float32.

    Args:
        condition: The condition, or None.
    """
    return None if condition is None else jnp.moveaxis(condition.astype(jnp.float32), 1, -1)


def begun_by(first: Float[Array, "_B 1 H W C"] | None, x: Video) -> Video:
    """Return latents whose first frame is a given one, if there is one.

    Args:
        first: The first frame's latents; None leaves x.
        x: Latents of the video.
    """
    if first is None:
        return x
    return jnp.concatenate([jnp.broadcast_to(first, (len(x), *first.shape[1:])), x[:, 1:]], axis=1)


@dataclass(frozen=True)
class WanDenoiser(Denoiser):
    """Predicts the velocity of latents from the prompt alone; a subclass gives the transformer a condition too."""

    def embed_timesteps(self, network: Any, times: Float[Array, "B"], plain: bool = False) -> Float[Array, "B _E"]:
        embedded = network.time_embed(times)
        return embedded if plain else network.time_proj(jax.nn.silu(embedded))

    def predict(
        self,
        network: Any,
        x: Video,
        t: Float[Array, "B"],
        prompt: Any,
        shared: Any,
        blocks: BlockCache = EVERY_BLOCK,
        dense: bool | None = None,
    ) -> Velocity:
        condition = shared.condition
        if condition is not None:
            condition = jnp.broadcast_to(condition, (len(x), *condition.shape[1:]))
        masks = {"mask": network.mask(network.grid(x))} if dense is False else {}
        return self.velocity(network, x, t, prompt, shared.rope, condition, cache=blocks, **masks)

    def velocity(
        self, network: Any, x: Video, t: Float[Array, "B"], prompt: Any, rope: Rope, condition: Any, **how: Any
    ) -> Velocity:
        """Return the velocity that the transformer predicts.

        Args:
            network: The network.
            x: Latents of the videos.
            t: Timestep of each.
            prompt: Keys and values of the prompt.
            rope: RoPE's tables.
            condition: The encoded condition; None without one.
            how: Further keywords of the transformer's forward.
        """
        return network(x, t, prompt, rope, **how)


class FirstFrameDenoiser(WanDenoiser):
    """The condition, if any, is the clean first latent frame, which replaces the noise."""

    def velocity(
        self, network: Any, x: Video, t: Float[Array, "B"], prompt: Any, rope: Rope, condition: Any, **how: Any
    ) -> Velocity:
        clean_frames = 0 if condition is None else 1
        return network(begun_by(condition, x), t, prompt, rope, clean_frames=clean_frames, **how)

    def finalize(self, x: Video, conditioning: Mapping[str, Any]) -> Video:
        return begun_by(as_latents(conditioning.get("condition")), x)


class ConditionedDenoiser(WanDenoiser):
    """The condition has the latents' shape, and joins their channels; without one these are zeros."""

    def velocity(
        self, network: Any, x: Video, t: Float[Array, "B"], prompt: Any, rope: Rope, condition: Any, **how: Any
    ) -> Velocity:
        if condition is None:
            condition = jnp.zeros((*x.shape[:-1], network.config.channels_in - x.shape[-1]), x.dtype)
        return network(jnp.concatenate([x, condition], axis=-1), t, prompt, rope, **how)


class FirstFrameConditionedDenoiser(ConditionedDenoiser):
    """The same, where the first latent frame, the last channels of the condition, is kept free of noise too."""

    def velocity(
        self, network: Any, x: Video, t: Float[Array, "B"], prompt: Any, rope: Rope, condition: Any, **how: Any
    ) -> Velocity:
        clean_frames = 0 if condition is None else 1
        x = begun_by(_first(condition, x), x)
        return super().velocity(network, x, t, prompt, rope, condition, clean_frames=clean_frames, **how)

    def finalize(self, x: Video, conditioning: Mapping[str, Any]) -> Video:
        return begun_by(_first(as_latents(conditioning.get("condition")), x), x)


def _first(condition: Any, x: Video) -> Any:
    return None if condition is None else condition[:, :1, :, :, -x.shape[-1] :]


class ControlDenoiser(WanDenoiser):
    """The condition is a control clip, which layers of its own read."""

    def velocity(
        self, network: Any, x: Video, t: Float[Array, "B"], prompt: Any, rope: Rope, condition: Any, **how: Any
    ) -> Velocity:
        return network(x, t, prompt, rope, control=condition, **how)


class CausalDenoiser(WanDenoiser):
    """Predicts a chunk of frames from the keys and values of those before it."""

    def predict(
        self,
        network: Any,
        x: Video,
        t: Float[Array, "B"],
        prompt: Any,
        shared: Any,
        blocks: BlockCache = EVERY_BLOCK,
        dense: bool | None = None,
    ) -> Velocity:
        return network(x, t, prompt, *shared)[0]
