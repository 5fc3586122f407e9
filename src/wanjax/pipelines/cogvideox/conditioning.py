# SPDX-License-Identifier: Apache-2.0
"""The output of CogVideoX's first stage, and the latents that pictures become in it.

The reference draws these latents from the autoencoder's posterior. Here the first stage keeps the posterior's mean and
deviation, and each video draws from it with its own seed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from wanjax.pipelines.seeds import further_noise


class CogVideoXEncoded(NamedTuple):
    """The output of `encode` for a prompt, the negative prompt and pictures; each array has a first axis of size 1.

    Videos that are made together have a prompt each on that axis. `image_latents` are those of the first frame, and
    `video_latents` those of the video from which denoising starts. A deviation beside them makes them the mean of a
    distribution, from which each video draws; without one they are used as they are.
    """

    prompt_embeds: Float[Array, "B S E"]
    negative_prompt_embeds: Float[Array, "_B _S _E"]
    image_latents: Float[Array, "B C 1 H W"] | None = None
    image_deviation: Float[Array, "_B _C 1 _H _W"] | None = None
    video_latents: Float[Array, "_B _C T _H _W"] | None = None
    video_deviation: Float[Array, "_B _C _T _H _W"] | None = None


POSTERIORS = {  # the noise's name, the number of its key among a seed's, and the fields that it completes
    "image_noise": (2, "image_latents", "image_deviation"),
    "video_noise": (3, "video_latents", "video_deviation"),
}


def drawn(encoded: CogVideoXEncoded, seeds: Sequence[int], noise: Mapping[str, Array]) -> CogVideoXEncoded:
    """Draws the latents of pictures for each seed; noise that is given takes the place of the seeds'."""
    for name, (number, mean, deviation) in POSTERIORS.items():
        spread = getattr(encoded, deviation)
        if spread is None:
            continue
        own = noise[name] if name in noise else _noise(seeds, number, spread.shape)
        sample = getattr(encoded, mean) + spread * own.astype(jnp.float32)
        encoded = encoded._replace(**{mean: sample, deviation: None})
    return encoded


def _noise(seeds: Sequence[int], number: int, shape: tuple[int, ...]) -> Float[Array, "B C T H W"]:
    return jnp.concatenate([further_noise(seed, number, (1, *shape[1:])) for seed in seeds])


def led(x: Float[Array, "B T H W C"], frames: int) -> Float[Array, "B _T H W C"]:
    """Returns latents of `frames` frames, the first of them repeated in front as often as is needed."""
    first: Any = x[:, :1]
    return jnp.concatenate([first] * (frames - x.shape[1]) + [x], axis=1)
