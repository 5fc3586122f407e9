# SPDX-License-Identifier: Apache-2.0
"""The progress of a stage, counted when the device has done the work: a bar on a terminal, else plain lines.

A stage of the command line holds the same stage of the pipeline; the outer one is then shown.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Event, Thread
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import jax
from jax import monitoring

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COMPILATION = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"
EVERY = 10.0  # seconds between two plain lines
BAR = 24  # columns


class Compilation(NamedTuple):
    """One call of the backend's compiler: the program's name, the seconds, and whether the cache answered it."""

    name: str
    seconds: float
    cached: bool


@dataclass
class Compilations:
    """The programs that were compiled or loaded from the cache, and the seconds spent compiling."""

    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0

    def add(self, made: Compilation) -> None:
        """Counts one more."""
        if made.cached:
            self.cached += 1
        else:
            self.compiled += 1
            self.seconds += made.seconds

    def __str__(self) -> str:
        if self.compiled:
            return f"{self.seconds:.1f} s"
        return "cached" if self.cached else "nothing"


class Pace:
    """The seconds that a unit of work takes, such as a step, apart from those in which something else was done."""

    def __init__(self) -> None:
        self.done, self.total = 0, 0
        self._last = perf_counter()
        self._times: list[float] = []
        self._left_out = 0

    def disturb(self) -> None:
        """Leaves the present unit out, and the next, whose work may have been done in the meantime."""
        self._left_out = 2

    def count(self, done: int, total: int) -> None:
        """Counts `done` of `total` units as done now."""
        now = perf_counter()
        if done > self.done and not self._left_out:
            self._times += [(now - self._last) / (done - self.done)] * (done - self.done)
        if done > self.done:
            self._left_out = max(0, self._left_out - (done - self.done))
        self._last, self.done, self.total = now, done, total

    @property
    def each(self) -> float | None:
        """The mean over the later half of the units; None before the first one counts."""
        late = self._times[len(self._times) // 2 :]
        return sum(late) / len(late) if late else None

    @property
    def left(self) -> float | None:
        """The seconds until the last unit is done, as far as the pace tells."""
        if self.each is None:
            return None
        units = self.total - self.done
        return max(units * self.each - (perf_counter() - self._last), max(0, units - 1) * self.each)


class Stage:
    """The state of one stage, to be shown."""

    def __init__(self, name: str):
        self.name = name
        self.start = perf_counter()
        self.unit = ""
        self.pace = Pace()
        self.compilations = Compilations()
        self._loading: tuple[str, int, int] | None = None
        self._compiling: float | None = None
        self._over = False
        self._beside = ""

    def load(self, component: str, done: int, total: int) -> None:
        """Tells that `done` of `total` bytes of a component are loaded."""
        self._loading = (component, done, total) if done < total else None
        self.pace.disturb()

    def count(self, unit: str, done: int, total: int, beside: str = "") -> None:
        """Tells that the device has done `done` of `total` units, such as steps, and a text to show beside."""
        self._beside = beside
        if unit != self.unit:
            self.unit, self.pace = unit, Pace()
            self.pace.disturb()
        self.pace.count(done, total)

    def end(self) -> None:
        """Tells that the stage is complete."""
        self._over = True

    @property
    def bar(self) -> tuple[int, int]:
        """How much is done, and of how much; 0 where that is unknown."""
        return self._loading[1:] if self._loading else (self.pace.done, self.pace.total)

    @property
    def elapsed(self) -> float:
        return perf_counter() - self.start

    def __str__(self) -> str:
        """What the stage is doing."""
        parts = []
        if self.unit:
            parts.append(f"{self.unit} {self.pace.done} of {self.pace.total}")
        if self.pace.each is not None:
            parts.append(f"{brief(self.pace.each)} each")
        if self._beside:
            parts.append(self._beside)
        if self._loading:
            component, done, total = self._loading
            parts.append(f"loading {component}, {in_bytes(done)} of {in_bytes(total)}")
        elif (since := self._compiling) is not None:
            parts.append(f"compiling for {duration(perf_counter() - since)}")
        elif self.pace.left is not None and not self._over:
            parts.append(f"{duration(self.pace.left)} left")
        return ", ".join(parts) or ("done" if self._over else "running")

    @contextmanager
    def watching_compiler(self) -> Iterator[None]:
        """Notes when JAX compiles, and counts the programs that it compiled or found in the cache."""

        def begin() -> None:
            self._compiling = perf_counter()

        def end(made: Compilation) -> None:
            self.compilations.add(made)
            self._compiling = None
            self.pace.disturb()

        with watched_compiler(end, begin):
            yield


@contextmanager
def watched_compiler(end: Callable[[Compilation], None], begin: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Calls `begin` before and `end` after each program is compiled or read from the cache in the `with` block."""
    from_cache = False

    def start(event: str, value: float, **_: object) -> None:
        nonlocal from_cache
        if event == COMPILATION:
            from_cache = False
            begin()

    def hit(event: str, **_: object) -> None:
        nonlocal from_cache
        from_cache |= event == CACHE_HIT

    def stop(event: str, duration_secs: float, **more: object) -> None:
        if event == COMPILATION:
            name = str(more.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            end(Compilation(name, duration_secs, from_cache))

    monitoring.register_scalar_listener(start)
    monitoring.register_event_listener(hit)
    monitoring.register_event_duration_secs_listener(stop)
    try:
        yield
    finally:
        monitoring.unregister_scalar_listener(start)
        monitoring.unregister_event_listener(hit)
        monitoring.unregister_event_duration_listener(stop)


_current: ContextVar[Stage | None] = ContextVar("stage", default=None)


@contextmanager
def stage(name: str, progress: bool | None = None) -> Iterator[Stage]:
    """Shows a stage of a pipeline while it runs, unless it is a part of one that is shown already.

    `progress` is True to show it, False to hide it, None to show it on a terminal and in a notebook.
    """
    if (outer := _current.get()) is not None:
        yield outer
        return
    with on_console(name, _console(progress)) as made:
        yield made


@contextmanager
def on_console(name: str, console: "Console | None") -> Iterator[Stage]:
    """Shows a stage on a console while it runs; None hides it."""
    made = Stage(name)
    token = _current.set(made)
    try:
        with made.watching_compiler(), _shown_on(console, made):
            yield made
            made.end()
    finally:
        _current.reset(token)


def count(unit: str, done: int, total: int) -> None:
    """Tells the current stage, if there is one, that the device has done `done` of `total` units, such as steps."""
    if (current := _current.get()) is not None:
        current.count(unit, done, total)


def loading(component: str, done: int, total: int) -> None:
    """Tells the current stage, if there is one, that `done` of `total` bytes of a component are loaded."""
    if (current := _current.get()) is not None:
        current.load(component, done, total)


def _console(progress: bool | None) -> "Console | None":
    """Returns the console for stages of the library, or None where nothing is to be shown."""
    usual = (sys.stderr is not None and sys.stderr.isatty()) or "ipykernel" in sys.modules
    if not (usual if progress is None else progress) or jax.process_index() != 0:
        return None
    return console()


def console(*, quiet: bool = False) -> "Console":
    """Returns a console that writes to stderr."""
    from rich.console import Console  # imported late for a quick --help

    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=quiet)


@contextmanager
def _shown_on(console: "Console | None", made: Stage) -> Iterator[None]:
    if console is None:
        yield
    elif console.is_terminal and not console.is_jupyter:
        from rich.live import Live

        with Live(get_renderable=lambda: _row(made), console=console, refresh_per_second=8):
            yield
    else:
        with _lines(made, console):
            yield
        console.print(f"{made.name}: {made}, {duration(made.elapsed)} in all")


def _row(made: Stage) -> "Table":
    """Returns the line of a terminal: the stage's name, a bar, the time, and what it is doing."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    done, total = made.bar
    bar = ProgressBar(total or None, done, width=BAR, pulse=not total)
    clock = "{}:{:02}:{:02}".format(*_clock(made.elapsed))
    row = Table.grid(padding=(0, 1))
    for _ in range(4):
        row.add_column(no_wrap=True, overflow="ellipsis")
    row.add_row(f"{made.name:7}", bar, clock, str(made))
    return row


@contextmanager
def _lines(made: Stage, console: "Console") -> Iterator[None]:
    """Prints a plain line from time to time."""
    over = Event()

    def tell() -> None:
        while not over.wait(EVERY):
            console.print(f"{made.name}: {made}")

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _clock(seconds: float) -> tuple[int, int, int]:
    minutes, whole = divmod(round(seconds), 60)
    return *divmod(minutes, 60), whole


def duration(seconds: float) -> str:
    """Returns a time such as 7 s, 2 min 30 s or 1 h 5 min."""
    hours, minutes, whole = _clock(seconds)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole} s" if minutes else f"{whole} s"


def brief(seconds: float) -> str:
    """Returns the time of a unit, such as 1.25 s or 80 ms."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def in_bytes(number: int) -> str:
    """Returns a size such as 1.42 GB."""
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
