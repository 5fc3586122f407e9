# SPDX-License-Identifier: Apache-2.0
"""The shape of the video that pictures were encoded for, which goes with them from `encode` to `denoise`.

Latents alone do not tell it: five latent frames of a control clip may be two references and three of the video.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from wanjax.errors import WanjaxError
from wanjax.figures import quantity
from wanjax.media.pictures import Pictures
from wanjax.media.stage_files import VIDEO_SHAPE
from wanjax.pipelines.settings import Settings


class VideoShape(NamedTuple):
    """The shape of a video in frames and pixels, and the number of its reference pictures.

    A family's conditioning holds it in the field `VIDEO_SHAPE`, as integers [1 4]; None where no picture was encoded.
    """

    frames: int
    height: int
    width: int
    references: int = 0

    def __str__(self) -> str:
        references = f" and {quantity(self.references, 'reference')}" if self.references else ""
        return f"{self.width}x{self.height}, {quantity(self.frames, 'frame')}{references}"

    def check(self, settings: Settings) -> None:
        """Raise WanjaxError unless a video of these settings has this size and these frames."""
        shape = VideoShape(settings.frames, *settings.size)
        if self[:3] != shape[:3]:
            raise WanjaxError(
                f"the pictures were encoded for {self}, and {shape} are to be denoised: encode them again for these, "
                "or leave the size and the frames out"
            )


def with_shape(fields: Mapping[str, Any], kind: type[Any], pictures: Pictures, settings: Settings) -> Mapping[str, Any]:
    """Return encoded pictures with the shape that they were encoded for.

    Args:
        fields: The fields of `kind` that pictures became.
        kind: The type of a family's conditioning.
        pictures: What was encoded.
        settings: Those of the video.
    """
    if not fields or VIDEO_SHAPE not in kind._fields:
        return fields
    shape = VideoShape(settings.frames, *settings.size, len(pictures.picture_list("references")))
    return {**fields, VIDEO_SHAPE: np.array([shape], np.int32)}


def encoded_shape(conditioning: Any) -> VideoShape | None:
    """Return the shape that pictures were encoded for; None where it is unknown.

    Raises:
        WanjaxError: The field holds anything but one shape.
    """
    field = getattr(conditioning, VIDEO_SHAPE, None)
    if field is None:
        return None
    rows = np.asarray(field)
    well_formed = rows.ndim == 2 and rows.shape[1] == len(VideoShape._fields) and np.issubdtype(rows.dtype, np.integer)
    if not (well_formed and len(rows) and (rows == rows[0]).all() and (rows[0][:3] > 0).all() and rows[0][3] >= 0):
        right = f"one row of {', '.join(VideoShape._fields)}"
        raise WanjaxError(f"{VIDEO_SHAPE} is {rows.dtype} {list(rows.shape)}, not {right}: encode the pictures again")
    return VideoShape(*map(int, rows[0]))
