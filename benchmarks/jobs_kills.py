# SPDX-License-Identifier: Apache-2.0
"""Kills drivers of `wanjax batch` with `nano`, and their workers, with SIGKILL until the batch is whole.

    python -m benchmarks.jobs_kills [--requests 60] [--drivers 10] [--workers 15]

`pytest -m slow tests/jobs/test_pool.py` kills 60 workers whose makers make no video.
"""

import argparse
import os
import random
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cluster import driver, videos, write_requests
from tests.support.batches import read_manifest
from wanjax.media.videos import read_metadata


def workers_of(pid: int) -> list[psutil.Process]:
    """Returns the processes of a driver's workers."""
    with suppress(psutil.Error):
        return [one for one in psutil.Process(pid).children() if "spawn_main" in " ".join(one.cmdline())]
    return []


def kill_all(folder: Path, requests: int, drivers: int, workers: int, seed: int = 0) -> dict[str, Any]:
    """Makes a batch by two workers while so many drivers and workers are killed; returns what came of it."""
    file, out, rng = write_requests(folder / "requests.jsonl", requests), folder / "videos", random.Random(seed)
    kinds = ["driver"] * drivers + ["worker"] * workers
    rng.shuffle(kinds)
    options = ("--workers", "2", "--retries", "5")
    process, start = driver(file, out, *options), time.perf_counter()
    done, wait = 0, requests // (len(kinds) + 1)
    while (status := process.poll()) != 0:
        if status is not None:
            process = driver(file, out, *options)
        if kinds and len(videos(out)) >= done + wait:
            done = len(videos(out))
            victims = [psutil.Process(process.pid)] if kinds[0] == "driver" else workers_of(process.pid)
            if victims:
                print(f"{done} of {requests}: {kinds.pop(0)} killed, load {os.getloadavg()[0]:.1f}", flush=True)
                rng.choice(victims).kill()
        time.sleep(0.1)
    entries = read_manifest(out)
    listed = [entry["file_name"] for entry in entries if "error" not in entry]
    return {
        "videos": len(videos(out)),
        "seeds": sorted(read_metadata(path)["seed"] for path in videos(out)) == list(range(requests)),
        "listed once": sorted(listed) == [path.name for path in videos(out)],
        "failed": len(entries) - len(listed),
        "spared": len(kinds),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--drivers", type=int, default=10)
    parser.add_argument("--workers", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(kill_all(Path(folder), **vars(options)))


if __name__ == "__main__":
    main()
