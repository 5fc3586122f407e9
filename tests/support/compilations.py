# SPDX-License-Identifier: Apache-2.0
"""The calls of the backend's compiler, counted."""

from collections.abc import Iterator
from contextlib import contextmanager

from jax import monitoring

from wanjax.pipelines.progress import COMPILATION


@contextmanager
def compilations() -> Iterator[list[float]]:
    """Yields a list to which each program that the backend's compiler makes in this context adds its seconds."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: object) -> None:
        if event == COMPILATION:
            seconds.append(duration_secs)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        monitoring.unregister_event_duration_listener(listen)
