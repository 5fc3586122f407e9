# SPDX-License-Identifier: Apache-2.0
"""The shape of the video for which pictures are encoded. `encode` passes the shape to `denoise` along with the latents.

The shape of the latents does not determine the shape of the video. Five latent frames may be two reference pictures and
three frames of a control clip.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from wanjax.errors import WanjaxError
from wanjax.figures import pluralize
from wanjax.media.pictures import Pictures
from wanjax.media.stage_files import VIDEO_SHAPE_TENSOR
from wanjax.pipelines.settings import Settings


class VideoShape(NamedTuple):
    """The shape of a video in frames and pixels, and the number of its reference pictures.

    The conditioning of a family stores it in the field `VIDEO_SHAPE_TENSOR` as integers [1 4], or None without
    pictures.
    """

    frames: int
    height: int
    width: int
    references: int = 0

    def __str__(self) -> str:
        references = f" and {pluralize(self.references, 'reference')}" if self.references else ""
        return f"{self.width}x{self.height}, {pluralize(self.frames, 'frame')}{references}"

    def check(self, settings: Settings) -> None:
        """Raise WanjaxError if the settings have another size or number of frames."""
        shape = VideoShape(settings.frames, *settings.size)
        if self[:3] != shape[:3]:
            raise WanjaxError(
                f"the pictures were encoded for {self}, but the video is {shape}: encode them again, or do not set the "
                "size and the frames"
            )


def add_shape(
    fields: Mapping[str, Any], conditioning_type: type[Any], pictures: Pictures, settings: Settings
) -> Mapping[str, Any]:
    """Add the video's shape to the fields of encoded pictures.

    Args:
        fields: The fields of the conditioning that belong to pictures.
        conditioning_type: The type of the family's conditioning.
        pictures: The pictures.
        settings: The settings of the video.
    """
    if not fields or VIDEO_SHAPE_TENSOR not in conditioning_type._fields:
        return fields
    shape = VideoShape(settings.frames, *settings.size, len(pictures.picture_list("references")))
    return {VIDEO_SHAPE_TENSOR: np.array([shape], np.int32), **fields}


def encoded_shape(conditioning: Any) -> VideoShape | None:
    """Return the shape of the video for which pictures were encoded; None if it is unknown.

    Raises:
        WanjaxError: The field does not hold exactly one shape.
    """
    field = getattr(conditioning, VIDEO_SHAPE_TENSOR, None)
    if field is None:
        return None
    rows = np.asarray(field)
    is_table = rows.ndim == 2 and rows.shape[1] == len(VideoShape._fields) and np.issubdtype(rows.dtype, np.integer)
    if not (is_table and len(rows) and (rows == rows[0]).all() and (rows[0][:3] > 0).all() and rows[0][3] >= 0):
        expected = f"one row of {', '.join(VideoShape._fields)}"
        raise WanjaxError(
            f"{VIDEO_SHAPE_TENSOR} must be {expected}, got {rows.dtype} {list(rows.shape)}: encode the pictures again"
        )
    return VideoShape(*map(int, rows[0]))
