# SPDX-License-Identifier: Apache-2.0
"""Makes videos with a pipeline: one run for the jobs of a batch, each video published under its name."""

import hashlib
import json
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from wanjax.compile_cache.cache import compile_cache_folder, use_shared
from wanjax.compile_cache.executables import user_executables
from wanjax.errors import WanjaxError, causes, is_full, reason, repr_short
from wanjax.execution import EXECUTE
from wanjax.jobs.multihost import is_first
from wanjax.jobs.rows import RowErrors
from wanjax.jobs.store import Job
from wanjax.jobs.worker import DISK_FULL, Failure, Interrupted, Lease
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Pictures
from wanjax.media.text_files import slug
from wanjax.media.video import try_output, write_video
from wanjax.pipelines.observers import Cancelled, Observer, Step
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.previews.previews import Previews
from wanjax.pipelines.progress import timing_writes
from wanjax.pipelines.request import MODEL, OWN, PreparedRequest, VideoRequest
from wanjax.pipelines.run import Run
from wanjax.pipelines.seeds import checked_seed
from wanjax.pipelines.settings import LOADED, Settings
from wanjax.pipelines.tracing import check_making
from wanjax.pipelines.windows import Window
from wanjax.stores.paths import AnyPath, StoreError, names_in, parse_path

T = TypeVar("T")
HOST_ENTRIES = ("devices", "version")  # entries of the metadata that do not say which video it is
LONGEST_ERROR = 500  # characters
PERCENT = {"extend": (0, 0), "compile": (0, 0), "encode": (0, 2), "denoise": (2, 95), "decode": (95, 99)}
"""How much is done at the start of a stage and at its end."""


class Task(NamedTuple):
    """A video to make.

    Args:
        output: The video's path, relative to the folder of videos.
        request: The request, with its seed.
    """

    output: str
    request: VideoRequest


class SharedParts(NamedTuple):
    """Everything that the videos of one run share.

    Args:
        pipe: The pipeline, with the requested solver.
        pictures: The loaded pictures and clips.
        settings: The settings, without prompt and seed.
        metadata: The metadata, without prompt and seed.
    """

    pipe: Pipeline
    pictures: Pictures
    settings: Settings
    metadata: Mapping[str, Any]

    def complete(self, request: VideoRequest) -> PreparedRequest:
        """Return a request with the shared settings and metadata, and its own prompt and seed.

        Args:
            request: The request, with its prompt and its seed.

        Raises:
            WanjaxError: The request is invalid.
        """
        seed = checked_seed(request.settings.get("seed", self.settings.seed), alone=True)
        settings = self.settings.updated({**{name: request.settings.get(name) for name in OWN}, "seed": seed})
        return PreparedRequest(settings, {**self.metadata, **{name: getattr(settings, name) for name in OWN}})


def with_program_cache(make: Callable[[], T], shared: Mapping[str, Any]) -> T:
    """Call `make` in a process that runs only this library, and cache its programs for other processes.

    Args:
        make: A function.
        shared: The arguments of `use_shared`, where a cache of compiled programs is shared.
    """
    use_shared(**shared)
    EXECUTE.executables = user_executables() if compile_cache_folder() is None else None
    return make()


class VideoMaker:
    """Make the videos of a batch with one pipeline, loaded on first use.

    Args:
        load: Returns the pipeline.
        folder: The place of the videos.
        tiling: Tiling of all videos.
        batch_guidance: Whether both prompts of guidance are computed in one batch.
        force: Whether existing videos are made again.
        observers: Observers of every run.
    """

    def __init__(
        self,
        load: Callable[[], Pipeline],
        folder: AnyPath,
        *,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        force: bool = False,
        observers: Sequence[Observer] = (),
    ):
        self.load, self.folder, self.force, self.observers = load, folder, force, observers
        self.run_options: Any = {"tiling": tiling, "batch_guidance": batch_guidance}
        self.settings: dict[str, Settings] = {}  # of the planned videos, by name
        self.in_sync = True  # False where other processes wait for what this one left in its midst

    @cached_property
    def pipe(self) -> Pipeline:
        return self.load()

    @property
    def models(self) -> list[str]:
        """The names of the models whose jobs it makes."""
        return [self.pipe.defaults.model]

    def warm_up(self, should_stop: Callable[[], bool]) -> None:
        """Create the pipeline; its networks are loaded with the first video.

        Args:
            should_stop: Not asked: a pipeline is loaded in one piece.
        """
        assert self.pipe

    def plan(self, requests: Sequence[VideoRequest], row_errors: RowErrors | None = None) -> list[Task]:
        """Return `tasks_for` requests, once the longest of those that are missing can be written.

        Args:
            requests: The requests.
            row_errors: Rows that are wrong already.

        Raises:
            WanjaxError: Some requests make no video, or the longest could not be written.
        """
        tasks = self.tasks_for(requests, row_errors)
        existing = set() if self.force else names_in(self.folder)
        if missing := [task for task in tasks if task.output not in existing]:
            self.try_output(max(missing, key=lambda task: len(task.request.settings["prompt"])))
        return tasks

    def tasks_for(self, requests: Sequence[VideoRequest], row_errors: RowErrors | None = None) -> list[Task]:
        """Return a task for each request, grouped by run.

        Args:
            requests: The requests.
            row_errors: Rows that are wrong already.

        Raises:
            WanjaxError: No video can be made of some of them; it has the numbers of their rows.
        """
        groups: dict[str, list[VideoRequest]] = {}
        for request in requests:
            request = request.timed(self.pipe.defaults.fps, self.pipe.model.vae.temporal_factor)
            groups.setdefault(digest_of(request), []).append(request)
        row_errors = row_errors or RowErrors()
        tasks = [task for group in groups.values() for task in self._tasks_of_run(group, row_errors)]
        row_errors.raise_if_any()
        return tasks

    def _tasks_of_run(self, requests: Sequence[VideoRequest], row_errors: RowErrors) -> Iterator[Task]:
        """Yield the tasks of requests that differ in prompt and seed alone;

        `row_errors` receives why others have none.
        """
        try:
            shared = self.shared_parts(requests[0])
        except WanjaxError as error:
            for request in requests:
                row_errors.add(request.row, error)
            return
        for request in requests:
            try:
                prepared = shared.complete(request)
            except WanjaxError as error:
                row_errors.add(request.row, error)
                continue
            self.settings[name := name_of(prepared.metadata)] = prepared.settings
            yield Task(name, request.updated({"seed": prepared.settings.seed}))

    def try_output(self, task: Task) -> None:
        """Raise WanjaxError if the video of a task could not be written.

        Args:
            task: The task.
        """
        prepared = self.shared_parts(task.request).complete(task.request)
        settings = prepared.settings
        try_output(self.folder / task.output, settings.length, settings.size, settings.fps, prepared.metadata)

    def fit_latent_preview(self) -> None:
        """Fit the latent preview, if the pipeline has no tiny decoder for previews."""
        assert self.pipe.latent_preview()

    def is_made(self, job: Job) -> bool:
        """Return True if a job's video exists; False if its store cannot be reached.

        Args:
            job: The job.
        """
        with suppress(StoreError):
            return not self.force and (self.folder / job.output).exists()
        return False

    def make(self, jobs: Sequence[Job], lease: Lease) -> Iterator[Job]:
        """Make the videos of jobs that differ only in prompt and seed in one run; yield each job once it is published.

        Args:
            jobs: The jobs, in order.
            lease: The lease of their worker, which receives their progress.

        Raises:
            Interrupted: The lease is to stop.
        """
        tasks = [Task(job.output, VideoRequest.from_json(job.request)) for job in jobs]
        progress = JobProgress(lease, self.should_stop(lease))
        try:
            for job, prepared in zip(jobs, self.run(tasks, [progress]), strict=True):
                lease.report(metadata=dict(prepared.metadata))
                yield job
                progress.restart()
        except Cancelled as error:
            raise Interrupted from error

    def should_stop(self, lease: Lease) -> Callable[[], bool]:
        """Return a function that says whether a run should stop early.

        Args:
            lease: The lease of the jobs of the run.
        """
        return lease.should_stop

    def run(self, tasks: Sequence[Task], observers: Sequence[Observer] = ()) -> Iterator[PreparedRequest]:
        """Make the videos of one run; yield each request once its video is published.

        Args:
            tasks: The tasks, which differ in prompt and seed alone.
            observers: Observers of this run, beside the maker's own.
        """
        return self.make_run(tasks, self.prepare_run(tasks, observers))

    def prepare_run(self, tasks: Sequence[Task], observers: Sequence[Observer] = ()) -> Run:
        """Check tasks and return their run; nothing is computed yet.

        Args:
            tasks: The tasks, which differ in prompt and seed alone.
            observers: Observers of this run, beside the maker's own.

        Raises:
            WanjaxError: A request is invalid, or its video would have another name.
        """
        shared = self.shared_parts(tasks[0].request)
        requests = [shared.complete(task.request) for task in tasks]
        for task, request in zip(tasks, requests, strict=True):
            if (name := name_of(request.metadata)) != task.output:
                problem = f"this worker's options give {task.output} the name {name}: start it with the batch's options"
                raise WanjaxError(problem)
        check_making(shared.pipe, requests[0].settings, shared.pictures, **self.run_options)
        return Run(shared.pipe, requests, shared.pictures, observers=[*observers, *self.observers], **self.run_options)

    def make_run(self, tasks: Sequence[Task], run: Run) -> Iterator[PreparedRequest]:
        """Make the videos of a prepared run; yield each request once its video is published.

        Args:
            tasks: The tasks.
            run: Their run.
        """
        for task, (prepared, frames) in zip(tasks, run, strict=True):
            with run.decode_stage(prepared):
                write(self.folder / task.output, frames, prepared)
            yield prepared

    def shared_parts(self, request: VideoRequest) -> SharedParts:
        """Return the parts that the videos of one run share.

        Args:
            request: One of their requests.

        Raises:
            WanjaxError: No such video can be made.
        """
        shared = request.shared
        loaded = {MODEL.name: shared.model, **shared.settings}
        for name in LOADED:
            if (value := loaded.get(name)) not in (None, default := getattr(self.pipe.defaults, name)):
                option = f"--{name.replace('_', '-')}"
                raise WanjaxError(
                    f"{name} is {repr_short(value)} where all videos of a run have {default}: give it as {option}"
                )
        pipe = self.pipe.with_solver(shared.scheduler)
        pictures, settings = pipe.prepare(**shared.inputs, **shared.settings, model=shared.model)
        return SharedParts(pipe, pictures, settings, pipe.metadata(settings, shared.inputs, **self.run_options))

    def explain(self, error: Exception) -> Failure:
        """Return why a job failed; an error in the request itself is not retried.

        Args:
            error: The error that ended its run.
        """
        is_user_error, full = isinstance(error, WanjaxError), is_full(error)
        return Failure(
            DISK_FULL if full else "invalid_request" if is_user_error else "server_error",
            error_message(error),
            is_retryable=not full and (not is_user_error or any(isinstance(cause, OSError) for cause in causes(error))),
            ends_worker=full or not self.in_sync,
            log="" if is_user_error else "".join(traceback.format_exception(error)),
        )


class JobProgress(Observer):
    """Report a job's progress to its lease, and stop the run early on request.

    Args:
        lease: The lease.
        should_stop: Returns True if the run should stop.
        preview: File of the preview, updated at a few steps; None for no preview.
    """

    def __init__(self, lease: Lease, should_stop: Callable[[], bool], preview: AnyPath | None = None):
        self.lease, self.should_stop, self.preview = lease, should_stop, preview
        self.restart()

    def restart(self) -> None:
        """Reset the progress for the next job of the run."""
        self.seconds: dict[str, float] = {}
        self._number, self._windows = 0, 1
        self._previews = self._new_previews()

    def _new_previews(self) -> Previews | None:
        if self.preview is None:
            return None
        from rich.console import Console

        return Previews(self.preview, on=Console(quiet=True))

    def _check(self) -> None:
        if self.should_stop():
            raise Interrupted

    def _report(self, percent: int, **state: Any) -> None:
        """Report the percentage of a window that is done, scaled to the whole video."""
        whole = (100 * self._number + percent) // self._windows
        self.lease.report(progress=whole, window=self._number + 1, stage_seconds=dict(self.seconds), **state)

    def window(self, window: Window) -> None:
        self._number, self._windows = window.number, window.count
        self._previews = self._new_previews()  # which counts the steps of one window

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Report a stage, and its seconds at its end.

        Args:
            name: The stage: extend, compile, encode, denoise or decode.
        """
        self._check()
        self._report(PERCENT[name][0], stage=name, stage_done=0, stage_total=0)
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + perf_counter() - start, 3)
            self.lease.report(stage_seconds=dict(self.seconds))

    def compiling(self, number: int, total: int) -> None:
        """Report which program is compiled now.

        Args:
            number: The program's number, from 0.
            total: How many there are.
        """
        self._check()
        self._report(0, stage_done=number, stage_total=total)

    def stepped(self, step: Step) -> bool:
        preview = {}
        if self._previews is not None:
            self._previews(step)
            if step.index + 1 == step.total:
                self._previews.wait()
            preview["preview"] = self._number * step.total + self._previews.shown
        done, (start, end) = step.index + 1, PERCENT["denoise"]
        percent = start + (end - start) * step.index // step.total  # this step may still be running
        self._report(percent, stage_done=done, stage_total=step.total, **preview)
        return done == step.total or not self.should_stop()

    def count(self, unit: str, done: int, total: int) -> None:
        if unit == "chunk" and done:
            self._check()
            start, end = PERCENT["decode"]
            self._report(start + (end - start) * done // total, stage_done=done, stage_total=total)


def digest_of(request: VideoRequest) -> str:
    """Return a digest that is equal for requests that one run may make.

    Args:
        request: One of them.
    """
    return hashlib.sha256(json.dumps(request.shared.to_json(), sort_keys=True).encode()).hexdigest()[:32]


def error_message(error: Exception) -> str:
    """Return the text of an error for the manifest.

    Args:
        error: The error.
    """
    sentence = str(error) if isinstance(error, WanjaxError) else f"{type(error).__name__}: {reason(error)}"
    return sentence[:LONGEST_ERROR]


def write(path: str | AnyPath, frames: Iterable[Any], prepared: PreparedRequest) -> AnyPath:
    """Write a video with its metadata while its frames arrive, in the first process only; return its path.

    Args:
        path: The place of the video.
        frames: Chunks of frames, which are read in every process.
        prepared: The request, with its metadata.
    """
    chunks = map(np.asarray, frames)
    if is_first():
        return write_video(path, timing_writes(chunks), prepared.settings.fps, prepared.metadata)
    deque(chunks, maxlen=0)
    return parse_path(path)


def name_of(metadata: Mapping[str, Any]) -> str:
    """Return a video's file name: prompt, seed, and a digest of its metadata.

    Args:
        metadata: The video's metadata.
    """
    shaping = {name: value for name, value in metadata.items() if name not in HOST_ENTRIES}
    digest = hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:8]
    return f"{slug(metadata['prompt'])}-{metadata['seed']}-{digest}.mp4"
