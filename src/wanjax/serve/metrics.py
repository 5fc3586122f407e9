# SPDX-License-Identifier: Apache-2.0
"""The state of the server in Prometheus' text form."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import psutil

from wanjax.serve.board import READY, Videos

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STARTED = time.time()


def text(board: Videos) -> str:
    """Returns all metrics."""
    lines = [
        *_counter("wanjax_videos", "Videos that came to an end.", {"status": board.counts}),
        *_counter("wanjax_answers", "Answers to requests, by status.", {"status": board.all_answers}),
        *_counter("wanjax_stage_seconds", "Seconds that videos took, by stage.", {"stage": board.seconds}),
        *_gauge("wanjax_queue_length", "Videos that wait.", board.waiting),
        *_gauge("wanjax_running", "Videos that are made now.", len(board.running)),
        *_gauge("wanjax_watchers", "Streams of events that are open.", board.watchers),
        *_gauge("wanjax_ready", "1 once the model is loaded and compiled.", int(board.state == READY)),
        *_gauge("wanjax_kept_videos", "Requests that are kept, with their videos.", len(board.jobs)),
        *_gauge("process_start_time_seconds", "When the process began.", STARTED),
        *_gauge("process_resident_memory_bytes", "Memory of the process.", psutil.Process().memory_info().rss),
    ]
    used = {device.id: (device.memory_stats() or {}).get("bytes_in_use") for device in jax.local_devices()}
    if known := {device: bytes_ for device, bytes_ in used.items() if bytes_ is not None}:
        lines += _samples("wanjax_device_bytes_in_use", "gauge", "Memory in use on a device.", {"device": known})
    return "\n".join(lines) + "\n"


def _counter(name: str, told: str, values: Mapping[str, Mapping[Any, float]]) -> Iterator[str]:
    return _samples(f"{name}_total", "counter", told, values)


def _gauge(name: str, told: str, value: float) -> Iterator[str]:
    yield from (f"# HELP {name} {told}", f"# TYPE {name} gauge", f"{name} {value}")


def _samples(name: str, kind: str, told: str, values: Mapping[str, Mapping[Any, float]]) -> Iterator[str]:
    """Yields a metric with a value for each value of a label."""
    yield from (f"# HELP {name} {told}", f"# TYPE {name} {kind}")
    for label, samples in values.items():
        for key, value in dict(samples).items():
            yield f'{name}{{{label}="{key}"}} {value}'
