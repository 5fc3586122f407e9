# SPDX-License-Identifier: Apache-2.0
"""`generate` with several prompts or seeds, and `batch`: many videos into a folder, each saved when it is done.

One process makes them, or workers of Ray do. Both are given the same batch.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
import jax

from wanjax import registry
from wanjax.cli import listing
from wanjax.cli.extending import Extender
from wanjax.cli.names import VIDEOS
from wanjax.cli.options import COMPILE_CACHE, SETTINGS
from wanjax.cli.processes import meet
from wanjax.cli.report import Report
from wanjax.cli.stages import Rendering, Reporting, given_settings, how_of, loaded, loading
from wanjax.cluster import actors
from wanjax.cluster.batch import MANIFEST, Batch, Manifest
from wanjax.cluster.hosts import FIRST
from wanjax.cluster.lockstep import Leader, follow
from wanjax.cluster.worker import STAGES, Job, Outcome, Worker, keeping_programs
from wanjax.errors import WanjaxError
from wanjax.figures import quantity
from wanjax.jobs.processes import is_first
from wanjax.jobs.rows import WrongRows, read_requests, with_seeds
from wanjax.media.inputs import INPUTS
from wanjax.pipelines.record import described
from wanjax.pipelines.request import SCHEDULER, VideoRequest
from wanjax.pipelines.seeds import check_count, checked_seed
from wanjax.pipelines.settings import LOADED, read_seed, read_seeds
from wanjax.pipelines.text.extending import as_settings
from wanjax.stores.own import own_folder
from wanjax.stores.places import Place, names_in, place
from wanjax.stores.writing import check_folder

FAILURE = 1  # the exit status where some videos failed


def generate(
    report: Report,
    *,
    prompt: str | None,
    prompts: str | None,
    seeds: str | None,
    count: int | None,
    folder: Path | None,
    out: str | None,
    force: bool,
    extend: Extender | None = None,
    workers: int | None = None,
    encode_workers: int | None = None,
    denoise_workers: int | None = None,
    decode_workers: int | None = None,
    ray: str | None = None,
    hosts: int = 1,
    retries: int = 2,
    resources: str | None = None,
    dashboard: bool = False,
    **given: Any,
) -> None:
    """Makes a video of each request and seed into a folder, except those that are there already."""
    counts = counts_of(workers, dict(zip(STAGES, (encode_workers, denoise_workers, decode_workers), strict=True)))
    several = sum(counts.values()) * hosts > 1 or ray is not None
    if hosts > 1 and len(counts) > 1:
        raise WanjaxError(f"--hosts {hosts} is given beside workers for a stage each: --workers has workers for all")
    if (resources or dashboard) and not several:
        option = "--resources" if resources else "--dashboard"
        raise WanjaxError(f"{option} is for workers of Ray: --workers 2, or --ray ADDRESS, has some")
    if several:
        jax.config.update("jax_platforms", "cpu")  # of this process alone: the devices are the workers'
    else:
        meet(report, given.get("processes"))
    for option in ("noise", "profile"):
        if given.pop(option, None) is not None:
            raise WanjaxError(f"--{option} is for one video: it cannot be given for several")
    target, chosen = folder_of(folder, out), given_settings(**given)
    arguments: dict[str, Any] = {
        "load": partial(loaded, loading(chosen, given, offload=None)),
        "folder": target.absolute(),
        "force": force,
        **how_of(given),
    }
    if several:
        shared = click.get_current_context().meta.get(COMPILE_CACHE, {})
        arguments["load"] = partial(keeping_programs, arguments["load"], shared)
    elif not is_first():
        follow(Worker(**arguments))
        report.awaited = False
        return
    with nullcontext() if several else _leading(report, arguments) as worker:
        wrong = WrongRows()
        requests = requests_of(prompt, prompts, wrong)
        options, model = options_of_each(chosen), str(chosen["model"])
        requests = _takeable(requests, model, options, wrong)
        if not _is_here(model):  # else it is downloaded to find more
            wrong.refuse()
        first = given.get("seed")
        numbers = numbers_of(requests, seeds, count, SETTINGS["seed"].usual if first is None else first)
        if extend is not None:
            texts = extend.all_of([request.settings["prompt"] for request in requests], target)
            told = [as_settings(text) for text in texts]
            requests = [one.updated(text) for one, text in zip(requests, told, strict=True)]
        unsaid = (seeds, count, first) == (None, None, None)
        requests = [one.under(options) for one in with_seeds(requests, None if unsaid else numbers)]
        if worker is not None:
            batch = _here(report, requests, wrong, given, worker, retries)
        else:
            cluster = {"counts": counts, "hosts": hosts, "address": ray, "resources": resources, "dashboard": dashboard}
            batch = _by_actors(report, requests, wrong, given, arguments, retries, **cluster)
    report.table()
    if batch.failed:
        told = f"{len(batch.failed)} of {quantity(batch.total, 'video')} failed, as listed in {target / MANIFEST}"
        report.note(f"{told}; the same command tries them again")
        raise click.exceptions.Exit(FAILURE)


@contextmanager
def _leading(report: Report, arguments: dict[str, Any]) -> Iterator[Worker]:
    """Yields the worker of this process, which leads those that it has met; at the end it lets them go."""
    own = {**arguments, "load": partial(arguments["load"], progress=report.load, note=report.note)}
    if not report.awaited:
        yield Worker(**own)
        return
    leader = Leader(**own)
    try:
        yield leader
    finally:
        report.awaited = not leader.dismiss()


def _here(
    report: Report,
    requests: Sequence[VideoRequest],
    wrong: WrongRows,
    given: dict[str, Any],
    worker: Worker,
    retries: int,
) -> Batch:
    """Makes the videos of requests in this process, and in those that it leads, unless there are `wrong` rows too."""
    check_folder(worker.folder)
    batch = _ordered(report, worker.planned(requests, wrong), worker.folder, retries, worker.force)
    if not batch.total:
        return batch
    first = next(iter(batch.jobs.values()))
    worker.try_output(_longest(batch))

    def outcomes() -> Iterator[Outcome]:
        while jobs := batch.take(1):
            for outcome in worker.make(jobs):  # out of step these processes have to end, and try nothing again
                ended = batch.finish(outcome if worker.in_step else outcome._replace(again=False))
                if ended is not None:
                    yield ended

    here = nullcontext(worker.folder) if isinstance(worker.folder, Path) else own_folder()
    with here as own:  # previews are shown by files
        video = Rendering(report, own, _of_job(given, first), pipe=worker.pipe)
        videos = [worker.settings[name] for name in batch.jobs]
        video.tell(videos)
        video.tell_prompt(videos)
        if video.previews and not given.get("preview_decoder"):
            with report.stage("preview"):
                worker.fit_colours()
        worker.observers = [Within(video, batch)]
        _tell_all(report, batch, outcomes(), worker.folder)
        if video.previews:
            video.previews.wait()
    return batch


def _by_actors(
    report: Report,
    requests: Sequence[VideoRequest],
    wrong: WrongRows,
    given: dict[str, Any],
    arguments: dict[str, Any],
    retries: int,
    *,
    counts: Mapping[str, int],
    hosts: int,
    address: str | None,
    resources: str | None,
    dashboard: bool,
) -> Batch:
    """Makes the videos of requests by workers of a Ray cluster. No device is used in this process."""
    if given.get("processes"):
        raise WanjaxError("--processes is for one worker, which is this process and those that it meets")
    folder, force = arguments["folder"], arguments["force"]
    asked = actors.resources_of(resources, counts if hosts == 1 else (FIRST,))
    check_folder(folder)
    cores = sum(count * asked.get(stage, asked.get("", {})).get("num_cpus", 1) for stage, count in counts.items())
    cores *= hosts
    alone = actors.address_of(address) is None
    store = actors.STORE if len(counts) == 1 else None  # Ray's own share of the memory
    with actors.connected(address, cores, dashboard, store) as ray:
        own = {"": actors.usual_resources(ray)} | asked
        with report.stage("workers"):
            pool = actors.Actors(arguments, counts, own, report.note, hosts, spread=not alone)
            jobs = pool.call("planned", requests, wrong, tick=report.stop_if_asked)
            if len(counts) > 1:
                pool.call("check_staged", jobs, tick=report.stop_if_asked)
            batch = _ordered(report, jobs, folder, retries, force)
            if batch.total:
                pool.call("try_output", _longest(batch), tick=report.stop_if_asked)
        outcomes = actors.counted(pool.outcomes(batch, report.stop_if_asked), batch)
        _tell_all(report, batch, outcomes, folder)
    return batch


def _ordered(report: Report, jobs: Sequence[Job], folder: Place, retries: int, force: bool) -> Batch:
    """Returns the batch of those jobs whose videos are not there, and tells how many there are."""
    each = {job.name: job for job in jobs}
    if repeated := len(jobs) - len(each):
        report.note(f"note: made once, of {len(jobs)} videos: {repeated} that repeat another")
    there = set() if force else each.keys() & set(names_in(folder))
    manifest = Manifest(folder)
    for job in each.values():
        if job.name in there:
            manifest.add(job)
    manifest.close()
    wanted = [job for job in each.values() if job.name not in there]
    wanted.sort(key=lambda job: job.name in manifest.failed)  # what ended this before does not keep others from it
    report.note(f"videos: {len(wanted)}, into {folder}")
    if there:
        report.note(f"there already: {quantity(len(there), 'video')}, to be made: {len(wanted)}")
    return Batch(wanted, retries, manifest)


def _tell_all(report: Report, batch: Batch, outcomes: Iterator[Outcome], folder: Place) -> None:
    """Prints each video as it is made, and what failed."""
    report.goes_on()
    with closing(batch.manifest), report.stage("videos"):
        _count(report, batch)
        for outcome in outcomes:
            row = batch.jobs[outcome.name].request.row
            if outcome.error is not None:
                report.note(f"{f'row {row}' if row else outcome.name} failed: {outcome.error}")
            elif outcome.record is not None:
                report.made(folder / outcome.name, outcome.record, seconds={"video": outcome.seconds})
            _count(report, batch)
    report.way_on = None


def _count(report: Report, batch: Batch, beside: str = "") -> None:
    failed = f"{len(batch.failed)} failed" if batch.failed else ""
    report.count("video", batch.ended, batch.total, beside=", ".join(filter(None, (failed, beside))))


class Within(Reporting):
    """Shows how far the video under way is beside the number of videos; stops the run between two steps."""

    def __init__(self, rendering: Rendering, batch: Batch):
        super().__init__(rendering)
        self.batch = batch

    def stage(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def count(self, unit: str, done: int, total: int) -> None:
        if self.batch.ended < self.batch.total:
            _count(self.report, self.batch, f"{unit} {done} of {total}")


def counts_of(workers: int | None, stages: Mapping[str, int | None]) -> dict[str, int]:
    """Returns the numbers of workers by stage, "" for those that make whole videos; raises WanjaxError for both."""
    if not any(stages.values()):
        return {"": workers or 1}
    if workers is not None:
        other = next(stage for stage, count in stages.items() if count)
        raise WanjaxError(f"--workers {workers} is given beside --{other}-workers: one way is enough")
    return {stage: count or 1 for stage, count in stages.items()}


def requests_of(prompt: str | None, file: str | None, wrong: WrongRows | None = None) -> list[VideoRequest]:
    """Returns the request of a prompt, or those of a file; raises WanjaxError where both are given.

    `wrong` receives the rows that are none; None refuses them here.
    """
    if file is None:
        assert prompt is not None
        return [VideoRequest(as_settings(prompt))]
    if prompt is not None:
        raise WanjaxError("--prompts is given beside a prompt: one way is enough")
    return read_requests(file, wrong)


def _takeable(
    requests: Sequence[VideoRequest], model: str, options: VideoRequest, wrong: WrongRows
) -> list[VideoRequest]:
    """Returns the requests that a listed model may take with these options; `wrong` receives the others."""
    found = []
    for request in requests:
        try:
            listing.check(model, request.under(options).fields, whole=True)
        except WanjaxError as error:
            wrong.add(request.row, error)
        else:
            found.append(request)
    return found


def _is_here(model: str) -> bool:
    """Tells whether a model is opened without a download."""
    preset = registry.published(model)
    return os.path.exists(model) if preset is None else preset.shipped


def options_of_each(chosen: Mapping[str, Any]) -> VideoRequest:
    """Returns what the options of a command ask of each video, as a part of its request."""
    names = {"size", SCHEDULER.name, *INPUTS, *SETTINGS} - {*LOADED, "prompt"}
    found = {name: value for name, value in chosen.items() if name in names}
    fields = {name: described(value) if name in INPUTS else value for name, value in found.items()}
    return VideoRequest.parse(fields, whole=False)


def _of_job(given: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Returns the options of a command with the settings of a job over them."""
    return {**given, **dict.fromkeys(("size", "height", "width")), **job.request.fields}


def _longest(batch: Batch) -> Job:
    """Returns the job of the longest prompt, which its record has to hold."""
    return max(batch.jobs.values(), key=lambda job: len(job.request.settings["prompt"]))


def numbers_of(requests: Sequence[VideoRequest], seeds: str | None, count: int | None, first: Any) -> list[int]:
    """Returns the seeds of each request that has none of its own, which --seeds or --count ask for, from `first` on.

    Raises WanjaxError for more videos than a command makes.
    """
    start = checked_seed(first, alone=True)
    numbers = [read_seed(seed) for seed in range(start, start + (count or 1))] if seeds is None else read_seeds(seeds)
    check_count(len(numbers), len([one for one in requests if "seed" not in one.settings]))
    return numbers


def folder_of(folder: Path | None, out: str | None) -> Place:
    """Returns the folder of the videos, which may be in a store."""
    if folder is not None:
        raise WanjaxError("--dir keeps the stages of one video: --out names the folder of several")
    if out is not None and Path(out).suffix:
        raise WanjaxError(f"--out names the file {out} for several videos: name a folder")
    return VIDEOS if out is None else place(out)
