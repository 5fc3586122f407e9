# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's own programs, beside those of all families, and its part of a denoising step."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from wanjax.execution import program
from wanjax.kernels.compiler_options import scan_options
from wanjax.layers.rope import Rope
from wanjax.layers.stack import EVERY_BLOCK, BlockCache
from wanjax.models.hunyuanvideo.transformer import Context
from wanjax.pipelines.denoiser import Denoiser, Latents
from wanjax.pipelines.guidance import Groups, group
from wanjax.pipelines.hunyuanvideo.conditioning import Lengths, Text
from wanjax.pipelines.hunyuanvideo.text import TEMPLATE_TOKENS
from wanjax.schedulers.base import TRAIN_STEPS

Features = Float[Array, "B S E"]
Both = tuple[Float[Array, "1 S E"], Float[Array, "1 S E"]]  # of the prompt and of the negative one


class Shared(NamedTuple):
    """The inputs that the forwards for all prompts share.

    Args:
        rope: RoPE's tables.
        image: Latents of the first frame, [_B 1 H W C]; None without one.
    """

    rope: Rope
    image: Any = None  # [_B 1 H W C]


@dataclass(frozen=True)
class HunyuanVideoDenoiser(Denoiser):
    """HunyuanVideo's transformer, which predicts the velocity.

    Args:
        meanflow: Whether the transformer is told the timestep to which a step goes.
    """

    meanflow: bool

    def timesteps(self, schedule: Any) -> tuple[Any, ...]:
        now = (super().timesteps(schedule),)
        return (*now, schedule.sigmas[1] * TRAIN_STEPS) if self.meanflow else now

    def embed_timesteps(
        self, network: Any, times: tuple[Float[Array, "B"], ...], plain: bool = False
    ) -> Float[Array, "B _E"]:
        return network.time(*times)

    def predict(
        self,
        network: Any,
        x: Latents,
        t: tuple[Float[Array, "B"], ...],
        prompt: Context,
        shared: Shared,
        blocks: BlockCache = EVERY_BLOCK,
        dense: bool | None = None,
    ) -> Latents:
        now, *following = t
        mask = network.mask(network.grid(x)) if dense is False else None
        arguments = beside_condition(x, shared.image), now, prompt, shared.rope, *following
        return network(*arguments, mask=mask, cache=blocks)


def beside_condition(x: Latents, image: Float[Array, "_B 1 H W C"] | None) -> Float[Array, "B T H W _C"]:
    """Join latents, those of a picture as the first frame, and a mask that is 1 there; zeros without a picture.

    Args:
        x: Latents of the videos.
        image: Latents of the first frame; None without one.
    """
    frames, channels = x.shape[1], x.shape[-1]
    if image is None:
        return jnp.pad(x, [(0, 0)] * 4 + [(0, channels + 1)])
    first = jnp.pad(image, [(0, 0)] * 4 + [(0, 1)], constant_values=1)
    condition = jnp.pad(first, [(0, 0), (0, frames - 1), (0, 0), (0, 0), (0, 0)])
    return jnp.concatenate([x, jnp.broadcast_to(condition, (len(x), *condition.shape[1:]))], axis=-1)


@program(scan_options)
def encode_chats(graphdef: Any, ids: Int[Array, "B _S"], mask: Bool[Array, "B S"], weights: Any) -> Both:
    """Encode both prompts' chats; return features of what follows the template, zeros outside the mask.

    Args:
        graphdef: The network's definition.
        ids: Ids of the tokens.
        mask: True at real tokens after the template.
        weights: The network's weights.
    """
    return _masked(nnx.merge(graphdef, weights)(ids)[:, TEMPLATE_TOKENS:], mask)


@program(scan_options)
def encode_glyphs(graphdef: Any, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], weights: Any) -> Both:
    """Encode the texts that both prompts quote; return features of their bytes, zeros outside the mask.

    Args:
        graphdef: The network's definition.
        ids: Ids of the bytes.
        mask: True at real tokens.
        weights: The network's weights.
    """
    return _masked(nnx.merge(graphdef, weights)(ids, mask), mask)


def _masked(features: Features, mask: Bool[Array, "B S"]) -> Both:
    features = jnp.where(mask[:, :, None], features, jnp.zeros((), features.dtype))
    return features[:1], features[1:]


@program(scan_options)
def encode_images(graphdef: Any, images: Float[Array, "B H W 3"], weights: Any) -> Features:
    """Return features of normalised images.

    Args:
        graphdef: The network's definition.
        images: Normalised images.
        weights: The network's weights.
    """
    return nnx.merge(graphdef, weights)(images)


@program(scan_options)
def make_context(
    static: tuple[Any, Groups, tuple[Lengths, ...]],
    x: Latents,
    weights: Any,
    texts: tuple[Text, Text],
    image: Float[Array, "_B _S _E"] | None,
    picture: Float[Array, "_B C 1 H W"] | None,
    nag: Float32[Array, "3"] | None = None,
) -> tuple[tuple[Context, ...], Shared]:
    """Return the context of each forward's texts, with features of a picture beside it, and what all share.

    Args:
        static: The network's definition, how the prompts are grouped, and the lengths of both texts.
        x: Latents of the videos.
        weights: The network's weights.
        texts: Features of the prompts, and of the negative ones.
        image: Features of the picture; None without one.
        picture: Latents of the picture; None without one.
        nag: Scale, tau and alpha of normalized attention guidance; None without it.
    """
    graphdef, groups, lengths = static
    transformer = nnx.merge(graphdef, weights)

    def context(text: Text) -> Context:
        glyphs = (text.glyphs, text.glyph_mask) if text.glyphs.shape[1] else None
        seen = None if image is None else jnp.broadcast_to(image, (len(text.embeds), *image.shape[1:]))
        return transformer.context(text.embeds, text.mask, glyphs, seen)

    short = [long.of(text) for long, text in zip(lengths, texts, strict=True)]
    first = None if picture is None else jnp.moveaxis(picture.astype(jnp.float32), 1, -1)
    contexts = tuple(context(text) for text in group(short, groups))
    if nag is not None:
        led, away = group(short, groups)[0], group((short[1], short[1]), groups)[0]
        both = Text(*map(jnp.concatenate, zip(led, away, strict=True)))
        contexts = (context(both)._replace(nag=nag), *contexts[1:])
    return contexts, Shared(transformer.rope(transformer.grid(x)), first)
