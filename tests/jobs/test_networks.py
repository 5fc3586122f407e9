# SPDX-License-Identifier: Apache-2.0
"""A server, a worker and PostgreSQL in separate network namespaces; each is killed or disconnected."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.postgres import running
from tests.support.served import SMALL
from wanjax.jobs.databases import ENV_VARIABLE

TOKEN, NET, PATIENCE = "a-token-of-this-test", "10.77.33", 300.0
HOSTS = {"front": f"{NET}.2", "worker": f"{NET}.3", "database": f"{NET}.4"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def inside(host: str) -> list[str]:
    return ["ip", "netns", "exec", f"wanjax-{host}"]


@contextmanager
def networks() -> Iterator[None]:
    """Create a network namespace for each host, on a bridge that this machine reaches."""
    with ExitStack() as stack:

        def undo(*words: str) -> None:
            stack.callback(subprocess.run, ["ip", *words], capture_output=True)

        undo("link", "del", "wanjax0")
        ip("link", "add", "wanjax0", "type", "bridge")
        ip("addr", "add", f"{NET}.1/24", "dev", "wanjax0")
        ip("link", "set", "wanjax0", "up")
        for host, address in HOSTS.items():
            name, outer = f"wanjax-{host}", f"wj-{host}"
            undo("netns", "del", name)
            ip("netns", "add", name)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", outer, "master", "wanjax0", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield


class Host:
    """A command of wanjax in a network namespace, which can be killed and restarted."""

    def __init__(self, host: str, url: str, log: Path, *command: str):
        self.command = [*inside(host), sys.executable, "-m", "wanjax", *command]
        self.environment, self.log = os.environ | {ENV_VARIABLE: url, "WANJAX_TOKEN": TOKEN}, log
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command, stderr=log, env=self.environment)

    def kill(self) -> None:
        self.process.kill()  # `ip netns exec` becomes the command
        self.process.wait()


def wait(condition: Callable[[], Any], logs: Path) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if result := condition():
                return result
        time.sleep(0.2)
    raise AssertionError("".join(f"{log.name}:\n{log.read_text()}" for log in logs.glob("*.log")))


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("ip"), reason="makes network namespaces")
def test_no_video_is_lost_if_any_of_three_hosts_dies(tmp_path):
    """Nor if a host is disconnected for longer than the timeout of the database."""
    folder = tmp_path / "served"
    with networks(), ExitStack() as stack:
        postgres = stack.enter_context(running(HOSTS["database"], inside("database")))
        url = stack.enter_context(postgres.database())
        options = ("--host", HOSTS["front"], "--port", "8000", "--workers", "0", "--dir", str(folder))
        front = Host("front", url, tmp_path / "front.log", "serve", *options)
        stack.callback(front.kill)
        worker = Host("worker", url, tmp_path / "worker.log", "worker", "--dir", str(folder))
        stack.callback(worker.kill)
        base, login = f"http://{HOSTS['front']}:8000", {"Authorization": f"Bearer {TOKEN}"}
        client = stack.enter_context(httpx.Client(base_url=base, headers=login, timeout=20))
        wait(lambda: client.get("/health").status_code == 200, tmp_path)
        ids = [
            client.post("/v1/videos", json=SMALL | {"steps": 20, "seed": seed}).raise_for_status().json()["id"]
            for seed in range(13)
        ]
        assert client.delete(f"/v1/videos/{ids.pop()}").raise_for_status()

        def statuses_by_id() -> dict[str, str]:
            result = client.get("/v1/videos", params={"limit": 100}).raise_for_status().json()["data"]
            return {video["id"]: video["status"] for video in result}

        def num_completed() -> int:
            statuses = statuses_by_id()
            assert sorted(statuses) == sorted(ids)
            return list(statuses.values()).count("completed")

        def disconnect_worker() -> None:
            ip("link", "set", "wj-worker", "down")
            time.sleep(15)
            ip("link", "set", "wj-worker", "up")

        def restart_database() -> None:
            postgres.stop("immediate")
            time.sleep(3)
            postgres.start()

        for fault in (worker.kill, worker.start, restart_database, front.kill, front.start, disconnect_worker):
            if fault not in (worker.start, front.start):
                before = wait(lambda: num_completed() + 1, tmp_path) - 1
                wait(lambda before=before: num_completed() >= min(before + 1, len(ids)), tmp_path)
            fault()
        wait(lambda: num_completed() == len(ids), tmp_path)
        assert sorted(path.parent.name for path in folder.glob("*/video.mp4")) == sorted(ids)
