# SPDX-License-Identifier: Apache-2.0
"""Colour profiles: each interface converts pictures to sRGB, and the values of masks stay unchanged."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from tests.support.profiles import ADOBE, P3, SRGB, by_littlecms, profile
from tests.support.video_files import max_difference
from wanjax.media.inputs import CONTROL_VIDEO, INPUT_SPECS, MASK
from wanjax.media.pictures import read_clip, read_picture, read_pictures
from wanjax.serve.limits import Limits
from wanjax.serve.uploads import save_pictures

PATCHES = np.array([[200, 60, 60], [60, 180, 80], [50, 80, 200], [220, 170, 140], [128, 128, 128]], np.uint8)
PICTURE = PATCHES.repeat(16, 0)[None].repeat(48, 0)
PROFILES = {"P3": P3, "Adobe": ADOBE, "sRGB": SRGB, "broken": P3[:200], "none": b""}
LOSSY = {"jpeg": {"quality": 95}, "webp": {"quality": 95}, "avif": {"quality": 95}}
CLIP_LIMITS = {"frames": 9, "fps": 8}


def encode_image(image: Image.Image, suffix: str, icc: bytes, **options) -> bytes:
    image.save(file := BytesIO(), suffix, icc_profile=icc, **options)
    return file.getvalue()


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("suffix", ["png", "jpeg", "webp", "tiff", "avif"])
def test_a_picture_is_converted_to_srgb_at_every_interface(tmp_path, name, suffix):
    icc, image = PROFILES[name], Image.fromarray(PICTURE)
    data = encode_image(image, suffix, icc, **LOSSY.get(suffix, {}))
    (tmp_path / "clip").mkdir()
    file = tmp_path / "clip" / f"a.{suffix}"
    file.write_bytes(data)
    stored = np.asarray(Image.open(BytesIO(data)).convert("RGB"))
    expected, max_error = (by_littlecms(Image.fromarray(stored), icc), 3) if name in ("P3", "Adobe") else (stored, 1)
    if name in ("P3", "Adobe"):
        assert max_difference(expected, stored) > 15
    saved = {
        field: save_pictures({field: [data]}, INPUT_SPECS, tmp_path, Limits(10**7))[field]
        for field in ("image", "references", "video", "mask")
    }
    read = read_pictures(
        {"image": file, "references": [file], "video": tmp_path / "clip"}, INPUT_SPECS.values(), **CLIP_LIMITS
    )
    interfaces = [
        *(read["image"], read["references"][0], read["video"][0]),
        *(read_picture(Image.open(BytesIO(data))), read_clip([Image.open(BytesIO(data))], **CLIP_LIMITS)[0]),
        *(read_picture(tmp_path / x) for x in (saved["image"], *saved["references"])),
        read_clip(tmp_path / saved["video"], **CLIP_LIMITS)[0],
    ]
    for picture in interfaces:
        assert max_difference(picture, expected) <= max_error
    values = read_pictures({"video": file, "mask": tmp_path / saved["mask"]}, (CONTROL_VIDEO, MASK), **CLIP_LIMITS)
    assert max_difference(values["mask"][0], stored) <= 1
    assert max_difference(values["video"][0], stored) == 0


@pytest.mark.parametrize("suffix", ["gif", "png", "webp", "avif"])
def test_an_animation_is_converted_to_srgb(tmp_path, suffix):
    frames = [Image.fromarray(np.roll(PICTURE, 16 * i, 1)) for i in range(3)]
    data = encode_image(frames[0], suffix, P3, save_all=True, append_images=frames[1:], duration=125, quality=95)
    (tmp_path / f"a.{suffix}").write_bytes(data)
    clip = read_clip(tmp_path / f"a.{suffix}", **CLIP_LIMITS)
    if suffix != "gif":  # GIF has no profiles
        for frame, read in zip(frames, clip, strict=True):
            assert np.abs(by_littlecms(frame, P3)[24, 8::16].astype(int) - read[24, 8::16]).max() <= 5


def test_profiles_of_other_modes_are_used(tmp_path):
    """Transparent parts stay, a grey picture may have a profile of grey or RGB, and other profiles are ignored."""
    image, expected = Image.fromarray(PICTURE), by_littlecms(Image.fromarray(PICTURE), P3)
    clear = image.convert("RGBA")
    clear.putalpha(Image.fromarray(np.where(np.arange(80) < 40, 255, 0).astype(np.uint8)[None].repeat(48, 0)))
    palette = image.quantize(8)
    for mode, image_with_mode in (("RGBA", clear), ("P", palette)):
        (tmp_path / "a.png").write_bytes(encode_image(image_with_mode, "png", P3))
        read = read_picture(tmp_path / "a.png")
        assert max_difference(read[:, :40], expected[:, :40]) <= 1
        assert max_difference(read[:, 40:], expected[:, 40:] if mode == "P" else expected[:, 40:] * 0 + 255) <= 1
    grey, linear = image.convert("L"), profile(1.0)
    for icc in (linear, P3):
        (tmp_path / "a.png").write_bytes(encode_image(grey, "png", icc))
        result = read_picture(tmp_path / "a.png")
        assert max_difference(result, by_littlecms(grey if icc is linear else grey.convert("RGB"), icc)) <= 1
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    (tmp_path / "a.png").write_bytes(encode_image(deep, "png", linear))
    assert max_difference(read_picture(tmp_path / "a.png"), by_littlecms(grey, linear)) <= 1
    (tmp_path / "a.tiff").write_bytes(encode_image(image.convert("CMYK"), "tiff", P3))
    assert max_difference(read_picture(tmp_path / "a.tiff"), PICTURE) <= 1
    (tmp_path / "a.png").write_bytes(encode_image(image, "png", linear))
    assert max_difference(read_picture(tmp_path / "a.png"), PICTURE) == 0


def test_a_rotated_photograph_is_converted_to_srgb(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "a.jpeg").write_bytes(encode_image(Image.fromarray(PICTURE), "jpeg", P3, quality=95, exif=exif))
    read = np.rot90(read_picture(tmp_path / "a.jpeg"))
    assert np.abs(read[24, 8::16].astype(int) - by_littlecms(Image.fromarray(PICTURE), P3)[24, 8::16]).max() <= 3
