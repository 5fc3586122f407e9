# SPDX-License-Identifier: Apache-2.0
"""Preprocessing of images for vision towers: scaling, cropping and normalising, with Pillow's filters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float
from PIL import Image

from wanjax.checkpoints.sources import read_json
from wanjax.errors import WanjaxError
from wanjax.media.pictures import Picture, PictureOfAnySize

# Entries of preprocessor_config.json, each with the only supported value.
REQUIRED_ENTRIES = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
REQUIRED_ENTRIES_WITH_CROP = {**REQUIRED_ENTRIES, "do_center_crop": True, "resample": 3}  # 3 means bicubic
Colour = tuple[float, float, float]
Processor = TypeVar("Processor")


@dataclass(frozen=True)
class ImageProcessor:
    """Scale the shorter edge to `edge` pixels, crop the centre to `crop`, subtract `mean` and divide by `std`.

    Follows transformers' CLIPImageProcessor, with Pillow's bicubic filter. With `stretch`, both edges are scaled to
    `crop` instead, as in wan/modules/clip.py of Wan-Video/Wan2.1.
    """

    edge: int
    crop: tuple[int, int]
    mean: Colour
    std: Colour

    @classmethod
    def load(cls, folder: Path) -> "ImageProcessor":
        """Read an `image_processor` folder in the layout of transformers.

        Raises WanjaxError if preprocessor_config.json cannot be read, lacks an entry or has an unsupported value.
        """

        def read(json: Mapping[str, Any]) -> ImageProcessor:
            size, crop = json["size"], json["crop_size"]
            edge = size["shortest_edge"] if isinstance(size, Mapping) else size
            return cls(edge, _height_and_width(crop), tuple(json["image_mean"]), tuple(json["image_std"]))

        return _load(folder, REQUIRED_ENTRIES_WITH_CROP, read)

    def __call__(
        self, pictures: Sequence[PictureOfAnySize], *, stretch: bool = False
    ) -> Float[np.ndarray, "B _H _W 3"]:
        """Preprocess images to one size, as float32."""
        resized = [
            stretch_bicubic(picture, self.crop) if stretch else np.asarray(self._resize_and_crop(picture), np.float32)
            for picture in pictures
        ]
        return np.stack([_normalise(pixels, self.mean, self.std) for pixels in resized])

    def _resize_and_crop(self, picture: Picture) -> Image.Image:
        image = Image.fromarray(picture)
        short = min(image.size)
        width, height = (int(self.edge * side / short) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        top, left = (height - self.crop[0]) // 2, (width - self.crop[1]) // 2
        return image.crop((left, top, left + self.crop[1], top + self.crop[0]))


@dataclass(frozen=True)
class StretchingImageProcessor:
    """Scale an image to `size`, ignoring its aspect ratio, subtract `mean` and divide by `std`.

    Follows transformers' SiglipImageProcessor, with one of Pillow's filters.
    """

    size: tuple[int, int]
    resample: Image.Resampling
    mean: Colour
    std: Colour

    @classmethod
    def load(cls, folder: Path) -> "StretchingImageProcessor":
        """Read a `feature_extractor` folder in transformers' layout. Raises the errors of `ImageProcessor.load`."""

        def read(json: Mapping[str, Any]) -> StretchingImageProcessor:
            size, resample = _height_and_width(json["size"]), Image.Resampling(json.get("resample", 3))
            return cls(size, resample, tuple(json["image_mean"]), tuple(json["image_std"]))

        return _load(folder, REQUIRED_ENTRIES, read)

    def __call__(self, pictures: Sequence[PictureOfAnySize]) -> Float[np.ndarray, "B _H _W 3"]:
        """Preprocess images to one size, as float32."""
        return np.stack([_normalise(self._resize(picture), self.mean, self.std) for picture in pictures])

    def _resize(self, picture: Picture) -> Float[np.ndarray, "_H _W 3"]:
        height, width = self.size
        return np.asarray(Image.fromarray(picture).resize((width, height), self.resample), np.float32)


def stretch_bicubic(picture: Picture, size: tuple[int, int]) -> Float[np.ndarray, "_H _W 3"]:
    """Resize an image to (height, width) by cubic interpolation without antialiasing. The aspect ratio is not kept.

    Each pixel is interpolated from the nearest four along each axis, at any scale, as in torch's `interpolate`. Values
    are not clipped: near sharp edges they exceed the range from 0 to 255.
    """
    resized: np.ndarray = picture
    for axis, length in enumerate(size):
        step, half = (
            np.float32(resized.shape[axis] / length),
            np.float32(0.5),
        )  # float32, so that the rounding of positions equals the reference's rounding
        positions = (np.arange(length, dtype=np.float32) + half) * step - half
        taps = np.floor(positions).astype(int)[:, None] + np.arange(-1, 3)
        weights = _cubic(np.abs(positions[:, None] - taps.astype(np.float32)))
        neighbours = resized.take(taps.clip(0, resized.shape[axis] - 1), axis).astype(np.float32)
        resized = (neighbours * np.expand_dims(weights, [0, 3] if axis else [2, 3])).sum(axis + 1)
    return resized


def _cubic(x: Float[np.ndarray, "_L 4"]) -> Float[np.ndarray, "_L 4"]:
    """Compute interpolation weights for pixels at distances below 2, by Keys' cubic kernel with a = -0.75."""
    a = -0.75
    return np.where(x <= 1, ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a)


def _load(folder: Path, required: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Processor]) -> Processor:
    """Check the entries of a preprocessor_config.json, and build the processor with `read`."""
    json = read_json(folder / "preprocessor_config.json")
    for entry, supported in required.items():
        if (value := json.get(entry, supported)) != supported:
            raise WanjaxError(f"the image processor's {entry} must be {supported!r}, got {value!r}")
    try:
        return read(json)
    except KeyError as missing:
        raise WanjaxError(f"{folder}'s preprocessor_config.json has no {missing.args[0]}") from None
    except ValueError as error:
        raise WanjaxError(f"{folder}'s preprocessor_config.json has an unsupported entry: {error}") from None


def _height_and_width(size: Any) -> tuple[int, int]:
    return (size["height"], size["width"]) if isinstance(size, Mapping) else (size, size)


def _normalise(pixels: Float[np.ndarray, "_H _W 3"], mean: Colour, std: Colour) -> Float[np.ndarray, "_H _W 3"]:
    return (pixels / np.float32(255) - np.array(mean, np.float32)) / np.array(std, np.float32)
