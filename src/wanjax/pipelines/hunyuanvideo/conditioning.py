# SPDX-License-Identifier: Apache-2.0
"""The output of HunyuanVideo's encode stage, its reduction to what a step needs, and the sizes of image to video."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Shaped

from wanjax.media.pictures import Picture, PictureOfAnySize, fit
from wanjax.pipelines.hunyuanvideo.text import GLYPH_LENGTH, TEXT_LENGTH

LENGTHS = (128, 256, 512, TEXT_LENGTH)
"""The lengths in tokens that a prompt is padded to. Steps are compiled once for each."""
GLYPH_LENGTHS = (0, GLYPH_LENGTH)
MAX_ASPECT_RATIO = 4  # the highest ratio of the longer side to the shorter among the reference's sizes


class HunyuanVideoConditioning(NamedTuple):
    """The output of `encode` for a prompt, the negative prompt and an image. Each array has a first axis of size 1.

    In a batch the first axis has a prompt for each video, and all videos share the image. `prompt_embeds` are the
    features of the prompt, `prompt_embeds_2` of the text that it quotes; both are zeros outside their masks.
    `image_embeds` are the features of the image, and `image_latents` are its latents. `video_shape` is the shape that
    they were encoded for, a `VideoShape`.
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
    """A prompt for the transformer: its features and mask, and those of its quoted text, which may have no tokens."""

    embeds: Any  # [B S E]
    mask: Any  # [B S]
    glyphs: Any  # [B _S _E]
    glyph_mask: Any  # [B _S]


class Lengths(NamedTuple):
    """The numbers of tokens that are used of a prompt, and of the text that it quotes."""

    prompt: int
    glyphs: int

    def cut(self, text: Text) -> Text:
        """Return a text cut to these lengths, without the padding after them."""
        masks = _as_booleans(text.mask)[:, : self.prompt], _as_booleans(text.glyph_mask)[:, : self.glyphs]
        return Text(text.embeds[:, : self.prompt], masks[0], text.glyphs[:, : self.glyphs], masks[1])


def used_lengths(texts: Sequence[Text], *, together: bool) -> tuple[Lengths, ...]:
    """Return the lengths of texts without most of their padding, from `LENGTHS` and `GLYPH_LENGTHS`.

    Masked tokens change nothing, so the lengths only decide which step is compiled. Texts that are encoded `together`
    get one length.
    """
    lengths = [
        Lengths(_covering_length(text.mask, LENGTHS), _covering_length(text.glyph_mask, GLYPH_LENGTHS))
        for text in texts
    ]
    if together:
        lengths = [Lengths(*map(max, zip(*lengths, strict=True)))] * len(texts)
    return tuple(lengths)


def _covering_length(mask: Shaped[Array | np.ndarray, "B S"], lengths: Sequence[int]) -> int:
    """Return the smallest length that covers all tokens of a mask, or the last one; a traced mask's full length."""
    if isinstance(mask, Tracer):
        return mask.shape[1]
    needed = int(np.max(np.nonzero(_as_booleans(mask))[1], initial=-1)) + 1
    return next((length for length in lengths if length >= needed), lengths[-1])


def _as_booleans(mask: Shaped[Array | np.ndarray, "B S"]) -> Bool[Array | np.ndarray, "B S"]:
    """Return a mask as booleans, on the host if possible. It may hold numbers, as in the reference's files."""
    return mask.astype(bool) if isinstance(mask, Tracer) else np.asarray(mask) != 0


def size_for_image(picture: tuple[int, ...], side: int, grid: int) -> tuple[int, int]:
    """Return the (height, width) of a video for an image [H W 3]: the model's size with the nearest aspect ratio.

    If two sizes are near, it is the one nearer to a square. Follows the reference's
    pipelines/hunyuan_video1_5/image_processor.py, which rounds the ratios of the sizes to five digits.
    """
    ratio = picture[0] / picture[1]
    sizes = list(candidate_sizes(side, grid))
    gaps = [round(height / width, 5) - ratio for height, width in sizes]
    candidates = [(abs(gap), index) for index, gap in enumerate(gaps) if (gap <= 0 if ratio >= 1 else gap >= 0)]
    return sizes[min(candidates)[1]]


def candidate_sizes(side: int, grid: int) -> Iterator[tuple[int, int]]:
    """Yield the sizes (height, width), in multiples of `grid`, whose areas are close to that of a square of this side.

    The widths of a height start at the largest width of the next height, and end at its own largest.
    """
    area = round((side / grid) ** 2)
    for height in range(area, 0, -1):
        for width in range(max(1, area // (height + 1)), area // height + 1):
            if max(height, width) <= MAX_ASPECT_RATIO * min(height, width):
                yield height * grid, width * grid


def fit_image(picture: Picture, size: tuple[int, int], resize: str) -> PictureOfAnySize:
    """Fit an image to (height, width). For a crop, first scale it to a size that is rounded down."""
    if resize != "crop":
        return fit(picture, size, resize)
    (height, width), (image_height, image_width, _) = size, picture.shape
    scaled = (
        (height, image_width * height // image_height)
        if image_width * height >= image_height * width
        else (image_height * width // image_width, width)
    )
    return fit(fit(picture, scaled, "stretch"), size, "crop")
