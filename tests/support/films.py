# SPDX-License-Identifier: Apache-2.0
"""Films that the bundled ffmpeg writes, and how far two clips are apart."""

import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np


def gap(one: np.ndarray, other: np.ndarray) -> int:
    """Returns the largest difference of two pictures or clips, which have one shape."""
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other).max())


def ffmpeg(*arguments: str | Path, frames: np.ndarray, rate: str = "25") -> str:
    """Runs ffmpeg on frames of RGB, or RGBA, at a rate; returns what it says."""
    height, width, channels = frames.shape[1:]
    raw = ["-f", "rawvideo", "-pix_fmt", "rgba" if channels == 4 else "rgb24", "-s", f"{width}x{height}"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", *raw, "-framerate", rate, "-i", "-", *arguments]
    done = subprocess.run(command, input=frames.tobytes(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-400:]
    return done.stderr.decode()
