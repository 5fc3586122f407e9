# SPDX-License-Identifier: Apache-2.0
"""The command `serve`: loads a model and listens until it is stopped."""

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from glob import glob
from importlib.util import find_spec
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

import click
import jax

from wanjax.checkpoints.lora_source import Lora
from wanjax.cli.names import TOKEN
from wanjax.cli.options import COMPILE_CACHE
from wanjax.cli.parsed import ListenOptions, PipelineOptions, ServeOptions, WorkerOptions
from wanjax.cli.processes import init_distributed
from wanjax.cli.report import Report
from wanjax.cli.stages import loaded
from wanjax.errors import WanjaxError, reason
from wanjax.jobs import ray_cluster
from wanjax.jobs.databases import resolve_database
from wanjax.jobs.maker import with_program_cache
from wanjax.jobs.pool import (
    CPU_NICENESS,
    GPU_FILES,
    POLL_INTERVAL,
    Autoscaler,
    LocalWorker,
    Pool,
    WorkerHandle,
    exit_event_on_signals,
)
from wanjax.jobs.ray_placement import start_single
from wanjax.jobs.ray_workers import RayWorker, RemoteStore
from wanjax.jobs.sharing import SERVE_FILE, check_namespace, join_namespace, requeue_dead
from wanjax.jobs.store import JobStore
from wanjax.jobs.worker import WorkerThread
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.prompt_extension import check_url, extend_prompt
from wanjax.serve.limits import Limits
from wanjax.serve.maker import ServedMaker
from wanjax.serve.variants import Variants
from wanjax.signals import INTERRUPTED
from wanjax.stores.locks import locked
from wanjax.stores.paths import AnyPath, parse_path
from wanjax.stores.writing import check_folder

LIBRARIES = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "python_multipart": "python-multipart",
}
DATABASE, LOCK = "jobs.sqlite", "serving.lock"  # in a server's folder, where no other database is named
ATTEMPTS = 2  # times that a request may be under way when the server, with its worker in it, ends
LAST_SECONDS = 60.0  # for a step that is under way when the server ends
STOPPED = "stopped; what waits is made when the server is started again"


def check_libraries() -> None:
    """Raise WanjaxError unless the libraries of the server are installed."""
    if missing := [name for module, name in LIBRARIES.items() if find_spec(module) is None]:
        raise WanjaxError(f"the server needs {' and '.join(missing)}: pip install 'wanjax[serve]' brings them")


def serve(
    report: Report,
    options: PipelineOptions,
    served: ServeOptions,
    listen: ListenOptions,
    folder: str,
    workers: tuple[int, int] | None,
    by: WorkerOptions,
) -> None:
    """Serve a model until a signal, by a worker in this process or by the least to the most `workers` elsewhere."""
    check_libraries()
    from wanjax.serve.auth import Access

    access = Access.read(listen.host, listen.token or os.environ.pop(TOKEN, None) or None, listen.origins)
    if served.extend_prompt is not None:
        check_url(served.extend_prompt)
    if workers is not None:
        jax.config.update("jax_platforms", "cpu")  # the devices are the workers'
    else:
        init_distributed(report, options.processes)
        if jax.process_count() > 1:
            raise WanjaxError("a server is one process: without --processes it uses the devices of its own host")
    with ExitStack() as stack:  # before the model: a port or a folder in use would be told after a long wait
        sockets = [stack.enter_context(each) for each in listening(listen.host, listen.port)]
        videos = parse_path(folder).absolute()
        store = stack.enter_context(opened(videos, resolve_database(by.database)))
        server = _Server(report, listen.host, sockets, access, store, videos, options, served)
        if workers is None:
            server.with_thread()
        elif workers == (0, 0):
            server.alone()
        else:
            server.with_pool(*workers, by)
    report.note(STOPPED)


@contextmanager
def opened(folder: AnyPath, database: str | None) -> Iterator[JobStore]:
    """Yield the jobs of a server whose videos are in a folder, here or in a store.

    Args:
        folder: The folder.
        database: A file of SQLite or PostgreSQL's URL; None is a file in the folder, which then is one server's.

    Raises:
        WanjaxError: The folder cannot be written, another server uses it, or the database cannot be used.
    """
    with ExitStack() as stack:
        check_folder(folder)
        if database is None:
            if not isinstance(folder, Path):
                fault = f"{folder} is a store, which can keep no database"
                raise WanjaxError(f"{fault}: --database FILE, on a disk of this machine, or PostgreSQL's URL has one")
            stack.enter_context(locked(folder / LOCK, "server", "--dir"))
            database = str(folder / DATABASE)
        store = stack.enter_context(closing(JobStore(database)))
        join_namespace(store, folder, SERVE_FILE)
        requeue_dead(store)
        yield store


class _Server:
    """A server at its sockets, before and while it runs."""

    def __init__(
        self,
        report: Report,
        host: str,
        sockets: list[socket.socket],
        access: Any,
        store: JobStore,
        folder: AnyPath,
        options: PipelineOptions,
        served: ServeOptions,
    ):
        self.report, self.host, self.sockets, self.access = report, host, sockets, access
        self.store, self.folder, self.options, self.served = store, folder, options, served

    def with_thread(self) -> None:
        """Run with a worker in a thread of this process."""
        self.report.note(f"loading {self.options.model}")
        maker = maker_of(self.options, self.served, self.folder, self.report.note)
        worker = WorkerThread(self.store, maker, attempts=ATTEMPTS)
        service = self._service(*maker.served(), lambda: worker.is_broken)
        self._run(service, self._server(service, worker.stop), worker.start)
        if not worker.join(LAST_SECONDS):
            os._exit(0)  # a long computation is under way, which no thread can stop; its video waits in the database

    def with_pool(self, least: int, most: int, by: WorkerOptions) -> None:
        """Run with workers in processes of this machine, or as actors of a Ray cluster; they end with this process."""
        shared = click.get_current_context().meta.get(COMPILE_CACHE, {})
        start = partial(_start, self.options, self.served, self.folder, shared)
        nice = 0 if glob(GPU_FILES) else CPU_NICENESS

        def local(number: int) -> LocalWorker:
            return LocalWorker(self.store, start, {}, number=number, nice=nice, probe=ServedMaker.served)

        with ExitStack() as stack:
            if by.ray is None:
                worker = local
            else:
                ray = stack.enter_context(ray_cluster.connect_ray(by.ray, most, by.dashboard))
                worker = self._placing(
                    ray, start, ray_cluster.parse_resources(by.resources).get("", ray_cluster.default_resources(ray))
                )
            self._run_pool(Pool(self.store.with_retry_seconds(inf), worker, Autoscaler(least, most), self.report.note))

    def _placing(
        self, ray: Any, start: Callable[[Any], Any], resources: Mapping[str, Any]
    ) -> Callable[[int], WorkerHandle]:
        """Return what places a worker in a Ray cluster, whose hosts reach PostgreSQL, or the file here by an actor."""
        shared = self.store if self.store.is_shared else RemoteStore.start(ray, self.store)
        place = partial(start_single, ray, resources)
        return lambda number: RayWorker(ray, shared, start, {}, place, probe=ServedMaker.served)

    def _run_pool(self, pool: Pool) -> None:
        """Answer until a signal, beside a pool that is looked after meanwhile."""
        stopped, faults = exit_event_on_signals(), list[BaseException]()
        try:
            self.report.note(f"loading {self.options.model}")
            if (served := _first_answer(pool, stopped)) is None:
                return
            service = self._service(*served)
            server = self._server(service, stopped.set)
            thread = threading.Thread(
                target=_keep, args=(pool, stopped, server, faults), name="wanjax-pool", daemon=True
            )
            self._run(service, server, thread.start)
            stopped.set()
            thread.join(LAST_SECONDS)
        finally:
            pool.close()
        if faults:
            raise faults[0]

    def alone(self) -> None:
        """Run without a worker: others of the database make the videos."""
        maker = maker_of(self.options._replace(mesh=None), self.served, self.folder, self.report.note)
        models, cards = maker.served()
        for card in cards:
            del card["started_with"]["devices"]  # which are not those that make the videos
        self._run(service := self._service(models, cards), self._server(service))

    def _service(self, models: Any, cards: list[dict[str, Any]], is_broken: Callable[[], bool] = lambda: False) -> Any:
        from wanjax.serve.app import Service

        defaults = models.model(None).defaults
        limits = _limits(self.served, defaults)
        limits.bound_pictures()
        self.model = defaults.model
        return Service(self.store, self.folder, models, cards, limits, self.access, is_broken)

    def _server(self, service: Any, stop: Callable[[], object] = lambda: None) -> Any:
        """Return the HTTP server of a service; `stop` is called at its first signal."""
        import uvicorn

        from wanjax.serve.connections import BACKLOG, Connection

        class Server(uvicorn.Server):
            """A server that ends all streams of events at a signal, and which a second signal ends at once."""

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                if self.should_exit:
                    os._exit(INTERRUPTED)
                self.end()

            def end(self) -> None:
                service.end()
                stop()
                self.should_exit = True

        config = uvicorn.Config(
            service.application(), log_level="warning", access_log=False, server_header=False, date_header=False,
            http=Connection, backlog=BACKLOG, timeout_keep_alive=30, timeout_graceful_shutdown=5, ws="none",
            proxy_headers=False,
        )  # fmt: skip
        return Server(config)

    def _run(self, service: Any, server: Any, begin: Callable[[], object] = lambda: None) -> None:
        """Answer until a signal; `begin` is called once requests are answered."""

        async def serve() -> None:
            await asyncio.gather(server.serve(self.sockets), begun())

        async def begun() -> None:
            while not server.started and not server.should_exit:
                await asyncio.sleep(0.01)
            if server.started:
                begin()
                service.start()
                where = address(self.host, self.sockets)
                self.report.note(f"{self.model} is served at {where}, videos in {self.folder}")

        signal.set_wakeup_fd(-1)  # Ctrl-C is the server's from here on
        asyncio.run(serve())
        server.end()
        service.close()


def _first_answer(pool: Any, stopped: threading.Event) -> Any:
    """Start a pool's workers, and return what the first one tells of its models; None where it is stopped before.

    Raises:
        WanjaxError: There is no such model, or one worker after another dies.
    """
    while not stopped.wait(POLL_INTERVAL):
        pool.poll()
        for worker in pool.workers.values():
            with suppress(EOFError):  # it died, and another takes its place
                if (answer := worker.probe_result()) is not None:
                    return answer
    return None


def _keep(pool: Any, stopped: threading.Event, server: Any, faults: list[BaseException]) -> None:
    """Look after a pool until it is stopped; end the server where the pool cannot go on, and note why."""
    try:
        pool.run(stopped.is_set)
    except BaseException as error:
        faults.append(error)
        server.end()


def _start(
    options: PipelineOptions, served: ServeOptions, folder: AnyPath, shared: Mapping[str, Any], store: Any
) -> ServedMaker:
    """Return the maker of a worker, in its own process."""
    check_namespace(store, folder, SERVE_FILE)
    note = logging.getLogger("wanjax.serve").info
    return with_program_cache(lambda: maker_of(options, served, folder, note), shared)


def _limits(served: ServeOptions, defaults: Settings) -> Limits:
    """Return the limits of requests for a model of these settings."""
    bounds = {"queue": served.max_queue, "steps": served.max_steps, "upload": served.max_upload * 2**20}
    return Limits.of(defaults, served.max_pixels, **bounds)


def maker_of(
    options: PipelineOptions, served: ServeOptions, folder: AnyPath, note: Callable[[str], None]
) -> ServedMaker:
    """Return what makes a server's videos; its model's networks are loaded when it begins."""

    def load(model: str | None, loras: Sequence[Lora]) -> Pipeline:
        pipe = loaded(options._replace(model=model, lora=tuple(loras)), VideoRequest({}), note=note)
        if served.preview_decoder:
            pipe.preview_with(served.preview_decoder)
        return pipe

    loras = [Lora.parse(lora) for lora in options.lora if isinstance(lora, str)]
    variants = Variants(pipe := load(options.model, loras), loras, load)
    Limits.of(pipe.defaults).bound_pictures()
    how, looking = options.how, served.preview or served.preview_decoder is not None
    if (url := served.extend_prompt) is not None:
        model = served.extend_model
        how["extend"] = lambda prompt, picture: extend_prompt(prompt, url, model=model, picture=picture)
    return ServedMaker(variants, folder, compiles=served.rehearse, preview=looking, note=note, **how)


def listening(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at each address of a host, all at one port; 0 is a free one.

    Raises:
        WanjaxError: The host is none of this machine's, or the port is in use or for others.
    """
    opened: list[socket.socket] = []
    try:
        addresses = dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
        for number, (family, *_, (name, _, *scope)) in enumerate(addresses):
            try:
                where = (name, _port(opened[0]) if opened else port, *scope)
                opened.append(socket.create_server(where, family=family))
            except OSError as error:  # a name such as localhost may have an address that this machine has not
                absent = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
                if not absent or (number + 1 == len(addresses) and not opened):
                    raise
    except OSError as error:
        for each in opened:
            each.close()
        why = reason(error).partition(" (")[0]  # the address stands in brackets, and is told here
        right = "--port takes another, and 0 a free one" if error.errno == errno.EADDRINUSE else "--host takes another"
        raise WanjaxError(f"the server cannot listen at port {port} of {host}, {why}: {right}") from error
    return opened


def _port(opened: socket.socket) -> int:
    return opened.getsockname()[1]


def address(host: str, sockets: Sequence[socket.socket]) -> str:
    """Return the address of the page; the port is the one that was found where 0 was asked for."""
    return f"http://{f'[{host}]' if ':' in host else host}:{_port(sockets[0])}/"
