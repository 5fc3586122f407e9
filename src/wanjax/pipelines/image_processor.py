# SPDX-License-Identifier: Apache-2.0
"""Preprocessing of pictures for CLIP's vision tower: scaling, cropping and normalising."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from PIL import Image

from wanjax.checkpoints.sources import read_json
from wanjax.errors import WanjaxError
from wanjax.media.pictures import Picture, PictureOfAnySize

# Entries of preprocessor_config.json, and the only value of each that is implemented.
STEPS = {
    "do_resize": True,
    "do_center_crop": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 3,  # bicubic
    "rescale_factor": 1 / 255,
}


@dataclass(frozen=True)
class ImageProcessor:
    """Scales the shorter edge to `edge` pixels, crops the middle to `crop`, subtracts `mean` and divides by `std`.

    Follows transformers' CLIPImageProcessor, with Pillow's bicubic filter.
    """

    edge: int
    crop: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def load(cls, folder: Path) -> "ImageProcessor":
        """Reads an `image_processor` folder in the layout of transformers.

        Raises WanjaxError where preprocessor_config.json cannot be read, has an unsupported value or lacks an entry.
        """
        json = read_json(folder / "preprocessor_config.json")
        for entry, offered in STEPS.items():
            if (value := json.get(entry, offered)) != offered:
                raise WanjaxError(f"the image processor's {entry} {value!r} is not offered: {offered!r} is")
        try:
            size, crop = json["size"], json["crop_size"]
            return cls(
                edge=size["shortest_edge"] if isinstance(size, Mapping) else size,
                crop=(crop["height"], crop["width"]) if isinstance(crop, Mapping) else (crop, crop),
                mean=tuple(json["image_mean"]),
                std=tuple(json["image_std"]),
            )
        except KeyError as missing:
            raise WanjaxError(f"{folder}'s preprocessor_config.json has no {missing.args[0]}") from None

    def __call__(self, pictures: Sequence[PictureOfAnySize]) -> Float[np.ndarray, "B _H _W 3"]:
        """Returns the preprocessed pictures, which then have one size, as float32."""
        return np.stack([self._one(picture) for picture in pictures])

    def _one(self, picture: Picture) -> Float[np.ndarray, "_H _W 3"]:
        image = Image.fromarray(picture)
        short = min(image.size)
        width, height = (int(self.edge * side / short) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        top, left = (height - self.crop[0]) // 2, (width - self.crop[1]) // 2
        pixels = np.asarray(image.crop((left, top, left + self.crop[1], top + self.crop[0])), np.float32)
        return (pixels / np.float32(255) - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
