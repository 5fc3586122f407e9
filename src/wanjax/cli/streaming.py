# SPDX-License-Identifier: Apache-2.0
"""The command `generate` for models that make a video block by block: its frames are written as they come."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from wanjax.media import stage_files
from wanjax.pipelines.streaming import StreamingPipeline


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


def stream(run: Any, encoded: Any) -> Path:
    """Denoises and decodes block by block, and writes the video while it is made; saves the latents after it.

    `run` is a `stages.Rendering`.
    """
    pipe, made, tempo = run.pipe, [], Tempo()
    assert isinstance(pipe, StreamingPipeline)
    run.ready_previews()
    profile, after = run.watching(encoded)

    def latents() -> Iterator[Any]:
        """Yields each block's latents, and keeps them."""
        for block in pipe.blocks(encoded, noise=run.noise, callback=after, **run.settings.to_json()):
            made.append(np.asarray(block))
            yield block

    def clips(blocks: Iterable[Any], total: int) -> Iterator[np.ndarray]:
        run.report.count("block", 0, total)
        for done, clip in enumerate(pipe.decode_blocks(blocks, tiling=run.tiling), 1):
            yield clip
            tempo.deliver(len(clip))
            run.report.count("block", done, total, beside=str(tempo))

    total = pipe.architecture.latent_shape(run.settings)[2] // pipe.block_frames
    with run.report.stage("stream"):
        written = run.write(clips(latents(), total))
    run.report.note(f"{tempo}, where {run.settings.fps} are played")
    run.looked(profile)
    pipe.free()
    run.save(stage_files.save_latents, np.concatenate(made, axis=2))
    run.report.way_on = None
    return written
