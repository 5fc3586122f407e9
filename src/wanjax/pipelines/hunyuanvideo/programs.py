# SPDX-License-Identifier: Apache-2.0
"""The programs that only HunyuanVideo uses, and its part of a denoising step."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from wanjax.execution import program
from wanjax.kernels.compiler_options import scan_options
from wanjax.layers.rope import Rope
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache
from wanjax.models.hunyuanvideo.transformer import Context
from wanjax.pipelines.denoiser import Denoiser, Latents
from wanjax.pipelines.guidance import Groups, group_prompts
from wanjax.pipelines.hunyuanvideo.conditioning import Lengths, Text
from wanjax.pipelines.hunyuanvideo.text import NUM_TEMPLATE_TOKENS
from wanjax.schedulers.base import TRAIN_STEPS

Features = Float[Array, "B S E"]
FeaturePair = tuple[Float[Array, "1 S E"], Float[Array, "1 S E"]]  # for the prompt and for the negative prompt


class Shared(NamedTuple):
    """The inputs that the forward passes for all prompts share.

    Args:
        rope: RoPE's tables.
        image: The latents of the first frame, [_B 1 H W C]; None if the video starts from no image.
    """

    rope: Rope
    image: Any = None  # [_B 1 H W C]


@dataclass(frozen=True)
class HunyuanVideoDenoiser(Denoiser):
    """HunyuanVideo's transformer, which predicts the velocity.

    Args:
        uses_meanflow: Whether the transformer also gets the timestep at the end of a step.
    """

    uses_meanflow: bool

    def timesteps(self, schedule: Any) -> tuple[Any, ...]:
        current = (super().timesteps(schedule),)
        return (*current, schedule.sigmas[1] * TRAIN_STEPS) if self.uses_meanflow else current

    def embed_timesteps(
        self, network: Any, times: tuple[Float[Array, "B"], ...], unprojected: bool = False
    ) -> Float[Array, "B _E"]:
        return network.time(*times)

    def predict(
        self,
        network: Any,
        x: Latents,
        t: tuple[Float[Array, "B"], ...],
        prompt: Context,
        shared: Shared,
        blocks: BlockCache = NO_BLOCK_CACHE,
        dense: bool | None = None,
    ) -> Latents:
        timestep, *next_timestep = t
        mask = network.mask(network.grid(x)) if dense is False else None
        arguments = with_condition(x, shared.image), timestep, prompt, shared.rope, *next_timestep
        return network(*arguments, mask=mask, cache=blocks)


def with_condition(x: Latents, image: Float[Array, "_B 1 H W C"] | None) -> Float[Array, "B T H W _C"]:
    """Concatenate latents, an image's latents as the first frame, and a mask of that frame, along the channels.

    Args:
        x: The latents of the videos.
        image: The latents of the first frame; None for zeros.
    """
    frames, channels = x.shape[1], x.shape[-1]
    if image is None:
        return jnp.pad(x, [(0, 0)] * 4 + [(0, channels + 1)])
    first_frame = jnp.pad(image, [(0, 0)] * 4 + [(0, 1)], constant_values=1)
    condition = jnp.pad(first_frame, [(0, 0), (0, frames - 1), (0, 0), (0, 0), (0, 0)])
    return jnp.concatenate([x, jnp.broadcast_to(condition, (len(x), *condition.shape[1:]))], axis=-1)


@program(scan_options)
def encode_chats(graphdef: Any, ids: Int[Array, "B _S"], mask: Bool[Array, "B S"], weights: Any) -> FeaturePair:
    """Encode the chats of both prompts; return the features after the template, with zeros outside the mask.

    Args:
        graphdef: The network's definition.
        ids: The ids of the tokens.
        mask: True at real tokens after the template.
        weights: The network's weights.
    """
    return _mask_and_split(nnx.merge(graphdef, weights)(ids)[:, NUM_TEMPLATE_TOKENS:], mask)


@program(scan_options)
def encode_glyphs(graphdef: Any, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], weights: Any) -> FeaturePair:
    """Encode the quoted texts of both prompts; return the features of their bytes, with zeros outside the mask.

    Args:
        graphdef: The network's definition.
        ids: The ids of the bytes.
        mask: True at real tokens.
        weights: The network's weights.
    """
    return _mask_and_split(nnx.merge(graphdef, weights)(ids, mask), mask)


def _mask_and_split(features: Features, mask: Bool[Array, "B S"]) -> FeaturePair:
    features = jnp.where(mask[:, :, None], features, jnp.zeros((), features.dtype))
    return features[:1], features[1:]


@program(scan_options)
def encode_images(graphdef: Any, images: Float[Array, "B H W 3"], weights: Any) -> Features:
    """Encode normalised images.

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
    image_embeds: Float[Array, "_B _S _E"] | None,
    image_latents: Float[Array, "_B C 1 H W"] | None,
    nag: Float32[Array, "3"] | None = None,
) -> tuple[tuple[Context, ...], Shared]:
    """Compute the context of each forward pass from the texts and an image's features. Also return the inputs that all
    forward passes share.

    Args:
        static: The network's definition, how the prompts are grouped, and the lengths of both texts.
        x: The latents of the videos.
        weights: The network's weights.
        texts: The features of the prompts and of the negative prompts.
        image_embeds: The features of the image; None without an image.
        image_latents: The latents of the image; None without an image.
        nag: The scale, tau and alpha of normalized attention guidance; None without it.
    """
    graphdef, groups, lengths = static
    transformer = nnx.merge(graphdef, weights)

    def context(text: Text) -> Context:
        glyphs = (text.glyphs, text.glyph_mask) if text.glyphs.shape[1] else None
        image_features = (
            None
            if image_embeds is None
            else jnp.broadcast_to(image_embeds, (len(text.embeds), *image_embeds.shape[1:]))
        )
        return transformer.context(text.embeds, text.mask, glyphs, image_features)

    cut_texts = [text_lengths.cut(text) for text_lengths, text in zip(lengths, texts, strict=True)]
    first_frame = None if image_latents is None else jnp.moveaxis(image_latents.astype(jnp.float32), 1, -1)
    contexts = tuple(context(text) for text in group_prompts(cut_texts, groups))
    if nag is not None:
        prompts, negatives = group_prompts(cut_texts, groups)[0], group_prompts((cut_texts[1], cut_texts[1]), groups)[0]
        prompts_and_negatives = Text(*map(jnp.concatenate, zip(prompts, negatives, strict=True)))
        contexts = (context(prompts_and_negatives)._replace(nag=nag), *contexts[1:])
    return contexts, Shared(transformer.rope(transformer.grid(x), contexts), first_frame)
