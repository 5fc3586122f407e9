# SPDX-License-Identifier: Apache-2.0
"""The command `serve`: load a model, and answer requests until the command is stopped."""

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
from wanjax.cli.names import TOKEN_VARIABLE
from wanjax.cli.options import COMPILE_CACHE
from wanjax.cli.parsed import ListenOptions, PipelineOptions, ServeOptions, WorkerOptions
from wanjax.cli.processes import init_distributed
from wanjax.cli.report import Report
from wanjax.cli.stages import load_pipeline
from wanjax.errors import WanjaxError, install_extra, reason, repr_short
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
from wanjax.serve.served_models import LoadedModels
from wanjax.signals import INTERRUPTED
from wanjax.stores.locks import locked
from wanjax.stores.paths import AnyPath, parse_path
from wanjax.stores.writing import created_output_folder

LIBRARIES = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "python_multipart": "python-multipart",
}
DATABASE, LOCK_FILE = "jobs.sqlite", "serving.lock"  # files in a server's folder, if --database names no database
MAX_ATTEMPTS = 2  # a job fails if the server died this many times while making it
STOP_TIMEOUT = 60.0  # seconds to wait for the end of the current step when the server stops
STOPPED_NOTE = "stopped"
STOPPED_WITH_JOBS_NOTE = "stopped; waiting videos are made when the server is started again"


def check_libraries() -> None:
    """Raise WanjaxError unless the libraries of the server are installed."""
    if missing := [name for module, name in LIBRARIES.items() if find_spec(module) is None]:
        raise WanjaxError(f"the server needs {' and '.join(missing)}: {install_extra('serve')}")


def serve(
    report: Report,
    options: PipelineOptions,
    serve_options: ServeOptions,
    listen_options: ListenOptions,
    folder: str,
    workers: tuple[int, int] | None,
    worker_options: WorkerOptions,
) -> None:
    """Serve a model until a signal arrives. One worker runs in this process, or `workers` run in other processes."""
    check_libraries()
    from wanjax.serve.auth import Access

    check_host(listen_options.host)
    token_variable = os.environ.pop(TOKEN_VARIABLE, None)  # removed, so that workers do not inherit the token
    access = Access.read(
        listen_options.host,
        listen_options.token if listen_options.token is not None else token_variable or None,
        listen_options.origins,
    )
    if serve_options.extend_prompt is not None:
        check_url(serve_options.extend_prompt)
    if workers is not None:
        jax.config.update("jax_platforms", "cpu")  # the workers use the devices
    else:
        init_distributed(report, options.processes)
        if jax.process_count() > 1:
            raise WanjaxError("--processes is not for a server, which is one process: leave it out")
    with ExitStack() as stack:  # opened before the model is loaded, so that a port or folder in use is reported at once
        sockets = [
            stack.enter_context(listening_socket)
            for listening_socket in listen_on_host(listen_options.host, listen_options.port)
        ]
        videos = parse_path(folder).absolute()
        store = stack.enter_context(open_store(videos, resolve_database(worker_options.database)))
        server = _ServeCommand(report, listen_options.host, sockets, access, store, videos, options, serve_options)
        if workers is None:
            server.run_with_thread()
        elif workers == (0, 0):
            server.run_without_worker()
        else:
            server.run_with_pool(*workers, worker_options)
        note = STOPPED_NOTE
        with suppress(WanjaxError):  # the server has stopped normally, even if the database is unavailable
            note = STOPPED_WITH_JOBS_NOTE if store.num_waiting() else STOPPED_NOTE
    report.note(note)


@contextmanager
def open_store(folder: AnyPath, database: str | None) -> Iterator[JobStore]:
    """Open the job store of a server.

    Args:
        folder: The folder of the server's videos, on this machine or in a store.
        database: An SQLite file, or a URL of PostgreSQL. None uses a file in the folder, for a single server.

    Raises:
        WanjaxError: The folder cannot be written, another server uses it, or the database cannot be used.
    """
    with ExitStack() as stack:
        with created_output_folder(folder):
            if database is None:
                if not isinstance(folder, Path):
                    problem = f"--dir {folder} is in a store, which cannot contain a database"
                    raise WanjaxError(f"{problem}: give --database with a file of this machine or a URL of PostgreSQL")
                stack.enter_context(locked(folder / LOCK_FILE, "server", "--dir"))
                database = str(folder / DATABASE)
            store = stack.enter_context(closing(JobStore(database)))
        join_namespace(store, folder, SERVE_FILE)
        requeue_dead(store)
        yield store


class _ServeCommand:
    """The command `serve`: its options, its listening sockets and its job store."""

    def __init__(
        self,
        report: Report,
        host: str,
        sockets: list[socket.socket],
        access: Any,
        store: JobStore,
        folder: AnyPath,
        options: PipelineOptions,
        serve_options: ServeOptions,
    ):
        self.report, self.host, self.sockets, self.access = report, host, sockets, access
        self.store, self.folder, self.options, self.serve_options = store, folder, options, serve_options

    def run_with_thread(self) -> None:
        """Serve, with one worker in a thread of this process."""
        self.report.note(f"loading {self.options.model}")
        maker = build_maker(self.options, self.serve_options, self.folder, self.report.note)
        worker = WorkerThread(self.store, maker, attempts=MAX_ATTEMPTS)
        service = self._service(*maker.models_and_cards(), lambda: worker.is_broken)
        self._run(service, self._server(service, worker.stop), worker.start)
        if not worker.join(STOP_TIMEOUT):
            os._exit(0)  # a thread cannot stop a long computation; the job stays in the database

    def run_with_pool(self, min_workers: int, max_workers: int, worker_options: WorkerOptions) -> None:
        """Serve, with workers that are processes of this machine or actors of a Ray cluster. They end with this
        process."""
        cache = click.get_current_context().meta.get(COMPILE_CACHE, {})
        start = partial(_start_maker, self.options, self.serve_options, self.folder, cache)
        nice = 0 if glob(GPU_FILES) else CPU_NICENESS

        def start_local(number: int) -> LocalWorker:
            return LocalWorker(
                self.store, start, {}, number=number, nice=nice, initializer=ServedMaker.models_and_cards
            )

        with ExitStack() as stack:
            if worker_options.ray is None:
                worker = start_local
            else:
                ray = stack.enter_context(
                    ray_cluster.connect_ray(worker_options.ray, max_workers, worker_options.dashboard)
                )
                worker = self._ray_starter(
                    ray,
                    start,
                    ray_cluster.parse_resources(worker_options.resources).get("", ray_cluster.default_resources(ray)),
                )
            self._run_pool(
                Pool(self.store.with_retry_seconds(inf), worker, Autoscaler(min_workers, max_workers), self.report.note)
            )

    def _ray_starter(
        self, ray: Any, start: Callable[[Any], Any], resources: Mapping[str, Any]
    ) -> Callable[[int], WorkerHandle]:
        """Return a function that starts a worker in a Ray cluster. If the job store is a file of this host, the workers
        access it through a Ray actor.
        """
        shared_store = self.store if self.store.is_shared else RemoteStore.start(ray, self.store)
        start_actor = partial(start_single, ray, resources)
        return lambda number: RayWorker(
            ray, shared_store, start, {}, start_actor, initializer=ServedMaker.models_and_cards
        )

    def _run_pool(self, pool: Pool) -> None:
        """Answer requests until a signal arrives, while a thread polls the pool."""
        stopped, errors = exit_event_on_signals(), list[BaseException]()
        try:
            self.report.note(f"loading {self.options.model}")
            if (models_and_cards := _wait_for_models(pool, stopped)) is None:
                return
            service = self._service(*models_and_cards)
            server = self._server(service, stopped.set)
            thread = threading.Thread(
                target=_poll_pool_until_stopped, args=(pool, stopped, server, errors), name="wanjax-pool", daemon=True
            )
            self._run(service, server, thread.start)
            stopped.set()
            thread.join(STOP_TIMEOUT)
        finally:
            pool.close()
        if errors:
            raise errors[0]

    def run_without_worker(self) -> None:
        """Serve without a worker. Workers of the same database on other hosts make the videos."""
        maker = build_maker(self.options._replace(mesh=None), self.serve_options, self.folder, self.report.note)
        models, model_cards = maker.models_and_cards()
        for card in model_cards:
            del card["started_with"]["devices"]  # the videos are made on devices of other hosts
        self._run(service := self._service(models, model_cards), self._server(service))

    def _service(
        self, models: Any, model_cards: list[dict[str, Any]], is_broken: Callable[[], bool] = lambda: False
    ) -> Any:
        from wanjax.serve.app import Service

        defaults = models.model(None).defaults
        limits = _limits(self.serve_options, defaults)
        limits.limit_pictures()
        self.model = defaults.model
        return Service(self.store, self.folder, models, model_cards, limits, self.access, is_broken)

    def _server(self, service: Any, stop: Callable[[], object] = lambda: None) -> Any:
        """Build the HTTP server of a service. The server calls `stop` at the first signal."""
        import uvicorn

        from wanjax.serve.connections import BACKLOG, Connection

        class Server(uvicorn.Server):
            """A server that ends all event streams at the first signal, and the process at the second signal."""

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

    def _run(self, service: Any, server: Any, on_start: Callable[[], object] = lambda: None) -> None:
        """Answer requests until a signal arrives. Call `on_start` when the server is ready."""

        async def serve() -> None:
            await asyncio.gather(server.serve(self.sockets), call_when_started())

        async def call_when_started() -> None:
            while not server.started and not server.should_exit:
                await asyncio.sleep(0.01)
            if server.started:
                on_start()
                service.start()
                url = page_address(self.host, self.sockets)
                self.report.note(f"serving {self.model} at {url}, videos in {self.folder}")
                for model in self.store.models_without_worker():
                    if model != self.model:  # for example because the folder's previous server had another model
                        self.report.note(f"waiting videos of {model} are made when a server or worker of it is started")

        signal.set_wakeup_fd(-1)  # now uvicorn handles Ctrl-C
        asyncio.run(serve())
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn has stopped, but a worker may still compute
            signal.signal(number, lambda *_: os._exit(INTERRUPTED))
        server.end()
        service.close()


def _wait_for_models(pool: Any, stopped: threading.Event) -> Any:
    """Start a pool's workers, and return the models and model cards of the first worker that has loaded its model.
    Return None if the pool is stopped before that.

    Raises:
        WanjaxError: The model does not exist, or one worker after another dies.
    """
    while not stopped.wait(POLL_INTERVAL):
        pool.poll()
        for worker in pool.workers.values():
            with suppress(EOFError):  # the worker died, and a new one replaces it
                if (models_and_cards := worker.initializer_result()) is not None:
                    return models_and_cards
    return None


def _poll_pool_until_stopped(pool: Any, stopped: threading.Event, server: Any, errors: list[BaseException]) -> None:
    """Run a pool until it is stopped. If the pool fails, append the error to `errors` and end the server."""
    try:
        pool.run(stopped.is_set)
    except BaseException as error:
        errors.append(error)
        server.end()


def _start_maker(
    options: PipelineOptions, serve_options: ServeOptions, folder: AnyPath, cache: Mapping[str, Any], store: Any
) -> ServedMaker:
    """Build the maker of a worker in its process."""
    check_namespace(store, folder, SERVE_FILE)
    note = logging.getLogger("wanjax.serve").info
    return with_program_cache(lambda: build_maker(options, serve_options, folder, note), cache)


def _limits(serve_options: ServeOptions, defaults: Settings) -> Limits:
    """Build the limits of requests for a model with these default settings."""
    bounds = {
        "queue": serve_options.max_queue,
        "steps": serve_options.max_steps,
        "upload": serve_options.max_upload * 2**20,
    }
    return Limits.of(defaults, serve_options.max_pixels, **bounds)


def build_maker(
    options: PipelineOptions, serve_options: ServeOptions, folder: AnyPath, note: Callable[[str], None]
) -> ServedMaker:
    """Build the maker of a server's videos. Its `warm_up` loads the model's networks."""

    def load(model: str | None, loras: Sequence[Lora]) -> Pipeline:
        pipe = load_pipeline(options._replace(model=model, lora=tuple(loras)), VideoRequest({}), note=note)
        if serve_options.preview_decoder:
            pipe.preview_with(serve_options.preview_decoder)
        return pipe

    loras = [Lora.parse(lora) for lora in options.lora if isinstance(lora, str)]
    loaded_models = LoadedModels(pipe := load(options.model, loras), loras, load)
    Limits.of(pipe.defaults).limit_pictures()
    maker_options = options.run_options
    shows_previews = serve_options.preview or serve_options.preview_decoder is not None
    if (url := serve_options.extend_prompt) is not None:
        model = serve_options.extend_model
        maker_options["extend_prompt"] = lambda prompt, has_picture: extend_prompt(
            prompt, url, model=model, picture=has_picture
        )
    return ServedMaker(
        loaded_models, folder, compiles=serve_options.rehearse, preview=shows_previews, note=note, **maker_options
    )


def check_host(host: str) -> None:
    """Raise WanjaxError unless a host is an IP address or a host name that resolves to one.

    Args:
        host: The value of `--host`.
    """
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:  # an invalid name can fail to encode
        advice = "give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all its addresses"
        raise WanjaxError(
            f"--host {repr_short(host)} is neither an address nor the name of a host: {advice}"
        ) from error


def listen_on_host(host: str, port: int) -> list[socket.socket]:
    """Open a listening socket for each address of a host, all with the same port. Port 0 takes a free port.

    Raises:
        WanjaxError: The host's address does not belong to this machine, or the port is in use or not permitted.
    """
    listeners: list[socket.socket] = []
    try:
        addresses = dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
        for index, (family, *_, (name, _, *scope)) in enumerate(addresses):
            try:
                socket_address = (name, _port_of(listeners[0]) if listeners else port, *scope)
                listeners.append(socket.create_server(socket_address, family=family))
            except OSError as error:  # a name such as localhost may resolve to an address that this machine lacks
                is_absent = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
                if not is_absent or (index + 1 == len(addresses) and not listeners):
                    raise
    except OSError as error:
        for listener in listeners:
            listener.close()
        cause = reason(error).partition(" (")[0]  # the reason of the system, without the address in brackets
        advice = (
            "give another --port, or 0 for a free one" if error.errno == errno.EADDRINUSE else "give another --host"
        )
        raise WanjaxError(f"the server cannot listen on port {port} of {host}, {cause}: {advice}") from error
    return listeners


def _port_of(listener: socket.socket) -> int:
    return listener.getsockname()[1]


def page_address(host: str, sockets: Sequence[socket.socket]) -> str:
    """Return the address of the page, with the actual port if the requested port was 0."""
    return f"http://{f'[{host}]' if ':' in host else host}:{_port_of(sockets[0])}/"
