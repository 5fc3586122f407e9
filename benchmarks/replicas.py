# SPDX-License-Identifier: Apache-2.0
"""Kill workers of `wanjax serve --workers` with `nano` while clients send requests.

    python -m benchmarks.replicas [--requests 200] [--clients 20] [--workers 2] [--every 20] [--database URL]

Every few seconds one of the workers is killed with SIGKILL, except while a video with only one attempt left is being
made. Each client requests a small video, polls it until it is made, and fetches it; in between, it lists videos. The
benchmark prints the outcomes of the requests and the response times of GET, both in the second after a kill and
otherwise. The database is SQLite unless `--database` names one. The last line says whether the target is met: every
accepted request has ended, and 99 % of the responses took at most 0.15 s.
"""

import argparse
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import numpy as np

from benchmarks.serving import running_server
from wanjax.jobs.sharing import SERVE_FILE, join_namespace
from wanjax.jobs.store import JobStore
from wanjax.jobs.worker import ATTEMPTS

SMALL_VIDEO = {"size": "32x32", "frames": 5}
POLL_SECONDS, RETRY_SECONDS = 0.5, 1.0  # seconds between two polls of a video, or between two requests to a full queue
MAX_RESPONSE_SECONDS = 0.15
START_TIMEOUT = 600.0  # time limit for the start of the service, in seconds
VIDEO_TIMEOUT = 900.0  # time limit for a video, in seconds


def service(
    folder: Path | str, workers: str, *options: str
) -> AbstractContextManager[tuple[str, "subprocess.Popen[str]"]]:
    """Return a context in which `wanjax serve --workers` runs, with its address and its process."""
    return running_server(folder, "--workers", workers, *options)


def ready_process_ids(store: JobStore) -> list[int]:
    """Return the processes of the workers that are ready, in the order of their names."""
    return [worker.info["process"] for worker in store.workers() if worker.state == "ready"]


def most_attempts(store: JobStore) -> int:
    """Return the largest number of attempts of any unfinished video."""
    jobs, _ = store.page(1000)
    return max((job.attempts for job in jobs if not job.is_over), default=0)


@dataclass
class ClientResults:
    """The clients' results: the outcomes of their requests, and the start and the duration of each GET."""

    outcomes: Counter[str] = field(default_factory=Counter)
    gets: list[tuple[float, float]] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)

    def get(self, client: httpx.Client, path: str) -> httpx.Response | None:
        """Send one GET; return None if it failed."""
        request_start = time.monotonic()
        try:
            answer = client.get(path)
        except httpx.TransportError as error:
            self.failed[type(error).__name__] += 1
            return None
        if answer.status_code >= 500:
            self.failed[str(answer.status_code)] += 1
            return None
        self.gets.append((request_start, time.monotonic() - request_start))
        return answer

    def request_video(self, address: str, number: int) -> None:
        """Request a video, and poll it until it ends."""
        with httpx.Client(base_url=address, timeout=60) as client:
            body = SMALL_VIDEO | {"prompt": f"a red circle moving right, take {number}", "seed": number}
            body |= {"steps": random.Random(number).choice([2, 4, 8])}
            while True:
                try:
                    answer = client.post("/v1/videos", json=body)
                except httpx.TransportError:
                    self.outcomes["sent again after no response"] += 1
                    continue
                if answer.status_code == 200:
                    break
                self.outcomes[f"sent again after status {answer.status_code}"] += 1
                time.sleep(RETRY_SECONDS)
            id, end = answer.json()["id"], time.monotonic() + VIDEO_TIMEOUT
            while time.monotonic() < end:
                time.sleep(POLL_SECONDS)
                video = self.get(client, f"/v1/videos/{id}")
                if video is not None and video.status_code != 200:
                    self.outcomes["lost"] += 1
                    return
                if video is not None and (status := video.json()["status"]) in ("completed", "failed"):
                    content = status == "completed" and self.get(client, f"/v1/videos/{id}/content")
                    is_mp4 = content and content.content[4:8] == b"ftyp"
                    self.outcomes["completed" if is_mp4 else f"{status}: {video.json()['error']}"] += 1
                    return
                self.get(client, "/v1/videos?limit=5")
            self.outcomes["not ended"] += 1


def measure(
    folder: Path, requests: int, clients: int, workers: int, kill_interval: float, database: str | None = None
) -> dict[str, Any]:
    """Return the outcomes, the number of kills, and the response times in the second after a kill and otherwise."""
    results, kills, is_over = ClientResults(), [], Event()
    database = database or str(folder / "jobs.sqlite")
    with service(folder, str(workers), "--database", database) as (address, _):
        join_namespace(store := JobStore(database), folder, SERVE_FILE)
        with httpx.Client(base_url=address, timeout=60) as client:
            end = time.monotonic() + START_TIMEOUT
            while client.get("/health").json()["status"] != "ready":
                assert time.monotonic() < end, "no worker is ready"
                time.sleep(0.2)

        def kill() -> None:
            while not is_over.wait(kill_interval):
                while most_attempts(store) >= ATTEMPTS - 1 and not is_over.wait(POLL_SECONDS):
                    pass
                for process in ready_process_ids(store)[:1]:
                    os.kill(process, signal.SIGKILL)
                    kills.append(time.monotonic())

        killer = Thread(target=kill)
        killer.start()
        began = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda number: results.request_video(address, number), range(requests)))
        seconds = time.monotonic() - began
        is_over.set()
        killer.join()
        store.close()
    after_kill = [
        seconds
        for start_time, seconds in results.gets
        if any(kill <= start_time + seconds and start_time <= kill + 1 for kill in kills)
    ]
    otherwise = [
        seconds
        for start_time, seconds in results.gets
        if not any(kill <= start_time + seconds and start_time <= kill + 1 for kill in kills)
    ]
    return {
        "outcomes": dict(results.outcomes),
        "completed": results.outcomes["completed"],
        "seconds": seconds,
        "kills": len(kills),
        "failed": dict(results.failed),
        "after_kill": after_kill,
        "otherwise": otherwise,
    }


def row(name: str, seconds: list[float]) -> str:
    if not seconds:
        return f"{name:<34} none"
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return f"{name:<34} {len(seconds):>7} {p50:>8.3f} {p90:>8.3f} {p99:>8.3f} {max(seconds):>8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--database", help="PostgreSQL's URL")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = measure(Path(folder), **vars(options))
    print(
        f"{options.requests} requests by {options.clients} clients, {options.workers} workers, {outcome['kills']} kills"
    )
    print(f"{outcome['seconds']:.0f} s; " + ", ".join(f"{count} {name}" for name, count in outcome["outcomes"].items()))
    print(f"{'responses to GET':<34} {'number':>7} {'p50 s':>8} {'p90 s':>8} {'p99 s':>8} {'most s':>8}")
    print(row("in the second after a kill", outcome["after_kill"]))
    print(row("otherwise", outcome["otherwise"]))
    print(f"failed GETs: {outcome['failed'] or 'none'}")
    ended = outcome["completed"] == options.requests
    met = ended and np.percentile(outcome["otherwise"], 99) <= MAX_RESPONSE_SECONDS
    print(f"target: {'met' if met else 'missed'}")


if __name__ == "__main__":
    main()
