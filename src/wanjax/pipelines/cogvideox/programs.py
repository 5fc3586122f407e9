# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's own programs, in addition to those of all families, and its part of a denoising step."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from wanjax.execution import program
from wanjax.kernels.compiler_options import scan_options
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache
from wanjax.models.cogvideox.positions import Positions
from wanjax.models.cogvideox.transformer import Context
from wanjax.pipelines.denoiser import Denoiser, Latents
from wanjax.pipelines.guidance import Groups, group_prompts


class Shared(NamedTuple):
    """The inputs that the forward passes for all prompts share.

    Args:
        positions: RoPE's tables, or position embeddings.
        image: The latents of the first frame, [B 1 H W C]; None if the video has no given first frame.
    """

    positions: Positions
    image: Any = None  # [B 1 H W C]


@dataclass(frozen=True)
class CogVideoXDenoiser(Denoiser):
    """CogVideoX's transformer, which predicts v of latents."""

    def embed_timesteps(
        self, network: Any, times: Float[Array, "B"], unprojected: bool = False
    ) -> Float[Array, "B _E"]:
        return network.time_embed(times)

    def predict(
        self,
        network: Any,
        x: Latents,
        t: Float[Array, "B"],
        prompt: Any,
        shared: Shared,
        blocks: BlockCache = NO_BLOCK_CACHE,
        dense: bool | None = None,
    ) -> Latents:
        if shared.image is not None:
            x = jnp.concatenate([x, first_frame(shared.image, x)], axis=-1)
        return network(x, t, prompt, shared.positions, cache=blocks)


def first_frame(image: Float[Array, "_B 1 H W _C"], x: Latents) -> Float[Array, "B T H W _C"]:
    """Pad an image's latents with zeros to as many frames and videos as x has.

    x may start with padding frames before the video. The image stands at the first of them, as in the reference.

    Args:
        image: The latents of the image.
        x: The latents of the videos.
    """
    images = jnp.concatenate([image] * (len(x) // len(image)))
    return jnp.pad(images, [(0, 0), (0, x.shape[1] - 1), (0, 0), (0, 0), (0, 0)])


@program(scan_options)
def encode_prompts(
    graphdef: Any, ids: Int[Array, "B S"], weights: Any
) -> tuple[Float[Array, "1 S E"], Float[Array, "1 S E"]]:
    """Encode the prompt and the negative prompt. Attention does not mask padding, as in the reference.

    Args:
        graphdef: The network's definition.
        ids: The token ids of the prompt and of the negative prompt.
        weights: The network's weights.
    """
    embeds = nnx.merge(graphdef, weights)(ids)
    return embeds[:1], embeds[1:]


@program(scan_options)
def make_context(
    static: tuple[Any, Groups],
    x: Latents,
    weights: Any,
    prompts: tuple[Float[Array, "B S E"], Float[Array, "_B _S _E"]],
    image: Float[Array, "B C 1 H W"] | None,
    nag: Float32[Array, "3"] | None = None,
) -> tuple[tuple[Context, ...], Shared]:
    """Project the prompts of each forward pass to the transformer's width. Also return the inputs that all
    forward passes share.

    Args:
        static: The network's definition, and how the prompts are grouped.
        x: The latents of the videos.
        weights: The network's weights.
        prompts: The features of the prompts and of the negative prompts.
        image: The latents of the first frame; None if the video has no given first frame.
        nag: The scale, tau and alpha of normalized attention guidance; None without it.
    """
    graphdef, groups = static
    transformer = nnx.merge(graphdef, weights)
    contexts = tuple(transformer.context(text) for text in group_prompts(prompts, groups))
    if nag is not None:
        prompts_and_negatives = group_prompts(prompts, groups)[0], group_prompts((prompts[1], prompts[1]), groups)[0]
        contexts = (transformer.context(jnp.concatenate(prompts_and_negatives))._replace(nag=nag), *contexts[1:])
    first = None if image is None else jnp.moveaxis(image.astype(jnp.float32), 1, -1)
    return contexts, Shared(transformer.positions(transformer.grid(x), prompts[0].shape[1]), first)
