# SPDX-License-Identifier: Apache-2.0
"""The output of CogVideoX's first stage, and the latents that pictures become in it.

The reference draws these latents from the autoencoder's posterior. Here the first stage keeps the posterior's mean and
deviation, and each video draws from it with its own seed.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from wanjax.pipelines.denoiser import Posterior


class CogVideoXConditioning(NamedTuple):
    """The output of `encode` for a prompt, the negative prompt and pictures; each array has a first axis of size 1.

    Videos that are made together have a prompt each on that axis. `image_latents` are those of the first frame, and
    `video_latents` those of the video from which denoising starts. A deviation beside them makes them the mean of a
    distribution, from which each video draws; without one they are used as they are. `video_shape` is what they were
    encoded for, a `VideoShape`.
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
