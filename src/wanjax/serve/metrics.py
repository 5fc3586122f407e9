# SPDX-License-Identifier: Apache-2.0
"""Metrics of the server in the text format of Prometheus."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import psutil

from wanjax.jobs.store import CANCELLED, COMPLETED, FAILED, QUEUED, RUNNING, Stats
from wanjax.jobs.worker import READY

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
START_TIME = time.time()


def format_metrics(stats: Stats, status_counts: Mapping[int, int], watchers: int) -> str:
    """Format all metrics: the jobs and workers, this server's responses and streams, and its process."""
    stages = {
        name.removeprefix("seconds_"): seconds
        for name, seconds in stats.counters.items()
        if name.startswith("seconds_")
    }
    ended = {status: stats.counters.get(status, 0) for status in (COMPLETED, FAILED, CANCELLED)}
    num_waiting, num_running = stats.jobs.get(QUEUED, 0), stats.jobs.get(RUNNING, 0)
    lines = [
        *_counter("wanjax_videos", "Videos that ended, by status.", {"status": ended}),
        *_counter("wanjax_answers", "HTTP responses of this server, by status.", {"status": status_counts}),
        *_counter("wanjax_stage_seconds", "Seconds spent on videos, by stage.", {"stage": stages}),
        *_gauge("wanjax_queue_length", "Videos in the queue.", num_waiting),
        *_gauge("wanjax_running", "Videos in progress.", num_running),
        *_gauge("wanjax_watchers", "Open event streams.", watchers),
        *_gauge(
            "wanjax_ready", "1 if a worker has its model loaded and compiled.", int(bool(stats.workers.get(READY)))
        ),
        *_gauge(
            "wanjax_kept_videos",
            "Stored videos, including those in the queue.",
            sum(stats.jobs.get(status, 0) for status in (QUEUED, RUNNING, COMPLETED, FAILED)),
        ),
        *_samples("wanjax_workers", "gauge", "Live workers, by state.", {"state": stats.workers}),
        *_gauge("process_start_time_seconds", "Start time of the process in seconds since 1970.", START_TIME),
        *_gauge("process_resident_memory_bytes", "Resident memory of the process.", psutil.Process().memory_info().rss),
    ]
    used = {device.id: (device.memory_stats() or {}).get("bytes_in_use") for device in jax.local_devices()}
    if measured := {device: bytes_ for device, bytes_ in used.items() if bytes_ is not None}:
        lines += _samples("wanjax_device_bytes_in_use", "gauge", "Memory in use on a device.", {"device": measured})
    return "\n".join(lines) + "\n"


def _counter(name: str, description: str, values: Mapping[str, Mapping[Any, float]]) -> Iterator[str]:
    return _samples(f"{name}_total", "counter", description, values)


def _gauge(name: str, description: str, value: float) -> Iterator[str]:
    yield from (f"# HELP {name} {description}", f"# TYPE {name} gauge", f"{name} {value}")


def _samples(name: str, metric_type: str, description: str, values: Mapping[str, Mapping[Any, float]]) -> Iterator[str]:
    """Yield the lines of a metric, with one sample per label value."""
    yield from (f"# HELP {name} {description}", f"# TYPE {name} {metric_type}")
    for label, samples in values.items():
        for key, value in dict(samples).items():
            yield f'{name}{{{label}="{key}"}} {value}'
