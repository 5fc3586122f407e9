# SPDX-License-Identifier: Apache-2.0
"""Measure `wanjax serve` with `nano`: its start, and its behaviour under load.

    python -m benchmarks.serving start [--empty-cache]
    python -m benchmarks.serving load [--requests 200] [--clients 20]

`start` measures the seconds from the start of the process to the first finished video, and compares the second video
with the library. `load` sends requests for small videos from many clients. Some of the requests are invalid, oversized,
cancelled or removed. Every finished video is compared with the library's, frame by frame, and the server's memory is
measured.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np

import wanjax
from wanjax.media.pictures import read_clip

PROMPTS = ("a red circle moving right", "a blue square growing", "a green triangle moving up")
SMALL_VIDEO = {"size": "32x32", "frames": 5, "steps": 2}
POLL_SECONDS = 0.02
SHUTDOWN_SECONDS = 120.0  # time limit for the end of a server, in seconds
MAX_FIRST_SECONDS, MAX_SECOND_RATIO = 10.0, 1.2
REQUEST_KINDS = ("plain",) * 6 + ("bad", "oversized", "large", "cancelled", "removed", "watched")


@contextmanager
def running_server(
    folder: Path | str, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Start `wanjax serve` on a free port; yield its address and the process, and end it."""
    command = [sys.executable, "-m", "wanjax", "serve", "--port", "0", "--dir", str(folder), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    drain_thread = Thread(
        target=process.stderr.read, daemon=True
    )  # otherwise the server would wait when the pipe is full
    try:
        match = None
        for line in process.stderr:
            if match := re.search(r"serving .* at (http://\S+)/,", line):
                break
        assert match, "the server did not start"
        drain_thread.start()
        yield match[1], process
    finally:
        process.terminate()
        try:
            process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if drain_thread.ident is not None:
            drain_thread.join(SHUTDOWN_SECONDS)
        if not drain_thread.is_alive():
            process.stderr.close()


def wait_for_video(client: httpx.Client, video_id: str) -> dict[str, Any]:
    """Wait for the end of a video."""
    while (video := client.get(f"/v1/videos/{video_id}").json())["status"] not in ("completed", "failed"):
        time.sleep(POLL_SECONDS)
    return video


def start(folder: Path, empty_cache: bool) -> dict[str, float]:
    """Measure the first and the second video of a server, and those of the library in this process."""
    environment = os.environ | ({"XDG_CACHE_HOME": str(folder / "cache")} if empty_cache else {})
    seconds = []
    start_time = time.perf_counter()
    with (
        running_server(folder, environment=environment) as (address, process),
        httpx.Client(base_url=address, timeout=120) as client,
    ):
        for index in range(6):
            id = client.post("/v1/videos", json={"prompt": PROMPTS[0]}).json()["id"]
            video = wait_for_video(client, id)
            assert video["status"] == "completed", video
            assert client.get(f"/v1/videos/{id}/content").status_code == 200
            seconds.append(time.perf_counter() - start_time)
            if index == 0:
                cpu = cpu_seconds(process.pid)
            start_time = time.perf_counter()
    pipe, library_seconds = wanjax.load("nano"), []
    for _ in range(6):
        start_time = time.perf_counter()
        pipe(PROMPTS[0]).save(folder / "video.mp4")
        library_seconds.append(time.perf_counter() - start_time)
    server_costs = {
        "first": seconds[0],
        "first_cpu": cpu,
        "second": seconds[1],
        "later": statistics.median(seconds[1:]),
    }
    return {**server_costs, "library": statistics.median(library_seconds[1:])}


def cpu_seconds(pid: int) -> float:
    """Return the seconds that a process's threads have computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(folder: Path, requests: int, clients: int) -> dict[str, Any]:
    """Send requests of all kinds from many clients; return the outcomes and the memory."""
    rng = random.Random(0)
    kinds = [rng.choice(REQUEST_KINDS) for _ in range(requests)]
    with (
        running_server(folder, "--max-queue", str(max(4, clients // 2))) as (address, _),
        httpx.Client(base_url=address, timeout=120) as client,
    ):
        while client.get("/health").json()["status"] != "ready":
            time.sleep(0.1)
        for seed in range(10):  # load everything before memory is measured
            wait_for_video(client, post_video(client, seed)["id"])
        memory = [memory_of(client)]
        with ThreadPoolExecutor(clients) as pool:
            for start in range(0, requests, max(1, requests // 4)):
                indices = range(start, min(requests, start + max(1, requests // 4)))
                results = pool.map(lambda n: run_request(address, kinds[n], n), indices)
                for kind, outcome in results:
                    COUNTS[f"{kind}: {outcome}"] += 1
                memory.append(memory_of(client))
        num_compared = compare(client)
    return {"outcomes": dict(sorted(COUNTS.items())), "compared": num_compared, "memory": memory}


COUNTS: Counter[str] = Counter()


def post_video(client: httpx.Client, seed: int) -> dict[str, Any]:
    """Request a small video until the queue accepts it."""
    body = {"prompt": PROMPTS[seed % len(PROMPTS)], "seed": seed, **SMALL_VIDEO}
    while (answer := client.post("/v1/videos", json=body)).status_code == 429:
        COUNTS["sent again because the queue was full"] += 1
        time.sleep(POLL_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def run_request(address: str, kind: str, seed: int) -> tuple[str, str]:
    """Send one request of a kind, and return the kind and the outcome."""
    with httpx.Client(base_url=address, timeout=120) as client:
        if kind in ("bad", "oversized", "large"):
            return kind, str(send_invalid_request(client, kind).status_code)
        id = post_video(client, seed)["id"]
        if kind == "cancelled":
            client.post(f"/v1/videos/{id}/cancel")
            video = wait_for_video(client, id)
            return kind, "completed before" if video["status"] == "completed" else video["error"]["code"]
        if kind == "removed":
            client.delete(f"/v1/videos/{id}")
            return kind, str(client.get(f"/v1/videos/{id}").status_code)
        if kind == "watched":
            lines = client.get(f"/v1/videos/{id}/events").text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
            return kind, events[-1]["status"]
        return kind, wait_for_video(client, id)["status"]


def send_invalid_request(client: httpx.Client, kind: str) -> httpx.Response:
    """Send a request that the server has to reject."""
    if kind == "large":
        return client.post("/v1/videos", json={"prompt": "a circle", "size": "4096x4096", "frames": 81})
    if kind == "oversized":
        return client.post("/v1/videos", files={"image": b"x" * (33 * 2**20)}, data={"prompt": "a circle"})
    return client.post("/v1/videos", json={"prompt": "a circle", "steps": "many"})


def compare(client: httpx.Client) -> int:
    """Compare every finished small video with the library's, by the frames of both files; return their number."""
    pipe, count, cursor = wanjax.load("nano"), 0, ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while True:
            page = client.get(f"/v1/videos?limit=100{cursor}").json()
            for video in page["data"]:
                if video["status"] == "completed":
                    (folder / "served.mp4").write_bytes(client.get(f"/v1/videos/{video['id']}/content").content)
                    settings = video["settings"]
                    shape = {name: settings[name] for name in ("height", "width", "frames", "steps", "seed")}
                    pipe(settings["prompt"], **shape).save(folder / "own.mp4")
                    served_clip, library_clip = (read_clip(folder / file, 99, 99) for file in ("served.mp4", "own.mp4"))
                    np.testing.assert_array_equal(served_clip, library_clip)
                    count += 1
            if not page["has_more"]:
                return count
            cursor = f"&after={page['last_id']}"


def memory_of(client: httpx.Client) -> float:
    """Return the server's resident memory in MB."""
    match = re.search(r"^process_resident_memory_bytes (\S+)", client.get("/metrics").text, re.MULTILINE)
    assert match
    return round(float(match[1]) / 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=("start", "load"))
    parser.add_argument("--empty-cache", action="store_true", help="start without compiled programs")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.benchmark == "load":
            print(json.dumps(load(Path(folder), options.requests, options.clients), indent=2))
            return
        costs = start(Path(folder), options.empty_cache)
    print("seconds:", ", ".join(f"{name} {value:.3f}" for name, value in costs.items()))
    print(f"first within {MAX_FIRST_SECONDS:g} s: {costs['first'] <= MAX_FIRST_SECONDS}")
    print(f"second / library: {costs['second'] / costs['library']:.2f}, target {MAX_SECOND_RATIO}")


if __name__ == "__main__":
    main()
