# SPDX-License-Identifier: Apache-2.0
"""The command `worker`: lease jobs from a database and make their videos until a signal arrives."""

from contextlib import closing
from functools import partial
from math import inf
from typing import Any

from wanjax.cli.parsed import PipelineOptions, ServeOptions
from wanjax.cli.processes import init_distributed
from wanjax.cli.report import Report
from wanjax.cli.stages import load_pipeline, with_full_paths
from wanjax.jobs.batch import MAX_RUN_JOBS
from wanjax.jobs.databases import check_exists, resolve_database
from wanjax.jobs.lockstep import Leader, follow_leader
from wanjax.jobs.maker import VideoMaker
from wanjax.jobs.multihost import is_first
from wanjax.jobs.pool import exit_event_on_signals
from wanjax.jobs.sharing import BATCH_FILE, SERVE_FILE, try_join_namespace
from wanjax.jobs.store import JobStore
from wanjax.jobs.worker import work
from wanjax.pipelines.request import VideoRequest
from wanjax.stores.paths import AnyPath, parse_path
from wanjax.stores.writing import check_folder


def run_worker(
    report: Report,
    options: PipelineOptions,
    serve_options: ServeOptions,
    database: str | None,
    out: str | None,
    folder: str | None,
    retries: int,
) -> None:
    """Lease and make jobs of a database until a signal arrives. Several processes may do this together."""
    url, folder_option = resolve_database(database), out or folder
    assert url is not None
    assert folder_option is not None, "`checks` refuses a worker without a folder"
    target = parse_path(folder_option).absolute()
    if folder is not None:
        return _work_for_server(report, url, target, options, serve_options)
    check_exists(url)
    # before the model is loaded, so that a wrong database is reported at once
    with closing(JobStore(url)) as store:
        init_distributed(report, options.processes)
        load = partial(load_pipeline, with_full_paths(options), VideoRequest({}))
        maker_arguments: dict[str, Any] = {"folder": target, **options.run_options}
        if not is_first():
            follow_leader(VideoMaker(load, **maker_arguments))
            report.has_peers = False
            return
        check_folder(target)
        load_here = partial(load, note=report.note)
        maker = Leader(load_here, **maker_arguments) if report.has_peers else VideoMaker(load_here, **maker_arguments)
        exit_requested = exit_event_on_signals()
        report.note(f"a worker of {store.name}, videos into {target}")
        work(
            store.with_retry_seconds(inf),
            maker,
            max_batch=MAX_RUN_JOBS,
            retries=retries,
            attempts=retries + 1,
            exit_requested=exit_requested.is_set,
            try_join_namespace=partial(try_join_namespace, folder=target, name=BATCH_FILE),
            note=report.note,
        )
        if isinstance(maker, Leader):
            report.has_peers = not maker.dismiss()
            if maker.sync_error is not None:
                raise maker.sync_error
    report.note("stopped")


def _work_for_server(
    report: Report, url: str, target: AnyPath, options: PipelineOptions, serve_options: ServeOptions
) -> None:
    """Lease and make the jobs of a server until a signal arrives."""
    from wanjax.cli import serving  # imported late, because this module needs the libraries of the server

    serving.check_libraries()
    check_exists(url)
    with closing(JobStore(url)) as store:
        init_distributed(report, None)
        check_folder(target)
        maker = serving.build_maker(options, serve_options, target, report.note)
        exit_requested = exit_event_on_signals()
        report.note(f"a worker of {store.name}, videos into {target}")
        worker_options: Any = {
            "exit_requested": exit_requested.is_set,
            "try_join_namespace": partial(try_join_namespace, folder=target, name=SERVE_FILE),
            "note": report.note,
        }
        work(store.with_retry_seconds(inf), maker, **worker_options)
    report.note("stopped")
