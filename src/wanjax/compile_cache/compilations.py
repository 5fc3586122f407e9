# SPDX-License-Identifier: Apache-2.0
"""Events for compilations and cache hits in this process.

JAX emits an event when it compiles a program or reads it from its cache. wanjax emits the same events when it reads a
program from its own cache.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident, local
from time import perf_counter
from typing import NamedTuple

COMPILATION_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"
REFUSED_EVENT = "/wanjax/executable_refused"
WAITING_EVENT = "/wanjax/waited_for_compiler"


class Compilation(NamedTuple):
    """A compilation or a cache hit: the program, the seconds, and the reason if a stored executable was rejected."""

    name: str
    seconds: float
    cached: bool
    refusal_reason: str = ""


@contextmanager
def watch_compiler(
    end: Callable[[Compilation], None], begin: Callable[[], None] = lambda: None, *, only_this_thread: bool = False
) -> Iterator[None]:
    """Within the block, call `begin` before and `end` after each program is compiled or read from a cache.

    With `only_this_thread`, watch only the programs that this thread compiles, and the programs that another thread
    compiles while this thread waits.
    """
    from jax import monitoring  # imported late, because some commands compute nothing

    thread, state = get_ident(), local()

    def start(event: str, value: float, **_: object) -> None:
        if (event == COMPILATION_EVENT or (only_this_thread and event == WAITING_EVENT)) and (
            not only_this_thread or get_ident() == thread
        ):
            state.cached = False
            begin()

    def on_event(event: str, **details: object) -> None:
        if event == CACHE_HIT:
            state.cached = True
        elif event == REFUSED_EVENT:
            state.refusal_reason = str(details["reason"])

    def stop(event: str, duration_secs: float, **details: object) -> None:
        is_waiting = event == WAITING_EVENT
        if (event == COMPILATION_EVENT or is_waiting) and (
            get_ident() == thread if only_this_thread else not is_waiting
        ):
            name = str(details.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            cached = not is_waiting and getattr(state, "cached", False)
            end(Compilation(name, duration_secs, cached, getattr(state, "refusal_reason", "")))
            state.refusal_reason = ""

    monitoring.register_scalar_listener(start)
    monitoring.register_event_listener(on_event)
    monitoring.register_event_duration_secs_listener(stop)
    try:
        yield
    finally:
        monitoring.unregister_scalar_listener(start)
        monitoring.unregister_event_listener(on_event)
        monitoring.unregister_event_duration_listener(stop)


def report_loaded(name: str, start_time: float) -> None:
    """Report a program that was read from a cache. `since` is the value of `perf_counter` at the start."""
    from jax import monitoring

    monitoring.record_scalar(COMPILATION_EVENT, 0.0)
    monitoring.record_event(CACHE_HIT)
    monitoring.record_event_duration_secs(COMPILATION_EVENT, perf_counter() - start_time, fun_name=name)


def report_refused(reason: str) -> None:
    """Report why a stored executable is rejected. JAX then compiles the program again."""
    from jax import monitoring

    monitoring.record_event(REFUSED_EVENT, reason=reason)


@contextmanager
def report_waiting(name: str) -> Iterator[None]:
    """Within the block, this thread waits for a program that another thread compiles. Report the time of the block."""
    from jax import monitoring

    start_time = perf_counter()
    monitoring.record_scalar(WAITING_EVENT, 0.0)
    yield
    monitoring.record_event_duration_secs(WAITING_EVENT, perf_counter() - start_time, fun_name=name)
