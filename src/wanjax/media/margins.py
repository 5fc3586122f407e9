# SPDX-License-Identifier: Apache-2.0
"""Add margins to a clip. A model that takes a mask fills the margins."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from wanjax.errors import SettingError
from wanjax.media.bounds import MEDIA_LIMITS
from wanjax.media.pictures import Clip, Pictures

GREY, KEEP, REPAINT = 127, 0, 255  # the colour of margins, and the values of a mask


def add_margins(pictures: Pictures, margins: Sequence[int]) -> Pictures:
    """Add grey margins to the clip, and white margins to its mask.

    If there is a mask, it keeps its position on the clip. Without a mask, the new mask keeps the whole clip.

    Args:
        pictures: The pictures and clips of a video.
        margins: The pixels of the clip to add at the left, the top, the right and the bottom.

    Raises:
        SettingError: There is no clip, or the clip with its margins is larger than the limit on clips.
    """
    if (clip := pictures.clip("video")) is None:
        raise SettingError(
            f"outpaint {','.join(map(str, margins))} adds margins to a clip, and there is none: give a video too",
            "outpaint",
        )
    frames, height, width, _ = clip.shape
    left, top, right, bottom = margins
    full_height, full_width = top + height + bottom, left + width + right
    if frames * full_height * full_width > MEDIA_LIMITS.max_clip_pixels:
        raise SettingError(
            f"the video with its margins has {frames} frames of {full_width}x{full_height} pixels, and the limit is "
            f"{MEDIA_LIMITS.max_clip_pixels:,} pixels in all: give smaller margins or a smaller video",
            "outpaint",
        )
    masks = pictures.clip("mask")
    if masks is None:
        [mask] = _padded(np.full((1, height, width, 3), KEEP, np.uint8), margins, REPAINT)
        masks = np.broadcast_to(mask, (frames, *mask.shape))
    else:
        ratios = [masks.shape[2] / width, masks.shape[1] / height] * 2
        scaled = [round(margin * ratio) for margin, ratio in zip(margins, ratios, strict=True)]
        masks = _padded(masks, scaled, REPAINT)
    return pictures.with_inputs(video=_padded(clip, margins, GREY), mask=masks)


def _padded(clip: Clip, margins: Sequence[int], value: int) -> UInt8[np.ndarray, "_T _H _W 3"]:
    left, top, right, bottom = margins
    return np.pad(clip, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=value)
