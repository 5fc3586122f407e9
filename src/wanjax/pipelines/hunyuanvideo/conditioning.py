# SPDX-License-Identifier: Apache-2.0
"""The output of HunyuanVideo's encode stage, the removal of padding from it, and the video sizes for image to video."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Shaped

from wanjax.media.pictures import Picture, PictureOfAnySize, fit_to_size
from wanjax.pipelines.hunyuanvideo.text import GLYPH_LENGTH, TEXT_LENGTH

LENGTHS = (128, 256, 512, TEXT_LENGTH)
"""The lengths in tokens that a prompt is padded to. Steps are compiled once for each."""
GLYPH_LENGTHS = (0, GLYPH_LENGTH)
MAX_ASPECT_RATIO = 4  # the largest ratio of the longer side to the shorter side


class HunyuanVideoConditioning(NamedTuple):
    """The output of `encode` for a prompt, the negative prompt and an image. Each array has a first axis of size 1.

    In a batch the first axis has a prompt for each video, and all videos share the image. `prompt_embeds` are the
    features of the prompt. `prompt_embeds_2` are the features of the quoted text in the prompt. Both arrays are zero
    outside their masks. `image_embeds` are the features of the image, and `image_latents` are its latents.
    `video_shape` is the `VideoShape` of the video for which the image was encoded.
    """

    prompt_embeds: Float[Array, "B S E"]
    prompt_embeds_mask: Shaped[Array, "B S"]
    prompt_embeds_2: Float[Array, "B _S _E"]
    prompt_embeds_mask_2: Shaped[Array, "B _S"]
    negative_prompt_embeds: Float[Array, "B S E"]
    negative_prompt_embeds_mask: Shaped[Array, "B S"]
    negative_prompt_embeds_2: Float[Array, "B _S _E"]
    negative_prompt_embeds_mask_2: Shaped[Array, "B _S"]
    image_embeds: Float[Array, "1 _S _E"] | None = None
    image_latents: Float[Array, "1 C 1 H W"] | None = None
    video_shape: Int[Array | np.ndarray, "_B 4"] | None = None

    @property
    def texts(self) -> tuple["Text", "Text"]:
        """The prompt and the negative prompt."""
        return Text(*self[:4]), Text(*self[4:8])


class Text(NamedTuple):
    """A prompt for the transformer: features and a mask of the prompt, and features and a mask of its quoted text.

    The quoted text may have no tokens.
    """

    embeds: Any  # [B S E]
    mask: Any  # [B S]
    glyphs: Any  # [B _S _E]
    glyph_mask: Any  # [B _S]


class Lengths(NamedTuple):
    """The number of tokens to use of a prompt, and the number of tokens to use of its quoted text."""

    prompt: int
    glyphs: int

    def cut(self, text: Text) -> Text:
        """Cut the features and masks of a prompt to these lengths, which removes padding."""
        masks = _as_booleans(text.mask)[:, : self.prompt], _as_booleans(text.glyph_mask)[:, : self.glyphs]
        return Text(text.embeds[:, : self.prompt], masks[0], text.glyphs[:, : self.glyphs], masks[1])


def used_lengths(texts: Sequence[Text], *, batched: bool) -> tuple[Lengths, ...]:
    """Choose short lengths from `LENGTHS` and `GLYPH_LENGTHS` that still hold all tokens of each prompt.

    The transformer ignores masked tokens, so the lengths do not change the video. The lengths decide which programs are
    compiled. With `batched`, all prompts get the same lengths.
    """
    lengths = [
        Lengths(_covering_length(text.mask, LENGTHS), _covering_length(text.glyph_mask, GLYPH_LENGTHS))
        for text in texts
    ]
    if batched:
        lengths = [Lengths(*map(max, zip(*lengths, strict=True)))] * len(texts)
    return tuple(lengths)


def _covering_length(mask: Shaped[Array | np.ndarray, "B S"], lengths: Sequence[int]) -> int:
    """Choose the smallest length that covers all True entries of a mask, or the last length if none does.

    A traced mask has no known entries, so its full length is returned.
    """
    if isinstance(mask, Tracer):
        return mask.shape[1]
    num_needed = int(np.max(np.nonzero(_as_booleans(mask))[1], initial=-1)) + 1
    return next((length for length in lengths if length >= num_needed), lengths[-1])


def _as_booleans(mask: Shaped[Array | np.ndarray, "B S"]) -> Bool[Array | np.ndarray, "B S"]:
    """Convert a mask to booleans, on the host unless it is traced. The reference's files store masks as numbers."""
    return mask.astype(bool) if isinstance(mask, Tracer) else np.asarray(mask) != 0


def size_for_image(picture: tuple[int, ...], side: int, grid: int) -> tuple[int, int]:
    """Choose the (height, width) of a video for an image [H W 3]: the model's size with the nearest aspect ratio.

    Ignores sizes that are further from a square than the image is. Follows the reference's
    pipelines/hunyuan_video1_5/image_processor.py, which rounds the ratios of the sizes to five digits.
    """
    ratio = picture[0] / picture[1]
    sizes = list(candidate_sizes(side, grid))
    gaps = [round(height / width, 5) - ratio for height, width in sizes]
    candidates = [(abs(gap), index) for index, gap in enumerate(gaps) if (gap <= 0 if ratio >= 1 else gap >= 0)]
    return sizes[min(candidates)[1]]


def candidate_sizes(side: int, grid: int) -> Iterator[tuple[int, int]]:
    """Yield sizes (height, width) with nearly the area `side`². Both sides are multiples of `grid`.

    For each height, the widths run from the largest width of the next greater height to the largest width of this
    height.
    """
    area = round((side / grid) ** 2)
    for height in range(area, 0, -1):
        for width in range(max(1, area // (height + 1)), area // height + 1):
            if max(height, width) <= MAX_ASPECT_RATIO * min(height, width):
                yield height * grid, width * grid


def fit_image(picture: Picture, size: tuple[int, int], resize: str) -> PictureOfAnySize:
    """Fit an image to (height, width). To crop, first scale the image to a size that is rounded down to whole
    pixels."""
    if resize != "crop":
        return fit_to_size(picture, size, resize)
    (height, width), (image_height, image_width, _) = size, picture.shape
    enlarged_size = (
        (height, image_width * height // image_height)
        if image_width * height >= image_height * width
        else (image_height * width // image_width, width)
    )
    return fit_to_size(fit_to_size(picture, enlarged_size, "stretch"), size, "crop")
