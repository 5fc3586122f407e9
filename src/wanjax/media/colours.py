# SPDX-License-Identifier: Apache-2.0
"""Conversion of a picture's colours from its ICC profile to sRGB, the colour space of the training data."""

from collections.abc import Callable
from io import BytesIO

from PIL import Image, ImageCms

MAX_PROFILE_BYTES = 2**22
PILLOW_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}  # modes of images by the colour space of a profile
GREY_MODES = ("1", "L", "LA", "La", *("I;16", "I;16L", "I;16B", "I;16N", "I", "F"))
PROFILE_ERRORS = (ImageCms.PyCMSError, OSError, ValueError, TypeError, MemoryError)  # raised for broken profiles

Conversion = Callable[[Image.Image], Image.Image]


def srgb_conversion(image: Image.Image) -> Conversion | None:
    """Return a function that converts this image, or a part of it, from the image's ICC profile to sRGB.

    The function takes the modes RGB, CMYK and L, and keeps the alpha channel of RGBA and LA. Returns None if the image
    has no profile, or if the profile is broken or does not fit the image's mode.
    """
    profile = image.info.get("icc_profile")
    if not isinstance(profile, bytes) or not 0 < len(profile) <= MAX_PROFILE_BYTES:
        return None
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        mode = PILLOW_MODES.get(str(getattr(source.profile, "xcolor_space", "")).strip())
        mode_matches = {
            "L": image.mode in GREY_MODES,
            "CMYK": image.mode == "CMYK",
            "RGB": image.mode not in ("CMYK", "LAB"),
        }
        if mode is None or not mode_matches[mode]:
            return None
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except PROFILE_ERRORS:
        return None

    def convert(region: Image.Image) -> Image.Image:
        alpha = region.getchannel("A") if region.mode in ("RGBA", "LA") else None
        converted = ImageCms.applyTransform(region if region.mode == mode else region.convert(mode), transform)
        assert converted is not None, "applyTransform returns None only in place"
        if alpha is not None:
            converted.putalpha(alpha)
        return converted

    return convert
