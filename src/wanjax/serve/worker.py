# SPDX-License-Identifier: Apache-2.0
"""The thread that owns the model: it makes one video after another, and nothing that a request asks for ends it."""

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from rich.console import Console

from wanjax.compilation import compile_cache, forget_programs
from wanjax.errors import WanjaxError, is_out_of_memory
from wanjax.layers.tiling import Tiling
from wanjax.media.videos import write_video
from wanjax.pipelines.components import free_memory
from wanjax.pipelines.looks import Previews
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.steps import Cancelled, Step
from wanjax.serve.board import Board, cancellation
from wanjax.serve.jobs import BROKEN, COMPLETED, FAILED, MISTAKE, PREVIEW, THUMBNAIL, VIDEO, Job

STEPS, CHUNKS = 2, 3  # after these a video of the same shape compiles nothing
SHAPES = 16  # shapes whose compiled programs are kept
ENCODED, DENOISED = 2, 95  # percent that are done at the end of these stages
THUMBNAIL_SIDE = 480  # pixels
LOADING, READY, BROKE = "loading", "ready", "failed"
OUT_OF_MEMORY = "the devices have too little memory for this video: a smaller size or fewer frames need less"
UNEXPECTED = "the server failed on this video, and its log has the details"
logger = logging.getLogger("wanjax.serve")


class Worker:
    """The worker of a board. `tiling` and `batch_guidance` are those of all videos.

    `preview` tells whether to show at a few steps what a video will be.

    `state` is "loading" while the model is loaded and compiled, then "ready", and "failed" if the thread ended.
    """

    def __init__(
        self,
        pipe: Pipeline,
        board: Board,
        *,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        rehearse: bool = True,
        preview: bool = False,
    ):
        self.pipe = pipe
        self.board = board
        self.tiling = tiling
        self.batch_guidance = batch_guidance
        self.state = LOADING
        self.seconds: dict[str, float] = {}  # of all videos so far, by stage
        self._rehearse = rehearse
        self._preview = preview
        self._shapes: dict[tuple[Any, ...], None] = {}
        self._thread = Thread(target=self._run, name="wanjax-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Waits for the end of the thread; returns False if it is still at work."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self.pipe.progress = False
        try:
            if self._rehearse:
                rehearse(self.pipe, self.tiling, self.batch_guidance, self._preview, lambda: self.board.closed)
            self.state = READY
            while (job := self.board.take()) is not None:
                self._make(job)
        except BaseException:
            logger.error("the worker ended: %s", traceback.format_exc())
            self.state = BROKE
            raise

    def _make(self, job: Job) -> None:
        """Makes a video, and notes its end, whatever that is."""
        try:
            self._forget_shapes(job)
            self._video(job)
        except Cancelled:
            if self.board.closed and not job.cancelled:
                self.board.give_back(job)
            else:
                self.board.finish(job, FAILED, cancellation())
        except WanjaxError as error:
            self.board.finish(job, FAILED, {"code": MISTAKE, "message": str(error)})
        except Exception as error:
            full = is_out_of_memory(error)
            if not full:
                logger.error("%s failed: %s", job.id, traceback.format_exc())
            self.board.finish(job, FAILED, {"code": BROKEN, "message": OUT_OF_MEMORY if full else UNEXPECTED})
        else:
            self.board.finish(job, COMPLETED)

    def _video(self, job: Job) -> None:
        pipe, files = self.pipe, self.board.shelf.files(job)
        settings: Any = {name: value for name, value in job.settings.items() if value is not None}
        prompt, negative = settings.pop("prompt"), settings.pop("negative_prompt")
        with self._stage(job, "encode", 0):
            job.notes = [str(told) for text in (prompt, negative) for told in pipe.truncations(text)]
            encoded = jax.block_until_ready(pipe.encode(prompt, negative, tiling=self.tiling, **files, **settings))

        previews = Previews(self.board.shelf.place(job.id) / PREVIEW, on=Console(quiet=True))

        def after(step: Step) -> bool:
            done = step.index + 1
            if self._preview:
                previews(step)
                job.preview = previews.shown
            progress = ENCODED + (DENOISED - ENCODED) * step.index // step.total  # this step may be under way
            self.board.advance(job, progress, done=done, total=step.total)
            return done == step.total or not self._stopped(job)

        with self._stage(job, "denoise", ENCODED):
            asked = {"callback": after, "batch_guidance": self.batch_guidance, **settings}
            latents = jax.block_until_ready(pipe.denoise(encoded, **asked))
            previews.wait()
            job.preview = previews.shown
        chosen = pipe.settings(prompt=prompt, negative_prompt=negative, **settings)
        options = {"tiling": self.tiling, "batch_guidance": self.batch_guidance}
        with self._stage(job, "decode", DENOISED):
            place = self.board.shelf.place(job.id)
            frames = with_thumbnail(self._frames(job, latents), chosen.frames, place / THUMBNAIL)
            write_video(place / VIDEO, frames, chosen.fps, pipe.record(chosen, files, **options))

    def _frames(self, job: Job, latents: Any) -> Iterator[np.ndarray]:
        """Yields the frames of each chunk; raises Cancelled between two."""
        total = self.pipe.chunks(latents)
        for done, chunk in enumerate(self.pipe.decode_chunks(latents, tiling=self.tiling), 1):
            if self._stopped(job):
                raise Cancelled(job.done)
            yield np.asarray(chunk)
            self.board.advance(job, DENOISED + (99 - DENOISED) * done // total, done=done, total=total)

    def _stopped(self, job: Job) -> bool:
        return job.cancelled or self.board.closed

    @contextmanager
    def _stage(self, job: Job, name: str, progress: int) -> Iterator[None]:
        """Notes that a stage is under way, and its seconds at its end; raises Cancelled before one."""
        if self._stopped(job):
            raise Cancelled(0)
        self.board.advance(job, progress, stage=name, done=0, total=0)
        start = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            job.seconds[name] = round(seconds, 3)

    def _forget_shapes(self, job: Job) -> None:
        """Drops all compiled programs once there are those of many shapes, so that memory does not grow."""
        made = job.settings
        shape = tuple(made[name] for name in ("height", "width", "frames")), made["guidance_scale"] > 1, made["cache"]
        self._shapes[shape] = None
        if len(self._shapes) > SHAPES:
            self._shapes = {shape: None}
            forget_programs()


def with_thumbnail(chunks: Iterator[np.ndarray], frames: int, file: Path) -> Iterator[np.ndarray]:
    """Yields the chunks of a video, and writes its middle frame, made small, to a file."""
    start = 0
    for chunk in chunks:
        if start <= frames // 2 < start + len(chunk):
            image = Image.fromarray(chunk[frames // 2 - start])
            image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
            image.save(file, "WEBP", quality=85)
        start += len(chunk)
        yield chunk


def rehearse(
    pipe: Pipeline, tiling: Tiling | None, batch_guidance: bool, preview: bool, stopped: Callable[[], bool]
) -> None:
    """Takes the first steps of each stage of a default video, which loads the model and compiles its programs.

    Where all networks fit into memory, the last stage is compiled beside the others. A model that begins from pictures
    cannot be rehearsed without one, and what fails here is told by the first request.
    """
    together = sum(pipe.components.sizes.values()) < free_memory(jax.local_devices()[0])
    with compile_cache():  # once for both threads, each of which would restore the thresholds
        decoding = Thread(target=_decode_first, args=(pipe, tiling, preview), name="wanjax-rehearsal", daemon=True)
        decoding.start()
        if not together:
            decoding.join()
        if not stopped():
            _denoise_first(pipe, batch_guidance, stopped)
        decoding.join()


def _denoise_first(pipe: Pipeline, batch_guidance: bool, stopped: Callable[[], bool]) -> None:
    with _telling_failures():
        encoded = pipe.encode("")
        pipe.denoise(
            encoded, callback=lambda step: step.index + 1 < STEPS and not stopped(), batch_guidance=batch_guidance
        )


def _decode_first(pipe: Pipeline, tiling: Tiling | None, preview: bool) -> None:
    with _telling_failures():
        latents = jnp.zeros(pipe.architecture.latent_shape(pipe.defaults), jnp.float32)
        for chunk in islice(pipe.decode_chunks(latents, tiling=tiling), CHUNKS):
            np.asarray(chunk)
        if preview:
            pipe.colours()


@contextmanager
def _telling_failures() -> Iterator[None]:
    try:
        yield
    except (WanjaxError, Cancelled):
        pass
    except Exception as error:
        logger.warning("the rehearsal did not succeed: %s", str(error)[:500])
