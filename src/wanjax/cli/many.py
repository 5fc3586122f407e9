# SPDX-License-Identifier: Apache-2.0
"""`generate` with several prompts or seeds, and `batch`: many videos into a folder, each saved when it is done.

This process makes them, or workers do, from a store of jobs that it fills and follows.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import click
import jax

from wanjax import registry
from wanjax.cli import listing
from wanjax.cli.extending import Extender
from wanjax.cli.names import videos_folder
from wanjax.cli.options import COMPILE_CACHE, SETTINGS
from wanjax.cli.parsed import CommandOptions, PipelineOptions, WorkerOptions
from wanjax.cli.processes import init_distributed
from wanjax.cli.report import Report
from wanjax.cli.stages import Reporting, VideoCommand, loaded, located
from wanjax.errors import WanjaxError
from wanjax.figures import progress_of_many, quantity
from wanjax.jobs import ray_cluster
from wanjax.jobs.batch import MANIFEST, MAX_RUN_JOBS, Batch, Manifest
from wanjax.jobs.databases import resolve_database
from wanjax.jobs.lockstep import Leader, follow
from wanjax.jobs.maker import Task, VideoMaker, with_program_cache
from wanjax.jobs.multihost import is_first
from wanjax.jobs.pool import POLL_INTERVAL, Autoscaler, LocalWorker, Pool
from wanjax.jobs.ray_placement import FIRST, placement_bundles, start_group, start_single
from wanjax.jobs.ray_workers import RayWorker, RemoteStore
from wanjax.jobs.rows import RowErrors, read_requests, with_seeds
from wanjax.jobs.sharing import BATCH_FILE, check_namespace, join_namespace
from wanjax.jobs.store import JobStore, Unavailable
from wanjax.jobs.worker import work
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.seeds import check_count, checked_seed
from wanjax.pipelines.settings import read_seed, read_seeds
from wanjax.pipelines.text.prompt_extension import as_settings
from wanjax.stores.paths import AnyPath, names_in
from wanjax.stores.temporary import temp_dir
from wanjax.stores.writing import folder_for_output

FAILURE = 1  # the exit status where some videos failed
NO_WORKERS = WorkerOptions()  # no workers elsewhere
PROMPT = ("prompt", "original_prompt")  # settings in which a list of prompts differs


def generate(
    report: Report,
    request: VideoRequest,
    options: PipelineOptions,
    command: CommandOptions,
    workers: int | None = None,
    worker_flags: WorkerOptions = NO_WORKERS,
    extend: Extender | None = None,
    original_metadata: Mapping[str, Any] | None = None,
) -> None:
    """Make a video for each request and seed in a folder, except those that already exist.

    Args:
        workers: Number of workers; None makes the videos in this process, and 0 leaves them to workers elsewhere.
        extend: Extends the prompts of a file.
        original_metadata: Metadata of the video that is made again, if one is.
    """
    database = resolve_database(worker_flags.database)
    if alone := worker_flags.is_alone(workers):
        init_distributed(report, options.processes)
    else:
        jax.config.update("jax_platforms", "cpu")  # of this process alone: the devices are the workers'
    target, options = videos_folder(command.out), located(options)
    arguments: dict[str, Any] = {
        "load": partial(loaded, options, request),
        "folder": target.absolute(),
        "force": command.force,
        **options.how,
    }
    if alone and not is_first():
        follow(VideoMaker(**arguments))
        report.has_peers = False
        return
    with _leading(report, arguments) if alone else nullcontext() as maker:
        row_errors = RowErrors()
        requests, shared = requests_of(request, command.prompts, row_errors), shared_by_all(request)
        requests = _valid_requests(requests, str(options.model), shared, row_errors)
        if not _is_local(str(options.model)):  # else it is downloaded to find more
            row_errors.raise_if_any()
        seeds = seeds_of(requests, command, request.settings.get("seed", SETTINGS["seed"].usual))
        if extend is not None:
            texts = extend.all_of([request.settings["prompt"] for request in requests], target)
            settings = [as_settings(text) for text in texts]
            requests = [each_request.updated(text) for each_request, text in zip(requests, settings, strict=True)]
        no_seed = (command.seeds, command.count) == (None, None) and "seed" not in request.settings
        requests = [each_request.under(shared) for each_request in with_seeds(requests, None if no_seed else seeds)]
        with folder_for_output(arguments["folder"]), _store(database, arguments["folder"]) as store:
            driver = Driver(report, store, arguments["folder"], command.force, worker_flags.retries)
            if maker is not None:
                batch = _make_here(driver, requests, row_errors, options, command, original_metadata, maker)
            else:
                cache = click.get_current_context().meta.get(COMPILE_CACHE, {})
                arguments["load"] = partial(with_program_cache, arguments["load"], cache)
                batch = _make_with_workers(
                    driver, requests, row_errors, arguments, 1 if workers is None else workers, worker_flags
                )
    report.table()
    if batch.failed:
        summary = f"{len(batch.failed)} of {quantity(batch.total, 'video')} failed, as listed in {target / MANIFEST}"
        report.note(f"{summary}; the same command tries them again")
        raise click.exceptions.Exit(FAILURE)


@contextmanager
def _leading(report: Report, arguments: dict[str, Any]) -> Iterator[VideoMaker]:
    """Yield the maker of this process, which leads those that it has met; at the end it lets them go."""
    arguments_here = {**arguments, "load": partial(arguments["load"], progress=report.load, note=report.note)}
    if not report.has_peers:
        yield VideoMaker(**arguments_here)
        return
    leader = Leader(**arguments_here)
    try:
        yield leader
    finally:
        report.has_peers = not leader.dismiss()


@contextmanager
def _store(database: str | None, target: AnyPath) -> Iterator[JobStore]:
    """Yield the store of a batch's jobs: a file of this process's own, unless a database is named."""
    if database is not None:
        with closing(JobStore(database)) as store:
            join_namespace(store, target, BATCH_FILE)
            yield store
        return
    with temp_dir() as folder, closing(JobStore(str(folder / "jobs.sqlite"))) as store:
        yield store


@dataclass
class Driver:
    """What fills the store of a batch, and tells of its videos as they end."""

    report: Report
    store: JobStore
    folder: AnyPath
    force: bool
    retries: int

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `work` in each worker."""
        return {"max_batch": MAX_RUN_JOBS, "retries": self.retries, "attempts": self.retries + 1}

    def batch(self, tasks: Sequence[Task], model: str) -> Batch:
        """Return the batch of those tasks whose videos are not there, and tells how many there are."""
        missing_tasks, manifest = missing(self.report, tasks, self.folder, self.force)
        return Batch(self.store, missing_tasks, manifest, model)

    def poll(self, batch: Batch) -> None:
        """Print each video that was made since the last look, and what failed."""
        for job in batch.poll():
            row = job.request["row"]
            if job.error is not None:
                self.report.note(f"{f'row {row}' if row else job.output} failed: {job.error['message']}")
            elif "metadata" in job.progress:
                seconds = {"video": job.progress["seconds"]}
                self.report.print_result(self.folder / job.output, job.progress["metadata"], seconds=seconds)
            _count(self.report, batch)

    @contextmanager
    def show_progress(self, batch: Batch) -> Iterator[None]:
        """Show how many videos there are, as long as the block runs."""
        self.report.enable_resume()
        try:
            with closing(batch.manifest), self.report.stage("videos"):
                _count(self.report, batch)
                yield
        finally:
            batch.close()
        self.report.resume_command = None


def missing(report: Report, tasks: Sequence[Task], folder: AnyPath, force: bool) -> tuple[list[Task], Manifest]:
    """Return the tasks whose videos are not there, those that failed before last; list the others, and tell."""
    task_by_output = {task.output: task for task in tasks}
    if repeated := len(tasks) - len(task_by_output):
        report.note(f"note: made once, of {len(tasks)} videos: {repeated} that repeat another")
    existing = set() if force else task_by_output.keys() & names_in(folder)
    manifest = Manifest(folder)
    for name in task_by_output:
        if name in existing:
            manifest.add(task_by_output[name])
    manifest.close()
    missing_tasks = [task for task in task_by_output.values() if task.output not in existing]
    missing_tasks.sort(
        key=lambda task: task.output in manifest.failed
    )  # what ended this before keeps no others from it
    report.videos = len(existing)
    report.note(progress_of_many(len(missing_tasks), len(existing), folder))
    return missing_tasks, manifest


def _make_here(
    driver: Driver,
    requests: Sequence[VideoRequest],
    row_errors: RowErrors,
    options: PipelineOptions,
    command: CommandOptions,
    original_metadata: Mapping[str, Any] | None,
    maker: VideoMaker,
) -> Batch:
    """Make the videos in this process and its followers, unless some rows are wrong."""
    report = driver.report
    batch = driver.batch(maker.plan(requests, row_errors), maker.pipe.defaults.model)
    if not batch.total:
        return batch
    first = next(iter(batch.tasks.values()))
    preview_dir = nullcontext(driver.folder) if isinstance(driver.folder, Path) else temp_dir()
    errors: list[Exception] = []

    def poll() -> None:
        try:
            driver.poll(batch)
        except WanjaxError as error:  # which the worker would take for its own
            errors.append(error)

    with preview_dir as preview_folder:  # previews are shown by files
        here_alone = command._replace(folder=preview_folder, out=None)
        video = VideoCommand(
            report, first.request, options, here_alone, original_metadata=original_metadata, pipe=maker.pipe
        )
        videos = [maker.settings[name] for name in batch.tasks]
        video.tell(videos)
        video.tell_prompt(videos)
        if video.previews and not command.preview_decoder:
            with report.stage("preview"):
                maker.fit_latent_preview()
        maker.observers = [BatchProgressObserver(video, batch)]
        with driver.show_progress(batch):
            worker_options: Any = {"exit_requested": lambda: bool(errors), "on_job_end": poll, "until_empty": True}
            work(driver.store, maker, **driver.options, **worker_options)
            errors += [fault] if (fault := getattr(maker, "sync_error", None)) is not None else []
            for error in errors:
                raise error
        if video.previews:
            video.previews.wait()
    return batch


def _make_with_workers(
    driver: Driver,
    requests: Sequence[VideoRequest],
    row_errors: RowErrors,
    arguments: dict[str, Any],
    count: int,
    worker_flags: WorkerOptions,
) -> Batch:
    """Make the videos of requests by workers, in processes of this machine or in a Ray cluster."""
    report = driver.report
    probe = partial(_plan, requests, row_errors)
    with ExitStack() as stack:
        plan: list[Any] = []
        if count == 0:  # workers of others make them
            plan.append(_plan(requests, row_errors, VideoMaker(**arguments)))
            start: Any = None
        elif worker_flags.ray is None:
            start = partial(LocalWorker, driver.store, partial(_make_maker, arguments), driver.options)
        else:
            start = stack.enter_context(_ray_workers(driver, arguments, count, worker_flags.ray, worker_flags))

        planners: list[LocalWorker | RayWorker] = []  # the last of which plans

        def worker(number: int) -> LocalWorker | RayWorker:
            planning = number == 0 and not plan
            new_worker = start(number=number, probe=probe if planning else None)
            planners.extend([new_worker] if planning else [])
            return new_worker

        pool = Pool(driver.store, worker, Autoscaler(count, count), report.note)
        stack.callback(pool.close)
        with report.stage("workers"):
            while not plan:
                _poll_pool(pool, report)
                with suppress(EOFError):  # it died, and another one is asked
                    answer = planners[-1].probe_result()
                    plan += [answer] if answer is not None else []
            tasks, model = plan[0]
            batch = driver.batch(tasks, model)
        with driver.show_progress(batch):
            while batch.ended_count < batch.total:
                _poll_pool(pool, report)
                with suppress(Unavailable):
                    driver.poll(batch)
        if batch.ended_count == batch.total:
            pool.kill()  # they hold no job
    return batch


def _poll_pool(pool: Pool, report: Report) -> None:
    """Look after the workers once; a database that is away for a while is waited for, as they do."""
    report.stop_if_asked()
    with suppress(Unavailable):
        pool.poll()
    sleep(POLL_INTERVAL)


def _make_maker(arguments: dict[str, Any], store: JobStore, leads: bool = False) -> VideoMaker:
    """Return the maker of a worker, in its own process, or of the first of several that compute together."""
    check_namespace(store, arguments["folder"], BATCH_FILE)
    return Leader(**arguments, restarts=True) if leads else VideoMaker(**arguments)


def _plan(requests: Sequence[VideoRequest], row_errors: RowErrors, maker: VideoMaker) -> tuple[list[Task], str]:
    """Return the tasks of requests, and the model that makes them, in a worker's process."""
    return maker.plan(requests, row_errors), maker.pipe.defaults.model


@contextmanager
def _ray_workers(
    driver: Driver,
    arguments: dict[str, Any],
    count: int,
    address: str,
    worker_flags: WorkerOptions,
) -> Iterator[Callable[..., Any]]:
    """Yield what starts workers in a Ray cluster, which has the store as an actor where no other host reaches it."""
    hosts = worker_flags.hosts
    requested_resources = ray_cluster.parse_resources(worker_flags.resources, (FIRST,) if hosts > 1 else ())
    local = ray_cluster.resolve_address(address) is None
    cores = count * hosts * requested_resources.get("", {}).get("num_cpus", 1)
    with ray_cluster.connect_ray(address, cores, worker_flags.dashboard) as ray:
        if not driver.store.is_shared:
            join_namespace(driver.store, driver.folder, BATCH_FILE)
            driver.store = RemoteStore.start(ray, driver.store)
        resources = {"": ray_cluster.default_resources(ray)} | requested_resources
        folder, follower = partial(start_single, ray, resources[""]), None
        if hosts > 1:
            folder = partial(start_group, ray, placement_bundles(ray, resources, hosts), not local)
            follower = partial(VideoMaker, **arguments)
        start = partial(_make_maker, arguments, leads=hosts > 1)
        yield lambda number, probe: RayWorker(ray, driver.store, start, driver.options, folder, follower, probe)


def _count(report: Report, batch: Batch, suffix: str = "") -> None:
    failed = f"{len(batch.failed)} failed" if batch.failed else ""
    report.count("video", batch.ended_count, batch.total, suffix=", ".join(filter(None, (failed, suffix))))


class BatchProgressObserver(Reporting):
    """Shows how far the video under way is beside the number of videos; stops the run between two steps."""

    def __init__(self, rendering: VideoCommand, batch: Batch):
        super().__init__(rendering)
        self.batch = batch

    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def count(self, unit: str, done: int, total: int) -> None:
        if self.batch.ended_count < self.batch.total:
            _count(self.report, self.batch, f"{unit} {done} of {total}")


def requests_of(request: VideoRequest, file: str | None, row_errors: RowErrors | None = None) -> list[VideoRequest]:
    """Return the request of a command's prompt, or those of a file; raise WanjaxError where both are given.

    `row_errors` receives the rows that are none; None refuses them here.
    """
    if file is None:
        return [VideoRequest({name: value for name, value in request.settings.items() if name in PROMPT})]
    if "prompt" in request.settings:
        raise WanjaxError("--prompts is given beside a prompt: one way is enough")
    return read_requests(file, row_errors)


def _valid_requests(
    requests: Sequence[VideoRequest], model: str, options: VideoRequest, row_errors: RowErrors
) -> list[VideoRequest]:
    """Return the requests that a listed model may take with these options; `row_errors` receives the others."""
    valid = []
    for request in requests:
        try:
            listing.check(model, request.under(options), is_complete=True)
        except WanjaxError as error:
            row_errors.add(request.row, error)
        else:
            valid.append(request)
    return valid


def _is_local(model: str) -> bool:
    """Return whether a model is opened without a download."""
    preset = registry.find_preset(model)
    return os.path.exists(model) if preset is None else preset.shipped


def shared_by_all(request: VideoRequest) -> VideoRequest:
    """Return what a command asks of each video, whatever its prompt."""
    return replace(request, settings={name: value for name, value in request.settings.items() if name not in PROMPT})


def seeds_of(requests: Sequence[VideoRequest], command: CommandOptions, first: int) -> list[int]:
    """Return the seeds of each request that has none of its own, which --seeds or --count ask for, from `first` on.

    Raises WanjaxError for more videos than a command makes.
    """
    start = checked_seed(first, alone=True)
    several = range(start, start + (command.count or 1))
    seeds = [read_seed(seed) for seed in several] if command.seeds is None else read_seeds(command.seeds)
    check_count(len(seeds), len([each_request for each_request in requests if "seed" not in each_request.settings]))
    return seeds
