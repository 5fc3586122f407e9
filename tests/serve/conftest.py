# SPDX-License-Identifier: Apache-2.0
"""A server of `nano` in this process, and small requests for it."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from starlette.testclient import TestClient

import wanjax
from wanjax.cli.serving import MAX_ATTEMPTS, open_store
from wanjax.jobs.store import Job
from wanjax.jobs.worker import WorkerThread
from wanjax.pipelines.pipeline import Pipeline
from wanjax.serve.app import Service
from wanjax.serve.auth import Access
from wanjax.serve.limits import Limits
from wanjax.serve.maker import ServedMaker
from wanjax.serve.served_models import LoadedModels
from wanjax.stores.paths import AnyPath
from wanjax.stores.temporary import HOST_NAME

SMALL: dict[str, Any] = {"prompt": "a red circle", "size": "32x32", "frames": 5, "steps": 2}
Start = Callable[..., "Server"]


class Server:
    """A server with its folder, and a client on this machine."""

    def __init__(
        self,
        loaded_models: LoadedModels,
        folder: AnyPath,
        *,
        database: str | None = None,
        token: str | None = None,
        origins: Sequence[str] = (),
        preview: bool = False,
        batch_guidance: bool = False,
        **limits: int,
    ):
        bounds = Limits.of(loaded_models.model(None).defaults, **limits)
        self._opened = ExitStack()
        self.folder, self.store = folder, self._opened.enter_context(open_store(folder, database))
        self.maker = ServedMaker(loaded_models, folder, batch_guidance=batch_guidance, compiles=False, preview=preview)
        self.worker = WorkerThread(self.store, self.maker, attempts=MAX_ATTEMPTS)
        access = Access.read("127.0.0.1", token, origins)
        self.service = Service(
            *(self.store, folder, *self.maker.models_and_cards(), bounds, access, lambda: self.worker.is_broken)
        )
        self.service.start()
        self.application = self.service.application()
        self.client = self.client_from("127.0.0.1")

    def client_from(self, address: str, host: str = "localhost:8000") -> TestClient:
        return TestClient(self.application, f"http://{host}", client=(address, 5000), raise_server_exceptions=False)

    def stop(self) -> None:
        """End the server like a signal; afterwards another server can use the folder."""
        self.service.end()
        self.worker.stop()
        assert self.worker.join(60)
        self.kill()

    def kill(self) -> None:
        """Close the server like a kill while its worker is idle: the folder and the database stay as they are."""
        self.service.close()
        self._opened.close()

    def lease(self, count: int = 1) -> list[str]:
        """Lease jobs to workers of dead processes, one for each job, and return the ids of the jobs."""
        ids = []
        for number in range(count):
            name = f"dead-{token_hex(4)}"
            self.store.register(name, "ready", {"host": HOST_NAME, "process": 2**22 + number, "models": ["nano"]})
            ids += [job.id for job in self.store.lease(name, ["nano"])]
        return ids

    @property
    def queue(self) -> list[str]:
        """The ids of the waiting videos, in order."""
        return [job.id for job in self.store.queue()]

    def jobs(self) -> dict[str, Job]:
        """The jobs by id, in the order of the requests."""
        return {job.id: job for job in self.store.page(1000, newest_first=False)[0]}

    def is_cleared(self, id: str) -> bool:
        """Return whether a video's folder is removed within 20 seconds."""
        end = time.monotonic() + 20
        while (exists := (self.folder / id).exists()) and time.monotonic() < end:
            time.sleep(0.02)
        return not exists

    def post_video(self, **more: Any) -> dict[str, Any]:
        response = self.client.post("/v1/videos", json=SMALL | more)
        assert response.status_code == 200, response.text
        return response.json()

    def content(self, id: str, **query: str) -> bytes:
        response = self.client.get(f"/v1/videos/{id}/content", params=query)
        assert response.status_code == 200, response.text
        return response.content

    def wait_until_finished(self, id: str) -> dict[str, Any]:
        for _ in range(1500):
            video = self.client.get(f"/v1/videos/{id}").json()
            if video["status"] in ("completed", "failed"):
                return video
            time.sleep(0.04)
        raise AssertionError(f"{id} does not end: {video}")

    def refused(self, status: int, **options: Any) -> str:
        """Send a request that must be refused, and return the message."""
        response = self.client.post("/v1/videos", **options)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "\n" not in error["message"]
        return error["message"]


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return wanjax.load("nano")


@pytest.fixture
def start(pipe: Pipeline, tmp_path: Path) -> Iterator[Start]:
    """A function that starts servers; with `work=False` the worker of a server does not run."""
    started: list[Server] = []

    def make(
        folder: AnyPath = tmp_path / "served",
        *,
        work: bool = True,
        loaded_models: LoadedModels | None = None,
        **options: Any,
    ) -> Server:
        server = Server(loaded_models or LoadedModels(pipe), folder, **options)
        started.append(server)
        if work:
            server.worker.start()
        return server

    yield make
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium for the tests of the page; names that end in .example resolve to this machine."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        arguments = ["--no-sandbox", "--host-resolver-rules=MAP *.example 127.0.0.1"]
        browser = started.chromium.launch(executable_path=chromium, args=arguments)
        yield browser
        browser.close()
