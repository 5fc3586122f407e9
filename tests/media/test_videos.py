# SPDX-License-Identifier: Apache-2.0
"""Videos of each format have the written frames and settings, and no error leaves a broken file."""

import errno
import re
import stat
import subprocess
import tempfile
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from tests.support.media import SETTINGS, names_in
from tests.support.types import unchecked
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.media import video as video_files
from wanjax.media.pictures import read_clip

COLOURS = np.array([[220, 30, 40], [30, 180, 60], [40, 60, 220], [240, 220, 40], [128, 128, 128]], np.uint8)


def clip(frames: int = 5, height: int = 32, width: int = 64) -> np.ndarray:
    """Return a clip whose frames are five plain colours in turn."""
    return np.broadcast_to(COLOURS[np.arange(frames) % 5][:, None, None], (frames, height, width, 3)).copy()


def ffmpeg(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", *arguments], capture_output=True, check=False
    )


def decode_video(path: Path) -> np.ndarray:
    """Return the frames of a video 64 wide and 32 high, as ffmpeg reads them."""
    raw = ffmpeg("-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-").stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, 32, 64, 3)


def mp4_boxes(path: Path) -> list[str]:
    """Return the names of an mp4's outermost boxes, in order."""
    data, names, at = path.read_bytes(), [], 0
    while at < len(data):
        names.append(data[at + 4 : at + 8].decode())
        at += int.from_bytes(data[at : at + 4], "big")
    return names


@pytest.mark.parametrize(("suffix", "codec"), [(".mp4", "h264"), (".mov", "h264"), (".webm", "vp9")])
def test_videos_of_each_format_have_their_frames_and_settings(tmp_path, suffix, codec):
    path = video_files.Video(clip(), 16, SETTINGS).save(tmp_path / "new" / f"clip{suffix}")
    output = ffmpeg("-i", path).stderr.decode()
    assert f"Video: {codec}" in output
    assert re.search(r"yuv420p\(tv, (bt709|bt709/bt709/bt709)[,)]", output)  # matrix, primaries and transfer
    assert "64x32" in output
    assert "16 fps" in output
    if codec == "h264":
        assert mp4_boxes(path).index("moov") < mp4_boxes(path).index("mdat")  # faststart
    assert video_files.read_metadata(path) == SETTINGS
    frames = decode_video(path)
    assert frames.shape == (5, 32, 64, 3)
    assert np.abs(frames.astype(int) - clip()).max() <= 6  # 8-bit YUV with half the chroma
    assert names_in(path.parent) == [f"clip{suffix}"]


def test_a_webm_may_have_an_odd_size(tmp_path):
    path = video_files.write_video(tmp_path / "clip.webm", clip(height=31, width=33), 16, SETTINGS)
    frames = read_clip(path, 5, 16)
    assert np.abs(frames.astype(int) - clip(height=31, width=33)).max() <= 6


def test_one_frame_is_written_as_a_picture(tmp_path):
    path = video_files.write_video(tmp_path / "one.png", clip(1), 16, SETTINGS)
    np.testing.assert_array_equal(np.asarray(Image.open(path)), clip(1)[0])
    assert video_files.read_metadata(path) == SETTINGS


def test_an_mp4_is_written_from_chunks_with_long_settings(tmp_path):
    settings = {"prompt": "红" * 5000}
    path = video_files.write_video(tmp_path / "clip.MP4", (clip(n) for n in (1, 4, 4)), 23.976, settings)
    assert decode_video(path).shape == (9, 32, 64, 3)
    assert video_files.read_metadata(tmp_path / "clip.MP4") == settings


@pytest.mark.parametrize("name", ["a.mp4", "a.mov", "a.webm", "a.gif", "a.webp", "a.png", "a"])
def test_settings_may_be_longer_than_an_argument_of_a_program(tmp_path, monkeypatch, name):
    """The limit of a program's argument is 128 KiB, and that of QuickTime's metadata 64 KiB."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    settings = {"prompt": "红" * 25_000 + "\n;#=\\"}
    video_files.write_trial_video(tmp_path / name, 1, (32, 64), 16, settings)
    assert names_in(tmp_path) == ["temporary"]
    assert video_files.read_metadata(video_files.write_video(tmp_path / name, clip(1), 16, settings)) == settings
    assert names_in(tmp_path / "temporary") == []


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_animations_have_their_frames_times_and_settings(tmp_path, suffix):
    path = video_files.write_video(tmp_path / f"clip{suffix}", clip(height=31, width=33), 16, SETTINGS)
    with Image.open(path) as image:
        assert (image.n_frames, image.size, image.info["loop"]) == (5, (33, 31), 0)
        total = 0
        for index in range(5):
            image.seek(index)
            image.load()
            total += image.info["duration"]
            assert np.abs(np.asarray(image.convert("RGB")).astype(int) - clip(height=31, width=33)[index]).max() <= 8
    assert total == pytest.approx(5 * 1000 / 16, abs=10)  # rounding errors of 10 ms do not accumulate
    assert video_files.read_metadata(path) == SETTINGS
    assert names_in(tmp_path) == [path.name]


@pytest.mark.parametrize("name", ["frames", "frames.mp4/", "frames/"])
def test_frames_are_written_as_png_files_in_a_folder(tmp_path, name):
    path = video_files.write_video(f"{tmp_path}/{name}", clip(7, 5, 3), 16, SETTINGS)
    video_files.write_video(f"{tmp_path}/{name}", clip(2, 5, 3), 16, SETTINGS)  # replaces the first
    assert names_in(path) == ["frame_00000.png", "frame_00001.png"]
    assert names_in(tmp_path) == [path.name]
    np.testing.assert_array_equal(np.asarray(Image.open(path / "frame_00001.png")), clip(2, 5, 3)[1])
    assert video_files.read_metadata(path) == SETTINGS


@pytest.mark.parametrize("name", ["a.mp4", "a.mov", "a.webm", "a.gif", "a.webp", "frames"])
def test_a_complete_video_is_distinguished_from_a_truncated_one(tmp_path, name):
    frames = np.random.default_rng(0).integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)
    path = tmp_path / name
    video_files.write_video(path, frames, 8, SETTINGS)
    assert not video_files.is_incomplete(path)
    file = path / "frame_00002.png" if path.is_dir() else path
    content = file.read_bytes()
    for size in (0, len(content) // 2, len(content) - 20):
        file.write_bytes(content[:size])
        assert video_files.is_incomplete(path)


@pytest.mark.parametrize(
    ("name", "frames", "message"),
    [
        ("clip.avi", clip(), "clip.avi .avi .mp4 .mov .webm .gif .webp .png"),
        ("clip.png", clip(), "clip.png picture one frame"),
        ("clip.mp4", clip(height=31), "frames 64x31 mp4"),
        ("clip.mp4", clip().astype(np.float32), "uint8 [T, H, W, 3] float32"),
        ("clip.mp4", [clip(), clip(height=16)], "uint8 [5, 16, 64, 3]"),
        ("clip.mp4", clip(0), "frames"),
        ("clip.gif", [], "no frames"),
        ("frames", [], "no frames"),
        ("file/clip.mp4", clip(), "file not a folder"),
        ("file", clip(), "file not a folder new or empty"),
        ("", clip(), "file frame"),  # a folder with other things
        ("no ffmpeg.mp4", clip(), "pip install imageio-ffmpeg"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused_videos_leave_nothing(tmp_path, monkeypatch, name, frames, message):
    def missing():
        raise RuntimeError("No ffmpeg exe could be found.")

    (tmp_path / "file").write_text("mine")
    if name == "no ffmpeg.mp4":
        monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", missing)
    with pytest.raises(WanjaxError, match=line_with_words(message)):
        video_files.write_video(f"{tmp_path}/{name}", frames, 16)
    assert names_in(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("fps", [0, -8, float("nan"), float("inf"), "16", None])
def test_a_frame_rate_is_a_number_above_0(tmp_path, fps):
    with unchecked(), pytest.raises(WanjaxError, match=line_with_words(f"fps number 0 {fps!r}")):
        video_files.write_video(tmp_path / "a.mp4", clip(), fps)
    assert names_in(tmp_path) == []


def test_no_video_is_written_to_a_web_address():
    with pytest.raises(WanjaxError, match=line_with_words("https://example.org/a.mp4 web address written s3://")):
        video_files.write_video("https://example.org/a.mp4", clip(), 16)


@pytest.mark.parametrize("name", ["clip.mp4", "clip.webm", "clip.gif", "clip.png", "frames"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError("decoding failed")])
def test_an_interrupted_write_leaves_the_earlier_file(tmp_path, name, failure):
    before = video_files.write_video(tmp_path / name, clip(1), 16, {"seed": 1})

    def frames():
        yield clip(1)
        raise failure

    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        video_files.write_video(tmp_path / name, frames(), 16, {"seed": 2})
    assert video_files.read_metadata(before) == {"seed": 1}
    assert names_in(tmp_path) == [name]


def test_frames_that_cannot_be_replaced_are_kept(tmp_path, monkeypatch):
    before, rename = video_files.write_video(tmp_path / "frames", clip(1), 16, {"seed": 1}), Path.rename

    def failing(self, target):
        if ".partial." in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(WanjaxError, match=line_with_words("frames written")):
        video_files.write_video(tmp_path / "frames", clip(1), 16, {"seed": 2})
    assert video_files.read_metadata(before) == {"seed": 1}
    assert names_in(tmp_path) == ["frames"]


@pytest.mark.parametrize("name", ["clip.gif", "clip.webp", "frames"])
def test_a_full_disk_leaves_nothing(tmp_path, name, monkeypatch):
    def full(self, file, *args, **kwargs):
        Path(file).write_bytes(b"the first bytes")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(WanjaxError, match=line_with_words(f"{name} No space left on device")):
        video_files.write_video(tmp_path / name, clip(), 16)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(("name", "kilobytes"), [("clip.mp4", 8), ("clip.mp4", 0), ("clip.mov", 0), ("clip.webm", 0)])
def test_a_full_disk_leaves_no_partial_video(tmp_path, monkeypatch, name, kilobytes):
    """A limit on the size of files simulates the full disk, because ffmpeg is another process."""
    run = subprocess.Popen
    limited = ["sh", "-c", f'ulimit -f {kilobytes}; trap "" XFSZ; exec "$@"', "sh"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kw: run([*limited, *command], **kw))
    noise = np.random.default_rng(0).integers(0, 256, (40, 64, 64, 3), np.uint8)
    with pytest.raises(WanjaxError, match=line_with_words(f"{name} File too large")):
        video_files.write_video(tmp_path / name, noise, 16)
    assert names_in(tmp_path) == []


def ffmpeg_without(encoder: str, folder: Path) -> str:
    """Return the path of an ffmpeg without an encoder."""
    message = f'#!/bin/sh\nfor x in "$@"; do [ "$x" = {encoder} ] && echo no {encoder} >&2 && exit 1; done\n'
    program = folder / "ffmpeg"
    program.write_text(message + f'exec {imageio_ffmpeg.get_ffmpeg_exe()} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("a.mp4", (32, 64), "a.mp4 libx264"),
        ("a.webm", (31, 33), None),
        ("a.mov", (31, 34), "34x31 mov .webm"),
        ("b" * 250 + ".gif", (32, 64), "name 254 bytes most"),
        ("c" * 252, (32, 64), "name 252 bytes most"),
        ("ä" * 130 + ".mp4", (32, 64), "name 264 bytes most"),
        ("a.png", (32, 64), "a.png picture frame"),
        ("small", (32, 64), "small 1 kB 65.5 kB"),
        ("small", (320, 640), "small 1 kB needs more"),
        ("file/a.gif", (32, 64), "file not a folder"),
    ],
)
def test_an_unwritable_video_is_reported_before_the_run(tmp_path, monkeypatch, machine, name, size, message):
    """Existing files stay, and no new files remain."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "a.mp4").write_text("mine")
    program = ffmpeg_without("libx264", tmp_path) if name == "a.mp4" else imageio_ffmpeg.get_ffmpeg_exe()
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: program)
    if name == "small":
        machine.has_disk(1000)
    before = names_in(tmp_path)
    if message is None:
        video_files.write_trial_video(tmp_path / name, 15, size, 16, {"seed": 1})
    else:
        with pytest.raises(WanjaxError, match=line_with_words(message)):
            video_files.write_trial_video(tmp_path / name, 15, size, 16, {"seed": 1})
    assert names_in(tmp_path) == before
    assert (tmp_path / "a.mp4").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "words"),
    [("text.mp4", "text.mp4 settings"), ("bare.gif", "bare.gif settings"), ("absent.mp4", "no file absent.mp4")],
)
def test_files_without_settings_are_refused(tmp_path, name, words):
    (tmp_path / "text.mp4").write_text("not a video")
    Image.fromarray(clip()[0]).save(tmp_path / "bare.gif")
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        video_files.read_metadata(tmp_path / name)
