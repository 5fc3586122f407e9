# SPDX-License-Identifier: Apache-2.0
"""The report of a run on stderr: the progress of each stage, and at the end a table of time and memory."""

import re
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from wanjax.errors import WanjaxWarning

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

COMPILATION = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"
STATUS = Path("/proc/self/status")  # Linux alone lets a process read and reset its peak memory
CLEAR = Path("/proc/self/clear_refs")


@dataclass
class Compilations:
    """The programs that a stage compiled or loaded from the cache, and the seconds spent compiling."""

    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.compiled:
            return f"{self.seconds:.1f} s"
        return "cached" if self.cached else "nothing"


class Stage:
    """The progress line of one stage: a bar, and what the stage is doing."""

    def __init__(self, progress: "Progress", name: str):
        self._progress = progress
        self._task: TaskID = progress.add_task(name, total=None, at="starting")
        self._at = "running"
        self._first: tuple[float, int] | None = None
        self.compilations = Compilations()

    def load(self, component: str, done: int, total: int) -> None:
        """Shows that `done` of `total` bytes of a component are loaded."""
        if done < total:
            self._show(f"loading {component}, {_bytes(done)} of {_bytes(total)}", done, total)
        else:
            self._show("running", 0, None)

    def advance(self, unit: str, done: int, total: int) -> None:
        """Shows that `done` of `total` units, such as steps, are complete."""
        now = perf_counter()
        self._first = self._first or (now, done)  # the first unit includes compilation, so the pace starts after it
        since, before = self._first
        pace = f", {_seconds((now - since) / (done - before))} each" if done > before else ""
        self._show(f"{unit} {done} of {total}{pace}", done, total)

    def stopping(self) -> None:
        """Shows that the run will stop after the current step."""
        self._at = f"{self._at}, stopping; Ctrl-C again stops at once"
        self._progress.update(self._task, at=self._at)

    def end(self) -> None:
        """Shows that the stage is complete."""
        self._show("done" if self._at == "running" else self._at, 1, 1)

    def _show(self, at: str, done: int, total: int | None) -> None:
        self._at = at
        self._progress.update(self._task, at=at, completed=done, total=total)

    @contextmanager
    def watching_compiler(self) -> Iterator[None]:
        """Shows when JAX compiles, and counts the programs that it compiled or found in the cache."""
        from jax import monitoring

        from_cache = False

        def start(event: str, value: float, **_: object) -> None:
            nonlocal from_cache
            if event == COMPILATION:
                from_cache = False
                self._progress.update(self._task, at="compiling")

        def hit(event: str, **_: object) -> None:
            nonlocal from_cache
            from_cache |= event == CACHE_HIT

        def end(event: str, duration_secs: float, **_: object) -> None:
            if event != COMPILATION:
                return
            if from_cache:
                self.compilations.cached += 1
            else:
                self.compilations.compiled += 1
                self.compilations.seconds += duration_secs
            self._progress.update(self._task, at=self._at)

        monitoring.register_scalar_listener(start)
        monitoring.register_event_listener(hit)
        monitoring.register_event_duration_secs_listener(end)
        try:
            yield
        finally:
            monitoring.unregister_scalar_listener(start)
            monitoring.unregister_event_listener(hit)
            monitoring.unregister_event_duration_listener(end)


class Report:
    """The report of one run: notes, the progress of its stages, the final table, and the command to resume it."""

    def __init__(self) -> None:
        self.way_on: str | None = None
        self._rows: list[tuple[str, ...]] = []
        self._current: Stage | None = None
        self._stop = False
        self._muted = False
        self._told: set[str] = set()

    def mute(self, muted: bool) -> None:
        """Silences this process; another one reports."""
        self._muted = muted

    @cached_property
    def console(self) -> "Console":
        from rich.console import Console  # imported late for a quick --help

        return Console(stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=self._muted)

    def note(self, text: str) -> None:
        """Prints a line."""
        self.console.print(text)

    def kept(self, text: str, way_on: str) -> None:
        """Prints what is complete, and the command that continues from there."""
        self.way_on = way_on
        self.note(f"{text}; to continue from there: {way_on}")
        self._stop_if_asked()

    def load(self, component: str, done: int, total: int) -> None:
        """Shows that `done` of `total` bytes of a component are loaded, on the line of the current stage."""
        if self._current:
            self._current.load(component, done, total)
            self._stop_if_asked()

    def advance(self, unit: str, done: int, total: int) -> None:
        """Shows that `done` of `total` units, such as steps, of the current stage are complete."""
        if self._current:
            self._current.advance(unit, done, total)
        if done < total:
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._stop:
            raise KeyboardInterrupt

    @contextmanager
    def _stopping_between_steps(self, stage: Stage) -> Iterator[None]:
        """Defers Ctrl-C to the end of the step: inside JAX the exception would be lost, or crash the process."""

        def ask(number: int, frame: object) -> None:
            self._stop = True
            stage.stopping()
            signal.signal(signal.SIGINT, signal.default_int_handler)

        before = signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def _telling_warnings(self) -> Iterator[None]:
        """Prints each warning of wanjax as a note, once."""

        def show(message: Warning | str, category: type[Warning], *where: Any, **file: Any) -> None:
            if not issubclass(category, WanjaxWarning):
                usual(message, category, *where, **file)
            elif str(message) not in self._told:
                self._told.add(str(message))
                self.note(f"note: {message}")

        with warnings.catch_warnings():
            usual, warnings.showwarning = warnings.showwarning, show
            warnings.simplefilter("always", WanjaxWarning)
            yield

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Shows a stage while it runs, and records its time and its peak memory for the table."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:7}"),
            BarColumn(24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[at]}"),
        )
        _reset_host_peak()
        start = perf_counter()
        with Progress(*columns, console=self.console) as progress:
            self._current = stage = Stage(progress, name)
            try:
                with self._stopping_between_steps(stage), stage.watching_compiler(), self._telling_warnings():
                    yield
                stage.end()
            finally:
                self._current = None
        peaks = (_bytes(_host_peak()), _bytes(_device_peak()))
        self._rows.append((name, f"{perf_counter() - start:.1f} s", str(stage.compilations), *peaks))

    def table(self) -> None:
        """Prints the time and the peak memory of each stage."""
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0))
        names = ("stage", "time", "compiling", "peak memory", "peak device memory")
        used = [i for i in range(len(names)) if any(row[i] for row in self._rows)]  # CPUs report no device memory
        for i in used:
            table.add_column(names[i], justify="left" if i == 0 else "right")
        for row in self._rows:
            table.add_row(*(row[i] for i in used))
        self.console.print(table)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _bytes(number: int | None) -> str:
    if number is None:
        return ""
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _reset_host_peak() -> None:
    with suppress(OSError):
        CLEAR.write_text("5")


def _host_peak() -> int | None:
    """Returns the peak memory of the process in bytes, since the last reset if the system supports resets."""
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", STATUS.read_text()):
            return int(found[1]) * 1024
    try:
        import resource
        import sys
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _device_peak() -> int | None:
    """Returns the peak bytes in use on any local accelerator since the process began, or None without accelerators."""
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices() if device.platform != "cpu"]
    return max((stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat), default=None)
