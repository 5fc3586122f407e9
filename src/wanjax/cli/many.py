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
from wanjax.figures import quantity
from wanjax.jobs import ray_cluster
from wanjax.jobs.batch import MANIFEST, TOGETHER, Batch, Manifest
from wanjax.jobs.databases import database_of
from wanjax.jobs.lockstep import Leader, follow
from wanjax.jobs.maker import Task, VideoMaker, keeping_programs
from wanjax.jobs.multihost import is_first
from wanjax.jobs.pool import POLL, LocalWorker, Pool, Scale
from wanjax.jobs.ray_placement import FIRST, bundles_of, place_alone, place_together
from wanjax.jobs.ray_workers import RayWorker, RemoteStore
from wanjax.jobs.rows import WrongRows, read_requests, with_seeds
from wanjax.jobs.sharing import BATCH, check_place, enter
from wanjax.jobs.store import JobStore, Unavailable
from wanjax.jobs.worker import work
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.seeds import check_count, checked_seed
from wanjax.pipelines.settings import read_seed, read_seeds
from wanjax.pipelines.text.prompt_extension import as_settings
from wanjax.stores.paths import AnyPath, names_in
from wanjax.stores.temporary import temp_dir
from wanjax.stores.writing import used_folder

FAILURE = 1  # the exit status where some videos failed
HERE = WorkerOptions()  # no workers elsewhere
PROMPT = ("prompt", "original_prompt")  # settings in which a list of prompts differs


def generate(
    report: Report,
    request: VideoRequest,
    options: PipelineOptions,
    command: CommandOptions,
    workers: int | None = None,
    by: WorkerOptions = HERE,
    extend: Extender | None = None,
    remade: Mapping[str, Any] | None = None,
) -> None:
    """Make a video of each request and seed into a folder, except those that are there already.

    `workers` of None is this process, and 0 those elsewhere. `extend` extends the prompts of a file, and `remade` is
    the metadata of the video that is made again, if one is.
    """
    database = database_of(by.database)
    if alone := by.is_alone(workers):
        init_distributed(report, options.processes)
    else:
        jax.config.update("jax_platforms", "cpu")  # of this process alone: the devices are the workers'
    target, options = videos_folder(command.out), located(options)
    arguments: dict[str, Any] = {
        "load": partial(loaded, options, request),
        "place": target.absolute(),
        "force": command.force,
        **options.how,
    }
    if alone and not is_first():
        follow(VideoMaker(**arguments))
        report.awaited = False
        return
    with _leading(report, arguments) if alone else nullcontext() as maker:
        wrong = WrongRows()
        requests, shared = requests_of(request, command.prompts, wrong), shared_by_all(request)
        requests = _takeable(requests, str(options.model), shared, wrong)
        if not _is_here(str(options.model)):  # else it is downloaded to find more
            wrong.refuse()
        numbers = numbers_of(requests, command, request.settings.get("seed", SETTINGS["seed"].usual))
        if extend is not None:
            texts = extend.all_of([request.settings["prompt"] for request in requests], target)
            settings = [as_settings(text) for text in texts]
            requests = [one.updated(text) for one, text in zip(requests, settings, strict=True)]
        unsaid = (command.seeds, command.count) == (None, None) and "seed" not in request.settings
        requests = [one.under(shared) for one in with_seeds(requests, None if unsaid else numbers)]
        with used_folder(arguments["place"]), _store(database, arguments["place"]) as store:
            driver = Driver(report, store, arguments["place"], command.force, by.retries)
            if maker is not None:
                batch = _here(driver, requests, wrong, options, command, remade, maker)
            else:
                cache = click.get_current_context().meta.get(COMPILE_CACHE, {})
                arguments["load"] = partial(keeping_programs, arguments["load"], cache)
                batch = _by_workers(driver, requests, wrong, arguments, 1 if workers is None else workers, by)
    report.table()
    if batch.failed:
        summary = f"{len(batch.failed)} of {quantity(batch.total, 'video')} failed, as listed in {target / MANIFEST}"
        report.note(f"{summary}; the same command tries them again")
        raise click.exceptions.Exit(FAILURE)


@contextmanager
def _leading(report: Report, arguments: dict[str, Any]) -> Iterator[VideoMaker]:
    """Yield the maker of this process, which leads those that it has met; at the end it lets them go."""
    arguments_here = {**arguments, "load": partial(arguments["load"], progress=report.load, note=report.note)}
    if not report.awaited:
        yield VideoMaker(**arguments_here)
        return
    leader = Leader(**arguments_here)
    try:
        yield leader
    finally:
        report.awaited = not leader.dismiss()


@contextmanager
def _store(database: str | None, target: AnyPath) -> Iterator[JobStore]:
    """Yield the store of a batch's jobs: a file of this process's own, unless a database is named."""
    if database is not None:
        with closing(JobStore(database)) as store:
            enter(store, target, BATCH)
            yield store
        return
    with temp_dir() as folder, closing(JobStore(str(folder / "jobs.sqlite"))) as store:
        yield store


@dataclass
class Driver:
    """What fills the store of a batch, and tells of its videos as they end."""

    report: Report
    store: JobStore
    place: AnyPath
    force: bool
    retries: int

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `work` in each worker."""
        return {"together": TOGETHER, "retries": self.retries, "attempts": self.retries + 1}

    def batch(self, tasks: Sequence[Task], model: str) -> Batch:
        """Return the batch of those tasks whose videos are not there, and tells how many there are."""
        wanted, manifest = missing(self.report, tasks, self.place, self.force)
        return Batch(self.store, wanted, manifest, model)

    def look(self, batch: Batch) -> None:
        """Print each video that was made since the last look, and what failed."""
        for job in batch.look():
            row = job.request["row"]
            if job.error is not None:
                self.report.note(f"{f'row {row}' if row else job.output} failed: {job.error['message']}")
            elif "metadata" in job.progress:
                seconds = {"video": job.progress["seconds"]}
                self.report.made(self.place / job.output, job.progress["metadata"], seconds=seconds)
            _count(self.report, batch)

    @contextmanager
    def telling(self, batch: Batch) -> Iterator[None]:
        """Show how many videos there are, as long as the block runs."""
        self.report.goes_on()
        try:
            with closing(batch.manifest), self.report.stage("videos"):
                _count(self.report, batch)
                yield
        finally:
            batch.close()
        self.report.way_on = None


def missing(report: Report, tasks: Sequence[Task], folder: AnyPath, force: bool) -> tuple[list[Task], Manifest]:
    """Return the tasks whose videos are not there, those that failed before last; list the others, and tell."""
    each = {task.output: task for task in tasks}
    if repeated := len(tasks) - len(each):
        report.note(f"note: made once, of {len(tasks)} videos: {repeated} that repeat another")
    there = set() if force else each.keys() & names_in(folder)
    manifest = Manifest(folder)
    for name in each:
        if name in there:
            manifest.add(each[name])
    manifest.close()
    wanted = [task for task in each.values() if task.output not in there]
    wanted.sort(key=lambda task: task.output in manifest.failed)  # what ended this before keeps no others from it
    report.note(f"videos: {len(wanted)}, into {folder}")
    if there:
        report.note(f"there already: {quantity(len(there), 'video')}, to be made: {len(wanted)}")
    return wanted, manifest


def _here(
    driver: Driver,
    requests: Sequence[VideoRequest],
    wrong: WrongRows,
    options: PipelineOptions,
    command: CommandOptions,
    remade: Mapping[str, Any] | None,
    maker: VideoMaker,
) -> Batch:
    """Make the videos of requests in this process, and in those that it leads, unless there are `wrong` rows too."""
    report = driver.report
    batch = driver.batch(maker.plan(requests, wrong), maker.pipe.defaults.model)
    if not batch.total:
        return batch
    first = next(iter(batch.tasks.values()))
    here = nullcontext(driver.place) if isinstance(driver.place, Path) else temp_dir()
    faults: list[Exception] = []

    def look() -> None:
        try:
            driver.look(batch)
        except WanjaxError as error:  # which the worker would take for its own
            faults.append(error)

    with here as preview_folder:  # previews are shown by files
        here_alone = command._replace(folder=preview_folder, out=None)
        video = VideoCommand(report, first.request, options, here_alone, remade=remade, pipe=maker.pipe)
        videos = [maker.settings[name] for name in batch.tasks]
        video.tell(videos)
        video.tell_prompt(videos)
        if video.previews and not command.preview_decoder:
            with report.stage("preview"):
                maker.fit_latent_preview()
        maker.observers = [BatchProgressObserver(video, batch)]
        with driver.telling(batch):
            how: Any = {"drained": lambda: bool(faults), "ended": look, "until_empty": True}
            work(driver.store, maker, **driver.options, **how)
            faults += [fault] if (fault := getattr(maker, "fault", None)) is not None else []
            for error in faults:
                raise error
        if video.previews:
            video.previews.wait()
    return batch


def _by_workers(
    driver: Driver,
    requests: Sequence[VideoRequest],
    wrong: WrongRows,
    arguments: dict[str, Any],
    count: int,
    by: WorkerOptions,
) -> Batch:
    """Make the videos of requests by workers, in processes of this machine or in a Ray cluster."""
    report = driver.report
    ask = partial(_planned, requests, wrong)
    with ExitStack() as stack:
        plan: list[Any] = []
        if count == 0:  # workers of others make them
            plan.append(_planned(requests, wrong, VideoMaker(**arguments)))
            start: Any = None
        elif by.ray is None:
            start = partial(LocalWorker, driver.store, partial(_maker, arguments), driver.options)
        else:
            start = stack.enter_context(_ray_workers(driver, arguments, count, by.ray, by))

        planners: list[Any] = []  # workers, the last of which plans

        def worker(number: int) -> Any:
            planning = number == 0 and not plan
            new_worker = start(number=number, ask=ask if planning else None)
            planners.extend([new_worker] if planning else [])
            return new_worker

        pool = Pool(driver.store, worker, Scale(count, count), report.note)
        stack.callback(pool.close)
        with report.stage("workers"):
            while not plan:
                _look_after(pool, report)
                with suppress(EOFError):  # it died, and another one is asked
                    answer = planners[-1].answer()
                    plan += [answer] if answer is not None else []
            tasks, model = plan[0]
            batch = driver.batch(tasks, model)
        with driver.telling(batch):
            while batch.ended < batch.total:
                _look_after(pool, report)
                with suppress(Unavailable):
                    driver.look(batch)
        if batch.ended == batch.total:
            pool.kill()  # they hold no job
    return batch


def _look_after(pool: Pool, report: Report) -> None:
    """Look after the workers once; a database that is away for a while is waited for, as they do."""
    report.stop_if_asked()
    with suppress(Unavailable):
        pool.look()
    sleep(POLL)


def _maker(arguments: dict[str, Any], store: JobStore, leads: bool = False) -> VideoMaker:
    """Return the maker of a worker, in its own process, or of the first of several that compute together."""
    check_place(store, arguments["place"], BATCH)
    return Leader(**arguments, started_again=True) if leads else VideoMaker(**arguments)


def _planned(requests: Sequence[VideoRequest], wrong: WrongRows, maker: VideoMaker) -> tuple[list[Task], str]:
    """Return the tasks of requests, and the model that makes them, in a worker's process."""
    return maker.plan(requests, wrong), maker.pipe.defaults.model


@contextmanager
def _ray_workers(
    driver: Driver,
    arguments: dict[str, Any],
    count: int,
    address: str,
    by: WorkerOptions,
) -> Iterator[Callable[..., Any]]:
    """Yield what starts workers in a Ray cluster, which has the store as an actor where no other host reaches it."""
    hosts = by.hosts
    requested = ray_cluster.resources_of(by.resources, (FIRST,) if hosts > 1 else ())
    local = ray_cluster.address_of(address) is None
    cores = count * hosts * requested.get("", {}).get("num_cpus", 1)
    with ray_cluster.connected(address, cores, by.dashboard) as ray:
        if not driver.store.is_shared:
            enter(driver.store, driver.place, BATCH)
            driver.store = RemoteStore.start(ray, driver.store)
        resources = {"": ray_cluster.usual_resources(ray)} | requested
        place, follower = partial(place_alone, ray, resources[""]), None
        if hosts > 1:
            place = partial(place_together, ray, bundles_of(ray, resources, hosts), not local)
            follower = partial(VideoMaker, **arguments)
        start = partial(_maker, arguments, leads=hosts > 1)
        yield lambda number, ask: RayWorker(ray, driver.store, start, driver.options, place, follower, ask)


def _count(report: Report, batch: Batch, beside: str = "") -> None:
    failed = f"{len(batch.failed)} failed" if batch.failed else ""
    report.count("video", batch.ended, batch.total, beside=", ".join(filter(None, (failed, beside))))


class BatchProgressObserver(Reporting):
    """Shows how far the video under way is beside the number of videos; stops the run between two steps."""

    def __init__(self, rendering: VideoCommand, batch: Batch):
        super().__init__(rendering)
        self.batch = batch

    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def count(self, unit: str, done: int, total: int) -> None:
        if self.batch.ended < self.batch.total:
            _count(self.report, self.batch, f"{unit} {done} of {total}")


def requests_of(request: VideoRequest, file: str | None, wrong: WrongRows | None = None) -> list[VideoRequest]:
    """Return the request of a command's prompt, or those of a file; raise WanjaxError where both are given.

    `wrong` receives the rows that are none; None refuses them here.
    """
    if file is None:
        return [VideoRequest({name: value for name, value in request.settings.items() if name in PROMPT})]
    if "prompt" in request.settings:
        raise WanjaxError("--prompts is given beside a prompt: one way is enough")
    return read_requests(file, wrong)


def _takeable(
    requests: Sequence[VideoRequest], model: str, options: VideoRequest, wrong: WrongRows
) -> list[VideoRequest]:
    """Return the requests that a listed model may take with these options; `wrong` receives the others."""
    takeable = []
    for request in requests:
        try:
            listing.check(model, request.under(options), whole=True)
        except WanjaxError as error:
            wrong.add(request.row, error)
        else:
            takeable.append(request)
    return takeable


def _is_here(model: str) -> bool:
    """Return whether a model is opened without a download."""
    preset = registry.find_preset(model)
    return os.path.exists(model) if preset is None else preset.shipped


def shared_by_all(request: VideoRequest) -> VideoRequest:
    """Return what a command asks of each video, whatever its prompt."""
    return replace(request, settings={name: value for name, value in request.settings.items() if name not in PROMPT})


def numbers_of(requests: Sequence[VideoRequest], command: CommandOptions, first: int) -> list[int]:
    """Return the seeds of each request that has none of its own, which --seeds or --count ask for, from `first` on.

    Raises WanjaxError for more videos than a command makes.
    """
    start = checked_seed(first, alone=True)
    several = range(start, start + (command.count or 1))
    numbers = [read_seed(seed) for seed in several] if command.seeds is None else read_seeds(command.seeds)
    check_count(len(numbers), len([one for one in requests if "seed" not in one.settings]))
    return numbers
