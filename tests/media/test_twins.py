# SPDX-License-Identifier: Apache-2.0
"""Pictures of each mode and clips of each bit depth, compared with 8 bits, and their transparent parts."""

import math
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.quick import quick
from tests.support.video_files import ffmpeg as encode
from tests.support.video_files import max_difference
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError, WanjaxWarning
from wanjax.media.inputs import CONTROL_VIDEO, IMAGE, INPUT_SPECS, LAST_IMAGE, MASK, REFERENCES, VIDEO
from wanjax.media.pictures import read_clip, read_picture, read_pictures
from wanjax.serve.limits import Limits
from wanjax.serve.uploads import save_pictures

ROWS, COLUMNS = np.mgrid[0:48, 0:64]
CLIP = np.stack([np.stack([ROWS * 3 + 40, COLUMNS * 2 + 60, ROWS + COLUMNS + 9 * i], -1) for i in range(6)]).astype(
    np.uint8
)
GREY = CLIP[0, ..., 1]
CLIP_LIMITS = {"frames": 100, "fps": 8}
ORIENTATION = 0x0112


def ffmpeg(*arguments: str | Path, frames: np.ndarray = CLIP) -> None:
    encode(*arguments, frames=frames, rate="8")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV", "LAB"])
def test_pictures_of_each_colour_mode_are_read(mode):
    image = Image.fromarray(CLIP[0])
    image = image.convert("RGBA").convert(mode) if mode == "RGBa" else image.convert(mode)
    max_error = 16 if mode in ("HSV", "LAB") else 3  # their 8 bits have fewer colours
    assert max_difference(read_picture(image), CLIP[0]) <= max_error
    assert np.abs(read_picture(image).astype(int) - CLIP[0]).mean() <= 2


@pytest.mark.parametrize("mode", ["L", "LA", "La", "P", "PA", "1"])
def test_pictures_of_each_grey_mode_are_read(tmp_path, mode):
    image, expected = Image.fromarray(GREY), np.repeat(GREY[..., None], 3, axis=-1)
    if mode == "La":
        image = image.convert("LA")
    if mode == "1":
        image, expected = Image.fromarray(GREY > 99), np.where(expected > 99, 255, 0)
    assert max_difference(read_picture(image.convert(mode)), expected) <= 3


DEEP = {
    "int32": GREY.astype(np.int32),
    "int32 of 16 bits": GREY.astype(np.int32) * 257,
    "uint16": GREY.astype(np.uint16) * 257,
    "uint16, the other byte order": (GREY.astype(np.uint16) * 257).astype(">u2"),
    "float to 1": GREY.astype(np.float32) / 255,
    "float to 255": GREY.astype(np.float32),
    "float to 65535": GREY.astype(np.float32) * 257,
    "float64, of a filter": GREY.astype(np.float64) / 255 + 0.004,
}


@pytest.mark.parametrize("kind", DEEP)
def test_grey_pictures_of_more_bits_are_read(tmp_path, kind):
    image, expected = Image.fromarray(DEEP[kind]), np.repeat(GREY[..., None], 3, axis=-1)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    image.save(tmp_path / "a.tif", exif=exif)
    assert max_difference(read_picture(image), expected) <= 3
    assert max_difference(np.rot90(read_picture(tmp_path / "a.tif")), expected) <= 3
    assert max_difference(read_clip([image, image], **CLIP_LIMITS)[1], expected) <= 3


def test_portable_grey_maps_are_read(tmp_path):
    """A dark PGM of 16 bits stays dark, though Pillow's mode for it has 32 bits; a PFM has floats."""
    (tmp_path / "a.pgm").write_bytes(b"P5 2 1 65535\n" + np.array([0, 257], ">u2").tobytes())
    (tmp_path / "a.pfm").write_bytes(b"Pf\n2 1\n-1.0\n" + np.array([0, 0.5], "<f4").tobytes())
    assert read_picture(tmp_path / "a.pgm")[0, :, 0].tolist() == [0, 1]
    assert read_picture(tmp_path / "a.pfm")[0, :, 0].tolist() == [0, 128]


def test_all_frames_of_a_clip_have_one_white_level(tmp_path):
    """Otherwise a clip that begins with a dark frame would flicker."""
    for i, value in enumerate((0.5, 200)):
        Image.fromarray(np.full((4, 4), value, np.float32)).save(tmp_path / f"{i}.tif")
    assert read_clip(tmp_path, **CLIP_LIMITS)[:, 0, 0, 0].tolist() == [1, 200]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e6])
def test_values_outside_known_ranges_are_refused(value):
    values = np.full((4, 4), 0.5, np.float32)
    values[2, 2] = value
    for read in (read_picture, lambda image: read_clip([Image.fromarray(np.zeros_like(values)), image], **CLIP_LIMITS)):
        with pytest.raises(WanjaxError, match=line_with_words("values 0 1 255 65535")):
            read(Image.fromarray(values))


def half_transparent(mode: str) -> Image.Image:
    """Return a picture whose left half is opaque and grey, and whose right half is transparent."""
    image = Image.new("LA", (64, 48), (90, 255))
    image.paste((90, 0), (32, 0, 64, 48))
    if mode == "P":
        palette = Image.fromarray((np.asarray(image)[..., 1] == 0).astype(np.uint8), "P")
        palette.putpalette([90] * 3 + [33] * 3)
        palette.info["transparency"] = 1
        return palette
    if mode == "PA":
        image = Image.merge("LA", [Image.new("L", image.size), image.getchannel("A")])
        image = Image.frombytes("PA", image.size, image.tobytes())
        image.putpalette([90] * 3)
    return image.convert({"WEBP": "RGBA"}.get(mode, mode))


@pytest.mark.parametrize("mode", ["LA", "RGBA", "PA", "P", "WEBP", "GIF", "I;16"])
def test_each_input_has_its_background(tmp_path, mode):
    """Pictures and clips are on white. Masks and control clips are on black, which changes nothing."""
    if mode == "I;16":
        source = tmp_path / "a.png"
        deep = np.where(np.asarray(half_transparent("LA"))[..., 1] > 0, 90 * 257, 7).astype(np.uint16)
        Image.fromarray(deep).save(source, transparency=7)
    elif mode in ("WEBP", "GIF"):
        source = tmp_path / f"a.{mode.lower()}"
        half_transparent("P" if mode == "GIF" else mode).save(source, lossless=True)
    else:
        source = half_transparent(mode)
    clip = source if isinstance(source, Path) else [source]
    inputs = {"image": source, "last_image": source, "references": [source], "video": clip, "mask": clip}
    for video, video_background in ((VIDEO, 255), (CONTROL_VIDEO, 0)):
        read = read_pictures(inputs, (IMAGE, LAST_IMAGE, REFERENCES, video, MASK), **CLIP_LIMITS)
        for picture, background in ((read["image"], 255), (read["last_image"], 255), (read["references"][0], 255)):
            assert picture[0, [0, 63], 0].tolist() == [90, background]
        assert read["video"][0, 0, [0, 63], 0].tolist() == [90, video_background]
        assert read["mask"][0, 0, [0, 63], 0].tolist() == [90, 0]


FFV1 = [
    *(chroma + bits for chroma in ("yuv420p", "yuv422p", "yuv444p") for bits in ("10le", "12le", "16le")),
    *("gbrp", "gbrp10le", "gbrp12le", "gbrp16le", "bgra", "rgb48le", "rgba64le", "gbrap16le", "yuva444p10le"),
    *("gray", "gray10le", "gray12le", "gray16le", "yuvj420p"),
]
CODECS = [
    *(("a.mkv", "ffv1", pixels) for pixels in FFV1),
    *(("a.mov", "prores_ks", pixels) for pixels in ("yuv422p10le", "yuv444p10le", "yuva444p10le")),
    ("a.mp4", "libx264", "yuv420p10le"),
    ("a.avi", "rawvideo", "bgr24"),
    ("a.mov", "png", "rgb48be"),
    ("a.mov", "qtrle", "argb"),
]
FAST = [("a.mkv", "ffv1", "yuv420p16le"), ("a.mkv", "ffv1", "gray12le"), ("a.mov", "prores_ks", "yuva444p10le")]


@pytest.mark.parametrize(("name", "codec", "pixels"), quick(FAST, CODECS))
def test_clips_of_each_bit_depth_are_read(tmp_path, name, codec, pixels):
    options = ["-crf", "0"] if codec == "libx264" else ["-qscale:v", "1"] if codec == "prores_ks" else []
    ffmpeg("-c:v", codec, *options, "-pix_fmt", pixels, tmp_path / name)
    twin_format = "gray" if pixels.startswith("gray") else "yuv444p" if pixels.startswith(("yuv", "gbr")) else "bgr0"
    ffmpeg("-c:v", "ffv1", "-pix_fmt", twin_format, tmp_path / "twin.mkv")
    assert (
        max_difference(read_clip(tmp_path / name, **CLIP_LIMITS), read_clip(tmp_path / "twin.mkv", **CLIP_LIMITS)) <= 3
    )


@pytest.mark.parametrize(("aspect", "size"), [("2", (48, 128)), ("1/2", (96, 64)), ("64/45", (48, 91))])
def test_pixels_that_are_not_square_are_resized(tmp_path, aspect, size):
    ffmpeg("-vf", f"setsar={aspect}", "-c:v", "ffv1", "-pix_fmt", "gbrp", tmp_path / "a.mkv")
    square = [np.asarray(Image.fromarray(x).resize(size[::-1], Image.Resampling.BICUBIC)) for x in CLIP]
    assert max_difference(read_clip(tmp_path / "a.mkv", **CLIP_LIMITS), np.stack(square)) <= 3


@pytest.mark.parametrize("aspect", ["16", "1/16"])
def test_long_pixels_that_make_a_frame_too_large_are_refused(tmp_path, machine, aspect):
    ffmpeg("-vf", f"setsar={aspect}", "-c:v", "libx264", tmp_path / "a.mp4")
    assert sorted(read_clip(tmp_path / "a.mp4", frames=1, fps=8).shape)[-1] >= 48 * 16
    machine.reads_at_most(max_pixels=64 * 48)
    with pytest.raises(WanjaxError, match=line_with_words("a.mp4 3,072")):
        read_clip(tmp_path / "a.mp4", frames=1, fps=8)


def test_a_video_is_rotated_as_its_metadata_says(tmp_path):
    ffmpeg("-c:v", "libx264", "-crf", "0", "-vf", "setsar=2", tmp_path / "a.mp4")
    rotate = ["-display_rotation", "90", "-i", tmp_path / "a.mp4", "-map", "1:v", "-c", "copy", tmp_path / "b.mp4"]
    ffmpeg(*rotate)
    assert (
        max_difference(
            read_clip(tmp_path / "b.mp4", **CLIP_LIMITS),
            np.rot90(read_clip(tmp_path / "a.mp4", **CLIP_LIMITS), axes=(1, 2)),
        )
        <= 3
    )


def test_frames_of_different_durations_are_read_by_their_times(tmp_path):
    times = "setpts='if(lt(N,3),N,2*N)/8/TB'"
    ffmpeg("-vf", times, "-fps_mode", "vfr", "-c:v", "ffv1", "-pix_fmt", "gbrp", tmp_path / "a.mkv")
    result = read_clip(tmp_path / "a.mkv", **CLIP_LIMITS)
    assert max_difference(result[:10], CLIP[[0, 1, 2, 2, 2, 2, 3, 3, 4, 4]]) == 0


VIDEOS_WITH_ALPHA = [
    ("a.mov", "prores_ks", "yuva444p10le"),
    ("a.mkv", "ffv1", "gbrap16le"),
    ("a.webm", "libvpx-vp9", "yuva420p"),
    ("a.webm", "libvpx", "yuva420p"),
    ("a.mov", "qtrle", "argb"),
]


@pytest.mark.parametrize(("name", "codec", "pixels"), quick(VIDEOS_WITH_ALPHA[::2], VIDEOS_WITH_ALPHA))
def test_a_video_with_transparent_parts_is_read_on_its_background(tmp_path, name, codec, pixels):
    alpha = np.where(COLUMNS < 32, 255, 0).astype(np.uint8)
    rgba = np.concatenate([CLIP * 0 + 90, np.broadcast_to(alpha, (6, 48, 64))[..., None]], axis=-1, dtype=np.uint8)
    options = ["-auto-alt-ref", "0"] if codec == "libvpx" else []
    ffmpeg("-c:v", codec, *options, "-pix_fmt", pixels, tmp_path / name, frames=rgba)
    for video_background, background in (("white", 255), ("black", 0)):
        result = read_clip(tmp_path / name, **CLIP_LIMITS, background=video_background)
        assert max_difference(result[:, :, :24], CLIP[:, :, :24] * 0 + 90) <= 3
        assert max_difference(result[:, :, 40:], CLIP[:, :, 40:] * 0 + background) <= 3


@pytest.mark.parametrize("transfer", ["smpte2084", "arib-std-b67"])
def test_a_video_of_high_dynamic_range_is_converted(tmp_path, transfer):
    """Its reference white becomes the white of other videos, and darker colours stay the same."""
    options = "setparams=color_primaries=bt709:color_trc=bt709:colorspace=gbr:range=pc"
    linear = "zscale=t=linear:npl=203,format=gbrpf32le,zscale=p=bt2020"
    coded = f"zscale=t={transfer}:npl=203:m=bt2020nc:r=tv,format=yuv444p12le"
    ffmpeg("-vf", f"format=gbrp,{options},{linear},{coded}", "-c:v", "ffv1", tmp_path / "a.mkv")
    assert max_difference(read_clip(tmp_path / "a.mkv", **CLIP_LIMITS), CLIP) <= 3


def test_a_folder_is_read_in_natural_order(tmp_path):
    for i in range(1, 13):
        Image.new("L", (8, 6), 10 * i).save(tmp_path / (f"Frame_{i}.png" if i % 2 else f"frame_{i}.PNG"))
    for name in ("._frame_1.png", ".DS_Store", "Thumbs.db", "notes.pdf"):
        (tmp_path / name).write_bytes(b"no picture")
    (tmp_path / "more.png").mkdir()
    with pytest.warns(WanjaxWarning, match=line_with_words(f"{tmp_path} 5")):
        read = read_pictures({"video": tmp_path, "mask": tmp_path}, (VIDEO, MASK), frames=100, fps=8)
    for clip in (read["video"], read["mask"]):
        assert (clip[:, 0, 0, 0] // 10).tolist() == list(range(1, 13))


def encode_image(format: str, first: Image.Image, *rest: Image.Image) -> bytes:
    file = BytesIO()
    first.save(file, format, **({"save_all": True, "append_images": rest, "duration": 200} if rest else {}))
    return file.getvalue()


def read_by_every_interface(data: bytes, folder: Path) -> dict[str, np.ndarray]:
    """Return a picture as it is read from a file, from Pillow, and from a request to the server."""
    (folder / "a.bin").write_bytes(data)
    read = {"file": read_picture(folder / "a.bin"), "Pillow": read_picture(Image.open(BytesIO(data)))}
    for field in ("image", "references", "mask", "video"):
        saved = save_pictures({field: [data]}, INPUT_SPECS, folder, Limits(10**7))[field]
        [name] = saved if isinstance(saved, list) else [saved]
        read[field] = read_clip(folder / name, **CLIP_LIMITS)[0]
    return read


def test_a_photograph_of_a_phone_is_a_picture_at_every_interface(tmp_path):
    """An MPO also has smaller pictures."""
    image = Image.fromarray(CLIP[0])
    photo = encode_image("MPO", image, image.resize((32, 24)))
    expected = read_picture(Image.open(BytesIO(encode_image("JPEG", image))))
    for interface, picture in read_by_every_interface(photo, tmp_path).items():
        assert max_difference(picture, expected) == 0, interface


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_every_interface_recognises_an_animation(tmp_path, format):
    """It is a clip, with any file name."""
    data = encode_image(format, *(Image.new("L", (64, 48), 80 * i) for i in range(3)))
    (tmp_path / "a.bin").write_bytes(data)
    interfaces = [lambda: read_picture(tmp_path / "a.bin"), lambda: read_picture(Image.open(BytesIO(data)))]
    for field in ("image", "last_image", "references"):
        interfaces.append(lambda field=field: save_pictures({field: [data]}, INPUT_SPECS, tmp_path, Limits(10**7)))
    for interface in interfaces:
        with pytest.raises(WanjaxError, match="animated"):
            interface()
    for field in ("video", "mask"):
        saved = save_pictures({field: [data]}, INPUT_SPECS, tmp_path, Limits(10**7))[field]
        assert len(read_clip(tmp_path / saved, **CLIP_LIMITS)) == 3
