# SPDX-License-Identifier: Apache-2.0
"""From a picture to what CLIP's vision tower reads: scaled, its middle cut out, and its colours normalised."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from PIL import Image

from wanjax.errors import WanjaxError
from wanjax.pictures import Picture
from wanjax.sources import read_json

# Steps that a preprocessor_config.json can choose otherwise, as they are here.
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
    """Scales the shorter edge to `edge` pixels, cuts out the middle `crop`, takes off `mean` and divides by `std`.

    Follows transformers' CLIPImageProcessor, with Pillow's bicubic filter.
    """

    edge: int
    crop: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def load(cls, folder: Path) -> "ImageProcessor":
        """Reads an `image_processor` folder in the layout of transformers.

        Raises WanjaxError where preprocessor_config.json cannot be read, asks for another step or lacks an entry.
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

    def __call__(self, pictures: Sequence[Picture]) -> Float[np.ndarray, "B H W 3"]:
        """The pictures, all of one size then, as float32."""
        return np.stack([self._one(picture) for picture in pictures])

    def _one(self, picture: Picture) -> Float[np.ndarray, "H W 3"]:
        image = Image.fromarray(picture)
        short = min(image.size)
        width, height = (int(self.edge * side / short) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        top, left = (height - self.crop[0]) // 2, (width - self.crop[1]) // 2
        pixels = np.asarray(image.crop((left, top, left + self.crop[1], top + self.crop[0])), np.float32)
        return (pixels / np.float32(255) - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
