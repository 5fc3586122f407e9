# SPDX-License-Identifier: Apache-2.0
"""The progress of a stage: a bar on a terminal, otherwise plain lines.

The progress counts work that the device has completed.

A stage of the command line contains the same stage of the pipeline; only the command line's stage is shown.
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
from wanjax.figures import format_bytes, format_duration
from wanjax.signals import discard_output

if TYPE_CHECKING:
    from rich.console import Console

LINE_INTERVAL = 10.0  # seconds between two plain lines
MIN_UNIT_SECONDS = 1e-3  # units that end closer together waited for the same event, such as a compilation
UNPACED_UNITS = ("program",)  # the durations of these units differ too much to estimate the remaining time


@dataclass
class Compilations:
    """The number of compiled programs, the number of programs loaded from the cache, and the seconds of both."""

    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0
    cache_seconds: float = 0.0

    def add(self, compilation: Compilation) -> None:
        """Add one compilation."""
        if compilation.cached:
            self.cached += 1
            self.cache_seconds += compilation.seconds
        else:
            self.compiled += 1
            self.seconds += compilation.seconds

    def join(self, other: "Compilations") -> None:
        """Add the counts of another `Compilations`."""
        self.compiled += other.compiled
        self.cached += other.cached
        self.seconds += other.seconds
        self.cache_seconds += other.cache_seconds

    def __str__(self) -> str:
        if self.compiled:
            return format_duration(self.seconds)
        return "cached" if self.cached else "nothing"


class Stage:
    """The state of one stage, and its row on a terminal: the name, a bar, the time and the current activity.

    Rich draws the row on `console`. Nothing is drawn if `console` is None or not a terminal.
    """

    def __init__(self, name: str, console: "Console | None" = None):
        from rich.progress import BarColumn, Progress, TextColumn  # imported late for a quick --help
        from rich.table import Column

        self.name = name
        self.start = self.last_change_time = perf_counter()
        self.unit, self.done, self.total = "", 0, 0
        self.unit_seconds: float | None = None  # the duration of a unit
        self.compilations = Compilations()
        self.loading_seconds = self.writing_seconds = 0.0  # spent on loading weights, and on writing results
        self.row = Progress(
            TextColumn("{task.description:7}"),
            BarColumn(None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[stage].clock}"),
            TextColumn("{task.fields[stage]}", markup=False, table_column=Column(ratio=5, no_wrap=True)),
            console=console,
            expand=True,
            disable=console is None or not console.is_terminal or console.is_jupyter,
            speed_estimate_period=math.inf,  # redraws while a unit runs, because a unit may take minutes
            get_time=perf_counter,
        )
        self.row.add_task(name, total=None, stage=self)
        (self._task,) = self.row.tasks
        self._loading_progress: tuple[str, int, int] | None = None
        self._loading_since = self.start
        self._compiling_since: float | None = None
        self._has_ended = False
        self._extra_text = ""

    def load(self, component: str, done: int, total: int) -> None:
        """Record that `done` of the `total` bytes of a component are loaded."""
        if self._loading_progress is None:
            self._loading_since = perf_counter()
        self._loading_progress = (component, done, total) if done < total else None
        if self._loading_progress is None:
            self.loading_seconds += perf_counter() - self._loading_since
        self._restart()

    def set_progress(self, unit: str, done: int, total: int, extra_text: str = "") -> None:
        """Record that the device has completed `done` of `total` units, such as steps. `extra_text` is shown after the
        count."""
        now = perf_counter()
        came_together = unit == self.unit and done > self.done and now - self.last_change_time < MIN_UNIT_SECONDS
        if (unit, done) != (self.unit, self.done):
            self.last_change_time = now
        if unit != self.unit:
            self.unit, self.done, self.total, self.unit_seconds = unit, done, total, None
            self._restart()
        self.done, self.total, self._extra_text = done, total, extra_text
        if came_together:
            self._restart()
        if self._loading_progress is None:
            self.row.update(self._task.id, completed=done, total=total)
            self.unit_seconds = (
                1 / self._task.speed if self._task.speed and unit not in UNPACED_UNITS else self.unit_seconds
            )

    def end(self) -> None:
        """Record that the stage is complete."""
        self._has_ended = True

    def _restart(self) -> None:
        """Restart the measurement of the speed, so that it excludes time spent on other work."""
        _, done, total = self._loading_progress or (self.unit, self.done, self.total)
        self.row.reset(self._task.id, completed=done, total=total)

    @property
    def remaining_seconds(self) -> float | None:
        """The estimated seconds until the last unit is done, or None."""
        if self.unit_seconds is None:
            return None
        units = self.total - self.done
        return max(
            units * self.unit_seconds - (perf_counter() - self.last_change_time), max(0, units - 1) * self.unit_seconds
        )

    @property
    def elapsed(self) -> float:
        return perf_counter() - self.start

    @property
    def clock(self) -> str:
        return str(timedelta(seconds=round(self.elapsed)))

    def __str__(self) -> str:
        """Describe the current activity of the stage."""
        parts = []
        if self.unit:
            parts.append(f"{self.unit} {self.done} of {self.total}")
        if self._loading_progress:
            component, done, total = self._loading_progress
            parts.append(f"loading {component}, {format_bytes(done)} of {format_bytes(total)}")
        elif (since := self._compiling_since) is not None:
            parts.append(f"compiling for {format_duration(round(perf_counter() - since))}")
        elif self.remaining_seconds is not None and self.done < self.total:
            parts.append(f"{format_duration(round(self.remaining_seconds))} left")
        if self.unit_seconds is not None:
            parts.append(f"{format_duration(self.unit_seconds)} each")
        if self._extra_text:
            parts.append(self._extra_text)
        return ", ".join(parts) or ("done" if self._has_ended else "running")

    @contextmanager
    def watching_compiler(self) -> Iterator[None]:
        """Record when JAX compiles, and count the programs that it compiled or found in the cache."""

        def begin() -> None:
            self._compiling_since = perf_counter()

        def end(compilation: Compilation) -> None:
            self.compilations.add(compilation)
            self._compiling_since = None
            self._restart()

        with watch_compiler(end, begin, only_this_thread=True):
            yield


_current: ContextVar[Stage | None] = ContextVar("stage", default=None)
_unit_prefix: ContextVar[str] = ContextVar("unit_prefix", default="")


@contextmanager
def stage(name: str, progress: bool | None = None) -> Iterator[Stage]:
    """Show a stage of a pipeline while it runs. A stage inside another shown stage is not shown.

    `progress` is True to show it and False to hide it. None shows it on a terminal and in a notebook.
    """
    if (outer_stage := _current.get()) is not None:
        yield outer_stage
        return
    with stage_on_console(name, _console(progress)) as current:
        yield current


@contextmanager
def stage_on_console(name: str, console: "Console | None") -> Iterator[Stage]:
    """Show a stage on a console while it runs. Without a console, the stage is hidden."""
    current = Stage(name, console)
    token = _current.set(current)
    try:
        compiler_watch = current.watching_compiler() if "jax" in sys.modules else nullcontext()
        with compiler_watch, _draw_or_print(console, current):
            yield current
            current.end()
    finally:
        _current.reset(token)


def set_progress(unit: str, done: int, total: int) -> None:
    """Record in the current stage, if any, that the device has completed `done` of `total` units, such as steps."""
    if (current := _current.get()) is not None:
        current.set_progress(f"{_unit_prefix.get()} {unit}".strip(), done, total)


@contextmanager
def unit_prefix(prefix: str) -> Iterator[None]:
    """Within the block, prefix the names of the current stage's units: `sample` shows "sample step 1 of 20"."""
    token = _unit_prefix.set(prefix)
    try:
        yield
    finally:
        _unit_prefix.reset(token)


def loading(component: str, done: int, total: int) -> None:
    """Record in the current stage, if any, that `done` of `total` bytes of a component are loaded."""
    if (current := _current.get()) is not None:
        current.load(component, done, total)


def timing_writes(frames: Iterable[Any]) -> Iterator[Any]:
    """Yield frames to a writer. The time until it requests the next frames counts as the stage's writing time."""
    for chunk in frames:
        start = perf_counter()
        yield chunk
        if (current := _current.get()) is not None:
            current.writing_seconds += perf_counter() - start


def _console(progress: bool | None) -> "Console | None":
    """Return the console for the library's stages, or None to show nothing."""
    import jax  # imported late, because some commands do not need JAX

    is_interactive = (sys.stderr is not None and sys.stderr.isatty()) or "ipykernel" in sys.modules
    if not (is_interactive if progress is None else progress) or jax.process_index() != 0:
        return None
    return console()


def console(*, stderr: bool = True, quiet: bool = False) -> "Console":
    """Create a console that prints lines unchanged, because names may look like rich's markup.

    Piped output has no colours and no bars, even if variables such as FORCE_COLOR request them.
    """
    from rich.console import Console  # imported late for a quick --help

    class ProgressConsole(Console):
        """The console for progress. If the reader of the output has exited, as in `| head -1`, the run continues."""

        def on_broken_pipe(self) -> None:
            self.quiet = True
            discard_output(sys.stderr)

    stream = sys.stderr if stderr else sys.stdout
    is_piped = stream is None or not stream.isatty()
    line_options: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
    console_type = ProgressConsole if stderr else Console
    return console_type(stderr=stderr, quiet=quiet, force_terminal=False if is_piped else None, **line_options)


@contextmanager
def _draw_or_print(console: "Console | None", current: Stage) -> Iterator[None]:
    if console is None or not current.row.disable:
        with current.row:
            yield
        return
    with _print_lines(current, console):
        yield
    console.print(f"{current.name}: {current}, {format_duration(current.elapsed)} in all")


@contextmanager
def _print_lines(current: Stage, console: "Console") -> Iterator[None]:
    """Print a plain line every few seconds if it differs from the previous one."""
    finished = Event()

    def print_lines() -> None:
        last_line = ""
        while not finished.wait(LINE_INTERVAL):
            if (line := f"{current.name}: {current}") != last_line:
                console.print(last_line := line)

    thread = Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
