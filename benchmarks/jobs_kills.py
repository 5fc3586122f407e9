# SPDX-License-Identifier: Apache-2.0
"""Kill the processes that make videos with `nano` until all videos are made, and check that none is lost.

    python -m benchmarks.jobs_kills batch [--requests 60] [--drivers 10] [--workers 15] [--databases 0]
    python -m benchmarks.jobs_kills serve [--requests 60] [--drivers 10] [--workers 15] [--databases 10]

Processes are killed with SIGKILL, and PostgreSQL with `-m immediate`. `batch` is `wanjax batch --workers 2`, whose
driver is restarted after each kill. `serve` is `wanjax serve --workers 2`: here a driver is the server process, and
some videos are deleted meanwhile. Both use PostgreSQL if databases are killed, otherwise SQLite. The benchmark prints
its checks, all of which should be True. The files of a batch are compared with those of a batch without kills.

`pytest -m slow tests/jobs/test_pool.py` kills 60 workers that compute no videos.
"""

import argparse
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.cluster import start_batch, video_files, write_requests
from benchmarks.serving import running_server
from tests.support.batches import read_manifest
from tests.support.postgres import Server, running
from wanjax.jobs.databases import ENV_VARIABLE
from wanjax.media.video import read_metadata

DOWNTIME = 1.0  # seconds from a kill of the database to its restart
MAX_STALL_SECONDS = 900.0  # the benchmark fails if no video is made for so long
SMALL_VIDEO = {"prompt": "a red circle", "size": "32x32", "frames": 5, "steps": 20}
MAX_UNFINISHED = 8  # unfinished videos of a server
DELETE_EVERY = 7  # one in so many videos is deleted


def workers_of(pid: int) -> list[psutil.Process]:
    """Return the processes of a command's workers."""
    with suppress(psutil.Error):
        return [process for process in psutil.Process(pid).children() if "spawn_main" in " ".join(process.cmdline())]
    return []


class Kills:
    """Kills processes of each kind in random order, one after every few videos."""

    def __init__(self, requests: int, drivers: int, workers: int, databases: int, postgres: Server | None):
        self.kinds = ["driver"] * drivers + ["worker"] * workers + ["database"] * databases
        self.random, self.postgres = random.Random(0), postgres
        self.random.shuffle(self.kinds)
        self.requests, self.wait = requests, max(1, requests // (len(self.kinds) + 1))
        self.done, self.last_kill_time = 0, time.monotonic()

    def poll(self, done: int, process: "subprocess.Popen[str]") -> None:
        """Kill the next process if enough videos were made since the last kill."""
        assert time.monotonic() - self.last_kill_time < MAX_STALL_SECONDS, (
            f"no further video in {MAX_STALL_SECONDS:.0f} s after {done} of {self.requests}"
        )
        if not self.kinds or done < self.done + self.wait:
            return
        victims = [psutil.Process(process.pid)] if self.kinds[0] == "driver" else workers_of(process.pid)
        if self.kinds[0] == "database":
            assert self.postgres is not None
            self.postgres.stop("immediate")
            time.sleep(DOWNTIME)
            self.postgres.start()
        elif victims:
            self.random.choice(victims).kill()
        else:
            return
        self.done, self.last_kill_time = done, time.monotonic()
        print(f"{done} of {self.requests}: {self.kinds.pop(0)} killed, load {os.getloadavg()[0]:.1f}", flush=True)


def kill_batch(folder: Path, kills: Kills) -> dict[str, Any]:
    """Make a batch with two workers during the kills, and again without kills; return the checks."""
    file, out, reference_out = (
        write_requests(folder / "requests.jsonl", kills.requests),
        folder / "videos",
        folder / "alone",
    )
    options = ("--workers", "2", "--retries", "5")
    process = start_batch(file, out, *options)
    while (status := process.poll()) != 0:
        if status is not None:
            process = start_batch(file, out, *options)
        kills.poll(len(video_files(out)), process)
        time.sleep(0.1)
    assert start_batch(file, reference_out, "--workers", "2").wait() == 0
    entries = read_manifest(out)
    listed_names = [entry["file_name"] for entry in entries if "error" not in entry]
    return {
        "all made": sorted(read_metadata(path)["seed"] for path in video_files(out)) == list(range(kills.requests)),
        "each listed once": sorted(listed_names) == [path.name for path in video_files(out)],
        "none failed": len(entries) == len(listed_names),
        "equal files": [path.read_bytes() for path in video_files(out)]
        == [path.read_bytes() for path in video_files(reference_out)],
    }


def kill_server(folder: Path, kills: Kills) -> dict[str, Any]:
    """Make a server's videos with two workers during the kills, and delete some of them; return the checks."""
    options = (
        "--workers",
        "2",
        "--no-rehearse",
        "--database",
        os.environ.get(ENV_VARIABLE) or str(folder / "jobs.sqlite"),
    )
    accepted, deleted, statuses, num_requests, problems = set[str](), set[str](), dict[str, str](), 0, set[str]()

    def num_ended() -> int:
        return sum(status in ("completed", "failed") for status in statuses.values())

    while num_requests < kills.requests or not accepted <= statuses.keys() or num_ended() < len(statuses):
        try:
            with (
                running_server(folder, *options) as (address, process),
                httpx.Client(base_url=address, timeout=60) as client,
            ):
                while num_requests < kills.requests or not accepted <= statuses.keys() or num_ended() < len(statuses):
                    if num_requests < kills.requests and len(statuses) - num_ended() < MAX_UNFINISHED:
                        answer = client.post("/v1/videos", json=SMALL_VIDEO | {"seed": num_requests})
                        if answer.status_code == 200:
                            accepted.add(answer.json()["id"])
                            num_requests += 1
                    if accepted and num_requests % DELETE_EVERY == 0 and len(deleted) < num_requests // DELETE_EVERY:
                        accepted.discard(id := min(accepted))  # without a response the video may or may not be deleted
                        if client.delete(f"/v1/videos/{id}").status_code == 200:
                            deleted.add(id)
                    if (listed_videos := list_videos(client)) is not None:
                        statuses = {video["id"]: video["status"] for video in listed_videos}
                        problems |= {"listed twice"} if len(statuses) < len(listed_videos) else set()
                        problems |= {"lost"} if not accepted <= statuses.keys() else set()
                        problems |= {"deleted but listed"} if deleted & statuses.keys() else set()
                    kills.poll(num_ended() + len(deleted), process)
                    time.sleep(0.1)
        except httpx.TransportError:
            continue  # the server process was killed
    num_completed = list(statuses.values()).count("completed")
    return {
        "nothing lost": not problems,
        "completed": num_completed,
        "given up": len(statuses) - num_completed,
        "deleted": len(deleted),
    }


def list_videos(client: httpx.Client) -> list[dict[str, Any]] | None:
    """Return all videos of a server, or None if its database does not answer."""
    listed_videos: list[dict[str, Any]] = []
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        after = {"after": listed_videos[-1]["id"]} if listed_videos else {}
        if (answer := client.get("/v1/videos", params={"limit": 100, **after})).status_code != 200:
            return None
        page = answer.json()
        listed_videos += page["data"]
    return listed_videos


@contextmanager
def database(kills: int) -> Iterator[Server | None]:
    """If databases are killed, start PostgreSQL and name it in the environment; yield the server or None."""
    if not kills:
        yield None
        return
    with running() as server, server.database() as url:
        os.environ[ENV_VARIABLE] = url
        yield server
        del os.environ[ENV_VARIABLE]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scenarios: dict[str, Callable[[Path, Kills], dict[str, Any]]] = {"batch": kill_batch, "serve": kill_server}
    parser.add_argument("scenario", choices=[*scenarios])
    for name, default in {"requests": 60, "drivers": 10, "workers": 15, "databases": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, database(options.databases) as server:
        kills = Kills(options.requests, options.drivers, options.workers, options.databases, server)
        start = time.perf_counter()
        checks = scenarios[options.scenario](Path(folder), kills)
        print(checks | {"kills left": len(kills.kinds), "seconds": round(time.perf_counter() - start, 1)})


if __name__ == "__main__":
    main()
