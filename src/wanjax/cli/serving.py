# SPDX-License-Identifier: Apache-2.0
"""The command `serve`: loads a model and listens until it is stopped."""

import asyncio
import os
import signal
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from wanjax import registry
from wanjax.checkpoints.lora import Lora
from wanjax.cli.processes import meet
from wanjax.cli.report import Report
from wanjax.errors import WanjaxError
from wanjax.kernels.compiler_options import kept_set
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import BOUNDS
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.text.extending import check_address, extend_prompt
from wanjax.signals import INTERRUPTED

LIBRARIES = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "python_multipart": "python-multipart",
    "pydantic": "pydantic",
}
TOKEN = "WANJAX_TOKEN"  # the name of a variable
LAST_SECONDS = 60.0  # for a step that is under way when the server ends
CLIP = 8  # times the pixels of all pictures of a request that a clip may have in all its frames
SHORTEST = 16  # characters of a token


def check_libraries() -> None:
    """Raises WanjaxError unless the libraries of the server are installed."""
    if missing := [name for module, name in LIBRARIES.items() if find_spec(module) is None]:
        raise WanjaxError(f"the server needs {' and '.join(missing)}: pip install 'wanjax[serve]' brings them")


def serve(report: Report, *, host: str, port: int, token: str | None, folder: Path, **given: Any) -> None:
    """Serves a model until it is stopped."""
    check_libraries()
    from wanjax.serve.guard import is_loopback

    token = token or os.environ.pop(TOKEN, None) or None
    if token is None and not is_loopback(host):
        raise WanjaxError(f"{host} is open to other machines, for which a token is needed: --token or {TOKEN} sets it")
    if token is not None and (len(token) < SHORTEST or not token.isascii() or not token.isprintable()):
        raise WanjaxError(f"the token is to have {SHORTEST} or more characters of ASCII, so that no one guesses it")
    if given["extend_prompt"] is not None:
        check_address(given["extend_prompt"])
    meet(report, given.get("processes"))
    if jax.process_count() > 1:
        raise WanjaxError("a server is one process: without --processes it uses the devices of its own host")
    from wanjax.serve.jobs import Shelf  # imported late, as what `_listen` needs

    with closing(Shelf(folder)) as shelf:  # before the model, for which another server's folder would be waited in vain
        _listen(report, host, port, token, shelf, given)


def _loaded(report: Report, given: dict[str, Any]) -> Pipeline:
    """Loads the model, and the decoder of its previews if there is one."""
    chosen: dict[str, Any] = {name: given[name] for name in ("dtype", "attention", "mesh", "lora", "decoder")}
    chosen["compiler"] = given["compiler"] or kept_set()
    chosen |= {"rules": given["rules"] or "fsdp", "verify": given["verify"]}
    pipe = registry.load(given["model"], note=report.note, **chosen)
    if decoder := given["preview_decoder"]:
        pipe.preview_with(decoder)
    return pipe


def _listen(report: Report, host: str, port: int, token: str | None, shelf: Any, given: dict[str, Any]) -> None:
    """Loads the model, and runs the server and the worker until a signal; `shelf` keeps the videos."""
    import uvicorn

    from wanjax.serve.app import Service
    from wanjax.serve.board import Board
    from wanjax.serve.connections import BACKLOG, Connection
    from wanjax.serve.limits import Limits
    from wanjax.serve.variants import Variants
    from wanjax.serve.worker import Worker

    folder, loras = shelf.folder, [Lora.parse(text) for text in given["lora"]]
    pipe = _loaded(report, given)
    variants = Variants(pipe, loras, lambda name, own: _loaded(report, given | {"model": name, "lora": own}))
    names = {"queue": "max_queue", "steps": "max_steps", "upload": "max_upload"}
    bounds = {name: given[option] for name, option in names.items()} | {"upload": given["max_upload"] * 2**20}
    limits = Limits.of(pipe.defaults, given["max_pixels"], **bounds)
    BOUNDS.pixels, BOUNDS.times = limits.picture, CLIP
    board = Board(shelf, limits.queue)
    if shelf.strange:
        report.note(f"note: {folder} holds what is no video of this server, left alone: {', '.join(shelf.strange[:5])}")
    options: dict[str, Any] = {"tiling": Tiling() if given["tile"] else None, "batch_guidance": given["batch_guidance"]}
    looking = given["preview"] or given["preview_decoder"] is not None
    if (url := given["extend_prompt"]) is not None:
        model = given["extend_model"]
        options["extend"] = lambda prompt, picture: extend_prompt(prompt, url, model=model, picture=picture)
    worker = Worker(variants, board, warm_up=given["rehearse"], preview=looking, **options)
    application = Service(board, worker, limits, token).application()

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
                report.note(f"{pipe.defaults.model} is served at {address(host, self.servers)}, videos in {folder}")

    config = uvicorn.Config(
        application, host, port, log_level="warning", access_log=False, server_header=False, date_header=False,
        http=Connection, backlog=BACKLOG, timeout_keep_alive=30, timeout_graceful_shutdown=5, ws="none",
    )  # fmt: skip
    server = Server(config)
    _run(server, report)
    board.close()
    if not worker.join(LAST_SECONDS):
        os._exit(0)  # a long computation is under way, which no thread can stop; its video waits on the disk


def _run(server: Any, report: Report) -> None:
    signal.set_wakeup_fd(-1)  # Ctrl-C is the server's from here on
    try:
        asyncio.run(server.serve())
    except SystemExit as error:  # uvicorn's, where it cannot listen; it has told why
        raise WanjaxError("the server cannot listen there: another --port or --host would do") from error
    report.note("stopped; what waits is made when the server is started again")


def address(host: str, servers: Any) -> str:
    """Returns the address of the page; the port is the one that was found where 0 was asked for."""
    port = servers[0].sockets[0].getsockname()[1]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
