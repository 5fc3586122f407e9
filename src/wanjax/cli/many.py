# SPDX-License-Identifier: Apache-2.0
"""`generate` with several prompts or seeds, and `batch`: make many videos in a folder, and save each video when it is
complete. This process adds the jobs to a store and watches them. Either this process or workers make the videos.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import click
import jax

from wanjax import registry
from wanjax.cli.checks import valid_rows
from wanjax.cli.extending import Extender
from wanjax.cli.names import videos_folder
from wanjax.cli.options import COMPILE_CACHE, SETTINGS
from wanjax.cli.parsed import CommandOptions, PipelineOptions, WorkerOptions
from wanjax.cli.processes import init_distributed
from wanjax.cli.report import Report
from wanjax.cli.stages import ReportObserver, VideoCommand, load_pipeline, published_pipeline, with_full_paths
from wanjax.cli.workflow_options import WORKFLOW_REQUESTS
from wanjax.errors import WanjaxError
from wanjax.figures import format_batch_progress, pluralize
from wanjax.jobs import ray_cluster
from wanjax.jobs.batch import MANIFEST, MAX_RUN_JOBS, Batch, Manifest
from wanjax.jobs.databases import resolve_database
from wanjax.jobs.lockstep import Leader, follow_leader
from wanjax.jobs.maker import Task, VideoMaker, batch_key, check_loaded_with, with_program_cache
from wanjax.jobs.multihost import is_first
from wanjax.jobs.pool import POLL_INTERVAL, Autoscaler, LocalWorker, Pool
from wanjax.jobs.ray_placement import FIRST_HOST, placement_bundles, start_group, start_single
from wanjax.jobs.ray_workers import RayWorker, RemoteStore
from wanjax.jobs.rows import PROMPT_SETTINGS, RowErrors, read_requests, shared_by_all, with_seeds, with_shared
from wanjax.jobs.sharing import BATCH_FILE, check_namespace, join_namespace
from wanjax.jobs.store import JobStore, Unavailable
from wanjax.jobs.worker import work
from wanjax.media.video import is_incomplete
from wanjax.pipelines.request import MODEL, VideoRequest
from wanjax.pipelines.seeds import check_count, checked_seed
from wanjax.pipelines.settings import LOAD_SETTINGS, read_seed, read_seeds
from wanjax.pipelines.text.prompt_extension import as_settings
from wanjax.stores.paths import AnyPath, file_names_in
from wanjax.stores.temporary import temp_dir
from wanjax.stores.writing import created_output_folder

FAILURE_STATUS = 1  # the exit status if some videos failed
NO_WORKERS = WorkerOptions()  # makes the videos in this process


def generate(
    report: Report,
    request: VideoRequest,
    options: PipelineOptions,
    command: CommandOptions,
    workers: int | None = None,
    worker_options: WorkerOptions = NO_WORKERS,
    extend: Extender | None = None,
    original_metadata: Mapping[str, Any] | None = None,
) -> None:
    """Make a video for each request and seed in a folder, except those that already exist.

    Args:
        workers: Number of workers; None makes the videos in this process, 0 leaves them to workers on other hosts.
        extend: The extender of the prompts, or None.
        original_metadata: The metadata of the video of --from, or None.
    """
    database = resolve_database(worker_options.database)
    if makes_here := worker_options.is_alone(workers):
        init_distributed(report, options.processes)
    else:
        # this process computes nothing on devices, because the workers use them
        jax.config.update("jax_platforms", "cpu")
    target, options = videos_folder(command.out), with_full_paths(options)
    arguments: dict[str, Any] = {
        "load": partial(load_pipeline, options, request),
        "folder": target.absolute(),
        "force": command.force,
        **options.run_options,
    }
    if makes_here and not is_first():
        follow_leader(VideoMaker(**arguments))
        report.has_peers = False
        return
    with _local_maker(report, arguments) if makes_here else nullcontext() as maker:
        row_errors = RowErrors()
        requests, shared_settings = requests_of(request, command.prompts, row_errors), shared_by_all(request)
        requests = valid_rows(requests, str(options.model), shared_settings, row_errors)
        if not _is_local(str(options.model)):  # if a row is invalid, stop before a model is downloaded
            _check_published_rows(requests, shared_settings, options, row_errors)
            row_errors.raise_if_any()
        seeds = seeds_of(requests, command, request.settings.get("seed", SETTINGS["seed"].example))
        if (command.seeds, command.count) != (None, None):
            _note_rows_with_seeds(requests, "--count" if command.seeds is None else "--seeds", report.note)
        if extend is not None:
            row_errors.raise_if_any()
            extended_prompts = extend.extend_all([request.settings["prompt"] for request in requests], target)
            extended_settings = [as_settings(text) for text in extended_prompts]
            requests = [
                each_request.updated(text) for each_request, text in zip(requests, extended_settings, strict=True)
            ]
        has_no_seeds = (command.seeds, command.count) == (None, None) and "seed" not in request.settings
        requests = [
            with_shared(each_request, shared_settings)
            for each_request in with_seeds(requests, None if has_no_seeds else seeds)
        ]
        with created_output_folder(arguments["folder"]), _open_store(database, arguments["folder"]) as store:
            driver = BatchDriver(report, store, arguments["folder"], command.force, worker_options.retries)
            if maker is not None:
                batch = _make_here(driver, requests, row_errors, options, command, original_metadata, maker)
            else:
                cache = click.get_current_context().meta.get(COMPILE_CACHE, {})
                arguments["load"] = partial(with_program_cache, arguments["load"], cache)
                batch = _make_with_workers(
                    driver, requests, row_errors, arguments, 1 if workers is None else workers, worker_options
                )
    report.table()
    if batch.failed:
        summary = f"{len(batch.failed)} of {pluralize(batch.total, 'video')} failed, as listed in {target / MANIFEST}"
        retry_advice = "run the same command to try them again"
        report.note(f"{summary}; {'correct their requests' if batch.only_wrong_requests else retry_advice}")
        raise click.exceptions.Exit(FAILURE_STATUS)


@contextmanager
def _local_maker(report: Report, arguments: dict[str, Any]) -> Iterator[VideoMaker]:
    """Yield the maker of this process. If there are other processes, the maker leads them, and dismisses them at the
    end."""
    local_arguments = {**arguments, "load": partial(arguments["load"], progress=report.load, note=report.note)}
    if not report.has_peers:
        yield VideoMaker(**local_arguments)
        return
    leader = Leader(**local_arguments)
    try:
        yield leader
    finally:
        report.has_peers = not leader.dismiss()


@contextmanager
def _open_store(database: str | None, target: AnyPath) -> Iterator[JobStore]:
    """Yield the store of a batch's jobs: the named database, or a temporary file."""
    if database is not None:
        with closing(JobStore(database)) as store:
            join_namespace(store, target, BATCH_FILE)
            yield store
        return
    with temp_dir() as folder, closing(JobStore(str(folder / "jobs.sqlite"))) as store:
        yield store


@dataclass
class BatchDriver:
    """Adds the jobs of a batch to its store, and reports each video that is complete or failed."""

    report: Report
    store: JobStore
    folder: AnyPath
    force: bool
    retries: int

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments with which each worker calls `work`."""
        return {"max_batch": MAX_RUN_JOBS, "retries": self.retries, "attempts": self.retries + 1}

    def batch(self, tasks: Sequence[Task], model: str) -> Batch:
        """Start a batch of the tasks whose videos are missing, and report the number of tasks."""
        missing_tasks, manifest = find_missing(self.report, tasks, self.folder, self.force)
        return Batch(self.store, missing_tasks, manifest, model)

    def poll(self, batch: Batch) -> None:
        """Print each video that was completed since the last poll, and each failure."""
        for job in batch.poll():
            if job.error is not None:
                position = VideoRequest.from_json(job.request).position
                self.report.note(f"{position or job.output} failed: {job.error['message']}")
            elif "metadata" in job.progress:
                seconds = {"video": job.progress["seconds"]}
                self.report.print_result(self.folder / job.output, job.progress["metadata"], seconds=seconds)
            _count(self.report, batch)

    @contextmanager
    def show_progress(self, batch: Batch) -> Iterator[None]:
        """Within the block, show the number of complete videos."""
        self.report.enable_resume()
        stage = self.report.stage("videos") if batch.total else nullcontext()
        try:
            with closing(batch.manifest), stage:
                _count(self.report, batch)
                yield
        finally:
            batch.close()
        self.report.resume_command = None


def find_missing(report: Report, tasks: Sequence[Task], folder: AnyPath, force: bool) -> tuple[list[Task], Manifest]:
    """Return the tasks whose videos are missing, and the manifest with the existing videos. Tasks that failed earlier
    come last."""
    task_by_output = {task.output: task for task in tasks}
    if repeated := len(tasks) - len(task_by_output):
        report.note(f"note: {repeated} of {len(tasks)} videos are requested more than once and are made once")
    existing = set() if force else task_by_output.keys() & file_names_in(folder)
    incomplete = {name for name in existing if is_incomplete(folder / name)}
    if incomplete:
        report.note(f"note: making {pluralize(len(incomplete), 'incomplete video')} again")
        existing -= incomplete
    manifest = Manifest(folder)
    for name in task_by_output:
        if name in existing:
            manifest.add(task_by_output[name])
    manifest.close()
    missing_tasks = [task for task in task_by_output.values() if task.output not in existing]
    missing_tasks.sort(
        key=lambda task: task.output in manifest.failed
    )  # last, so that a task that made an earlier run fail does not delay the other tasks
    report.num_videos = len(existing)
    report.note(format_batch_progress(len(missing_tasks), len(existing), folder))
    return missing_tasks, manifest


def _make_here(
    driver: BatchDriver,
    requests: Sequence[VideoRequest],
    row_errors: RowErrors,
    options: PipelineOptions,
    command: CommandOptions,
    original_metadata: Mapping[str, Any] | None,
    maker: VideoMaker,
) -> Batch:
    """Make the videos in this process, together with its followers if there are any. If rows are invalid, make no
    video."""
    report = driver.report
    batch = driver.batch(maker.checked_tasks(requests, row_errors), maker.pipe.model_name)
    if not batch.total:
        return batch
    first = next(iter(batch.tasks.values()))
    preview_dir = nullcontext(driver.folder) if isinstance(driver.folder, Path) else temp_dir()
    errors: list[Exception] = []

    def poll_batch() -> None:
        try:
            driver.poll(batch)
        except WanjaxError as error:  # otherwise the worker would treat the error as a failure of the job
            errors.append(error)

    with preview_dir as preview_folder:  # a terminal shows a preview from its file
        preview_command = command._replace(folder=preview_folder, out=None)
        video = VideoCommand(
            report, first.request, options, preview_command, original_metadata=original_metadata, pipe=maker.pipe
        )
        videos = [maker.settings[name] for name in batch.tasks]
        video.print_settings(videos)
        video.print_prompt_notes(videos)
        if video.previews and not command.preview_decoder:
            with report.stage("preview"):
                maker.fit_latent_preview()
        maker.observers = [BatchProgressObserver(video, batch)]
        with driver.show_progress(batch):
            worker_options: Any = {
                "exit_requested": lambda: bool(errors),
                "on_job_end": poll_batch,
                "until_empty": True,
            }
            work(driver.store, maker, **driver.options, **worker_options)
            errors += [sync_error] if (sync_error := getattr(maker, "sync_error", None)) is not None else []
            for error in errors:
                raise error
        if video.previews:
            video.previews.wait()
    return batch


def _make_with_workers(
    driver: BatchDriver,
    requests: Sequence[VideoRequest],
    row_errors: RowErrors,
    arguments: dict[str, Any],
    count: int,
    worker_options: WorkerOptions,
) -> Batch:
    """Start workers as processes of this machine or in a Ray cluster, and let them make the videos."""
    report = driver.report
    make_tasks = partial(_make_tasks, requests, row_errors)
    with ExitStack() as exit_stack:
        results: list[tuple[list[Task], str]] = []
        if count == 0:  # workers on other hosts make the videos
            results.append(_make_tasks(requests, row_errors, VideoMaker(**arguments)))
            start: Any = None
        elif worker_options.ray is None:
            start = partial(LocalWorker, driver.store, partial(_make_maker, arguments), driver.options)
        else:
            start = exit_stack.enter_context(_ray_workers(driver, arguments, count, worker_options.ray, worker_options))

        # the workers that make the tasks: the first worker, and its replacements
        initializing_workers: list[LocalWorker | RayWorker] = []

        def start_worker(number: int) -> LocalWorker | RayWorker:
            is_first = number == 0 and not results
            new_worker = start(number=number, initializer=make_tasks if is_first else None)
            initializing_workers.extend([new_worker] if is_first else [])
            return new_worker

        pool = Pool(driver.store, start_worker, Autoscaler(count, count), report.note)
        exit_stack.callback(pool.close)
        with report.stage("workers"):
            while not results:
                _poll_pool(pool, report)
                with suppress(EOFError):  # the worker died, and its successor makes the tasks
                    tasks_and_model = initializing_workers[-1].initializer_result()
                    results += [tasks_and_model] if tasks_and_model is not None else []
            tasks, model = results[0]
            batch = driver.batch(tasks, model)
        with driver.show_progress(batch):
            while batch.ended_count < batch.total:
                _poll_pool(pool, report)
                with suppress(Unavailable):
                    driver.poll(batch)
        if batch.ended_count == batch.total:
            pool.kill()  # no worker owns a job at this point
    return batch


def _poll_pool(pool: Pool, report: Report) -> None:
    """Poll the workers once. If the database is unavailable for a while, wait for it, as the workers do."""
    report.stop_if_interrupted()
    with suppress(Unavailable):
        pool.poll()
    sleep(POLL_INTERVAL)


def _make_maker(arguments: dict[str, Any], store: JobStore, leads: bool = False) -> VideoMaker:
    """Build the maker of a worker in the worker's process. With `leads`, this process is the first of several
    processes."""
    check_namespace(store, arguments["folder"], BATCH_FILE)
    return Leader(**arguments, can_restart=True) if leads else VideoMaker(**arguments)


def _make_tasks(requests: Sequence[VideoRequest], row_errors: RowErrors, maker: VideoMaker) -> tuple[list[Task], str]:
    """Make the tasks of requests in a worker's process. Return the tasks and the model's name."""
    return maker.checked_tasks(requests, row_errors), maker.pipe.model_name


@contextmanager
def _ray_workers(
    driver: BatchDriver,
    arguments: dict[str, Any],
    count: int,
    address: str,
    worker_options: WorkerOptions,
) -> Iterator[Callable[..., Any]]:
    """Yield a function that starts a worker in a Ray cluster. If the store is a file of this host, the workers access
    it through a Ray actor.
    """
    hosts = worker_options.hosts
    requested_resources = ray_cluster.parse_resources(worker_options.resources, (FIRST_HOST,) if hosts > 1 else ())
    local = ray_cluster.resolve_address(address) is None
    core_count = count * hosts * requested_resources.get("", {}).get("num_cpus", 1)
    with ray_cluster.connect_ray(address, core_count, worker_options.dashboard) as ray:
        if not driver.store.is_shared:
            join_namespace(driver.store, driver.folder, BATCH_FILE)
            driver.store = RemoteStore.start(ray, driver.store)
        resources = {"": ray_cluster.default_resources(ray)} | requested_resources
        start_actors, make_follower = partial(start_single, ray, resources[""]), None
        if hosts > 1:
            start_actors = partial(start_group, ray, placement_bundles(ray, resources, hosts), not local)
            make_follower = partial(VideoMaker, **arguments)
        make_maker = partial(_make_maker, arguments, leads=hosts > 1)
        yield lambda number, initializer: RayWorker(
            ray, driver.store, make_maker, driver.options, start_actors, make_follower, initializer
        )


def _count(report: Report, batch: Batch, suffix: str = "") -> None:
    failed = f"{len(batch.failed)} failed" if batch.failed else ""
    report.set_progress("video", batch.ended_count, batch.total, suffix=", ".join(filter(None, (failed, suffix))))


class BatchProgressObserver(ReportObserver):
    """Shows the progress of the current video, and the number of videos. After Ctrl-C, it stops the run between two
    steps."""

    def __init__(self, video: VideoCommand, batch: Batch):
        super().__init__(video)
        self.batch = batch

    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def progressed(self, unit: str, done: int, total: int) -> None:
        if self.batch.ended_count < self.batch.total:
            _count(self.report, self.batch, f"{unit} {done} of {total}")


def requests_of(request: VideoRequest, file: str | None, row_errors: RowErrors | None = None) -> list[VideoRequest]:
    """Return the request of a command's prompt, or the requests of a file. `row_errors` collects the errors of invalid
    rows; without `row_errors`, an invalid row raises WanjaxError. A prompt together with a file also raises
    WanjaxError.
    """
    if file is None:
        return [VideoRequest({name: value for name, value in request.settings.items() if name in PROMPT_SETTINGS})]
    if "prompt" in request.settings:
        raise WanjaxError("both --prompts and a prompt: give one of them")
    context = click.get_current_context(silent=True)
    rows = context and context.meta.get(WORKFLOW_REQUESTS)
    return read_requests(file, row_errors) if rows is None else rows


def _check_published_rows(
    requests: Sequence[VideoRequest], shared: VideoRequest, options: PipelineOptions, row_errors: RowErrors
) -> None:
    """Check the requests by the rules of a published model, before the model is downloaded. `row_errors` collects the
    errors."""
    if (pipe := published_pipeline(options)) is None:
        return
    groups: dict[str, list[VideoRequest]] = {}  # requests that differ only in prompt and seed
    for request in requests:
        request = with_shared(request, shared).seconds_to_frames(pipe.defaults.fps, pipe.model.vae.temporal_factor)
        groups.setdefault(batch_key(request), []).append(request)
    for group in groups.values():
        request = group[0].common
        settings = {name: value for name, value in request.settings.items() if name not in LOAD_SETTINGS}
        try:
            check_loaded_with(request, pipe.defaults, [MODEL.name])
            pipe.with_solver(request.scheduler).settings(**settings)
        except WanjaxError as error:
            for request in group:
                row_errors.add(request.row, error, request.row_noun)


def _is_local(model: str) -> bool:
    """Whether all files of a model are on this machine."""
    preset = registry.find_preset(model)
    return os.path.exists(model) if preset is None else preset.bundled


def _note_rows_with_seeds(requests: Sequence[VideoRequest], option: str, note: Callable[[str], object]) -> None:
    """Note how many requests have a seed, and so make one video whatever --count or --seeds says."""
    if num_seeded := sum("seed" in each_request.settings for each_request in requests):
        note(
            f"{num_seeded} of {pluralize(len(requests), 'request')} have a seed, so {option} has no effect on them: "
            "each makes one video"
        )


def seeds_of(requests: Sequence[VideoRequest], command: CommandOptions, first: int) -> list[int]:
    """Return the seeds for each request without a seed: the seeds of --seeds, or --count seeds from `first` on.

    Raises:
        WanjaxError: There are more videos than one command can make.
    """
    start = checked_seed(first, alone=True)
    seed_range = range(start, start + (command.count or 1))
    seeds = [read_seed(seed) for seed in seed_range] if command.seeds is None else read_seeds(command.seeds)
    check_count(len(seeds), len([each_request for each_request in requests if "seed" not in each_request.settings]))
    return seeds
