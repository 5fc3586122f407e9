# SPDX-License-Identifier: Apache-2.0
"""The state of the server in Prometheus' text form."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import psutil

from wanjax.jobs.store import CANCELLED, COMPLETED, FAILED, QUEUED, RUNNING, Stats
from wanjax.jobs.worker import READY

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STARTED = time.time()


def text(stats: Stats, answers: Mapping[int, int], watchers: int) -> str:
    """Return all metrics: of the store's jobs and workers, of this server's answers and streams, and of its process."""
    stages = {name.removeprefix("seconds_"): x for name, x in stats.counters.items() if name.startswith("seconds_")}
    ends = {status: stats.counters.get(status, 0) for status in (COMPLETED, FAILED, CANCELLED)}
    waiting, running = stats.jobs.get(QUEUED, 0), stats.jobs.get(RUNNING, 0)
    lines = [
        *_counter("wanjax_videos", "Videos that came to an end.", {"status": ends}),
        *_counter("wanjax_answers", "Answers of this server to requests, by status.", {"status": answers}),
        *_counter("wanjax_stage_seconds", "Seconds that videos took, by stage.", {"stage": stages}),
        *_gauge("wanjax_queue_length", "Videos that wait.", waiting),
        *_gauge("wanjax_running", "Videos that are made now.", running),
        *_gauge("wanjax_watchers", "Streams of events that are open.", watchers),
        *_gauge("wanjax_ready", "1 once the model is loaded and compiled.", int(bool(stats.workers.get(READY)))),
        *_gauge(
            "wanjax_kept_videos",
            "Requests that are kept, with their videos.",
            sum(stats.jobs.get(status, 0) for status in (QUEUED, RUNNING, COMPLETED, FAILED)),
        ),
        *_samples("wanjax_workers", "gauge", "Workers that are heard of, by state.", {"state": stats.workers}),
        *_gauge("process_start_time_seconds", "When the process began.", STARTED),
        *_gauge("process_resident_memory_bytes", "Memory of the process.", psutil.Process().memory_info().rss),
    ]
    used = {device.id: (device.memory_stats() or {}).get("bytes_in_use") for device in jax.local_devices()}
    if measured := {device: bytes_ for device, bytes_ in used.items() if bytes_ is not None}:
        lines += _samples("wanjax_device_bytes_in_use", "gauge", "Memory in use on a device.", {"device": measured})
    return "\n".join(lines) + "\n"


def _counter(name: str, description: str, values: Mapping[str, Mapping[Any, float]]) -> Iterator[str]:
    return _samples(f"{name}_total", "counter", description, values)


def _gauge(name: str, description: str, value: float) -> Iterator[str]:
    yield from (f"# HELP {name} {description}", f"# TYPE {name} gauge", f"{name} {value}")


def _samples(name: str, kind: str, description: str, values: Mapping[str, Mapping[Any, float]]) -> Iterator[str]:
    """Yield a metric with a value for each value of a label."""
    yield from (f"# HELP {name} {description}", f"# TYPE {name} {kind}")
    for label, samples in values.items():
        for key, value in dict(samples).items():
            yield f'{name}{{{label}="{key}"}} {value}'
