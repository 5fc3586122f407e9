# SPDX-License-Identifier: Apache-2.0
"""The programs that only Wan uses."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from wanjax.execution import program
from wanjax.kernels.compiler_options import scan_options
from wanjax.models.wan.config import ImageTransformerConfig
from wanjax.pipelines.guidance import Groups, group_prompts
from wanjax.pipelines.wan.denoisers import Shared, channels_last

TEXT_LENGTH = 512
"""The number of tokens that Wan reads of a prompt, including padding."""


def encode_text(encoder: Any, ids: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Float[Array, "B S E"]:
    """Encode prompts. Features after the last real token are exactly zero, as Wan's transformer expects.

    Args:
        encoder: The text encoder.
        ids: The ids of the tokens.
        mask: True at real tokens.
    """
    features = encoder(ids, mask)
    return jnp.where(mask[:, :, None], features, jnp.zeros((), features.dtype))


@program(scan_options)
def encode_prompts(
    graphdef: Any, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], weights: Any
) -> tuple[Float[Array, "1 S E"], Float[Array, "1 S E"]]:
    """Encode the prompt and the negative prompt with `encode_text`.

    Args:
        graphdef: The network's definition.
        ids: The token ids of the prompt and of the negative prompt.
        mask: True at real tokens.
        weights: The network's weights.
    """
    embeds = encode_text(nnx.merge(graphdef, weights), ids, mask)
    return embeds[:1], embeds[1:]


@program(scan_options)
def encode_images(graphdef: Any, images: Float[Array, "B H W 3"], weights: Any) -> Float[Array, "1 S E"]:
    """Encode normalised images, and concatenate their features along the token axis.

    Args:
        graphdef: The network's definition.
        images: Normalised images.
        weights: The network's weights.
    """
    features = nnx.merge(graphdef, weights)(images)
    return features.reshape(1, -1, features.shape[-1])


@program(scan_options)
def resize(size: tuple[int, int], picture: Float[Array, "H W 3"]) -> Float[Array, "_H _W 3"]:
    """Resize an image bilinearly to (height, width) without antialiasing, as in the reference.

    Args:
        size: (height, width) in pixels.
        picture: The image.
    """
    return jax.image.resize(picture, (*size, 3), "linear", antialias=False)


@program(scan_options)
def known_condition(static: None, latents: Float[Array, "1 C T H W"], mask: Any) -> Float[Array, "1 _C T H W"]:
    """Concatenate a mask of known frames [C T] and the latents of a clip along the channels.

    Args:
        static: Nothing.
        latents: The latents of a clip in which unknown frames are grey.
        mask: 1 at known frames.
    """
    mask = jnp.broadcast_to(mask[None, :, :, None, None], (1, len(mask), *latents.shape[2:]))
    return jnp.concatenate([mask, latents], axis=1)


@program(scan_options)
def control_condition(
    static: None, clips: tuple[Float[Array, "1 C _T H W"], ...], mask: Any
) -> Float[Array, "1 _C _T H W"]:
    """Build the control condition: the reference images, then the clip's unchanged pixels, changed pixels and mask.

    Args:
        static: Nothing.
        clips: The latents of the unchanged pixels, of the changed pixels, and of each reference image.
        mask: 1 at changed pixels.
    """
    unchanged, changed, *references = clips
    condition = jnp.concatenate([unchanged, changed, mask[None]], axis=1)
    padding = [(0, 0), (0, condition.shape[1] - unchanged.shape[1]), (0, 0), (0, 0), (0, 0)]
    return jnp.concatenate([*(jnp.pad(x, padding) for x in references), condition], axis=2)


@program(scan_options)
def make_context(
    static: tuple[Any, Groups],
    x: Float[Array, "B T H W C"],
    weights: Any,
    prompts: tuple[Float[Array, "B S E"], Float[Array, "_B _S E"]],
    condition: Float[Array, "B _C _T H W"] | None,
    features: Float[Array, "_B _S _E"] | None,
    nag: Float32[Array, "3"] | None = None,
) -> tuple[tuple[Any, ...], Shared]:
    """Return the keys and values for each forward pass, and the inputs that all forward passes share.

    If there are no image features, a transformer that expects them gets one zero token. One token suffices, because
    attention to copies of a token equals attention to the token.

    Args:
        static: The network's definition, and how the prompts are grouped.
        x: The latents of the videos.
        weights: The network's weights.
        prompts: The features of the prompts and of the negative prompts.
        condition: The encoded condition; None without one.
        features: The features of images; None without images.
        nag: The scale, tau and alpha of normalized attention guidance; None without it.
    """
    graphdef, groups = static
    transformer = nnx.merge(graphdef, weights)

    def context(text: Float[Array, "B S E"]) -> Any:
        if not isinstance(transformer.config, ImageTransformerConfig):
            return transformer.context(text)
        image_features = (
            jnp.zeros((1, 1, transformer.config.image_width), jnp.float32) if features is None else features
        )
        return transformer.context(text, jnp.broadcast_to(image_features, (len(text), *image_features.shape[1:])))

    contexts = tuple(map(context, group_prompts(prompts, groups)))
    if nag is not None:
        negative = context(group_prompts((prompts[1], prompts[1]), groups)[0])
        contexts = (contexts[0].with_nag(negative, nag), *contexts[1:])
    return contexts, Shared(transformer.rope(transformer.grid(x)), channels_last(condition))
