# SPDX-License-Identifier: Apache-2.0
"""Measure the job store with a long queue: the time of a page, of the changes and of a lease.

    python -m benchmarks.jobs_store [--jobs 5000] [--database FILE|URL]

Each operation runs 50 times. The table has the median and the maximum in milliseconds. The last line says whether
SQLite meets the targets: 30 ms for a page of 20 of 5,000 jobs, and 5 ms for the latest changes.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from wanjax.jobs.store import JobStore, NewJob

REPEATS = 50
TARGETS = {"a page of 20": 30.0, "the last change": 5.0}  # milliseconds


def measure(database: str, jobs: int) -> dict[str, list[float]]:
    """Return the milliseconds of each operation on a store with a number of jobs."""
    store = JobStore(database)
    start = time.perf_counter()
    store.add_all([NewJob(f"job{n}", {"settings": {"prompt": f"take {n}"}}, "nano", f"{n}.mp4") for n in range(jobs)])
    milliseconds = {f"{jobs} jobs added": [1000 * (time.perf_counter() - start)]}
    store.register("worker", "ready", {"models": ["nano"]})

    def lease() -> None:
        [job] = store.lease("worker", ["nano"])
        store.finish("worker", job.id, {})

    operations: dict[str, Callable[[], object]] = {
        "a page of 20": lambda: store.page(20),
        "a page of 20, oldest first": lambda: store.page(20, newest_first=False),
        "the last change": lambda: store.changes(store.version() - 1),
        "one job": lambda: store.get(f"job{jobs - 1}"),
        "the counts": store.stats,
        "a heartbeat": lambda: store.heartbeat("worker", None, None),
        "a lease and its end": lease,
    }
    for name, operation in operations.items():
        milliseconds[name] = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            operation()
            milliseconds[name].append(1000 * (time.perf_counter() - start))
    store.close()
    return milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--database", help="a new file for SQLite, or the URL of a new PostgreSQL database")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        milliseconds = measure(options.database or str(Path(folder) / "jobs.sqlite"), options.jobs)
    print(f"{'':<30} {'p50 ms':>8} {'most ms':>8}")
    for name, times in milliseconds.items():
        print(f"{name:<30} {median(times):>8.1f} {max(times):>8.1f}")
    met = all(median(milliseconds[name]) <= target for name, target in TARGETS.items())
    print(f"targets: {'met' if met else 'missed'}")


if __name__ == "__main__":
    main()
