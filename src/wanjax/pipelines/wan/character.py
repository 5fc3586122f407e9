# SPDX-License-Identifier: Apache-2.0
"""The common base of the models that animate a character: a picture of the character, and a latent frame for the
picture."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int32

from wanjax.media.inputs import IMAGE
from wanjax.media.pictures import Pictures
from wanjax.pipelines.model import ForwardCost
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.validation import Shape
from wanjax.pipelines.video_shape import VideoShape
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.pipelines.wan.tasks import ImageToVideoWithEncoder

CHARACTER = IMAGE.needed._replace(noun="a picture of the character")


class CharacterToVideo(ImageToVideoWithEncoder):
    """Model that makes a video from a character's picture and a clip, segment by segment.

    The first latent frame of a segment is the picture. It is dropped after the last step.
    """

    radial = False

    def cost(self, settings: Settings, conditioning: WanConditioning | None = None) -> ForwardCost:
        """Count the work of one forward pass, including the picture's frame."""
        return super().cost(replace(settings, frames=settings.frames + self.vae.temporal_factor), conditioning)

    def leading_frames(self, conditioning: WanConditioning, settings: Settings) -> int:
        return 1

    def picture_shapes(self, settings: Settings) -> Mapping[str, Shape]:
        shapes = super().picture_shapes(settings)
        batch, channels, frames, *latent_size = shapes["condition"]
        condition = batch, channels, (frames or 0) + 1, *latent_size
        return {**shapes, "condition": condition, "clip_latents": self.spec.latent_shape(settings)}


def previous_segment_frames(pictures: Pictures, settings: Settings) -> Float[np.ndarray, "_T H W 3"]:
    """Return the last frames of the previous segment, in [0, 1]. The first segment has no such frames."""
    return pictures.get("previous_frames", np.zeros((0, *settings.size, 3), np.float32))


def segment_shape(settings: Settings) -> Int32[np.ndarray, "1 N"]:
    """Return the tensor of a segment's `VideoShape`."""
    return np.array([VideoShape(settings.frames, *settings.size, references=1)], np.int32)
