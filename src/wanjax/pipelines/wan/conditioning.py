# SPDX-License-Identifier: Apache-2.0
"""The output of Wan's encode stage, and the preparation of its images on the host."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from wanjax.media.pictures import Picture, fit_to_size
from wanjax.pipelines.settings import Settings

GREY = np.float32(0.5)  # the colour of unknown frames: 0, for pixels in [-1, 1]
ResizeFunction = Callable[[np.ndarray, tuple[int, int]], np.ndarray]  # takes a picture [H W 3] and a (height, width)


class WanConditioning(NamedTuple):
    """The output of `encode` for a prompt, the negative prompt and images; each array has a first axis of size 1.

    In a batch the first axis has a prompt for each video, and all videos share the images. `prompt_embeds` and
    `negative_prompt_embeds` are zeros after their last tokens. `condition` is concatenated to the channels of the
    video's latents. It may have other numbers of channels and frames than the latents. `image_embeds` are features of
    images. `video_latents` are the clean latents of the video from which denoising starts. `video_shape` is the
    `VideoShape` of the video for which the images were encoded.

    For a driving clip, `clip_prompt_embeds` are the features of its prompt, `clip_image_embeds` are the features of its
    first frame, and `clip_latents` are its latents. `first_frame_bias` is added to the scores of the first frame's
    keys. For a pose clip, only `clip_latents` are set. `face_pictures` are pictures of a face, with 8-bit pixels.
    """

    prompt_embeds: Float[Array, "B S E"]
    negative_prompt_embeds: Float[Array, "_B _S _E"]
    condition: Float[Array, "1 C T H W"] | None = None
    image_embeds: Float[Array, "1 _S _E"] | None = None
    video_latents: Float[Array, "1 _C _T _H _W"] | None = None
    video_shape: Int[Array | np.ndarray, "_B 4"] | None = None
    clip_prompt_embeds: Float[Array, "_B _S _E"] | None = None
    clip_image_embeds: Float[Array, "1 _S _E"] | None = None
    clip_latents: Float[Array, "1 _C _T _H _W"] | None = None
    first_frame_bias: Float[Array | np.ndarray, "1"] | None = None
    face_pictures: UInt8[Array | np.ndarray, "1 _T _H _W 3"] | None = None


def fit_to_unit_range(picture: Picture, settings: Settings) -> Float[np.ndarray, "_H _W 3"]:
    """Fit an image to the video's size, in [0, 1]."""
    return fit_to_size(picture, settings.size, settings.resize).astype(np.float32) / np.float32(255)


def known_frame_mask(indices: Sequence[int], frames: int, factor: int) -> Float[np.ndarray, "C T"]:
    """Build the mask of a video's known frames (1) and unknown frames (0), as channels of the latent frames.

    A latent frame has one channel for each of its `factor` frames. The first latent frame has only one frame, which
    fills all its channels.
    """
    flags = np.zeros(frames, np.float32)
    flags[list(indices)] = 1
    return frame_channels(flags, factor)


def frame_channels(values: Float[np.ndarray, "T ..."], factor: int) -> Float[np.ndarray, "C _T ..."]:
    """Rearrange values, one for each frame, as channels of the latent frames, in the layout of `known_frame_mask`."""
    repeated = np.concatenate([np.repeat(values[:1], factor, axis=0), values[1:]])
    return np.swapaxes(repeated.reshape(-1, factor, *values.shape[1:]), 0, 1)


def mask_to_channels(mask: Float[np.ndarray, "T H W"], frames: int, factor: int) -> Float[np.ndarray, "C _T _H _W"]:
    """Rearrange a mask: each `factor` × `factor` patch of pixels becomes the channels of one latent position.

    The mask's frames are divided into `frames` equal intervals, and only the middle frame of each is used, as in the
    reference.
    """
    count, height, width = mask.shape
    middle_indices = [(2 * i + 1) * count // (2 * frames) for i in range(frames)]
    patches = mask[middle_indices].reshape(frames, height // factor, factor, width // factor, factor)
    return patches.transpose(2, 4, 0, 1, 3).reshape(factor**2, frames, height // factor, width // factor)


def fit_on_white(picture: Picture, size: tuple[int, int], resize: ResizeFunction) -> Float[np.ndarray, "_H _W 3"]:
    """Scale a whole image, in [0, 1], to fit the centre of a white canvas of size (height, width)."""
    height, width, _ = picture.shape
    scale = min(size[0] / height, size[1] / width)
    inner_size = int(height * scale), int(width * scale)
    resized_picture = resize(picture.astype(np.float32) / np.float32(255), inner_size)
    top, left = ((canvas - inner) // 2 for canvas, inner in zip(size, inner_size, strict=True))
    background = np.ones((*size, 3), np.float32)
    background[top : top + inner_size[0], left : left + inner_size[1]] = resized_picture
    return background
