# SPDX-License-Identifier: Apache-2.0
"""Pictures and clips from files of every kind, the size that a video takes from them, and their fitting to it."""

import io as bytes_io
import math
import struct
import zlib
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image

from tests.support.quick import quick
from tests.support.video_files import ffmpeg
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.media import video as io
from wanjax.media.bounds import MEDIA_LIMITS
from wanjax.media.inputs import INPUT_SPECS
from wanjax.media.pictures import Pictures, fit_to_size, read_clip, read_picture, read_pictures, size_for_area
from wanjax.pipelines.wan.conditioning import fit_on_white, known_frame_mask, mask_to_channels

ORIENTATION = 0x0112
WHITE, RED, BLUE = (255, 255, 255), (255, 0, 0), (0, 0, 255)
PICTURE = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
CLIP_LIMITS = {"frames": 100, "fps": 16}


def saved(path: Path, image: Image.Image, **options) -> Path:
    image.save(path, **options)
    return path


def test_a_picture_is_read_as_saved(tmp_path):
    image = Image.fromarray(PICTURE)
    for source in (PICTURE, image, saved(tmp_path / "a.png", image), str(saved(tmp_path / "a.bmp", image))):
        np.testing.assert_array_equal(read_picture(source), PICTURE)


@pytest.mark.parametrize(("orientation", "turned"), [(1, 0), (3, 2), (6, 3), (8, 1)])
def test_a_picture_is_rotated_as_its_metadata_says(tmp_path, orientation, turned):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = saved(tmp_path / "a.png", Image.fromarray(PICTURE), exif=exif)
    np.testing.assert_array_equal(read_picture(path), np.rot90(PICTURE, turned))


def test_transparent_pixels_become_white(tmp_path):
    rgba = Image.new("RGBA", (2, 1), (*RED, 255))
    rgba.putpixel((1, 0), (*BLUE, 0))
    grey = Image.new("LA", (2, 1), (7, 255))
    grey.putpixel((1, 0), (9, 0))
    palette = Image.new("P", (2, 1))
    palette.putpalette([*RED, *BLUE])
    palette.putpixel((1, 0), 1)
    assert read_picture(saved(tmp_path / "a.png", rgba)).tolist() == [[list(RED), list(WHITE)]]
    assert read_picture(saved(tmp_path / "b.png", grey)).tolist() == [[[7] * 3, list(WHITE)]]
    assert read_picture(saved(tmp_path / "c.png", palette)).tolist() == [[list(RED), list(BLUE)]]
    assert read_picture(saved(tmp_path / "d.png", palette, transparency=1)).tolist() == [[list(RED), list(WHITE)]]
    assert read_picture(saved(tmp_path / "e.gif", palette, transparency=1)).tolist() == [[list(RED), list(WHITE)]]


def test_other_depths(tmp_path):
    deep = Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16))
    assert read_picture(saved(tmp_path / "a.png", deep))[0, :, 0].tolist() == [0, 1, 128, 255]
    assert read_picture(saved(tmp_path / "b.png", Image.new("1", (1, 1), 1))).tolist() == [[list(WHITE)]]
    assert read_picture(saved(tmp_path / "c.jpg", Image.new("CMYK", (1, 1)))).tolist() == [[list(WHITE)]]


def test_a_photograph_with_its_thumbnail_is_no_animation(tmp_path):
    image = Image.fromarray(PICTURE)
    path = saved(tmp_path / "a.jpg", image, format="MPO", save_all=True, append_images=[image.resize((5, 3))])
    with Image.open(path) as opened:
        assert opened.n_frames == 2
    assert read_picture(path).shape == PICTURE.shape


def animation(path: Path, count: int = 3, duration: int = 100) -> Path:
    frames = [Image.new("RGB", (8, 6), (40 * i, 0, 0)) for i in range(count)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=duration)
    return path


def grey_png(width: int, height: int) -> bytes:
    """Return a small PNG that says it is large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packed, row = zlib.compressobj(1), bytes(1 + width)
    rows = b"".join(packed.compress(row) for _ in range(min(height, 64))) + packed.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def endless_gif(frames: int) -> bytes:
    """Return an animation of many frames of one pixel."""
    frame = b"\x2c\0\0\0\0\x01\0\x01\0\0\x02\x02\x44\x01\0"
    return b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff" + frame * frames + b";"


@pytest.mark.parametrize("size", [(8000, 8000), (64_000_000, 1), (1, 40_000), (20_000, 20_000)])
def test_a_picture_that_claims_to_be_large_is_not_decoded(tmp_path, size):
    """Its pixels are cut off, which decoding would report."""
    (tmp_path / "a.png").write_bytes(grey_png(*size)[:45])
    for read in (read_picture, partial(read_clip, **CLIP_LIMITS)):
        with pytest.raises(WanjaxError, match=line_with_words("a.png 60,000,000")):
            read(tmp_path / "a.png")


@pytest.mark.parametrize("width", [2**20, 2**31, 2**40])
def test_a_big_tiff_that_claims_to_be_large_is_not_decoded(tmp_path, width):
    file = tmp_path / "a.tif"
    Image.new("RGB", (64, 64)).save(file, big_tiff=True)
    assert read_picture(file).shape == (64, 64, 3)
    content = bytearray(file.read_bytes())
    entry = content.index(struct.pack("<HHQ", 256, 4, 1))  # its width, of 4 bytes
    content[entry : entry + 20] = struct.pack("<HHQQ", 256, 16, 1, width)
    file.write_bytes(content)
    with pytest.raises(WanjaxError, match=line_with_words("a.tif 60,000,000")):
        read_picture(file)


@pytest.mark.parametrize("count", [10**9, 2**32 - 1])
def test_a_video_that_claims_endless_frames_has_its_actual_ones(tmp_path, count):
    io.write_video(tmp_path / "a.mp4", np.zeros((9, 32, 32, 3), np.uint8), 8, {})
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    table = content.index(b"stts") + 12  # the number of frames of its first entry
    assert content[table : table + 4] == struct.pack(">I", 9)
    content[table : table + 4] = struct.pack(">I", count)
    (tmp_path / "a.mp4").write_bytes(content)
    assert read_clip(tmp_path / "a.mp4", **CLIP_LIMITS).shape == (9, 32, 32, 3)


def growing_gif(size: int) -> bytes:
    """Return an animation whose second frame is much larger than its first."""
    frames = (struct.pack("<HHHH", 0, 0, side, side) for side in (1, size))
    body = b"".join(b"!\xf9\x04\x08\0\0\0\0," + frame + b"\0\x02\x02\x44\x01\0" for frame in frames)
    return b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff" + body + b";"


def many_passes(count: int) -> bytes:
    """Return a progressive JPEG with more passes over its pixels than it has need for."""
    file = bytes_io.BytesIO()
    Image.new("L", (64, 64), 128).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    table = b"\xff\xc4\0\x14\x11\x01" + bytes(15) + b"\xe0"  # one code, for a run of blocks without a coefficient
    scan = b"\xff\xda\0\x08\x01\x01\x01\x01\x3f\x10\x40\x00"
    return content[:-2] + table + scan * count + content[-2:]


def two_pages(size: int) -> bytes:
    """Return a TIFF whose second page says that it is large."""
    result = b"II*\0\x08\0\0\0"
    for side, more in ((1, True), (size, False)):
        tags = [(256, side), (257, side), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, side), (279, 1)]
        following = len(result) + 2 + 12 * len(tags) + 4 if more else 0
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        result += struct.pack("<H", len(tags)) + entries + struct.pack("<I", following)
    return result


@pytest.mark.parametrize("suffix", [".eps", ".png", ".mp4"])
def test_programs_are_no_pictures(tmp_path, monkeypatch, suffix):
    """Pillow would have Ghostscript run PostScript, whatever the name of its file."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("it was run"))
    (tmp_path / f"a{suffix}").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    for read in (read_picture, partial(read_clip, **CLIP_LIMITS)):
        with pytest.raises(WanjaxError, match=line_with_words(f"a{suffix}")):
            read(tmp_path / f"a{suffix}")


PLAYLISTS = {
    "a.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{film}\n#EXT-X-ENDLIST\n",
    "a.mp4": "ffconcat version 1.0\nfile film.mp4\n",
}


@pytest.mark.parametrize("name", PLAYLISTS)
def test_a_video_cannot_name_another_file(tmp_path, name):
    video_file = io.write_video(tmp_path / "film.mp4", CLIP, 10)
    assert len(read_clip(video_file, **CLIP_LIMITS)) == len(CLIP)
    (tmp_path / name).write_text(PLAYLISTS[name].format(film=video_file.as_uri()))
    with pytest.raises(WanjaxError, match=line_with_words(f"{name} video")):
        read_clip(tmp_path / name, **CLIP_LIMITS)


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".mp4"])
def test_a_clip_whose_frames_are_large_together(tmp_path, machine, suffix):
    path = io.write_video(tmp_path / f"a{suffix}", CLIP, 10)
    machine.reads_at_most(max_pixels=16 * 16)
    assert len(read_clip(path, **CLIP_LIMITS)) == len(CLIP)
    machine.reads_at_most(max_pixels=16 * 16, clip_factor=5)
    with pytest.raises(WanjaxError, match=line_with_words(f"a{suffix} pixels 1,280")):
        read_clip(path, **CLIP_LIMITS)
    machine.reads_at_most(max_pixels=16 * 15)  # too few for one frame, and enough for all of them
    with pytest.raises(WanjaxError, match=line_with_words(f"a{suffix} pixels")):
        read_clip(path, **CLIP_LIMITS)


@pytest.mark.parametrize(
    "text", ["#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{0}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile {0}\n"]
)
def test_another_file_named_by_a_video_is_not_read(tmp_path, text):
    io.write_video(tmp_path / "secret.mp4", CLIP, 10, {"prompt": "of another"})
    (tmp_path / "a.mp4").write_text(text.format("secret.mp4"))
    for read in (partial(read_clip, **CLIP_LIMITS), io.read_metadata):
        with pytest.raises(WanjaxError, match=line_with_words("a.mp4")):
            read(tmp_path / "a.mp4")


CLIP = np.repeat(np.arange(10, dtype=np.uint8) * 20, 16 * 16 * 3).reshape(10, 16, 16, 3)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.webp", "a/"])
def test_clips(tmp_path, name):
    path = io.write_video(f"{tmp_path}/{name}", CLIP, 10)
    clip = read_clip(path, **CLIP_LIMITS)
    assert clip.shape == CLIP.shape
    assert np.abs(clip.astype(int) - CLIP).max() <= 6  # mp4 and webp lose a little
    assert len(read_clip(path, frames=4, fps=16)) == 4
    if name != "a/":  # a folder of pictures has no frame rate
        half = read_clip(path, frames=100, fps=5)
        assert np.abs(half.astype(int) - CLIP[::2]).max() <= 6


def uniform_frames(colours: list[int]) -> np.ndarray:
    """Return a clip of plain frames, 20 pixels wide: many small ones are quick to write."""
    return np.broadcast_to(np.array(colours, np.uint8)[:, None, None, None], (len(colours), 16, 20, 3)).copy()


@pytest.mark.parametrize("suffix", ["mp4", "gif", "webp"])
@pytest.mark.parametrize("fps", quick([1, 7, 23.976, 60], [1, 7, 8, 16, 23.976, 24, 25, 30, 60]))
def test_a_clip_is_read_with_every_frame_that_was_written(tmp_path, suffix, fps):
    """A GIF's times are rounded to 10 ms, and encoders join equal frames in a row."""
    moving = [15 * (i % 17) for i in range(81)]
    halting = [0, *[50] * 7, 100, 200, *[150] * 5]
    for colours in (moving[:1], moving[:2], moving[:17], moving, halting):
        path = io.write_video(
            tmp_path / f"a.{suffix}",
            uniform_frames(colours),
            fps,
            {"fps": fps} if colours is halting or (suffix, fps) == ("gif", 60) else {},
        )
        for requested in (fps, 2 * fps):
            clip = read_clip(path, frames=100, fps=requested)
            assert len(clip) == len(colours)
            assert np.abs(clip.mean(axis=(1, 2, 3)) - colours).max() <= 6


@pytest.mark.parametrize("count", [2, 17, 81])
@pytest.mark.parametrize("suffix", ["gif", "webp"])
def test_a_still_animation_has_the_length_of_its_settings(tmp_path, suffix, count):
    """All its frames are one, whose time alone tells no number of frames."""
    path = io.write_video(tmp_path / f"a.{suffix}", uniform_frames([90] * count), 8, {"fps": 8})
    assert len(read_clip(path, frames=100, fps=8)) == count
    assert len(read_clip(path, frames=100, fps=16)) == count
    assert len(read_clip(path, frames=100, fps=4)) == math.ceil(count / 2)


def test_settings_that_no_longer_fit_are_ignored(tmp_path):
    path = io.write_video(tmp_path / "a.gif", uniform_frames([0, 50, 100, 150]), 20, {"fps": 8})
    assert len(read_clip(path, frames=100, fps=20)) == 4


@pytest.mark.parametrize(
    ("durations", "fps", "expected"),
    [
        ([100] * 4, 5, [0, 2]),
        ([40, 40, 50] * 4, 24, range(12)),  # 23 frames a second
        ([40, 40, 50] * 4, 60, range(12)),
        ([100, 300, 100], 10, [0, 1, 1, 1, 2]),
        ([100, 300, 100], 20, [0, 1, 1, 1, 2]),
        ([100, 300, 100], 5, [0, 1, 2]),
        ([0, 0, 0], 16, [0, 1, 2]),
    ],
)
def test_animations_of_other_programs_are_read_by_their_times(tmp_path, durations, fps, expected):
    first, *rest = [Image.new("L", (8, 6), 20 * i) for i in range(len(durations))]
    first.save(tmp_path / "a.gif", save_all=True, append_images=rest, duration=durations)
    clip = read_clip(tmp_path / "a.gif", frames=100, fps=fps)
    assert (clip[:, 0, 0, 0] // 20).tolist() == list(expected)


def test_clips_in_memory():
    np.testing.assert_array_equal(read_clip(CLIP, frames=5, fps=1), CLIP[:5])
    np.testing.assert_array_equal(read_clip(list(CLIP), frames=5, fps=1), CLIP[:5])
    np.testing.assert_array_equal(read_clip([Image.fromarray(CLIP[3])], **CLIP_LIMITS), CLIP[3:4])


def test_pictures_together(tmp_path):
    path = saved(tmp_path / "mask.png", Image.new("L", (16, 16), 255))
    options = {"image": PICTURE, "video": CLIP, "mask": path, "references": [PICTURE, path]}
    read = read_pictures(options, INPUT_SPECS.values(), **CLIP_LIMITS)
    assert list(read) == ["image", "video", "mask", "references"]
    assert read["mask"].shape == CLIP.shape
    np.testing.assert_array_equal(read.first, PICTURE)
    np.testing.assert_array_equal(read.with_inputs(image=None).first, CLIP[0])
    assert not Pictures(references=())
    assert Pictures().first is None


def of_bytes(data):
    """Return what writes a file of these bytes."""
    return lambda file: file.write_bytes(data)


def damaged_png(file):
    buffer = bytes_io.BytesIO()
    Image.fromarray(PICTURE).save(buffer, "png")
    file.write_bytes(buffer.getvalue()[:-200])


def damaged_gif(file):
    file.write_bytes(animation(file, 3).read_bytes()[:-20])


def of_two_sizes(folder):
    folder.mkdir()
    for i, size in enumerate(((4, 4), (4, 5))):
        saved(folder / f"{i}.png", Image.new("RGB", size))


def of_subtitles(file):
    text = file.with_suffix(".srt")
    text.write_text("1\n00:00:00,000 --> 00:00:01,000\na cat\n")
    ffmpeg("-i", text, "-map", "1", file, frames=np.zeros((5, 24, 32, 3), np.uint8), rate="8")


def nothing(file):
    """Leave it as it is: it is not there."""


PICTURES = [  # the name of a file that is no picture, what writes it, and what the sentence about it names
    *((f"a{suffix}", animation, f"a{suffix} animated picture") for suffix in (".gif", ".webp", ".png")),
    ("absent.png", nothing, "no file absent.png"),
    ("text.png", of_bytes(b"a red circle"), "text.png picture"),
    ("empty.jpg", of_bytes(b""), "empty.jpg empty"),
    ("short.png", damaged_png, "short.png end damaged"),
    ("folder", Path.mkdir, "folder picture"),
    ("passes.jpg", of_bytes(many_passes(4000)), "passes.jpg passes 50"),
    ("endless.gif", of_bytes(endless_gif(20_000)), "animated"),
    ("grows.gif", of_bytes(growing_gif(13_000)), "animated"),
    ("pages.tif", of_bytes(two_pages(9_000)), "animated"),
]
CLIPS = [  # the same of what is no clip
    ("absent.mp4", nothing, "no file absent.mp4"),
    ("text.mp4", of_bytes(b"a red circle"), "text.mp4 video"),
    ("empty", Path.mkdir, "empty no pictures"),
    ("empty.mp4", of_bytes(b""), "empty.mp4 is empty clip"),
    ("empty.gif", of_bytes(b""), "empty.gif is empty"),
    ("a.mkv", of_subtitles, "a.mkv video stream"),
    ("mixed", of_two_sizes, "mixed different sizes"),
    ("short.gif", damaged_gif, "short.gif frame 3"),
    ("endless.gif", of_bytes(endless_gif(20_000)), "endless.gif 4001 frames 1x1 4,000"),
    ("grows.gif", of_bytes(growing_gif(13_000)), "grows.gif pixels 60,000,000"),
    ("pages.tif", of_bytes(two_pages(9_000)), "pages.tif pixels 60,000,000"),
]
READERS = [
    *((read_picture, *row) for row in PICTURES),
    *((partial(read_clip, **CLIP_LIMITS), *row) for row in CLIPS),
]


@pytest.mark.parametrize(("read", "name", "write", "words"), READERS, ids=[f"{row[1]}-{row[3]}" for row in READERS])
def test_files_that_are_no_pictures(tmp_path, read, name, write, words):
    write(tmp_path / name)
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read(tmp_path / name)


def test_bounds_are_not_those_of_other_users_of_pillow(tmp_path):
    assert MEDIA_LIMITS.max_pixels < Image.MAX_IMAGE_PIXELS
    (tmp_path / "a.jpg").write_bytes(many_passes(40))
    assert read_picture(tmp_path / "a.jpg").shape == (64, 64, 3)


ARRAYS = [
    *(
        (partial(read_picture, array), "pictures uint8 [H, W, 3]")
        for array in (PICTURE.astype(np.float64), PICTURE[..., :2], PICTURE[None], PICTURE[:0])
    ),
    (partial(read_picture, PICTURE.astype(np.float32)), "float32 [0, 1] 255 astype uint8"),
    (
        partial(read_pictures, {"video": CLIP, "mask": CLIP[:3]}, INPUT_SPECS.values(), **CLIP_LIMITS),
        "mask 3 frames video 10",
    ),
    (partial(read_pictures, {"mask": CLIP}, INPUT_SPECS.values(), **CLIP_LIMITS), "mask video"),
]


@pytest.mark.parametrize(("read", "words"), ARRAYS)
def test_arrays_that_are_no_pictures(read, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read()


@given(
    st.integers(16, 4000), st.integers(16, 4000), st.sampled_from([480 * 832, 720 * 1280]), st.sampled_from([16, 32])
)
def test_a_video_takes_the_proportions_of_a_picture(height, width, area, grid):
    """Follow the reference's documentation, except for pictures so long that a side would become 0."""
    size = size_for_area((height, width, 3), area, grid)
    ratio = height / width
    exact = [round(np.sqrt(area * r)) // grid * grid for r in (ratio, 1 / ratio)]
    assert size == tuple(max(side, grid) for side in exact)
    if 1 / 3 < ratio < 3:
        assert math.prod(size) <= 1.01 * area
        assert abs(size[0] - size[1] * ratio) <= 1.01 * grid * max(1, ratio)


def test_sizes_of_usual_pictures():
    assert size_for_area((480, 832), 480 * 832, 16) == (480, 832)
    assert size_for_area((1080, 1920), 720 * 1280, 16) == (720, 1280)
    assert size_for_area((1920, 1080), 720 * 1280, 16) == (1280, 720)
    assert size_for_area((3000, 3000), 480 * 832, 16) == (624, 624)


def halves(height: int, width: int) -> np.ndarray:
    """Return a picture that is red on the left and blue on the right."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[:, : width // 2], picture[:, width // 2 :] = RED, BLUE
    return picture


def test_fit():
    wide = halves(20, 80)
    np.testing.assert_array_equal(fit_to_size(wide, (20, 80), "crop"), wide)
    assert fit_to_size(wide, (40, 40), "stretch")[20, [0, -1]].tolist() == [list(RED), list(BLUE)]
    cropped = fit_to_size(wide, (40, 40), "crop")
    assert cropped[20, [0, 10, 29, -1]].tolist() == [list(RED), list(RED), list(BLUE), list(BLUE)]
    padded = fit_to_size(wide, (40, 40), "pad")
    assert padded[[0, -1], 20].tolist() == [[0] * 3] * 2
    assert padded[20, [0, -1]].tolist() == [list(RED), list(BLUE)]


@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from(["crop", "pad", "stretch"]))
@example(32, 47, "crop")  # 48 / 47 is rounded so that 47 times it is less than 48
def test_whatever_its_size_a_picture_fits(height, width, resize):
    """It fills the frame, unless bars are asked for: no edge is black."""
    fitted = fit_to_size(np.full((height, width, 3), 255, np.uint8), (32, 48), resize)
    assert fitted.shape == (32, 48, 3)
    assert resize == "pad" or fitted.min() == 255


def test_mask_of_fixed_frames_as_channels():
    """Follow the reference: the first frame fills its latent frame, and a last frame is the last of four."""
    np.testing.assert_array_equal(known_frame_mask([0], 9, 4), [[1, 0, 0]] * 4)
    np.testing.assert_array_equal(known_frame_mask([0, 8], 9, 4), [[1, 0, 0]] * 3 + [[1, 0, 1]])
    np.testing.assert_array_equal(known_frame_mask([0], 1, 4), [[1]] * 4)


def test_mask_to_channels():
    mask = np.arange(5 * 4 * 6, dtype=np.float32).reshape(5, 4, 6)
    cells = mask_to_channels(mask, 2, 2)
    assert cells.shape == (4, 2, 2, 3)
    np.testing.assert_array_equal(cells[1 * 2 + 0, 1], mask[3, 1::2, 0::2])  # row 1, column 0 of each 2 × 2


def test_a_picture_fits_on_a_white_page():
    def resized(x, size):
        return np.asarray(jax.image.resize(x, (*size, 3), "linear", antialias=False))

    page = fit_on_white(halves(10, 20), (40, 40), resized)
    assert page[:10].min() == page[-10:].min() == 1
    np.testing.assert_array_equal(page[20, [0, -1]], np.array([RED, BLUE]) / 255)
