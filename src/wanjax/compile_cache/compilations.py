# SPDX-License-Identifier: Apache-2.0
"""Events for compilations and cache hits in this process.

JAX reports its compiler and its cache by events. Programs that this library reads itself are reported by the same ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident, local
from time import perf_counter
from typing import NamedTuple

COMPILATION = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"
REFUSED = "/wanjax/executable_refused"
WAITING = "/wanjax/waited_for_compiler"


class Compilation(NamedTuple):
    """A compilation or a cache hit: the program, the seconds, and why a stored executable was rejected, if one was."""

    name: str
    seconds: float
    cached: bool
    refused: str = ""


@contextmanager
def watch_compiler(
    end: Callable[[Compilation], None], begin: Callable[[], None] = lambda: None, *, this_thread: bool = False
) -> Iterator[None]:
    """Within the block, call `begin` before and `end` after each program is compiled or read from a cache.

    With `this_thread`, watch only programs that this thread compiles or waits for.
    """
    from jax import monitoring  # imported late, for commands that compute nothing

    thread, state = get_ident(), local()

    def start(event: str, value: float, **_: object) -> None:
        if (event == COMPILATION or (this_thread and event == WAITING)) and (not this_thread or get_ident() == thread):
            state.cached = False
            begin()

    def on_event(event: str, **details: object) -> None:
        if event == CACHE_HIT:
            state.cached = True
        elif event == REFUSED:
            state.refused = str(details["reason"])

    def stop(event: str, duration_secs: float, **details: object) -> None:
        is_waiting = event == WAITING
        if (event == COMPILATION or is_waiting) and (get_ident() == thread if this_thread else not is_waiting):
            name = str(details.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            cached = not is_waiting and getattr(state, "cached", False)
            end(Compilation(name, duration_secs, cached, getattr(state, "refused", "")))
            state.refused = ""

    monitoring.register_scalar_listener(start)
    monitoring.register_event_listener(on_event)
    monitoring.register_event_duration_secs_listener(stop)
    try:
        yield
    finally:
        monitoring.unregister_scalar_listener(start)
        monitoring.unregister_event_listener(on_event)
        monitoring.unregister_event_duration_listener(stop)


def report_loaded(name: str, since: float) -> None:
    """Report a program that was read from a cache; `since` is the start by `perf_counter`."""
    from jax import monitoring

    monitoring.record_scalar(COMPILATION, 0.0)
    monitoring.record_event(CACHE_HIT)
    monitoring.record_event_duration_secs(COMPILATION, perf_counter() - since, fun_name=name)


def report_refused(reason: str) -> None:
    """Report why a stored executable is rejected; its program is compiled next."""
    from jax import monitoring

    monitoring.record_event(REFUSED, reason=reason)


@contextmanager
def report_waiting(name: str) -> Iterator[None]:
    """Report the time of the block, in which this thread waits for a program that another thread compiles."""
    from jax import monitoring

    since = perf_counter()
    monitoring.record_scalar(WAITING, 0.0)
    yield
    monitoring.record_event_duration_secs(WAITING, perf_counter() - since, fun_name=name)
