# SPDX-License-Identifier: Apache-2.0
"""The command `serve`: loads a model and listens until it is stopped."""

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import click
import jax

from wanjax import loading
from wanjax.checkpoints.lora_source import Lora
from wanjax.cli.options import COMPILE_CACHE
from wanjax.cli.processes import meet
from wanjax.cli.report import Report
from wanjax.cli.stages import how_of
from wanjax.cluster import actors
from wanjax.errors import WanjaxError, reason
from wanjax.kernels.compiler_options import kept_set
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.extending import check_address, extend_prompt
from wanjax.signals import INTERRUPTED
from wanjax.stores.places import Place, place
from wanjax.stores.writing import check_folder

LIBRARIES = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "python_multipart": "python-multipart",
    "pydantic": "pydantic",
}
TOKEN = "WANJAX_TOKEN"  # the name of a variable
LAST_SECONDS = 60.0  # for a step that is under way when the server ends
STOPPED = "stopped; what waits is made when the server is started again"


def check_libraries() -> None:
    """Raises WanjaxError unless the libraries of the server are installed."""
    if missing := [name for module, name in LIBRARIES.items() if find_spec(module) is None]:
        raise WanjaxError(f"the server needs {' and '.join(missing)}: pip install 'wanjax[serve]' brings them")


def serve(
    report: Report,
    *,
    host: str,
    port: int,
    token: str | None,
    origins: Sequence[str],
    folder: str,
    table: Path | None,
    replicas: tuple[int, int] | None,
    ray: str | None,
    resources: str | None,
    dashboard: bool,
    **given: Any,
) -> None:
    """Serves a model until it is stopped, here or, with `replicas`, by so many workers of Ray."""
    check_libraries()
    from wanjax.serve.guard import Access

    access = Access.read(host, token or os.environ.pop(TOKEN, None) or None, origins)
    if given["extend_prompt"] is not None:
        check_address(given["extend_prompt"])
    kept = place(folder)
    if replicas is not None:
        cluster: dict[str, Any] = {"address": ray, "resources": resources, "dashboard": dashboard}
        where: dict[str, Any] = {"folder": kept.absolute(), "table": table and table.expanduser().absolute()}
        return _replicated(report, replicas, given, **cluster, **where, host=host, port=port, access=access)
    for option, value in {"--ray": ray, "--resources": resources, "--dashboard": dashboard}.items():
        if value:
            raise WanjaxError(f"{option} is for workers of Ray: --replicas 2 has some")
    meet(report, given.get("processes"))
    if jax.process_count() > 1:
        raise WanjaxError("a server is one process: without --processes it uses the devices of its own host")
    from wanjax.serve.shelf import Shelf  # imported late, as what `_listen` needs

    with ExitStack() as stack:  # before the model: a port or a folder in use would be told after a long wait
        sockets = [stack.enter_context(each) for each in listening(host, port)]
        shelf = stack.enter_context(closing(Shelf(kept, table)))
        check_folder(shelf.folder)
        report.note(f"loading {given['model']}")
        _listen(report, host, sockets, access, shelf, given)


def _replicated(
    report: Report,
    replicas: tuple[int, int],
    given: dict[str, Any],
    *,
    address: str | None,
    resources: str | None,
    dashboard: bool,
    folder: Place,
    table: Path | None,
    host: str,
    port: int,
    access: Any,
) -> None:
    """Serves by workers of a Ray cluster until a signal. No device is used in this process."""
    if given.get("processes"):
        raise WanjaxError("--processes is for one worker, which is this process and those that it meets")
    if find_spec("ray") is not None and find_spec("fastapi") is None:
        raise WanjaxError("--replicas needs Ray Serve: pip install 'wanjax[cluster]' brings it")
    least, most = replicas
    asked = actors.resources_of(resources).get("")
    cores = most * (asked or {}).get("num_cpus", 1)
    jax.config.update("jax_platforms", "cpu")
    from wanjax.serve import replicas as service
    from wanjax.serve.shelf import Shelf

    address = actors.address_of(address)
    if address is None or port == 0:  # else it is one of the cluster's head, which may be elsewhere
        opened = listening(host, port)
        port = _port(opened[0])
        for each in opened:
            each.close()
    with closing(Shelf(folder, table)):  # before Ray is waited for
        check_folder(folder)
    with actors.connected(address, cores, dashboard, variables=service.VARIABLES) as ray:
        stopped = _until_signal()
        service.run(
            ray,
            partial(_worker, given, logging.getLogger("wanjax.serve").warning),
            service.Wanted(least, most, asked or actors.usual_resources(ray)),
            lambda told: _limits(given, told.outlines[0].defaults),
            own=address is None,
            queue=given["max_queue"],
            shared=click.get_current_context().meta.get(COMPILE_CACHE, {}),
            note=report.note,
            stopped=stopped,
            folder=folder,
            table=table,
            host=host,
            port=port,
            access=access,
        )
    report.note(STOPPED)


def _until_signal() -> Callable[[], bool]:
    """Returns a function that tells whether a signal has asked for the end; a second one ends the process at once."""
    asked: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if asked:
            os._exit(INTERRUPTED)
        asked.append(number)

    signal.set_wakeup_fd(-1)  # Ctrl-C is the server's from here on
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    return lambda: bool(asked)


def _loaded(note: Callable[[str], None], given: dict[str, Any]) -> Pipeline:
    """Loads the model, and the decoder of its previews if there is one."""
    names = ("dtype", "vae_dtype", "attention", "mesh", "rules", "lora", "decoder", "verify")
    chosen: dict[str, Any] = {name: given[name] for name in names}
    chosen["compiler"] = given["compiler"] or kept_set()
    pipe = loading.load(given["model"], note=note, **chosen)
    if decoder := given["preview_decoder"]:
        pipe.preview_with(decoder)
    return pipe


def _limits(given: dict[str, Any], defaults: Settings) -> Any:
    """Returns the limits of requests for a model of these settings."""
    from wanjax.serve.limits import Limits

    names = {"queue": "max_queue", "steps": "max_steps", "upload": "max_upload"}
    bounds = {name: given[option] for name, option in names.items()} | {"upload": given["max_upload"] * 2**20}
    return Limits.of(defaults, given["max_pixels"], **bounds)


def _worker(given: dict[str, Any], note: Callable[[str], None], board: Any) -> Any:
    """Returns the worker of a board, or of a desk away from one; its model's networks are loaded when it begins."""
    from wanjax.serve.variants import Variants
    from wanjax.serve.worker import Worker

    pipe = _loaded(note, given)
    loras = [Lora.parse(text) for text in given["lora"]]
    variants = Variants(pipe, loras, lambda name, own: _loaded(note, given | {"model": name, "lora": own}))
    _limits(given, pipe.defaults).bound_pictures()
    options = how_of(given)
    looking = given["preview"] or given["preview_decoder"] is not None
    if (url := given["extend_prompt"]) is not None:
        model = given["extend_model"]
        options["extend"] = lambda prompt, picture: extend_prompt(prompt, url, model=model, picture=picture)
    return Worker(variants, board, warm_up=given["rehearse"], preview=looking, note=note, **options)


def _listen(
    report: Report, host: str, sockets: list[socket.socket], access: Any, shelf: Any, given: dict[str, Any]
) -> None:
    """Load the model, and run the server at its sockets and the worker until a signal; `shelf` keeps the videos."""
    import uvicorn

    from wanjax.serve.app import Service
    from wanjax.serve.board import Board
    from wanjax.serve.connections import BACKLOG, Connection

    folder, board = shelf.folder, Board(shelf, given["max_queue"])
    worker = _worker(given, report.note, board)
    defaults = worker.variants.model(None).defaults
    if shelf.strange:
        report.note(f"note: {folder} holds what is no video of this server, left alone: {', '.join(shelf.strange[:5])}")
    application = Service(board, worker.variants, worker.models(), _limits(given, defaults), access).application()

    class Server(uvicorn.Server):
        """A server that ends all streams of events at a signal, and which a second signal ends at once."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:
                os._exit(INTERRUPTED)
            board.close()
            self.should_exit = True

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                worker.start()
                report.note(f"{defaults.model} is served at {address(host, sockets)}, videos in {folder}")

    config = uvicorn.Config(
        application, log_level="warning", access_log=False, server_header=False, date_header=False, http=Connection,
        backlog=BACKLOG, timeout_keep_alive=30, timeout_graceful_shutdown=5, ws="none", proxy_headers=False,
    )  # fmt: skip
    server = Server(config)
    signal.set_wakeup_fd(-1)  # Ctrl-C is the server's from here on
    asyncio.run(server.serve(sockets))
    report.note(STOPPED)
    board.close()
    if not worker.join(LAST_SECONDS):
        os._exit(0)  # a long computation is under way, which no thread can stop; its video waits on the disk


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
    """Returns the address of the page; the port is the one that was found where 0 was asked for."""
    return f"http://{f'[{host}]' if ':' in host else host}:{_port(sockets[0])}/"
