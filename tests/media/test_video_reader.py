# SPDX-License-Identifier: Apache-2.0
"""Intact videos and animations are read with all frames at their times; truncated and damaged ones are refused."""

import math
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from tests.support.commands import refused
from tests.support.quick import quick
from tests.support.video_files import (
    ANIMATIONS,
    CONTAINERS,
    FRAMES,
    X264,
    ffmpeg,
    max_difference,
    names_broken_frame,
    write_clip,
    write_damaged,
)
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.media.damage import MIN_HOLE_BYTES, ZeroRuns, first_frame_with_hole
from wanjax.media.inputs import INPUT_SPECS
from wanjax.media.pictures import read_clip
from wanjax.media.video_reader import read_video_file
from wanjax.serve.limits import Limits
from wanjax.serve.uploads import save_pictures
from wanjax.training.clips import Cutting

FAST = ("fast.mp4", "parts.mp4", "a.mkv", "vp9.webm", "a.avi", "a.ts", "a.flv", *ANIMATIONS)
CLIP_LIMITS = {"frames": 100, "fps": 25}
CUTTING = Cutting(((96, 128),), (17, 9), 25, "uniform", "crop")


@pytest.mark.parametrize("name", quick(["a.gif"], (*CONTAINERS, *ANIMATIONS)))
def test_the_message_of_a_command_names_the_broken_frame_of_a_video(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    intact = write_clip(tmp_path / name)
    arguments = ("generate", "a", "--model", "nano", "--size", "32x32", "--frames", str(len(FRAMES)), "--fps", "25")
    for kind in ("cut", "hole"):
        message = refused(*arguments, "--video", write_damaged(intact, kind))
        assert str(tmp_path / f"{kind}-{name}") in message
        assert names_broken_frame(message, name, kind)


@pytest.mark.parametrize("kind", ["cut", "hole"])
@pytest.mark.parametrize("name", quick(FAST, (*CONTAINERS, *ANIMATIONS)))
def test_the_error_of_each_interface_names_the_broken_frame_of_a_video(tmp_path, name, kind):
    """The interfaces are a path, a request and training data. The intact video has all frames."""
    intact = write_clip(tmp_path / name)
    clip = read_clip(intact, **CLIP_LIMITS)
    assert len(clip) == len(FRAMES)
    assert np.abs(clip.astype(int) - FRAMES).mean(axis=(1, 2, 3)).max() < 20
    assert [len(clip) for clip in CUTTING.clips(intact)] == [17]
    damaged = write_damaged(intact, kind)
    interfaces = [lambda: read_clip(damaged, **CLIP_LIMITS), lambda: list(CUTTING.clips(damaged))]
    if name.endswith(("mp4", "mov", "webm", "mkv", *ANIMATIONS)):

        def request():
            saved = save_pictures({"video": [damaged.read_bytes()]}, INPUT_SPECS, tmp_path, Limits(10**7))
            read_clip(tmp_path / saved["video"], **CLIP_LIMITS)

        interfaces.append(request)
    for interface in interfaces:
        with pytest.raises(WanjaxError) as caught:
            interface()
        assert names_broken_frame(str(caught.value), name, kind)


@pytest.mark.parametrize(
    ("name", "share", "words"),
    [
        ("plain.mp4", 0.5, "plain.mp4 truncated ffmpeg complete copy"),
        ("fast.mp4", 0.001, "fast.mp4 truncated complete copy"),
        ("vp9.webm", 0.005, "vp9.webm truncated complete copy"),
    ],
)
def test_a_video_without_its_end_is_reported_as_truncated(tmp_path, name, share, words):
    """No frame of these videos can be decoded."""
    content = write_clip(tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: max(64, int(share * len(content)))])
    with pytest.raises(WanjaxError, match=line_with_words(words)) as caught:
        read_clip(tmp_path / name, **CLIP_LIMITS)
    assert not re.search("Conversion failed|Error opening|Terminating|frame=|Errno", str(caught.value))


def test_a_file_without_a_video_stream_is_refused(tmp_path):
    (tmp_path / "text.mp4").write_text("a cat\n" * 100)
    with pytest.raises(WanjaxError, match=line_with_words("text.mp4 damaged kind ffmpeg")):
        read_clip(tmp_path / "text.mp4", **CLIP_LIMITS)
    run_ffmpeg("-f", "lavfi", "-i", "sine=d=1", tmp_path / "sound.mp4")
    with pytest.raises(WanjaxError, match=line_with_words("sound.mp4 no video stream")):
        read_clip(tmp_path / "sound.mp4", **CLIP_LIMITS)


def run_ffmpeg(*arguments: str | Path) -> None:
    subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *arguments], check=True)


VALID_VIDEOS = {
    "an edit list": ("-ss", "0.3", "-i", "whole.mp4", "-c", "copy", "a.mp4"),
    "a time code, as of cameras": ("-i", "whole.mp4", "-c", "copy", "-timecode", "01:00:00:00", "a.mov"),
    "no times of decoding": ("-i", "whole.mp4", "-c", "copy", "a.avi"),
    "times that fall": (
        *("-i", "whole.mp4", "-c", "copy", "-bsf:v", "setts=pts='if(eq(mod(N,7),3),PTS-4000,PTS)'", "a.mkv"),
    ),
    "a turned picture": ("-display_rotation", "180", "-i", "whole.mp4", "-c", "copy", "a.mp4"),
    "an old name of pixels": ("-i", "whole.mp4", "-c:v", "mjpeg", "-pix_fmt", "yuvj420p", "-q:v", "1", "a.mov"),
    "a cover": (
        *("-i", "whole.mp4", "-i", "cover.png", "-map", "0", "-map", "1", "-c", "copy"),
        *("-disposition:v:1", "attached_pic", "a.mp4"),
    ),
    "packed frames": ("-i", "whole.mp4", "-c:v", "libxvid", "-bf", "2", "-q:v", "2", "a.avi"),
    "a length that is not told": ("-i", "whole.mp4", "-c", "copy", "-f", "matroska", "-live", "1", "a.mkv"),
    "padding of zeros": (
        *("-i", "black.mkv", "-c:v", "mpeg2video", "-f", "vob"),
        *("-b:v", "4M", "-minrate", "4M", "-maxrate", "4M", "-bufsize", "1M", "a.mpg"),
    ),
}


@pytest.mark.parametrize("kind", VALID_VIDEOS)
def test_valid_videos_with_messages_of_ffmpeg_are_read(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    ffmpeg(*X264, "-bf", "2", "whole.mp4", frames=FRAMES)
    Image.fromarray(FRAMES[0]).save("cover.png")
    ffmpeg("-c:v", "ffv1", "black.mkv", frames=FRAMES * 0)
    run_ffmpeg(*VALID_VIDEOS[kind])
    expected = {"an edit list": 17, "times that fall": 24}.get(kind, 25)  # some frames of these two are not shown
    assert len(read_clip(Path(VALID_VIDEOS[kind][-1]), **CLIP_LIMITS)) == expected


def test_holes_of_zeros_are_detected_across_reads_and_padding_is_not():
    def holes(*packets: bytes, pixels: int = 0, size: int = 100) -> set[int]:
        zeros, data = ZeroRuns(pixels), b"".join(packets)
        for at in range(0, len(data), size):
            zeros.feed(data[at : at + size])
        return zeros.packets_with_holes(np.cumsum([len(packet) for packet in packets]).tolist())

    full, hole = b"\x05" * 300, bytes(MIN_HOLE_BYTES)
    for size in (1, 100, 10_000):
        assert holes(full, full + hole + full, full, size=size) == {1}
        assert holes(full, hole, full, size=size) == {1}  # all of it
        assert holes(full, hole, size=size) == {1}
        assert holes(full + bytes(MIN_HOLE_BYTES // 2), bytes(MIN_HOLE_BYTES // 2) + full, size=size) == set()
        assert holes(full + hole, full + hole + b"\x01" + full, size=size) == set()  # stuffing
        assert holes(full + hole + full, full, full + hole + full, pixels=10_000_000, size=size) == set()
    assert holes(bytes(3 * MIN_HOLE_BYTES) + full, full) == {0}


def test_a_uniform_picture_has_no_hole(tmp_path):
    """Large uniform areas become many zeros in WebP."""
    picture = np.zeros((1080, 1920, 3), np.uint8)
    picture[-270:, -480:] = np.random.default_rng(0).integers(0, 255, (270, 480, 3))
    for suffix, options in (("webp", {"quality": 80, "method": 0}), ("webp", {"lossless": True, "method": 0})):
        Image.fromarray(picture).save(tmp_path / f"a.{suffix}", **options)
        data = (tmp_path / f"a.{suffix}").read_bytes()
        assert first_frame_with_hole(data, suffix.upper(), 1920 * 1080, []) is None


RATES = ("8", "16", "24000/1001", "25", "30000/1001", "60")
CONTAINER_RATES = [
    (name, rate) for name in ("plain.mp4", "a.mkv", "vp9.webm", "a.avi", "a.ts", "a.flv") for rate in RATES
]


@pytest.mark.parametrize(("name", "rate"), quick([("a.mkv", "30000/1001"), ("vp9.webm", "60")], CONTAINER_RATES))
def test_frames_are_dropped_equally_in_each_container(tmp_path, name, rate):
    """The clip has the frame that is shown at each k/fps up to the time of the last one, and at least one frame."""
    for count in (17, 81) if name == "a.ts" else (1, 2, 17, 81):
        grey = (np.arange(count) * 3 % 243).astype(np.uint8)
        ramp = np.broadcast_to(grey[:, None, None, None], (count, 16, 32, 3))
        path = write_clip(tmp_path / name, rate, np.ascontiguousarray(ramp))
        for fps in (8, 16, 24):
            steps = range(math.floor((count - 1) / Fraction(rate) * fps) + 1)
            expected = range(count) if Fraction(rate) <= fps else [math.floor(k * Fraction(rate) / fps) for k in steps]
            clip = read_clip(path, frames=200, fps=fps)
            assert len(clip) == len(expected)
            assert np.abs(clip.mean(axis=(1, 2, 3)) - grey[list(expected)]).max() <= 1.4


PEAK_MEMORY = """
import resource, sys
from wanjax.media.pictures import read_clip
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
clip = read_clip(sys.argv[1], frames=100, fps=25)
print(clip.nbytes, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process")
def test_reading_a_video_needs_the_memory_of_one_copy(tmp_path):
    """A clip within the limits may need 2.9 GB."""
    run_ffmpeg("-f", "lavfi", "-i", "testsrc=s=1280x720:r=25:d=2", *X264, "-preset", "ultrafast", tmp_path / "a.mp4")
    read = subprocess.run([sys.executable, "-c", PEAK_MEMORY, tmp_path / "a.mp4"], capture_output=True, check=True)
    size, peak = map(int, read.stdout.split())
    assert size == 50 * 720 * 1280 * 3
    assert peak < 1.3 * size


def test_a_video_of_the_largest_size_is_read(tmp_path, machine):
    machine.reads_at_most(max_pixels=96 * 128, clip_factor=len(FRAMES))
    assert len(list(read_video_file(write_clip(tmp_path / "fast.mp4"), 100, 25, is_non_colour=False))) == len(FRAMES)


def test_a_video_too_large_is_refused_before_a_frame_is_read(tmp_path, machine):
    machine.reads_at_most(max_pixels=96 * 128, clip_factor=len(FRAMES) - 1)
    frames = read_video_file(write_clip(tmp_path / "fast.mp4"), 100, 25, is_non_colour=False)
    with pytest.raises(WanjaxError, match=line_with_words("128x96 294,912")):
        next(frames)


def interlacing(clip: np.ndarray) -> float:
    """Return the mean difference of odd rows from their neighbours."""
    x = clip.astype(np.float32).mean(-1)
    return float(np.abs(x[:, 1:-1:2] - (x[:, :-2:2] + x[:, 2::2]) / 2).mean())


@pytest.mark.parametrize("name", ["a.mp4", "a.mpg"])
def test_an_interlaced_video_is_read_in_full_frames(tmp_path, name):
    bar = np.zeros((34, 64, 64, 3), np.uint8)
    for i, frame in enumerate(bar):
        frame[:, np.arange(2 * i, 2 * i + 8) % 64] = 255
    codec = ["-c:v", "mpeg2video", "-q:v", "2"] if name == "a.mpg" else ["-c:v", "libx264", "-x264opts", "tff=1"]
    fields = ["-vf", "tinterlace=interleave_top,fieldorder=tff", "-flags", "+ilme+ildct"]
    ffmpeg(*fields, *codec, "-pix_fmt", "yuv420p", tmp_path / name, frames=bar, rate="50")
    assert interlacing(read_clip(tmp_path / name, frames=100, fps=25)) < 2
    ffmpeg(*X264, tmp_path / "whole.mp4", frames=bar)
    assert interlacing(read_clip(tmp_path / "whole.mp4", frames=100, fps=25)) < 2


@pytest.mark.parametrize("primaries", ["smpte432", "smpte431", "bt2020"])
def test_wide_primaries_are_converted_to_srgb(tmp_path, primaries):
    """A mask or a control clip is not converted."""
    pale = FRAMES[:6] // 2 + 60
    options = "setparams=color_primaries=bt709:color_trc=bt709:colorspace=gbr:range=pc"
    wide = f"zscale=t=linear,format=gbrpf32le,zscale=p={primaries},zscale=t=bt709:m=bt2020nc:r=tv,format=yuv444p12le"
    ffmpeg("-vf", f"format=gbrp,{options},{wide}", "-c:v", "ffv1", tmp_path / "a.mkv", frames=pale)
    assert max_difference(read_clip(tmp_path / "a.mkv", **CLIP_LIMITS), pale) <= 3
    assert max_difference(read_clip(tmp_path / "a.mkv", **CLIP_LIMITS, background="black"), pale) > 10


def test_the_default_picture_of_an_animation_is_not_a_frame(tmp_path):
    frames = [Image.new("RGB", (8, 6), (20 * i, 0, 0)) for i in range(4)]
    options = {"save_all": True, "append_images": frames, "default_image": True, "duration": 100}
    Image.new("RGB", (8, 6), (0, 255, 0)).save(tmp_path / "a.png", **options)
    assert read_clip(tmp_path / "a.png", frames=100, fps=10)[:, 0, 0].tolist() == [[20 * i, 0, 0] for i in range(4)]


@pytest.mark.parametrize(("duration", "delay"), [(0, 100), (10, 100), (20, 20), (100, 100)])
@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_delays_that_are_too_short_become_a_tenth_of_a_second(tmp_path, suffix, duration, delay):
    first, *rest = [Image.new("L", (8, 6), 20 * i) for i in range(12)]
    first.save(tmp_path / f"a.{suffix}", save_all=True, append_images=rest, duration=duration)
    expected = [math.floor(k * 125 / delay) for k in range(math.floor(11 * delay / 125) + 1)]
    clip = read_clip(tmp_path / f"a.{suffix}", frames=100, fps=8)
    assert [round(float(x) / 20) for x in clip.mean(axis=(1, 2, 3))] == expected
