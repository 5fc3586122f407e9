# SPDX-License-Identifier: Apache-2.0
"""The functions of Wan's models that JAX traces: the transformer's prediction, with the condition of each task."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from wanjax.layers.rope import Rope
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache
from wanjax.pipelines.denoiser import Denoiser

Video = Float[Array, "B T H W C"]
Velocity = Float[Array, "B T H W _C"]  # applies to the channels of the latents, not to the channels of a condition


class Shared(NamedTuple):
    """The inputs that the forward passes for all prompts share.

    Args:
        rope: RoPE's tables.
        condition: The encoded condition, [B T H W C]; None without one.
    """

    rope: Rope
    condition: Any = None


def channels_last(condition: Any) -> Any:
    """Convert an encoded condition [B C T H W] to the transformer's layout, [B T H W C] in float32.

    Args:
        condition: The condition, or None.
    """
    return None if condition is None else jnp.moveaxis(condition.astype(jnp.float32), 1, -1)


def replace_first_frame(first: Float[Array, "_B 1 H W C"] | None, x: Video) -> Video:
    """Replace the first frame of latents.

    Args:
        first: The first frame's latents; None leaves x unchanged.
        x: The latents of the video.
    """
    if first is None:
        return x
    return jnp.concatenate([jnp.broadcast_to(first, (len(x), *first.shape[1:])), x[:, 1:]], axis=1)


@dataclass(frozen=True)
class WanDenoiser(Denoiser):
    """A denoiser whose only condition is the prompt. The denoiser predicts the velocity. Subclasses add a condition."""

    def embed_timesteps(
        self, network: Any, times: Float[Array, "B"], unprojected: bool = False
    ) -> Float[Array, "B _E"]:
        embedding = network.time_embed(times)
        return embedding if unprojected else network.time_proj(jax.nn.silu(embedding))

    def predict(
        self,
        network: Any,
        x: Video,
        t: Float[Array, "B"],
        prompt: Any,
        shared: Any,
        blocks: BlockCache = NO_BLOCK_CACHE,
        dense: bool | None = None,
    ) -> Velocity:
        condition = shared.condition
        if condition is not None:
            condition = jnp.broadcast_to(condition, (len(x), *condition.shape[1:]))
        masks = {"mask": network.mask(network.grid(x))} if dense is False else {}
        return self.velocity(network, x, t, prompt, shared.rope, condition, cache=blocks, **masks)

    def velocity(
        self, network: Any, x: Video, t: Float[Array, "B"], prompt: Any, rope: Rope, condition: Any, **options: Any
    ) -> Velocity:
        """Return the velocity that the transformer predicts.

        Args:
            network: The network.
            x: The latents of the videos.
            t: The timestep of each video.
            prompt: The keys and values of the prompt.
            rope: RoPE's tables.
            condition: The encoded condition; None without one.
            options: Further keyword arguments of the transformer's forward.
        """
        return network(x, t, prompt, rope, **options)


class FirstFrameDenoiser(WanDenoiser):
    """A denoiser whose condition, if any, is the clean first latent frame. This frame replaces the noise."""

    def velocity(
        self, network: Any, x: Video, t: Float[Array, "B"], prompt: Any, rope: Rope, condition: Any, **options: Any
    ) -> Velocity:
        clean_frames = 0 if condition is None else 1
        return network(replace_first_frame(condition, x), t, prompt, rope, clean_frames=clean_frames, **options)

    def finalize(self, x: Video, conditioning: Mapping[str, Any]) -> Video:
        return replace_first_frame(channels_last(conditioning.get("condition")), x)


class ChannelConcatDenoiser(WanDenoiser):
    """A denoiser that concatenates a condition to the channels of the latents. Without a condition it uses zeros."""

    def velocity(
        self, network: Any, x: Video, t: Float[Array, "B"], prompt: Any, rope: Rope, condition: Any, **options: Any
    ) -> Velocity:
        if condition is None:
            condition = jnp.zeros((*x.shape[:-1], network.config.channels_in - x.shape[-1]), x.dtype)
        return network(jnp.concatenate([x, condition], axis=-1), t, prompt, rope, **options)


class FirstFrameChannelConcatDenoiser(ChannelConcatDenoiser):
    """A `ChannelConcatDenoiser` that also keeps the first latent frame clean.

    The condition's last channels hold this frame.
    """

    def velocity(
        self, network: Any, x: Video, t: Float[Array, "B"], prompt: Any, rope: Rope, condition: Any, **options: Any
    ) -> Velocity:
        clean_frames = 0 if condition is None else 1
        x = replace_first_frame(_first_frame_of(condition, x), x)
        return super().velocity(network, x, t, prompt, rope, condition, clean_frames=clean_frames, **options)

    def finalize(self, x: Video, conditioning: Mapping[str, Any]) -> Video:
        return replace_first_frame(_first_frame_of(channels_last(conditioning.get("condition")), x), x)


def _first_frame_of(condition: Any, x: Video) -> Any:
    return None if condition is None else condition[:, :1, :, :, -x.shape[-1] :]


class ControlDenoiser(WanDenoiser):
    """A denoiser whose condition is a control clip, which the control layers read."""

    def velocity(
        self, network: Any, x: Video, t: Float[Array, "B"], prompt: Any, rope: Rope, condition: Any, **options: Any
    ) -> Velocity:
        return network(x, t, prompt, rope, control=condition, **options)


class CausalDenoiser(WanDenoiser):
    """A denoiser of chunks, which attends to the keys and values of earlier chunks."""

    def predict(
        self,
        network: Any,
        x: Video,
        t: Float[Array, "B"],
        prompt: Any,
        shared: Any,
        blocks: BlockCache = NO_BLOCK_CACHE,
        dense: bool | None = None,
    ) -> Velocity:
        return network(x, t, prompt, *shared)[0]
