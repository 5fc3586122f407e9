# SPDX-License-Identifier: Apache-2.0
"""Make the videos of jobs with a pipeline, and publish each video under its name."""

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
from wanjax.jobs.worker import DISK_FULL, INVALID_REQUEST, Failure, Interrupted, Lease
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Pictures
from wanjax.media.text_files import slug
from wanjax.media.video import is_incomplete, write_trial_video, write_video
from wanjax.pipelines.observers import Cancelled, Observer, Step
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.previews.previews import Previews
from wanjax.pipelines.progress import timing_writes
from wanjax.pipelines.request import MODEL, PER_VIDEO, PreparedRequest, VideoRequest
from wanjax.pipelines.run import Run
from wanjax.pipelines.seeds import checked_seed
from wanjax.pipelines.settings import LOAD_SETTINGS, Settings
from wanjax.pipelines.tracing import check_run_memory
from wanjax.pipelines.windows import Window
from wanjax.stores.paths import AnyPath, StoreError, file_names_in, parse_path

T = TypeVar("T")
HOST_ENTRIES = ("devices", "version")  # entries of metadata that affect neither the video nor its name
MAX_ERROR_LENGTH = 500  # characters
STAGE_PERCENTS = {"extend": (0, 0), "compile": (0, 0), "encode": (0, 2), "denoise": (2, 95), "decode": (95, 99)}
"""The progress of a video in percent, at the start and at the end of each stage."""


class Task(NamedTuple):
    """A video to make.

    Args:
        output: The video's path, relative to the folder of videos.
        request: The request, with its seed.
    """

    output: str
    request: VideoRequest


class BatchSetup(NamedTuple):
    """Data that all requests of one run share.

    Args:
        pipe: The pipeline, with the requested scheduler.
        pictures: The loaded pictures and clips.
        settings: The settings, without prompt and seed.
        metadata: The metadata, without prompt and seed.
    """

    pipe: Pipeline
    pictures: Pictures
    settings: Settings
    metadata: Mapping[str, Any]

    def complete(self, request: VideoRequest) -> PreparedRequest:
        """Prepare a request: add its prompt and its seed to the shared settings and metadata.

        Args:
            request: The request, with its prompt and its seed.

        Raises:
            WanjaxError: The request is invalid.
        """
        seed = checked_seed(request.settings.get("seed", self.settings.seed), alone=True)
        settings = self.settings.updated({**{name: request.settings.get(name) for name in PER_VIDEO}, "seed": seed})
        return PreparedRequest(settings, {**self.metadata, **{name: getattr(settings, name) for name in PER_VIDEO}})


def with_program_cache(function: Callable[[], T], cache_options: Mapping[str, Any]) -> T:
    """Call a function in a process that runs only wanjax, and cache compiled programs for later processes.

    Args:
        function: The function to call.
        cache_options: The arguments of `use_shared`, for a shared cache of compiled programs.
    """
    use_shared(**cache_options)
    EXECUTE.executables = user_executables() if compile_cache_folder() is None else None
    return function()


class VideoMaker:
    """Makes videos with one pipeline, which is loaded on first use.

    Args:
        load: Loads the pipeline.
        folder: The folder of the videos.
        tiling: Tiling of the autoencoder, for all videos.
        batch_guidance: Whether the prompt and the negative prompt are computed in one batch.
        force: Whether to make existing videos again.
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
        self.settings: dict[str, Settings] = {}  # the requests of the planned videos, by file name
        self.in_sync = True  # False while other processes may wait for this process in a collective

    @cached_property
    def pipe(self) -> Pipeline:
        return self.load()

    @property
    def models(self) -> list[str]:
        """Names of the models whose jobs this maker can make."""
        return [self.pipe.model_name]

    def warm_up(self, should_stop: Callable[[], bool]) -> None:
        """Create the pipeline. The networks of the pipeline are loaded with the first video.

        Args:
            should_stop: Not called, because this method cannot be interrupted.
        """
        assert self.pipe

    def checked_tasks(self, requests: Sequence[VideoRequest], row_errors: RowErrors | None = None) -> list[Task]:
        """Return the tasks of requests, after checking that the video with the longest prompt can be written.

        Args:
            requests: The requests.
            row_errors: The errors of other rows, or None.

        Raises:
            WanjaxError: Some requests are invalid, or the video cannot be written.
        """
        tasks = self.tasks_for(requests, row_errors)
        existing = set() if self.force else file_names_in(self.folder)
        if missing := [task for task in tasks if task.output not in existing]:
            self.check_writable(max(missing, key=lambda task: len(task.request.settings["prompt"])))
        return tasks

    def tasks_for(self, requests: Sequence[VideoRequest], row_errors: RowErrors | None = None) -> list[Task]:
        """Return a task for each request, grouped by run.

        Args:
            requests: The requests.
            row_errors: The errors of other rows, or None.

        Raises:
            WanjaxError: Some requests are invalid. The message has the numbers of their rows.
        """
        groups: dict[str, list[VideoRequest]] = {}
        for request in requests:
            request = request.seconds_to_frames(self.pipe.defaults.fps, self.pipe.model.vae.temporal_factor)
            groups.setdefault(batch_key(request), []).append(request)
        row_errors = row_errors or RowErrors()
        tasks = [task for group in groups.values() for task in self._tasks_of_run(group, row_errors)]
        row_errors.raise_if_any()
        return tasks

    def _tasks_of_run(self, requests: Sequence[VideoRequest], row_errors: RowErrors) -> Iterator[Task]:
        """Yield the tasks of the valid requests, and add the errors of the invalid ones to `row_errors`.

        The requests differ only in prompt and seed.
        """
        try:
            setup = self.batch_setup(requests[0])
        except WanjaxError as error:
            for request in requests:
                row_errors.add(request.row, error, request.row_noun)
            return
        for request in requests:
            try:
                prepared = setup.complete(request)
            except WanjaxError as error:
                row_errors.add(request.row, error, request.row_noun)
                continue
            self.settings[name := video_name(prepared.metadata)] = prepared.settings
            yield Task(name, request.updated({"seed": prepared.settings.seed}))

    def check_writable(self, task: Task) -> None:
        """Raise WanjaxError if the video of a task cannot be written.

        Args:
            task: The task.
        """
        prepared = self.batch_setup(task.request).complete(task.request)
        settings = prepared.settings
        write_trial_video(self.folder / task.output, settings.length, settings.size, settings.fps, prepared.metadata)

    def fit_latent_preview(self) -> None:
        """Fit the latent preview of the pipeline, for previews without a tiny decoder."""
        assert self.pipe.latent_preview()

    def is_published(self, job: Job) -> bool:
        """Return True if a job's video exists. Return False if it is incomplete, or if its store cannot be reached.

        Args:
            job: The job.
        """
        with suppress(StoreError):
            file = self.folder / job.output
            return not self.force and file.exists() and not is_incomplete(file)
        return False

    def make(self, jobs: Sequence[Job], lease: Lease) -> Iterator[Job]:
        """Make the videos of jobs in one run, and yield each job once its video is published.

        Args:
            jobs: The jobs, which differ only in prompt and seed.
            lease: The lease of their worker, which receives their progress.

        Raises:
            Interrupted: The run has to stop early.
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
        """Return a function that returns True if a run should stop early.

        Args:
            lease: The lease of the jobs of the run.
        """
        return lease.should_stop

    def run(self, tasks: Sequence[Task], observers: Sequence[Observer] = ()) -> Iterator[PreparedRequest]:
        """Make the videos of one run, and yield each request once its video is published.

        Args:
            tasks: The tasks, which differ only in prompt and seed.
            observers: Observers of this run, in addition to the maker's.
        """
        return self.make_videos(tasks, self.prepare_run(tasks, observers))

    def prepare_run(self, tasks: Sequence[Task], observers: Sequence[Observer] = ()) -> Run:
        """Check tasks and return their run, without computing anything.

        Args:
            tasks: The tasks, which differ only in prompt and seed.
            observers: Observers of this run, in addition to the maker's.

        Raises:
            WanjaxError: A request is invalid, or its video would have another name.
        """
        setup = self.batch_setup(tasks[0].request)
        requests = [setup.complete(task.request) for task in tasks]
        for task, request in zip(tasks, requests, strict=True):
            if (name := video_name(request.metadata)) != task.output:
                problem = f"the batch names a video {task.output}, and this worker's options name it {name}"
                raise WanjaxError(f"{problem}: start the worker with the options of the batch")
        check_run_memory(setup.pipe, requests[0].settings, setup.pictures, **self.run_options)
        return Run(setup.pipe, requests, setup.pictures, observers=[*observers, *self.observers], **self.run_options)

    def make_videos(self, tasks: Sequence[Task], run: Run) -> Iterator[PreparedRequest]:
        """Make the videos of a prepared run, and yield each request once its video is published.

        Args:
            tasks: The tasks.
            run: Their run.
        """
        for task, (prepared, frames) in zip(tasks, run, strict=True):
            with run.decode_stage(prepared):
                write_frames(self.folder / task.output, frames, prepared)
            yield prepared

    def batch_setup(self, request: VideoRequest) -> BatchSetup:
        """Return the data that all requests of one run share.

        Args:
            request: One of the requests.

        Raises:
            WanjaxError: The request is invalid.
        """
        setup = request.common
        check_loaded_with(setup, self.pipe.defaults)
        pipe = self.pipe.with_solver(setup.scheduler)
        pictures, settings = pipe.prepare(**setup.inputs, **setup.settings, model=setup.model)
        return BatchSetup(pipe, pictures, settings, pipe.metadata(settings, setup.inputs, **self.run_options))

    def explain(self, error: Exception) -> Failure:
        """Return why a job failed. An invalid request is not retried.

        Args:
            error: The error that ended the run.
        """
        is_user_error, is_disk_full = isinstance(error, WanjaxError), is_full(error)
        return Failure(
            DISK_FULL if is_disk_full else INVALID_REQUEST if is_user_error else "server_error",
            error_message(error),
            is_retryable=not is_disk_full
            and (not is_user_error or any(isinstance(cause, OSError) for cause in causes(error))),
            ends_worker=is_disk_full or not self.in_sync,
            log="" if is_user_error else "".join(traceback.format_exception(error)),
        )


class JobProgress(Observer):
    """Reports a job's progress to its lease, and stops the run early on request.

    Args:
        lease: The lease.
        should_stop: Returns True if the run should stop.
        preview: Path of the preview, which is written after some of the steps; None for no preview.
    """

    def __init__(self, lease: Lease, should_stop: Callable[[], bool], preview: AnyPath | None = None):
        self.lease, self.should_stop, self.preview = lease, should_stop, preview
        self.restart()

    def restart(self) -> None:
        """Reset the progress for the next job of the run."""
        self.seconds: dict[str, float] = {}
        self._window_index, self._window_count = 0, 1
        self._previews = self._new_previews()

    def _new_previews(self) -> Previews | None:
        if self.preview is None:
            return None
        from rich.console import Console

        return Previews(self.preview, on=Console(quiet=True))

    def _raise_if_stopped(self) -> None:
        if self.should_stop():
            raise Interrupted

    def _report(self, percent: int, **state: Any) -> None:
        """Report the progress of a window, scaled to the whole video."""
        video_percent = (100 * self._window_index + percent) // self._window_count
        self.lease.report(
            progress=video_percent, window=self._window_index + 1, stage_seconds=dict(self.seconds), **state
        )

    def window(self, window: Window) -> None:
        self._window_index, self._window_count = window.index, window.count
        self._previews = self._new_previews()  # each window needs a new observer, which counts the steps of the window

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Within the block, report that a stage is running. At the end, report its seconds.

        Args:
            name: The stage: extend, compile, encode, denoise or decode.
        """
        self._raise_if_stopped()
        self._report(STAGE_PERCENTS[name][0], stage=name, stage_done=0, stage_total=0)
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + perf_counter() - start, 3)
            self.lease.report(stage_seconds=dict(self.seconds))

    def compiling(self, index: int, num_programs: int) -> None:
        """Report that a program is being compiled.

        Args:
            index: The index of the program, from 0.
            num_programs: The number of programs.
        """
        self._raise_if_stopped()
        self._report(0, stage_done=index, stage_total=num_programs)

    def stepped(self, step: Step) -> bool:
        preview_fields = {}
        if self._previews is not None:
            self._previews(step)
            if step.index + 1 == step.total:
                self._previews.wait()
            preview_fields["preview"] = self._window_index * step.total + self._previews.shown
        done, (start_percent, end_percent) = step.index + 1, STAGE_PERCENTS["denoise"]
        percent = (
            start_percent + (end_percent - start_percent) * step.index // step.total
        )  # this step may still be running
        self._report(percent, stage_done=done, stage_total=step.total, **preview_fields)
        return done == step.total or not self.should_stop()

    def progressed(self, unit: str, done: int, total: int) -> None:
        if unit == "chunk" and done:
            self._raise_if_stopped()
            start_percent, end_percent = STAGE_PERCENTS["decode"]
            self._report(
                start_percent + (end_percent - start_percent) * done // total, stage_done=done, stage_total=total
            )


def check_loaded_with(request: VideoRequest, defaults: Settings, names: Iterable[str] = LOAD_SETTINGS) -> None:
    """Raise WanjaxError if a request has another model, dtype or precision than the loaded model.

    Args:
        request: The request.
        defaults: The settings of the loaded model.
        names: The names of the settings to check.
    """
    requested = {MODEL.name: request.model, **request.settings}
    for name in names:
        if (value := requested.get(name)) not in (None, default := getattr(defaults, name)):
            option = f"--{name.replace('_', '-')}"
            raise WanjaxError(
                f"{name} is {repr_short(value)}, but the model was loaded with {default}: give the option {option}"
            )


def batch_key(request: VideoRequest) -> str:
    """Return the batch key of a request: requests with the same key can share a run.

    Args:
        request: The request.
    """
    return hashlib.sha256(json.dumps(request.common.to_json(), sort_keys=True).encode()).hexdigest()[:32]


def error_message(error: Exception) -> str:
    """Return the message of an error for the manifest, cut to MAX_ERROR_LENGTH characters.

    Args:
        error: The error.
    """
    message = str(error) if isinstance(error, WanjaxError) else f"{type(error).__name__}: {reason(error)}"
    return message[:MAX_ERROR_LENGTH]


def write_frames(path: str | AnyPath, frames: Iterable[Any], prepared: PreparedRequest) -> AnyPath:
    """Write a video with its metadata in the first process, and return its path.

    Args:
        path: The path of the video.
        frames: Chunks of frames. Every process must consume them, because all processes take part in computing them.
        prepared: The request, with its metadata.
    """
    chunks = map(np.asarray, frames)
    if is_first():
        return write_video(path, timing_writes(chunks), prepared.settings.fps, prepared.metadata)
    deque(chunks, maxlen=0)
    return parse_path(path)


def video_name(metadata: Mapping[str, Any]) -> str:
    """Return the file name of a video. The file name contains the prompt, the seed and a digest of the metadata.

    Args:
        metadata: The video's metadata.
    """
    entries = {name: value for name, value in metadata.items() if name not in HOST_ENTRIES}
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:8]
    return f"{slug(metadata['prompt'])}-{metadata['seed']}-{digest}.mp4"
