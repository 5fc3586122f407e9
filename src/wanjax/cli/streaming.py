# SPDX-License-Identifier: Apache-2.0
"""The command `generate` for models that make a video block by block: its frames are written as they come."""

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np


class Tempo:
    """The frames delivered, and their number a second since the first block, for which programs are compiled."""

    def __init__(self) -> None:
        self.frames = 0
        self._first: tuple[int, float] | None = None
        self._last = 0.0

    def deliver(self, frames: int) -> None:
        """Counts frames that are delivered now."""
        self.frames += frames
        self._last = perf_counter()
        if self._first is None:
            self._first = self.frames, self._last

    def __str__(self) -> str:
        """Tells the frames, and how many there are a second, if there are two blocks."""
        if self._first is None or self.frames == self._first[0]:
            return f"{self.frames} frames"
        frames, since = self._first
        return f"{self.frames} frames, {(self.frames - frames) / (self._last - since):.1f} a second"


def stream(rendering: Any, frames: Iterator[Any]) -> Path:
    """Writes a video while it is made, from the frames of each block; the latents are saved after it.

    `rendering` is a `stages.Rendering`.
    """
    report, tempo = rendering.report, Tempo()
    architecture = rendering.pipe.architecture
    total = architecture.latent_shape(rendering.settings)[2] // architecture.block_frames

    def clips() -> Iterator[np.ndarray]:
        report.count("block", 0, total)
        for done, clip in enumerate(frames, 1):
            yield np.asarray(clip)
            tempo.deliver(len(clip))
            report.count("block", done, total, beside=str(tempo))

    with report.stage("stream"):
        written = rendering.write(clips())
    report.note(f"{tempo}, where {rendering.settings.fps} are played")
    report.way_on = None
    return written
