# SPDX-License-Identifier: Apache-2.0
"""The output of CogVideoX's encode stage, and how the latents of images and videos are sampled.

The reference samples these latents from the autoencoder's posterior. Here the encode stage returns the posterior's mean
and deviation, and each video samples from it with its own seed.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from wanjax.pipelines.denoiser import Posterior


class CogVideoXConditioning(NamedTuple):
    """The output of `encode` for a prompt, the negative prompt, images and videos. Arrays have a first axis of size 1.

    In a batch that axis has a prompt for each video. `image_latents` has the latents of the first frame.
    `video_latents` has the latents of the video from which denoising starts. If there is a deviation, `video_latents`
    is the mean of a distribution, and each video samples its latents from this distribution. Otherwise each video uses
    `video_latents` unchanged. `video_shape` is a `VideoShape`, the shape for which the latents were encoded.
    """

    prompt_embeds: Float[Array, "B S E"]
    negative_prompt_embeds: Float[Array, "_B _S _E"]
    image_latents: Float[Array, "B C 1 H W"] | None = None
    image_deviation: Float[Array, "_B _C 1 _H _W"] | None = None
    video_latents: Float[Array, "_B _C T _H _W"] | None = None
    video_deviation: Float[Array, "_B _C _T _H _W"] | None = None
    video_shape: Int[Array | np.ndarray, "_B 4"] | None = None


POSTERIORS = (
    Posterior("image_noise", 2, "image_latents", "image_deviation"),
    Posterior("video_noise", 3, "video_latents", "video_deviation"),
)
