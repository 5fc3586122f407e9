# SPDX-License-Identifier: Apache-2.0
"""The thread that owns the model: it makes one video after another, and nothing that a request asks for ends it."""

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np
from PIL import Image
from rich.console import Console

from wanjax.cluster.worker import write
from wanjax.errors import WanjaxError
from wanjax.figures import duration
from wanjax.layers.tiling import Tiling
from wanjax.media.videos import try_output
from wanjax.pipelines.components import free_memory
from wanjax.pipelines.observers import Cancelled, Observer, Step
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.previews.previews import Previews
from wanjax.pipelines.record import digest_of
from wanjax.pipelines.recording import needed_pictures, record
from wanjax.pipelines.request import PreparedRequest
from wanjax.pipelines.run import Run
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.extending import Extended
from wanjax.pipelines.windows import Window
from wanjax.programs import EXECUTE
from wanjax.serve import offer
from wanjax.serve.board import BROKE, Board
from wanjax.serve.desk import Desk
from wanjax.serve.faults import OUT_OF_MEMORY, STORAGE, explained
from wanjax.serve.jobs import COMPLETED, FAILED, PREVIEW, THUMBNAIL, VIDEO, Job, cancellation, files_in
from wanjax.serve.variants import Known, ModelInfo, Variants
from wanjax.stores.places import Place, Remote

SHAPES = 16  # shapes whose compiled programs are kept
PERCENT = {"extend": (0, 0), "compile": (0, 0), "encode": (0, 2), "denoise": (2, 95), "decode": (95, 99)}
"""How much is done at the start of a stage and at its end."""
THUMBNAIL_SIDE = 480  # pixels
NOTE_SECONDS = 5.0  # between two lines on programs that are compiled
logger = logging.getLogger("wanjax.serve")


class Told(NamedTuple):
    """What a process without the models needs to know of them.

    `models` is what clients are told, and requests are checked by the others. `usual` are the LoRAs' strengths.
    """

    models: list[dict[str, Any]]
    outlines: list[ModelInfo]
    usual: dict[str, float]
    folders: list[Path]

    def known(self) -> Known:
        """Returns the models without components, and the LoRAs."""
        return Known({one.defaults.model: one.pipeline() for one in self.outlines}, self.usual, self.folders)


class Worker:
    """The worker of a board, or of a desk away from one. `tiling` and `batch_guidance` are those of all videos.

    `preview` tells whether to show at a few steps what a video will be. `note` receives lines on what is done before
    the first video. `extend` extends a prompt, and is told whether the video begins from a picture.
    """

    def __init__(
        self,
        variants: Variants,
        board: Board | Desk,
        *,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        warm_up: bool = True,
        preview: bool = False,
        note: Callable[[str], object] = lambda text: None,
        extend: Callable[[str, bool], Extended] | None = None,
    ):
        self.variants = variants
        self.board = board
        self.tiling = tiling
        self.batch_guidance = batch_guidance
        self._warm_up = warm_up
        self.preview = preview
        self.note = note
        self.extend = extend
        self._shapes: set[Any] = set()
        self._thread = Thread(target=self.run, name="wanjax-worker", daemon=True)

    @property
    def folders(self) -> list[Place]:
        """Folders of this machine or of a store that no client is told of."""
        return [self.board.shelf.folder, *self.variants.folders]

    def models(self) -> list[dict[str, Any]]:
        """Returns what a server tells of its models, the served one first."""
        loras = [{"name": name, "strength": strength} for name, strength in self.variants.usual.items()]
        about = {"created": int(time.time()), "loras": loras, "extends_prompts": self.extend is not None}
        return [about | offer.model(pipe, self.tiling, self.batch_guidance) for pipe in self.variants.pipes.values()]

    def told(self) -> Told:
        """Returns what a server away from here needs to know of this worker."""
        outlines = [ModelInfo.of(pipe) for pipe in self.variants.pipes.values()]
        return Told(self.models(), outlines, self.variants.usual, self.variants.folders)

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Waits for the end of the thread; returns False if it is still at work."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def run(self) -> None:
        """Loads the model, and makes videos until the board is closed."""
        pipe = self.variants.model(None)
        pipe.progress = False
        try:
            if self._warm_up:
                options: Any = {"tiling": self.tiling, "batch_guidance": self.batch_guidance, "preview": self.preview}
                warm_up(pipe, **options, note=self.note, stopped=lambda: self.board.closed)
            while (job := self.board.take()) is not None:
                self._make(job)
        except BaseException:
            logger.error("the worker ended: %s", traceback.format_exc())
            self.board.state = BROKE
            raise

    def _make(self, job: Job) -> None:
        """Makes a video, and notes its end, whatever that is."""
        try:
            with self.board.shelf.fetched(job) as here:
                self._video(job, here)
        except Cancelled:
            if self.board.closed and not job.cancelled:
                self.board.give_back(job)
            else:
                self.board.finish(job, FAILED, cancellation())
        except Exception as error:
            found = explained(error, self.folders)
            if found.own and found.message != OUT_OF_MEMORY:
                logger.error("%s failed: %s", job.id, error if found.code == STORAGE else traceback.format_exc())
            self.board.finish(job, FAILED, {"code": found.code, "message": found.message})
        else:
            self.board.finish(job, COMPLETED)

    def _video(self, job: Job, here: Path) -> None:
        """Makes a video, whose pictures are in a folder here, and keeps it where the board's are."""
        strengths = self.variants.strengths(job.lora)
        pipe = offer.with_scheduler(self.variants.take(job.settings["model"], strengths), job.scheduler)
        job.seconds = {}
        files, place = self.board.shelf.files(job), self.board.shelf.place(job.id)
        digests = {str(place / name): digest for name in job.files if (digest := digest_of(here / name)) is not None}
        observer = Advancing(self, job)
        if self.extend and not job.settings.get("original_prompt"):
            with observer.stage("extend"):
                self._extend(job, self.extend)
        settings: Any = {name: value for name, value in job.settings.items() if value is not None}
        pictures, chosen = pipe.prepare(**files_in(here, job), **settings)
        texts = chosen.prompt, chosen.negative_prompt
        job.notes = [str(told) for text in texts for told in pipe.truncations(text, follow=chosen.follow)]
        options: Any = {"tiling": self.tiling, "batch_guidance": self.batch_guidance}
        if (shape := self._shape(job, chosen)) not in self._shapes:
            with observer.stage("compile"):
                needed = record(pipe, replace(chosen, windows=min(2, chosen.windows)), pictures, **options).programs
                EXECUTE.compile(*(one.instance for one in needed), begun=observer.compiling)
            self._shapes.add(shape)
        request = PreparedRequest(chosen, offer.without_folders(pipe.record(chosen, files, digests=digests, **options)))
        try_output(place / VIDEO, chosen.length, chosen.size, chosen.fps, request.metadata)
        for _, frames in (run := Run(pipe, [request], pictures, observers=[observer], **options)):
            with run.decode_stage(request):
                clips = with_thumbnail(map(np.asarray, frames), chosen.length, here / THUMBNAIL)
                write(place / VIDEO, clips, request)
        if isinstance(place, Remote):  # after the video, which a store that fails meanwhile is not to cost
            (place / THUMBNAIL).upload(here / THUMBNAIL)

    def _extend(self, job: Job, extend: Callable[[str, bool], Extended]) -> None:
        """Extends a video's prompts, and keeps what was asked for beside them."""
        asked = [job.settings["prompt"], *(job.settings.get("then") or "").splitlines()]
        prompt, *then = (extend(text, "image" in job.pictures) for text in asked)
        told = {"prompt": str(prompt), "then": "\n".join(then), "original_prompt": "\n".join(asked)}
        job.settings = job.settings | told

    def stopped(self, job: Job) -> bool:
        """Tells whether a video is to end before its time."""
        return job.cancelled or self.board.closed

    def _shape(self, job: Job, chosen: Settings) -> tuple[Any, ...]:
        """Returns what decides which programs a video needs, but for the lengths of its prompts.

        Before one of too many shapes all programs are dropped, so that memory does not grow.
        """
        rule = chosen.guidance_rule
        made = chosen.model, chosen.size, chosen.frames, chosen.windows > 1, chosen.guided, chosen.cache, chosen.follow
        made = *made, type(rule), rule.averages
        shape = *made, job.scheduler, tuple(job.files)
        if shape not in self._shapes and len(self._shapes) >= SHAPES:
            self._shapes.clear()
            EXECUTE.forget()
        return shape


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


class Advancing(Observer):
    """Notes on the board how far a video is; ends the run where it is cancelled, or the server ends."""

    def __init__(self, worker: Worker, job: Job):
        self.worker, self.job, self.board = worker, job, worker.board
        self.previews = self._looks()
        self._number, self._windows = 0, 1

    def _looks(self) -> Previews:
        return Previews(self.board.shelf.place(self.job.id) / PREVIEW, on=Console(quiet=True))

    def window(self, window: Window) -> None:
        self._number, self._windows = window.number, window.count
        self.previews = self._looks()  # which counts the steps of one window

    def _advance(self, percent: int, **told: Any) -> None:
        """Notes how much of a window is done, in percent, as its part of the whole."""
        whole = (100 * self._number + percent) // self._windows
        self.board.advance(self.job, whole, window=self._number + 1, **told)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Notes that a stage is under way, and its seconds at its end; raises Cancelled before one."""
        if self.worker.stopped(self.job):
            raise Cancelled(0)
        self._advance(PERCENT[name][0], stage=name, done=0, total=0)
        start = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - start
            self.job.seconds[name] = round(self.job.seconds.get(name, 0.0) + seconds, 3)

    def compiling(self, number: int, total: int) -> None:
        """Notes which program is compiled now; raises Cancelled before one."""
        if self.worker.stopped(self.job):
            raise Cancelled(0)
        self._advance(0, done=number, total=total)

    def stepped(self, step: Step) -> bool:
        if self.worker.preview:
            self.previews(step)
            if step.index + 1 == step.total:
                self.previews.wait()
            self.job.preview = self._number * step.total + self.previews.shown
        done, (start, end) = step.index + 1, PERCENT["denoise"]
        progress = start + (end - start) * step.index // step.total  # this step may be under way
        self._advance(progress, done=done, total=step.total)
        return done == step.total or not self.worker.stopped(self.job)

    def count(self, unit: str, done: int, total: int) -> None:
        if unit != "chunk" or done == 0:
            return
        if self.worker.stopped(self.job):
            raise Cancelled(self.job.done)
        start, end = PERCENT["decode"]
        self._advance(start + (end - start) * done // total, done=done, total=total)


def warm_up(
    pipe: Pipeline,
    *,
    tiling: Tiling | None,
    batch_guidance: bool,
    preview: bool,
    note: Callable[[str], object],
    stopped: Callable[[], bool],
) -> None:
    """Compile the programs of a default video, and load the model where all of it fits into memory.

    `note` receives a line on each network that is loaded, and now and then one on the program that is compiled. What
    fails here fails the first request, which is told of it.
    """
    begun, last = perf_counter(), -NOTE_SECONDS

    def check(number: int, total: int) -> None:
        nonlocal last
        if stopped():
            raise Cancelled(0)
        if perf_counter() - last >= NOTE_SECONDS:
            last = perf_counter()
            note(f"compiling program {number} of {total} of a default video")

    try:
        settings = pipe.settings()
        recorded = record(pipe, settings, needed_pictures(pipe, settings), tiling=tiling, batch_guidance=batch_guidance)
        EXECUTE.compile(*(one.instance for one in recorded.programs), begun=check)
        if sum(pipe.components.sizes.values()) < free_memory(jax.local_devices()[0]):
            for name in pipe.components.names:
                if not stopped():
                    note(f"loading the {name.replace('_', ' ')}")
                    pipe.components.get(name)
        if preview and not stopped():
            pipe.latent_preview()
        if not stopped():
            note(f"ready after {duration(perf_counter() - begun)}")
    except (WanjaxError, Cancelled):
        pass
    except Exception as error:
        logger.warning("the warm-up did not succeed: %s", str(error)[:500])
