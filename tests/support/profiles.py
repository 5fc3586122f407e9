# SPDX-License-Identifier: Apache-2.0
"""Small ICC profiles."""

import struct
from collections.abc import Sequence
from io import BytesIO

import numpy as np
from PIL import Image, ImageCms

WHITE = (0.9642, 1.0, 0.8249)  # D50


def _fixed(*values: float) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def profile(gamma: float, primaries: Sequence[Sequence[float]] = ()) -> bytes:
    """Return an RGB profile with the XYZ of its primaries under D50, or a grey profile without primaries."""
    curve = struct.pack(">4s4xIH2x", b"curv", 1, round(gamma * 256))
    tags = {
        b"desc": struct.pack(">4s4xI5s78x1x", b"desc", 5, b"test"),
        b"cprt": struct.pack(">4s4x4s", b"text", b"none"),
        b"wtpt": b"XYZ \0\0\0\0" + _fixed(*WHITE),
    }
    for name, colour in zip("rgb", primaries, strict=False):
        tags[f"{name}XYZ".encode()] = b"XYZ \0\0\0\0" + _fixed(*colour)
        tags[f"{name}TRC".encode()] = curve
    if not primaries:
        tags[b"kTRC"] = curve
    table, body = struct.pack(">I", len(tags)), b""
    for name, data in tags.items():
        table += struct.pack(">4sII", name, 132 + 12 * len(tags) + len(body), len(data))
        body += data
    kind = b"RGB " if primaries else b"GRAY"
    size = 128 + len(table) + len(body)
    head = struct.pack(
        ">I4x4s4s4s4s12x4s28x12s48x", size, b"\2\x40\0\0", b"mntr", kind, b"XYZ ", b"acsp", _fixed(*WHITE)
    )
    return head + table + body


P3 = profile(2.2, ((0.5151, 0.2412, -0.0011), (0.2920, 0.6922, 0.0419), (0.1571, 0.0666, 0.7841)))
ADOBE = profile(2.2, ((0.6097, 0.3111, 0.0195), (0.2053, 0.6257, 0.0609), (0.1492, 0.0632, 0.7446)))
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def by_littlecms(image: Image.Image, icc: bytes) -> np.ndarray:
    """Return a picture in sRGB, as LittleCMS converts it."""
    source, target = ImageCms.ImageCmsProfile(BytesIO(icc)), ImageCms.createProfile("sRGB")
    converted = ImageCms.profileToProfile(image, source, target, outputMode="RGB")
    assert converted is not None
    return np.asarray(converted)
