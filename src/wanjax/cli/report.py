# SPDX-License-Identifier: Apache-2.0
"""What a run tells on stderr: how far each stage is, what it is waiting for, and in the end what it took."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

COMPILATION = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"
STATUS = Path("/proc/self/status")  # on Linux, where the peak of memory can be read and set back
CLEAR = Path("/proc/self/clear_refs")


@dataclass
class Compilations:
    """What a stage compiled, and how much of it came from the cache."""

    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.compiled:
            return f"{self.seconds:.1f} s"
        return "cached" if self.cached else "nothing"


class Stage:
    """The line of one stage: a bar, and what the stage is at."""

    def __init__(self, progress: "Progress", name: str):
        self._progress = progress
        self._task: TaskID = progress.add_task(name, total=None, at="starting")
        self._at = "running"
        self._first: tuple[float, int] | None = None
        self.compilations = Compilations()

    def load(self, part: str, done: int, total: int) -> None:
        """`done` of `total` bytes of a part are loaded."""
        if done < total:
            self._show(f"loading {part}, {_bytes(done)} of {_bytes(total)}", done, total)
        else:
            self._show("running", 0, None)

    def advance(self, unit: str, done: int, total: int) -> None:
        """`done` of `total` steps, or whatever the unit is, have been taken."""
        now = perf_counter()
        self._first = self._first or (now, done)  # with what was compiled for it, so it does not count
        since, before = self._first
        pace = f", {_seconds((now - since) / (done - before))} each" if done > before else ""
        self._show(f"{unit} {done} of {total}{pace}", done, total)

    def stopping(self) -> None:
        self._at = f"{self._at}, stopping; Ctrl-C again stops at once"
        self._progress.update(self._task, at=self._at)

    def end(self) -> None:
        self._show("done" if self._at == "running" else self._at, 1, 1)

    def _show(self, at: str, done: int, total: int | None) -> None:
        self._at = at
        self._progress.update(self._task, at=at, completed=done, total=total)

    @contextmanager
    def watching_compiler(self) -> Iterator[None]:
        """Tells when JAX compiles rather than runs, and counts what came from the cache."""
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
    """One run: notes, the stages as they go, a table of what they took, and how to go on from what is complete."""

    def __init__(self) -> None:
        self.way_on: str | None = None
        self._rows: list[tuple[str, ...]] = []
        self._current: Stage | None = None
        self._stop = False
        self._muted = False

    def mute(self, muted: bool) -> None:
        """Tells no more: another process does."""
        self._muted = muted

    @cached_property
    def console(self) -> "Console":
        from rich.console import Console  # here, for a quick --help

        return Console(stderr=True, highlight=False, markup=False, soft_wrap=True, quiet=self._muted)

    def note(self, text: str) -> None:
        self.console.print(text)

    def kept(self, text: str, way_on: str) -> None:
        """Tells what is complete, and the command that goes on from it."""
        self.way_on = way_on
        self.note(f"{text}; to go on from there: {way_on}")
        self._stop_if_asked()

    def load(self, part: str, done: int, total: int) -> None:
        """`done` of `total` bytes of a part are loaded, for the stage that waits for it."""
        if self._current:
            self._current.load(part, done, total)
            self._stop_if_asked()

    def advance(self, unit: str, done: int, total: int) -> None:
        """`done` of `total` steps of the stage, or whatever the unit is, have been taken."""
        if self._current:
            self._current.advance(unit, done, total)
        if done < total:
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._stop:
            raise KeyboardInterrupt

    @contextmanager
    def _stopping_between_steps(self, stage: Stage) -> Iterator[None]:
        """Makes of Ctrl-C a wish that is met after the step: JAX loses what is raised inside it, or crashes."""

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
    def stage(self, name: str) -> Iterator[None]:
        """Shows a stage while it runs, and keeps its time and the peaks of memory for the table."""
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
                with self._stopping_between_steps(stage), stage.watching_compiler():
                    yield
                stage.end()
            finally:
                self._current = None
        peaks = (_bytes(_host_peak()), _bytes(_device_peak()))
        self._rows.append((name, f"{perf_counter() - start:.1f} s", str(stage.compilations), *peaks))

    def table(self) -> None:
        """Tells the time and the peak of memory of each stage."""
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0))
        names = ("stage", "time", "of it compiling", "peak memory", "of the device")
        used = [i for i in range(len(names)) if any(row[i] for row in self._rows)]  # a CPU has no memory of its own
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
    """The most bytes that the process held in memory, since the last reset where the system knows one."""
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", STATUS.read_text()):
            return int(found[1]) * 1024
    try:
        import resource
        import sys
    except ImportError:  # on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _device_peak() -> int | None:
    """The most bytes that were in use on one accelerator since the process began; None where there is none."""
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices() if device.platform != "cpu"]
    return max((stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat), default=None)
