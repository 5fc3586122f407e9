# SPDX-License-Identifier: Apache-2.0
"""The worker: it keeps a loaded pipeline and makes videos with it, in this process or as an actor of Ray."""

import hashlib
import json
import logging
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import groupby
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from wanjax.compile_cache.cache import compile_cache_folder, use_shared
from wanjax.compile_cache.executables import of_this_machine
from wanjax.errors import WanjaxError, causes, is_full, reason, shown
from wanjax.jobs.processes import is_first
from wanjax.jobs.rows import WrongRows
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Pictures
from wanjax.media.texts import slug
from wanjax.media.videos import try_output, write_video
from wanjax.pipelines.model import encoded_from
from wanjax.pipelines.observers import Observer
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.progress import timing_writes
from wanjax.pipelines.recording import check_making
from wanjax.pipelines.request import MODEL, OWN, PreparedRequest, VideoRequest
from wanjax.pipelines.run import Run
from wanjax.pipelines.seeds import checked_seed
from wanjax.pipelines.settings import LOADED, Settings
from wanjax.programs import EXECUTE
from wanjax.stores.own import HOST
from wanjax.stores.places import Place, place

HERE = ("devices", "version")  # entries of a record that do not say which video it is
STAGES = ("encode", "denoise", "decode")
T = TypeVar("T")
LONGEST_ERROR = 500  # characters
logger = logging.getLogger("wanjax.cluster")


class Job(NamedTuple):
    """A video that is to be made: the name of its file, and the request with its seed."""

    name: str
    request: VideoRequest


class Outcome(NamedTuple):
    """What came of a job, known by its name: the record of a video that was made, or an error.

    `again` tells that another try may end otherwise. `record` is None too where the video was there already.
    """

    name: str
    record: Mapping[str, Any] | None = None
    seconds: float = 0.0
    worker: str = ""
    error: str | None = None
    again: bool = False


class Staged(NamedTuple):
    """What a stage made, as arrays of the host, and the seconds of the stages so far."""

    made: Any
    seconds: float


class Shared(NamedTuple):
    """What the videos of one run share: the pipeline with its solver, pictures, and settings with their record."""

    pipe: Pipeline
    pictures: Pictures
    settings: Settings
    record: Mapping[str, Any]

    def prepared(self, request: VideoRequest) -> PreparedRequest:
        """Completes a request, whose prompt and seed are its own; raises WanjaxError for a wrong one."""
        seed = checked_seed(request.settings.get("seed", self.settings.seed), alone=True)
        own = self.settings.updated({**{name: request.settings.get(name) for name in OWN}, "seed": seed})
        return PreparedRequest(own, {**self.record, **{name: getattr(own, name) for name in OWN}})


def keeping_programs(make: Callable[[], T], shared: Mapping[str, Any]) -> T:
    """Returns what `make` does, in a process in which nothing but this library runs: its programs are kept for others.

    `shared` are the arguments of `use_shared`, where a cache of compiled programs is shared.
    """
    use_shared(**shared)
    EXECUTE.kept = of_this_machine() if compile_cache_folder() is None else None
    return make()


class Worker:
    """A pipeline, and the folder of its videos. The pipeline is loaded when it is first needed, and kept.

    `tiling` and `batch_guidance` are those of all videos. With `force` a video that is there is made again.
    """

    def __init__(
        self,
        load: Callable[[], Pipeline],
        folder: Place,
        *,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        force: bool = False,
    ):
        self.load, self.folder, self.force = load, folder, force
        self.how: Any = {"tiling": tiling, "batch_guidance": batch_guidance}
        self.observers: Sequence[Observer] = ()
        self.settings: dict[str, Settings] = {}  # of the planned jobs, by name
        self.in_step = True  # False where other processes wait for what this one left in its midst

    @cached_property
    def pipe(self) -> Pipeline:
        return self.load()

    def ready(self) -> None:
        """Loads the pipeline; its networks are loaded with the first video."""
        assert self.pipe

    def planned(self, requests: Sequence[VideoRequest], wrong: WrongRows | None = None) -> list[Job]:
        """Returns a job for each request, those of one run together.

        Raises WanjaxError, with the numbers of their rows, for requests of which no video can be made, and for rows
        that are `wrong` already.
        """
        groups: dict[str, list[VideoRequest]] = {}
        for request in requests:
            request = request.timed(self.pipe.defaults.fps, self.pipe.architecture.vae.temporal_factor)
            groups.setdefault(json.dumps(asdict(request.shared), sort_keys=True), []).append(request)
        wrong = wrong or WrongRows()
        jobs = [job for same in groups.values() for job in self._jobs(same, wrong)]
        wrong.refuse()
        return jobs

    def _jobs(self, requests: Sequence[VideoRequest], wrong: WrongRows) -> Iterator[Job]:
        """Yields the jobs of requests that differ in prompt and seed alone; `wrong` receives why others have none."""
        try:
            shared = self._shared(requests[0])
        except WanjaxError as error:
            for request in requests:
                wrong.add(request.row, error)
            return
        for request in requests:
            try:
                prepared = shared.prepared(request)
            except WanjaxError as error:
                wrong.add(request.row, error)
                continue
            self.settings[name := name_of(prepared.metadata)] = prepared.settings
            yield Job(name, request.updated({"seed": prepared.settings.seed}))

    def try_output(self, job: Job) -> None:
        """Raises WanjaxError where the video of a job could not be written."""
        prepared = self._shared(job.request).prepared(job.request)
        own = prepared.settings
        try_output(self.folder / job.name, own.length, own.size, own.fps, prepared.metadata)

    def make(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Yields the outcome of each job as soon as it is known.

        Jobs that differ in prompt and seed alone are made by one run. Where it fails, each is made alone. Raises
        WanjaxError where nothing more can be written, and any error that leaves other processes behind.
        """
        for _, same in groupby(jobs, lambda job: job.request.shared):
            left = {job.name: job for job in same}
            try:
                for outcome in self._together(list(left.values())):
                    del left[outcome.name]
                    yield outcome
            except Exception as error:
                if is_full(error):
                    raise
                if not self.in_step:
                    yield self._failed(next(iter(left.values())), error)
                    raise
                if len(left) == 1:
                    yield self._failed(next(iter(left.values())), error)
                else:
                    for job in left.values():
                        yield from self.make([job])

    def _together(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Yields the outcomes of jobs of one run; those whose videos are there are not made again."""
        there = set() if self.force else {job.name for job in jobs if (self.folder / job.name).exists()}
        yield from map(Outcome, there)
        if wanted := [job for job in jobs if job.name not in there]:
            yield from self.run(wanted)

    def fit_colours(self) -> None:
        """Makes ready what shows how far a video is, if the pipeline has no tiny decoder for that."""
        assert self.pipe.latent_preview()

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """Makes the videos of one run, and yields the outcome of each."""
        return self.made(jobs, self.prepared(jobs))

    def prepared(self, jobs: Sequence[Job]) -> Run:
        """Returns the run of jobs, before anything is computed; raises WanjaxError where there can be none."""
        shared = self._shared(jobs[0].request)
        requests = [shared.prepared(job.request) for job in jobs]
        check_making(shared.pipe, requests[0].settings, shared.pictures, **self.how)
        return Run(shared.pipe, requests, shared.pictures, observers=self.observers, **self.how)

    def made(self, jobs: Sequence[Job], run: Run) -> Iterator[Outcome]:
        """Makes the videos of a run of jobs, and yields the outcome of each."""
        start = perf_counter()
        for job, (prepared, frames) in zip(jobs, run, strict=True):
            with run.decode_stage(prepared):
                write(self.folder / job.name, frames, prepared)
            seconds, start = perf_counter() - start, perf_counter()
            yield Outcome(job.name, prepared.metadata, round(seconds, 3), own_name())

    def check_staged(self, jobs: Sequence[Job]) -> None:
        """Raises WanjaxError for a video that does not go through encode, denoise and decode once each."""
        self.pipe.architecture.spec.check_whole(self.pipe.defaults.model, "a worker for a stage")
        for job in jobs:
            settings = job.request.settings
            if max(settings.get("windows") or 1, 2 * bool(settings.get("then"))) > 1:
                raise job.request.wrong(WanjaxError("a video of windows goes through all stages: workers for all do"))

    def staged(self, stage: str, job: Job, before: Any) -> tuple[Any, Outcome | None]:
        """Returns what a stage makes of what the one before made, as arrays of the host; and an outcome, if known.

        There is one where the stage is the last, where it failed, and where the video is there already.
        """
        start = perf_counter()
        try:
            if stage == STAGES[0] and not self.force and (self.folder / job.name).exists():
                return None, Outcome(job.name)
            shared = self._shared(job.request)
            prepared = shared.prepared(job.request)
            run = Run(shared.pipe, [prepared], shared.pictures, **self.how)
            if stage == "encode":
                made = self._encoded(run, prepared)
            elif stage == "denoise":
                made = self._latents(run, prepared, before.made)
            else:
                made = self._written(run, prepared, before.made, self.folder / job.name)
        except Exception as error:
            if is_full(error):
                raise
            return None, self._failed(job, error)
        seconds = perf_counter() - start + (before.seconds if before else 0.0)
        if stage != STAGES[-1]:
            return Staged(made, seconds), None
        return None, Outcome(job.name, prepared.metadata, round(seconds, 3), own_name())

    @staticmethod
    def _encoded(run: Run, prepared: PreparedRequest) -> dict[str, np.ndarray]:
        encoded = run.encode()[prepared.settings.prompt]
        return {name: np.asarray(x) for name, x in encoded._asdict().items() if x is not None}

    @staticmethod
    def _latents(run: Run, prepared: PreparedRequest, tensors: Mapping[str, Any]) -> list[Any]:
        encoded = encoded_from(run.model, {name: jnp.asarray(x) for name, x in tensors.items()})
        with run.stage("denoise"):
            pieces = run.latents(encoded, prepared.settings, [prepared.settings.seed])
            return jax.tree.map(np.asarray, list(pieces))

    @staticmethod
    def _written(run: Run, prepared: PreparedRequest, latents: Sequence[Any], path: Place) -> None:
        with run.decode_stage(prepared):
            write(path, run.frames(jax.tree.map(jnp.asarray, list(latents))), prepared)

    def _shared(self, request: VideoRequest) -> "Shared":
        """Returns what the videos of one run share; raises WanjaxError where no such video can be made."""
        shared = request.shared
        loaded = {MODEL.name: shared.model, **shared.settings}
        for name in LOADED:
            if (value := loaded.get(name)) not in (None, own := getattr(self.pipe.defaults, name)):
                option = f"--{name.replace('_', '-')}"
                raise WanjaxError(f"{name} is {shown(value)} where all videos of a run have {own}: give it as {option}")
        pipe = self.pipe.with_solver(shared.scheduler)
        pictures, chosen = pipe.prepare(**shared.inputs, **shared.settings, model=shared.model)
        return Shared(pipe, pictures, chosen, pipe.record(chosen, shared.inputs, **self.how))

    def _failed(self, job: Job, error: Exception) -> Outcome:
        """Returns the outcome of a job that failed; what is the request's own fault fails again."""
        again = not isinstance(error, WanjaxError) or any(isinstance(cause, OSError) for cause in causes(error))
        if not isinstance(error, WanjaxError):
            logger.error("%s failed: %s", job.name, traceback.format_exc())
        return Outcome(job.name, worker=own_name(), error=told_of(error), again=again)


def own_name() -> str:
    """Returns the machine and the process of this worker."""
    return f"{HOST}:{os.getpid()}"


def told_of(error: Exception) -> str:
    """Returns an error as an outcome tells it."""
    told = str(error) if isinstance(error, WanjaxError) else f"{type(error).__name__}: {reason(error)}"
    return told[:LONGEST_ERROR]


def write(path: str | Place, frames: Iterable[Any], prepared: PreparedRequest) -> Place:
    """Writes a video with its metadata from frames as they come, in the first process alone; returns its place."""
    chunks = map(np.asarray, frames)
    if is_first():
        return write_video(path, timing_writes(chunks), prepared.settings.fps, prepared.metadata)
    deque(chunks, maxlen=0)
    return place(path)


def name_of(record: Mapping[str, Any]) -> str:
    """Returns the name of a video: its prompt, its seed, and a digest of all that shapes it."""
    told = {name: value for name, value in record.items() if name not in HERE}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    return f"{slug(record['prompt'])}-{record['seed']}-{digest}.mp4"
