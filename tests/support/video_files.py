# SPDX-License-Identifier: Apache-2.0
"""Video files that the bundled ffmpeg writes, intact and damaged, and the difference of two clips."""

import re
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from PIL import Image

RANDOM = np.random.default_rng(0)
FRAMES = np.stack([np.roll(RANDOM.integers(40, 216, (12, 16, 3)), i, 1) for i in range(25)]).repeat(8, 1).repeat(8, 2)
FRAMES = FRAMES.astype(np.uint8)  # 25 of 128x96; each is encoded in enough bytes for a hole in one frame
X264 = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-g", "12")
CONTAINERS = {
    "fast.mp4": (*X264, "-movflags", "+faststart"),
    "plain.mp4": X264,
    "parts.mp4": (*X264, "-movflags", "+frag_keyframe+empty_moov"),
    "parts.mov": (*X264, "-movflags", "+frag_keyframe+empty_moov"),
    "a.mkv": X264,
    "vp9.webm": ("-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", "8"),
    "vp8.webm": ("-c:v", "libvpx", "-deadline", "realtime", "-b:v", "2M"),
    "av1.mp4": ("-c:v", "libsvtav1", "-preset", "10", "-svtav1-params", "lp=1", "-movflags", "+faststart"),
    "hevc.mp4": ("-c:v", "libx265", "-tag:v", "hvc1", "-movflags", "+faststart"),
    "a.avi": ("-c:v", "mpeg4", "-q:v", "2"),
    "a.ts": X264,
    "mpeg2.ts": ("-c:v", "mpeg2video", "-q:v", "2"),
    "a.flv": X264,
    "a.mpg": ("-c:v", "mpeg2video", "-q:v", "2"),
    "a.ogv": ("-c:v", "libtheora", "-q:v", "9"),
    "a.mxf": ("-c:v", "mpeg2video", "-q:v", "2"),
}
ANIMATIONS = ("a.gif", "a.webp", "a.png", "a.avif")


def max_difference(first: np.ndarray, second: np.ndarray) -> int:
    """Return the largest difference of two pictures or clips of equal shape."""
    assert first.shape == second.shape
    return int(np.abs(first.astype(int) - second).max())


def ffmpeg(*arguments: str | Path, frames: np.ndarray, rate: str = "25") -> str:
    """Run ffmpeg on RGB or RGBA frames at a frame rate; return its messages."""
    height, width, channels = frames.shape[1:]
    raw = ["-f", "rawvideo", "-pix_fmt", "rgba" if channels == 4 else "rgb24", "-s", f"{width}x{height}"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", *raw, "-framerate", rate, "-i", "-", *arguments]
    run = subprocess.run(command, input=frames.tobytes(), capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()[-400:]
    return run.stderr.decode()


def write_clip(path: Path, rate: str = "25", frames: np.ndarray = FRAMES) -> Path:
    """Write a video or an animation in the container that the file name says."""
    if path.name in ANIMATIONS:
        first, *rest = [Image.fromarray(frame) for frame in frames]
        first.save(path, save_all=True, append_images=rest, duration=40, quality=90)
    else:
        ffmpeg(*CONTAINERS[path.name], path, frames=frames, rate=rate)
    return path


def write_damaged(path: Path, kind: str) -> Path:
    """Write a copy of a file that ends early or has a hole in the middle of its frames."""
    data = bytearray(path.read_bytes())
    if kind == "cut":
        del data[int(len(data) * 0.6) :]
    else:
        data[len(data) // 2 : len(data) // 2 + 600] = bytes(600)
    damaged = path.with_name(f"{kind}-{path.name}")
    damaged.write_bytes(data)
    return damaged


def names_broken_frame(message: str, name: str, kind: str) -> bool:
    """Return whether a message names the frame at which a damaged clip of `FRAMES` breaks.

    A file that ends early may not open at all.
    """
    if (frame := re.search(r"breaks at frame (\d+)", message)) is None:
        return kind == "cut" and name in ("plain.mp4", "a.webp", "a.avif")
    if (name, kind) == ("a.avif", "cut"):  # its frames are not stored in display order
        return True
    return 8 <= int(frame[1]) <= 18
