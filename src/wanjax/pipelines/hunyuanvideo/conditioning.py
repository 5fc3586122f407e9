# SPDX-License-Identifier: Apache-2.0
"""The output of HunyuanVideo's first stage, the part of it that a step needs, and the sizes of videos of a picture."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Shaped

from wanjax.media.pictures import Picture, PictureOfAnySize, fit
from wanjax.pipelines.hunyuanvideo.text import GLYPH_LENGTH, TEXT_LENGTH

LENGTHS = (128, 256, 512, TEXT_LENGTH)
"""The numbers of a prompt's tokens for which steps are compiled."""
GLYPH_LENGTHS = (0, GLYPH_LENGTH)
LONGEST_RATIO = 4  # of the longer side to the shorter, in the reference's sizes


class HunyuanVideoConditioning(NamedTuple):
    """The output of `encode` for a prompt, the negative prompt and a picture; each array has a first axis of size 1.

    Videos that are made together have a prompt each on that axis, and share the picture. `prompt_embeds` are features
    of the prompt, `prompt_embeds_2` of the text that it quotes; both are zeros outside their masks. `image_embeds` are
    features of a picture, and `image_latents` the picture itself. `video_shape` is what they were encoded for, a
    `VideoShape`.
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
    """A prompt for the transformer: features and mask, and those of quoted text, which may have no token."""

    embeds: Any  # [B S E]
    mask: Any  # [B S]
    glyphs: Any  # [B _S _E]
    glyph_mask: Any  # [B _S]


class Lengths(NamedTuple):
    """The numbers of a text's tokens that are read: of the prompt, and of what it quotes."""

    prompt: int
    glyphs: int

    def of(self, text: Text) -> Text:
        """Return a text without the padding behind these lengths."""
        masks = _booleans(text.mask)[:, : self.prompt], _booleans(text.glyph_mask)[:, : self.glyphs]
        return Text(text.embeds[:, : self.prompt], masks[0], text.glyphs[:, : self.glyphs], masks[1])


def lengths_of(texts: Sequence[Text], *, together: bool) -> tuple[Lengths, ...]:
    """Return the lengths of texts without most of their padding, in `LENGTHS` and `GLYPH_LENGTHS`.

    A masked token changes nothing, so the lengths decide only which step is compiled. Texts that are read `together`
    get one length.
    """
    lengths = [Lengths(_enough(text.mask, LENGTHS), _enough(text.glyph_mask, GLYPH_LENGTHS)) for text in texts]
    if together:
        lengths = [Lengths(*map(max, zip(*lengths, strict=True)))] * len(texts)
    return tuple(lengths)


def _enough(mask: Shaped[Array | np.ndarray, "B S"], lengths: Sequence[int]) -> int:
    """Return the first of the lengths behind which a mask has no token, else the last; all of one that is traced."""
    if isinstance(mask, Tracer):
        return mask.shape[1]
    needed = int(np.max(np.nonzero(_booleans(mask))[1], initial=-1)) + 1
    return next((length for length in lengths if length >= needed), lengths[-1])


def _booleans(mask: Shaped[Array | np.ndarray, "B S"]) -> Bool[Array | np.ndarray, "B S"]:
    """Return a mask, which may be one of numbers as in the reference's files, as booleans, on the host if possible."""
    return mask.astype(bool) if isinstance(mask, Tracer) else np.asarray(mask) != 0


def size_of(picture: tuple[int, ...], side: int, grid: int) -> tuple[int, int]:
    """Return the (height, width) of a video of a picture [H W 3]: the model's size with the nearest proportions.

    Of two such sizes, the one that is nearer to a square. Follows the reference's
    pipelines/hunyuan_video1_5/image_processor.py, which rounds the sizes' proportions to five digits.
    """
    ratio = picture[0] / picture[1]
    sizes = list(sizes_like(side, grid))
    gaps = [round(height / width, 5) - ratio for height, width in sizes]
    nearer = [(abs(gap), index) for index, gap in enumerate(gaps) if (gap <= 0 if ratio >= 1 else gap >= 0)]
    return sizes[min(nearer)[1]]


def sizes_like(side: int, grid: int) -> Iterator[tuple[int, int]]:
    """Yield the sizes (height, width), in multiples of `grid`, whose areas are near that of a square of this side.

    The widths of each height begin with the greatest of the next height, and end with its own greatest.
    """
    area = round((side / grid) ** 2)
    for height in range(area, 0, -1):
        for width in range(max(1, area // (height + 1)), area // height + 1):
            if max(height, width) <= LONGEST_RATIO * min(height, width):
                yield height * grid, width * grid


def fitted(picture: Picture, size: tuple[int, int], resize: str) -> PictureOfAnySize:
    """Return the picture in a (height, width); a cropped one is first scaled to a size that is rounded down."""
    if resize != "crop":
        return fit(picture, size, resize)
    (height, width), (tall, wide, _) = size, picture.shape
    scaled = (height, wide * height // tall) if wide * height >= tall * width else (tall * width // wide, width)
    return fit(fit(picture, scaled, "stretch"), size, "crop")
