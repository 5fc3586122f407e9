# SPDX-License-Identifier: Apache-2.0
"""The progress of a stage, counted when the device has done the work: a bar on a terminal, else plain lines.

A stage of the command line holds the same stage of the pipeline; the outer one is then shown.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any

from wanjax.compile_cache.compilations import Compilation, watch_compiler
from wanjax.figures import duration, in_bytes

if TYPE_CHECKING:
    from rich.console import Console

EVERY = 10.0  # seconds between two plain lines
UNLIKE = ("program",)  # units that take unlike times, so that the pace of some says nothing of the others


@dataclass
class Compilations:
    """The programs that were compiled or loaded from the cache, and the seconds of either."""

    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0
    reading: float = 0.0

    def add(self, compilation: Compilation) -> None:
        """Count one more."""
        if compilation.cached:
            self.cached += 1
            self.reading += compilation.seconds
        else:
            self.compiled += 1
            self.seconds += compilation.seconds

    def join(self, others: "Compilations") -> None:
        """Count others too."""
        self.compiled += others.compiled
        self.cached += others.cached
        self.seconds += others.seconds
        self.reading += others.reading

    def __str__(self) -> str:
        if self.compiled:
            return duration(self.seconds)
        return "cached" if self.cached else "nothing"


class Stage:
    """The state of one stage, and its row on a terminal: its name, a bar, the time, and what it is doing.

    `console` is where rich draws the row; nothing is drawn without one, or on one that is no terminal.
    """

    def __init__(self, name: str, console: "Console | None" = None):
        from rich.progress import BarColumn, Progress, TextColumn  # imported late for a quick --help
        from rich.table import Column

        self.name = name
        self.start = self.last = perf_counter()
        self.unit, self.done, self.total = "", 0, 0
        self.each: float | None = None  # the seconds that a unit takes
        self.compilations = Compilations()
        self.loading = self.writing = 0.0  # seconds in which weights were loaded, and results written
        self.row = Progress(
            TextColumn("{task.description:7}"),
            BarColumn(None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[stage].clock}"),
            TextColumn("{task.fields[stage]}", markup=False, table_column=Column(ratio=5, no_wrap=True)),
            console=console,
            expand=True,
            disable=console is None or not console.is_terminal or console.is_jupyter,
            speed_estimate_period=math.inf,  # a unit may take minutes
            get_time=perf_counter,
        )
        self.row.add_task(name, total=None, stage=self)
        (self._task,) = self.row.tasks
        self._loading: tuple[str, int, int] | None = None
        self._loading_since = self.start
        self._compiling: float | None = None
        self._over = False
        self._beside = ""

    def load(self, component: str, done: int, total: int) -> None:
        """Tell that `done` of `total` bytes of a component are loaded."""
        if self._loading is None:
            self._loading_since = perf_counter()
        self._loading = (component, done, total) if done < total else None
        if self._loading is None:
            self.loading += perf_counter() - self._loading_since
        self._restart()

    def count(self, unit: str, done: int, total: int, beside: str = "") -> None:
        """Tell that the device has done `done` of `total` units, such as steps, and a text to show beside."""
        if (unit, done) != (self.unit, self.done):
            self.last = perf_counter()
        if unit != self.unit:
            self.unit, self.done, self.total, self.each = unit, done, total, None
            self._restart()
        self.done, self.total, self._beside = done, total, beside
        if self._loading is None:
            self.row.update(self._task.id, completed=done, total=total)
            self.each = 1 / self._task.speed if self._task.speed and unit not in UNLIKE else self.each

    def end(self) -> None:
        """Tell that the stage is complete."""
        self._over = True

    def _restart(self) -> None:
        """Measure the pace from here on, apart from the time in which something else was done."""
        _, done, total = self._loading or (self.unit, self.done, self.total)
        self.row.reset(self._task.id, completed=done, total=total)

    @property
    def left(self) -> float | None:
        """The seconds until the last unit is done, as far as the pace tells."""
        if self.each is None:
            return None
        units = self.total - self.done
        return max(units * self.each - (perf_counter() - self.last), max(0, units - 1) * self.each)

    @property
    def elapsed(self) -> float:
        return perf_counter() - self.start

    @property
    def clock(self) -> str:
        return str(timedelta(seconds=round(self.elapsed)))

    def __str__(self) -> str:
        """What the stage is doing."""
        parts = []
        if self.unit:
            parts.append(f"{self.unit} {self.done} of {self.total}")
        if self._loading:
            component, done, total = self._loading
            parts.append(f"loading {component}, {in_bytes(done)} of {in_bytes(total)}")
        elif (since := self._compiling) is not None:
            parts.append(f"compiling for {duration(round(perf_counter() - since))}")
        elif self.left is not None and self.done < self.total:
            parts.append(f"{duration(round(self.left))} left")
        if self.each is not None:
            parts.append(f"{duration(self.each)} each")
        if self._beside:
            parts.append(self._beside)
        return ", ".join(parts) or ("done" if self._over else "running")

    @contextmanager
    def watching_compiler(self) -> Iterator[None]:
        """Note when JAX compiles, and count the programs that it compiled or found in the cache."""

        def begin() -> None:
            self._compiling = perf_counter()

        def end(compilation: Compilation) -> None:
            self.compilations.add(compilation)
            self._compiling = None
            self._restart()

        with watch_compiler(end, begin, this_thread=True):
            yield


_current: ContextVar[Stage | None] = ContextVar("stage", default=None)


@contextmanager
def stage(name: str, progress: bool | None = None) -> Iterator[Stage]:
    """Show a stage of a pipeline while it runs, unless it is a part of one that is shown already.

    `progress` is True to show it, False to hide it, None to show it on a terminal and in a notebook.
    """
    if (outer := _current.get()) is not None:
        yield outer
        return
    with on_console(name, _console(progress)) as current:
        yield current


@contextmanager
def on_console(name: str, console: "Console | None") -> Iterator[Stage]:
    """Show a stage on a console while it runs; None hides it."""
    current = Stage(name, console)
    token = _current.set(current)
    try:
        watching = current.watching_compiler() if "jax" in sys.modules else nullcontext()
        with watching, _shown_on(console, current):
            yield current
            current.end()
    finally:
        _current.reset(token)


def count(unit: str, done: int, total: int) -> None:
    """Tell the current stage, if there is one, that the device has done `done` of `total` units, such as steps."""
    if (current := _current.get()) is not None:
        current.count(unit, done, total)


def loading(component: str, done: int, total: int) -> None:
    """Tell the current stage, if there is one, that `done` of `total` bytes of a component are loaded."""
    if (current := _current.get()) is not None:
        current.load(component, done, total)


def timing_writes(frames: Iterable[Any]) -> Iterator[Any]:
    """Yield frames to what writes them; the seconds until it asks for more count as the stage's writing."""
    for chunk in frames:
        begun = perf_counter()
        yield chunk
        if (current := _current.get()) is not None:
            current.writing += perf_counter() - begun


def _console(progress: bool | None) -> "Console | None":
    """Return the console for stages of the library, or None where nothing is to be shown."""
    import jax  # imported late, for commands that compute nothing

    usual = (sys.stderr is not None and sys.stderr.isatty()) or "ipykernel" in sys.modules
    if not (usual if progress is None else progress) or jax.process_index() != 0:
        return None
    return console()


def console(*, stderr: bool = True, quiet: bool = False) -> "Console":
    """Return a console that prints lines as they are: names may hold what rich takes for markup.

    A pipe has no colours and no bars, whatever variables such as FORCE_COLOR ask of rich.
    """
    from rich.console import Console  # imported late for a quick --help

    stream = sys.stderr if stderr else sys.stdout
    piped = stream is None or not stream.isatty()
    plain: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
    return Console(stderr=stderr, quiet=quiet, force_terminal=False if piped else None, **plain)


@contextmanager
def _shown_on(console: "Console | None", current: Stage) -> Iterator[None]:
    if console is None or not current.row.disable:
        with current.row:
            yield
        return
    with _lines(current, console):
        yield
    console.print(f"{current.name}: {current}, {duration(current.elapsed)} in all")


@contextmanager
def _lines(current: Stage, console: "Console") -> Iterator[None]:
    """Print a plain line from time to time, where it differs from the one before."""
    over = Event()

    def tell() -> None:
        before = ""
        while not over.wait(EVERY):
            if (line := f"{current.name}: {current}") != before:
                console.print(before := line)

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
