# SPDX-License-Identifier: Apache-2.0
"""Pictures and clips from all kinds of files, the size of a video from them, and their fitting to it."""

import io
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
from wanjax.media import video as video_files
from wanjax.media.bounds import MEDIA_LIMITS
from wanjax.media.inputs import INPUT_SPECS
from wanjax.media.pictures import Pictures, fit_to_size, read_clip, read_picture, read_pictures, size_for_area
from wanjax.pipelines.wan.conditioning import fit_on_white, known_frame_mask, mask_to_channels

ORIENTATION = 0x0112
WHITE, RED, BLUE = (255, 255, 255), (255, 0, 0), (0, 0, 255)
PICTURE = np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)
CLIP_LIMITS = {"frames": 100, "fps": 16}


def save_image(path: Path, image: Image.Image, **options) -> Path:
    image.save(path, **options)
    return path


def test_a_picture_is_read_as_saved(tmp_path):
    image = Image.fromarray(PICTURE)
    for source in (PICTURE, image, save_image(tmp_path / "a.png", image), str(save_image(tmp_path / "a.bmp", image))):
        np.testing.assert_array_equal(read_picture(source), PICTURE)


@pytest.mark.parametrize(("orientation", "num_turns"), [(1, 0), (3, 2), (6, 3), (8, 1)])
def test_a_picture_is_rotated_as_its_metadata_says(tmp_path, orientation, num_turns):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = save_image(tmp_path / "a.png", Image.fromarray(PICTURE), exif=exif)
    np.testing.assert_array_equal(read_picture(path), np.rot90(PICTURE, num_turns))


def test_transparent_pixels_become_white(tmp_path):
    rgba = Image.new("RGBA", (2, 1), (*RED, 255))
    rgba.putpixel((1, 0), (*BLUE, 0))
    grey = Image.new("LA", (2, 1), (7, 255))
    grey.putpixel((1, 0), (9, 0))
    palette = Image.new("P", (2, 1))
    palette.putpalette([*RED, *BLUE])
    palette.putpixel((1, 0), 1)
    assert read_picture(save_image(tmp_path / "a.png", rgba)).tolist() == [[list(RED), list(WHITE)]]
    assert read_picture(save_image(tmp_path / "b.png", grey)).tolist() == [[[7] * 3, list(WHITE)]]
    assert read_picture(save_image(tmp_path / "c.png", palette)).tolist() == [[list(RED), list(BLUE)]]
    assert read_picture(save_image(tmp_path / "d.png", palette, transparency=1)).tolist() == [[list(RED), list(WHITE)]]
    assert read_picture(save_image(tmp_path / "e.gif", palette, transparency=1)).tolist() == [[list(RED), list(WHITE)]]


def test_pictures_of_other_bit_depths_are_read(tmp_path):
    deep = Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16))
    assert read_picture(save_image(tmp_path / "a.png", deep))[0, :, 0].tolist() == [0, 1, 128, 255]
    assert read_picture(save_image(tmp_path / "b.png", Image.new("1", (1, 1), 1))).tolist() == [[list(WHITE)]]
    assert read_picture(save_image(tmp_path / "c.jpg", Image.new("CMYK", (1, 1)))).tolist() == [[list(WHITE)]]


def test_a_photograph_with_a_thumbnail_is_not_an_animation(tmp_path):
    image = Image.fromarray(PICTURE)
    path = save_image(tmp_path / "a.jpg", image, format="MPO", save_all=True, append_images=[image.resize((5, 3))])
    with Image.open(path) as opened:
        assert opened.n_frames == 2
    assert read_picture(path).shape == PICTURE.shape


def write_animation(path: Path, count: int = 3, duration: int = 100) -> Path:
    frames = [Image.new("RGB", (8, 6), (40 * i, 0, 0)) for i in range(count)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=duration)
    return path


def large_png(width: int, height: int) -> bytes:
    """Return a small PNG whose header has a large size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packed, row = zlib.compressobj(1), bytes(1 + width)
    rows = b"".join(packed.compress(row) for _ in range(min(height, 64))) + packed.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def long_gif(frames: int) -> bytes:
    """Return an animation with many frames of one pixel."""
    frame = b"\x2c\0\0\0\0\x01\0\x01\0\0\x02\x02\x44\x01\0"
    return b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff" + frame * frames + b";"


@pytest.mark.parametrize("size", [(8000, 8000), (64_000_000, 1), (1, 40_000), (20_000, 20_000)])
def test_a_picture_with_a_large_size_in_its_header_is_not_decoded(tmp_path, size):
    """Its pixels are cut off, and decoding would report that."""
    (tmp_path / "a.png").write_bytes(large_png(*size)[:45])
    for read in (read_picture, partial(read_clip, **CLIP_LIMITS)):
        with pytest.raises(WanjaxError, match=line_with_words("a.png 60,000,000")):
            read(tmp_path / "a.png")


@pytest.mark.parametrize("width", [2**20, 2**31, 2**40])
def test_a_big_tiff_with_a_large_size_in_its_header_is_not_decoded(tmp_path, width):
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
def test_a_video_with_a_wrong_number_of_frames_in_its_header_is_read(tmp_path, count):
    video_files.write_video(tmp_path / "a.mp4", np.zeros((9, 32, 32, 3), np.uint8), 8, {})
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


def jpeg_with_passes(count: int) -> bytes:
    """Return a progressive JPEG with unnecessary passes over its pixels."""
    file = io.BytesIO()
    Image.new("L", (64, 64), 128).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    table = b"\xff\xc4\0\x14\x11\x01" + bytes(15) + b"\xe0"  # one code, for a run of blocks without a coefficient
    scan = b"\xff\xda\0\x08\x01\x01\x01\x01\x3f\x10\x40\x00"
    return content[:-2] + table + scan * count + content[-2:]


def two_page_tiff(size: int) -> bytes:
    """Return a TIFF whose second page has a large size in its header."""
    result = b"II*\0\x08\0\0\0"
    for side, more in ((1, True), (size, False)):
        tags = [(256, side), (257, side), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, side), (279, 1)]
        following = len(result) + 2 + 12 * len(tags) + 4 if more else 0
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        result += struct.pack("<H", len(tags)) + entries + struct.pack("<I", following)
    return result


@pytest.mark.parametrize("suffix", [".eps", ".png", ".mp4"])
def test_postscript_files_are_refused(tmp_path, monkeypatch, suffix):
    """Pillow would run PostScript with Ghostscript, with any file name."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("it was run"))
    (tmp_path / f"a{suffix}").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    for read in (read_picture, partial(read_clip, **CLIP_LIMITS)):
        with pytest.raises(WanjaxError, match=line_with_words(f"a{suffix}")):
            read(tmp_path / f"a{suffix}")


PLAYLISTS = {
    "a.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{video_url}\n#EXT-X-ENDLIST\n",
    "a.mp4": "ffconcat version 1.0\nfile video.mp4\n",
}


@pytest.mark.parametrize("name", PLAYLISTS)
def test_a_playlist_that_names_another_file_is_refused(tmp_path, name):
    video_file = video_files.write_video(tmp_path / "video.mp4", CLIP, 10)
    assert len(read_clip(video_file, **CLIP_LIMITS)) == len(CLIP)
    (tmp_path / name).write_text(PLAYLISTS[name].format(video_url=video_file.as_uri()))
    with pytest.raises(WanjaxError, match=line_with_words(f"{name} video")):
        read_clip(tmp_path / name, **CLIP_LIMITS)


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".mp4"])
def test_a_clip_with_too_many_pixels_in_all_frames_is_refused(tmp_path, machine, suffix):
    path = video_files.write_video(tmp_path / f"a{suffix}", CLIP, 10)
    machine.reads_at_most(max_pixels=16 * 16)
    assert len(read_clip(path, **CLIP_LIMITS)) == len(CLIP)
    machine.reads_at_most(max_pixels=16 * 16, clip_factor=5)
    with pytest.raises(WanjaxError, match=line_with_words(f"a{suffix} pixels 1,280")):
        read_clip(path, **CLIP_LIMITS)
    machine.reads_at_most(max_pixels=16 * 15)  # less than one frame, though the limit of a clip is enough
    with pytest.raises(WanjaxError, match=line_with_words(f"a{suffix} pixels")):
        read_clip(path, **CLIP_LIMITS)


@pytest.mark.parametrize(
    "text", ["#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{0}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile {0}\n"]
)
def test_another_file_named_in_a_video_is_not_read(tmp_path, text):
    video_files.write_video(tmp_path / "secret.mp4", CLIP, 10, {"prompt": "of another"})
    (tmp_path / "a.mp4").write_text(text.format("secret.mp4"))
    for read in (partial(read_clip, **CLIP_LIMITS), video_files.read_metadata):
        with pytest.raises(WanjaxError, match=line_with_words("a.mp4")):
            read(tmp_path / "a.mp4")


CLIP = np.repeat(np.arange(10, dtype=np.uint8) * 20, 16 * 16 * 3).reshape(10, 16, 16, 3)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.webp", "a/"])
def test_clips_of_each_kind_are_read_with_a_frame_rate(tmp_path, name):
    path = video_files.write_video(f"{tmp_path}/{name}", CLIP, 10)
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
def test_a_clip_is_read_with_all_frames_that_were_written(tmp_path, suffix, fps):
    """GIF rounds times to 10 ms, and encoders merge equal successive frames."""
    changing = [15 * (i % 17) for i in range(81)]
    with_still_parts = [0, *[50] * 7, 100, 200, *[150] * 5]
    for colours in (changing[:1], changing[:2], changing[:17], changing, with_still_parts):
        path = video_files.write_video(
            tmp_path / f"a.{suffix}",
            uniform_frames(colours),
            fps,
            {"fps": fps} if colours is with_still_parts or (suffix, fps) == ("gif", 60) else {},
        )
        for requested in (fps, 2 * fps):
            clip = read_clip(path, frames=100, fps=requested)
            assert len(clip) == len(colours)
            assert np.abs(clip.mean(axis=(1, 2, 3)) - colours).max() <= 6


@pytest.mark.parametrize("count", [2, 17, 81])
@pytest.mark.parametrize("suffix", ["gif", "webp"])
def test_the_settings_give_the_length_of_a_still_animation(tmp_path, suffix, count):
    """Its frames are merged into one, and the time of one frame does not give the number of frames."""
    path = video_files.write_video(tmp_path / f"a.{suffix}", uniform_frames([90] * count), 8, {"fps": 8})
    assert len(read_clip(path, frames=100, fps=8)) == count
    assert len(read_clip(path, frames=100, fps=16)) == count
    assert len(read_clip(path, frames=100, fps=4)) == math.ceil(count / 2)


def test_settings_that_no_longer_fit_are_ignored(tmp_path):
    path = video_files.write_video(tmp_path / "a.gif", uniform_frames([0, 50, 100, 150]), 20, {"fps": 8})
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


def test_clips_in_memory_are_read():
    np.testing.assert_array_equal(read_clip(CLIP, frames=5, fps=1), CLIP[:5])
    np.testing.assert_array_equal(read_clip(list(CLIP), frames=5, fps=1), CLIP[:5])
    np.testing.assert_array_equal(read_clip([Image.fromarray(CLIP[3])], **CLIP_LIMITS), CLIP[3:4])


def test_all_inputs_are_read_together(tmp_path):
    path = save_image(tmp_path / "mask.png", Image.new("L", (16, 16), 255))
    options = {"image": PICTURE, "video": CLIP, "mask": path, "references": [PICTURE, path]}
    read = read_pictures(options, INPUT_SPECS.values(), **CLIP_LIMITS)
    assert list(read) == ["image", "video", "mask", "references"]
    assert read["mask"].shape == CLIP.shape
    np.testing.assert_array_equal(read.first, PICTURE)
    np.testing.assert_array_equal(read.with_inputs(image=None).first, CLIP[0])
    assert not Pictures(references=())
    assert Pictures().first is None


def write_bytes(data):
    """Return a function that writes these bytes to a file."""
    return lambda file: file.write_bytes(data)


def write_truncated_png(file):
    buffer = io.BytesIO()
    Image.fromarray(PICTURE).save(buffer, "png")
    file.write_bytes(buffer.getvalue()[:-200])


def write_truncated_gif(file):
    file.write_bytes(write_animation(file, 3).read_bytes()[:-20])


def write_mixed_sizes(folder):
    folder.mkdir()
    for i, size in enumerate(((4, 4), (4, 5))):
        save_image(folder / f"{i}.png", Image.new("RGB", size))


def write_subtitles(file):
    text = file.with_suffix(".srt")
    text.write_text("1\n00:00:00,000 --> 00:00:01,000\na cat\n")
    ffmpeg("-i", text, "-map", "1", file, frames=np.zeros((5, 24, 32, 3), np.uint8), rate="8")


def write_nothing(file):
    """Write no file."""


NOT_PICTURES = [  # a file name, what writes the file, and words of the message
    *((f"a{suffix}", write_animation, f"a{suffix} animated picture") for suffix in (".gif", ".webp", ".png")),
    ("absent.png", write_nothing, "no file absent.png"),
    ("text.png", write_bytes(b"a red circle"), "text.png picture"),
    ("empty.jpg", write_bytes(b""), "empty.jpg empty"),
    ("short.png", write_truncated_png, "short.png end damaged"),
    ("folder", Path.mkdir, "folder picture"),
    ("passes.jpg", write_bytes(jpeg_with_passes(4000)), "passes.jpg passes 50"),
    ("endless.gif", write_bytes(long_gif(20_000)), "animated"),
    ("grows.gif", write_bytes(growing_gif(13_000)), "animated"),
    ("pages.tif", write_bytes(two_page_tiff(9_000)), "animated"),
]
NOT_CLIPS = [  # the same for clips
    ("absent.mp4", write_nothing, "no file absent.mp4"),
    ("text.mp4", write_bytes(b"a red circle"), "text.mp4 video"),
    ("empty", Path.mkdir, "empty no pictures"),
    ("empty.mp4", write_bytes(b""), "empty.mp4 is empty clip"),
    ("empty.gif", write_bytes(b""), "empty.gif is empty"),
    ("a.mkv", write_subtitles, "a.mkv video stream"),
    ("mixed", write_mixed_sizes, "mixed different sizes"),
    ("short.gif", write_truncated_gif, "short.gif frame 3"),
    ("endless.gif", write_bytes(long_gif(20_000)), "endless.gif 4001 frames 1x1 4,000"),
    ("grows.gif", write_bytes(growing_gif(13_000)), "grows.gif pixels 60,000,000"),
    ("pages.tif", write_bytes(two_page_tiff(9_000)), "pages.tif pixels 60,000,000"),
]
UNREADABLE = [
    *((read_picture, *row) for row in NOT_PICTURES),
    *((partial(read_clip, **CLIP_LIMITS), *row) for row in NOT_CLIPS),
]


@pytest.mark.parametrize(
    ("read", "name", "write", "words"), UNREADABLE, ids=[f"{row[1]}-{row[3]}" for row in UNREADABLE]
)
def test_files_without_a_picture_or_clip_are_refused(tmp_path, read, name, write, words):
    write(tmp_path / name)
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read(tmp_path / name)


def test_the_limits_of_pillow_for_other_libraries_stay(tmp_path):
    assert MEDIA_LIMITS.max_pixels < Image.MAX_IMAGE_PIXELS
    (tmp_path / "a.jpg").write_bytes(jpeg_with_passes(40))
    assert read_picture(tmp_path / "a.jpg").shape == (64, 64, 3)


WRONG_ARRAYS = [
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


@pytest.mark.parametrize(("read", "words"), WRONG_ARRAYS)
def test_arrays_of_another_type_or_shape_are_refused(read, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read()


@given(
    st.integers(16, 4000), st.integers(16, 4000), st.sampled_from([480 * 832, 720 * 1280]), st.sampled_from([16, 32])
)
def test_a_video_has_the_proportions_of_its_picture(height, width, area, grid):
    """Sizes follow the reference's documentation, except when a side would become 0."""
    size = size_for_area((height, width, 3), area, grid)
    ratio = height / width
    exact = [round(np.sqrt(area * r)) // grid * grid for r in (ratio, 1 / ratio)]
    assert size == tuple(max(side, grid) for side in exact)
    if 1 / 3 < ratio < 3:
        assert math.prod(size) <= 1.01 * area
        assert abs(size[0] - size[1] * ratio) <= 1.01 * grid * max(1, ratio)


def test_usual_pictures_give_usual_sizes():
    assert size_for_area((480, 832), 480 * 832, 16) == (480, 832)
    assert size_for_area((1080, 1920), 720 * 1280, 16) == (720, 1280)
    assert size_for_area((1920, 1080), 720 * 1280, 16) == (1280, 720)
    assert size_for_area((3000, 3000), 480 * 832, 16) == (624, 624)


def red_and_blue(height: int, width: int) -> np.ndarray:
    """Return a picture that is red on the left and blue on the right."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[:, : width // 2], picture[:, width // 2 :] = RED, BLUE
    return picture


def test_a_picture_is_stretched_cropped_or_padded():
    wide = red_and_blue(20, 80)
    np.testing.assert_array_equal(fit_to_size(wide, (20, 80), "crop"), wide)
    assert fit_to_size(wide, (40, 40), "stretch")[20, [0, -1]].tolist() == [list(RED), list(BLUE)]
    cropped = fit_to_size(wide, (40, 40), "crop")
    assert cropped[20, [0, 10, 29, -1]].tolist() == [list(RED), list(RED), list(BLUE), list(BLUE)]
    padded = fit_to_size(wide, (40, 40), "pad")
    assert padded[[0, -1], 20].tolist() == [[0] * 3] * 2
    assert padded[20, [0, -1]].tolist() == [list(RED), list(BLUE)]


@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from(["crop", "pad", "stretch"]))
@example(32, 47, "crop")  # 48 / 47 is rounded so that 47 times it is less than 48
def test_a_picture_of_any_size_fills_the_frame(height, width, resize):
    """Without padding, no edge is black."""
    fitted = fit_to_size(np.full((height, width, 3), 255, np.uint8), (32, 48), resize)
    assert fitted.shape == (32, 48, 3)
    assert resize == "pad" or fitted.min() == 255


def test_fixed_frames_become_channels_of_a_mask():
    """As in the reference, the first frame fills its latent frame, and a last frame is the last of four."""
    np.testing.assert_array_equal(known_frame_mask([0], 9, 4), [[1, 0, 0]] * 4)
    np.testing.assert_array_equal(known_frame_mask([0, 8], 9, 4), [[1, 0, 0]] * 3 + [[1, 0, 1]])
    np.testing.assert_array_equal(known_frame_mask([0], 1, 4), [[1]] * 4)


def test_the_pixels_of_a_cell_become_channels():
    mask = np.arange(5 * 4 * 6, dtype=np.float32).reshape(5, 4, 6)
    cells = mask_to_channels(mask, 2, 2)
    assert cells.shape == (4, 2, 2, 3)
    np.testing.assert_array_equal(cells[1 * 2 + 0, 1], mask[3, 1::2, 0::2])  # row 1, column 0 of each 2 × 2


def test_a_picture_is_centred_on_white():
    def resized(x, size):
        return np.asarray(jax.image.resize(x, (*size, 3), "linear", antialias=False))

    fitted = fit_on_white(red_and_blue(10, 20), (40, 40), resized)
    assert fitted[:10].min() == fitted[-10:].min() == 1
    np.testing.assert_array_equal(fitted[20, [0, -1]], np.array([RED, BLUE]) / 255)
