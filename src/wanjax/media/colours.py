# SPDX-License-Identifier: Apache-2.0
"""Conversion of a picture's colours from its ICC profile to sRGB, in which models are trained."""

from collections.abc import Callable
from io import BytesIO

from PIL import Image, ImageCms

LARGEST = 2**22  # bytes of a profile
MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}  # of Pillow, by the colour space of a profile
OF_GREY = ("1", "L", "LA", "La", *("I;16", "I;16L", "I;16B", "I;16N", "I", "F"))
BROKEN = (ImageCms.PyCMSError, OSError, ValueError, TypeError, MemoryError)  # raised for profiles that are broken

Conversion = Callable[[Image.Image], Image.Image]


def conversion(image: Image.Image) -> Conversion | None:
    """Return a function that converts images with this one's profile, whole or in part, to sRGB.

    It takes RGB or CMYK, of a grey image L, and RGB or L with transparency, which stays. None where the image has no
    profile, or one that is broken or does not belong to its kind of colours.
    """
    profile = image.info.get("icc_profile")
    if not isinstance(profile, bytes) or not 0 < len(profile) <= LARGEST:
        return None
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        mode = MODES.get(str(getattr(source.profile, "xcolor_space", "")).strip())
        fits = {"L": image.mode in OF_GREY, "CMYK": image.mode == "CMYK", "RGB": image.mode not in ("CMYK", "LAB")}
        if mode is None or not fits[mode]:
            return None
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except BROKEN:
        return None

    def convert(part: Image.Image) -> Image.Image:
        alpha = part.getchannel("A") if part.mode in ("RGBA", "LA") else None
        converted = ImageCms.applyTransform(part if part.mode == mode else part.convert(mode), transform)
        assert converted is not None, "only a transform in place returns nothing"
        if alpha is not None:
            converted.putalpha(alpha)
        return converted

    return convert
