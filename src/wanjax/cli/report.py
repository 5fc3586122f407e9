# SPDX-License-Identifier: Apache-2.0
"""The report of a run: on stderr the progress of each stage, and a table of time and memory; on stdout what it made.

Ctrl-C is deferred to the end of a step.
"""

import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from wanjax.cli.tables import print_table
from wanjax.errors import WanjaxWarning
from wanjax.figures import duration, in_bytes, quantity
from wanjax.signals import INTERRUPTED, run_cleanups

if TYPE_CHECKING:
    from rich.console import Console

    from wanjax.pipelines.progress import Stage
    from wanjax.stores.paths import AnyPath

STATUS = Path("/proc/self/status")  # Linux alone lets a process read and reset its peak memory
CLEAR_REFS = Path("/proc/self/clear_refs")
SAFE_STAGES = ("encode", "denoise", "decode", "preview", "train", "record", "compile")
"""The stages that Ctrl-C ends after `STOP_TIMEOUT`, once all steps that are done are in a file: of training none is."""
CACHE_WARNING = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '[^']*': \w+: (?:\[Errno \d+\] )?(.*)"
)
"""A warning of JAX's."""
STOP_TIMEOUT = 2.0  # seconds that a stage has to come to an end of its own
POLL_INTERVAL = 0.1  # seconds between two looks whether they are
EXIT_GRACE = 5.0  # seconds that other processes have to end with this one


class Row:
    """The time, its parts and the peak memory of a stage, of all its turns in a video of windows."""

    def __init__(self) -> None:
        from wanjax.pipelines.progress import Compilations  # imported late for a quick --help

        self.seconds, self.compilations, self.peaks = 0.0, Compilations(), (0, 0)
        self.loading = self.writing = 0.0
        self.units = ""

    def add(self, stage: "Stage") -> None:
        """Add a turn that is over."""
        self.seconds += stage.elapsed
        self.compilations.join(stage.compilations)
        self.loading += stage.loading
        self.writing += stage.writing
        if stage.unit_seconds is not None:
            self.units = f", {quantity(stage.total, stage.unit)}, {duration(stage.unit_seconds)} each"
        self.peaks = tuple(
            max(previous, now or 0) for previous, now in zip(self.peaks, (_host_peak(), _device_peak()), strict=True)
        )

    def cells(self) -> tuple[str, ...]:
        """Return the row as texts."""
        return duration(self.seconds), str(self.compilations), *(in_bytes(peak) if peak else "" for peak in self.peaks)

    def parts(self, name: str) -> Iterator[tuple[str, float]]:
        """Yield the parts of the stage's time with their seconds; the last is what is left of it."""
        seconds_of = {
            "loading weights": self.loading,
            "compiling": self.compilations.seconds,
            "reading programs": self.compilations.cache_seconds,
            "writing": self.writing,
        }
        yield from ((f"{name}: {part}", seconds) for part, seconds in seconds_of.items() if seconds)
        yield f"{name}: the work{self.units}", max(0.0, self.seconds - sum(seconds_of.values()))


class Report:
    """The report of one run: notes, the progress of its stages, the final table, and the command to resume it.

    With `quiet`, nothing is printed but what the run made and errors. With `in_json`, what it made is a JSON object.
    With `stats`, the table is followed by where all time of the process went. `owns_process` tells that nothing else
    runs in the process, `has_peers` that other processes wait for this one, and `muted` that another one reports.
    `seconds` are those of the stages so far, and `videos` how many of several are complete, None for one.
    """

    def __init__(self) -> None:
        self.resume_command: str | None = None
        self.quiet = False
        self.in_json = False
        self.stats = False
        self.owns_process = False
        self.has_peers = False
        self.muted = False
        self.seconds: dict[str, float] = {}
        self.videos: int | None = None
        self._start_time = time.time()
        self._first_stage: float | None = None
        self._rows: dict[str, Row] = {}
        self._current: Stage | None = None
        self._stop = False
        self._name, self._steps = "", 0  # of the current stage, and how many steps it has taken
        self._saved: int | None = 0  # how many of them a file holds; None while it does not hold the last
        self._noted: set[str] = set()

    @cached_property
    def console(self) -> "Console":
        from wanjax.pipelines.progress import console  # imported late for a quick --help

        return console(quiet=self._silent)

    @property
    def _silent(self) -> bool:
        return self.muted or self.quiet

    def print_result(self, file: "AnyPath", record: Mapping[str, Any], **more: Any) -> None:
        """Print what a run made: the name of the file, or an object of it, its record and more."""
        if self.videos is not None:
            self.videos += 1
        if self.in_json:
            click.echo(json.dumps({"file": str(file), **more, "record": dict(record)}))
        else:  # in bytes, where the stream takes them, because a name may hold some that are no text
            click.echo(os.fsencode(str(file)) if hasattr(sys.stdout, "buffer") else str(file))

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.print(text)

    def record_resume(self, resume_command: str, text: str | None = None) -> None:
        """Take the command that continues from what is complete, and print it after a text on that, if any."""
        self.resume_command = resume_command
        if text is not None:
            self.note(f"{text}; to continue from there: {resume_command}")
        self.stop_if_asked()

    def load(self, component: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of a component are loaded, on the line of the current stage."""
        if self._current:
            self._current.load(component, done, total)
            self.stop_if_asked()

    def count(self, unit: str, done: int, total: int, *, suffix: str = "") -> None:
        """Show that `done` of `total` units of the current stage, such as chunks, are complete, and a text beside."""
        if self._current:
            self._current.count(unit, done, total, suffix)
            self._steps = done if unit in ("step", "block") else 0
            if unit == "step" and done == total:
                self._saved = None  # the latents are about to take the place of the file
        if done < total:
            self.stop_if_asked()

    def saved(self, steps: int | None) -> None:
        """Take how many steps of the current stage a file holds, or None once one is done that it does not hold."""
        self._saved = steps

    def stop_if_asked(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed while a stage ran."""
        if self._stop:
            raise KeyboardInterrupt

    def enable_resume(self) -> None:
        """Note that this command, given again, goes on from what it has done."""
        self.resume_command = shlex.join(["wanjax", *sys.argv[1:]])

    @property
    def outcome(self) -> str:
        """The last line of a run that did not complete: what is left of it, if anything."""
        if not self.resume_command:
            return ""
        if self.videos == 0:
            return f"no video was complete, and this begins again: {self.resume_command}\n"
        return f"what was complete is kept, and this goes on from there: {self.resume_command}\n"

    def leave(self, error: BaseException) -> NoReturn:
        """End the process for an error, though other processes wait for it.

        They have a moment to end with it, as where all were given the same mistake: JAX lets none end before the others
        for minutes, which is too long where they are in the midst of something.
        """
        import jax

        if not isinstance(error, click.exceptions.Exit):
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        ending = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        ending.start()
        ending.join(EXIT_GRACE)
        run_cleanups()
        os._exit(getattr(error, "exit_code", 1))

    def interrupted(self) -> None:
        """Answer Ctrl-C outside of a stage: ends the process at once.

        An exception would be lost, or crash the process, where Python imports, collects garbage, or waits for C.
        """
        end_at_once(
            f"\nwanjax: stopped\n{self.outcome}", terminal=self._current is not None and self.console.is_terminal
        )

    def _on_interrupt(self) -> None:
        """Answer Ctrl-C. An exception inside JAX would be lost, or crash the process, so the run stops in between."""
        if self._stop:
            message = "" if self.muted else f"\nwanjax: stopped at once\n{self.outcome}"
            end_at_once(message, self.console.is_terminal)
        self._stop = True
        unit = self._current.unit if self._current else ""
        work = f"the {unit}s under way" if unit else "this stage"
        self.note(f"stopping after {work}; Ctrl-C again stops at once")
        if self.owns_process and self._name in SAFE_STAGES:
            threading.Thread(target=self._exit_when_saved, args=[self._current], daemon=True).start()

    def _exit_when_saved(self, stage: "Stage | None") -> None:
        """End the process where a stage goes on, as while the memory is exhausted, once that loses nothing done."""
        time.sleep(STOP_TIMEOUT)
        while stage is not None and self._current is stage:
            if self._saved is not None and self._steps <= self._saved:
                end_at_once("" if self.muted else f"\nwanjax: stopped\n{self.outcome}", self.console.is_terminal)
            time.sleep(POLL_INTERVAL)

    @contextmanager
    def print_warnings(self) -> Iterator[None]:
        """Print each warning of wanjax as a note, once, and what JAX warns of for each program of its cache."""

        def show(message: Warning | str, category: type[Warning], *where: Any, **file: Any) -> None:
            of_cache = CACHE_WARNING.match(str(message))
            if not (of_cache or issubclass(category, WanjaxWarning)):
                original(message, category, *where, **file)
                return
            why = f"the cache of compiled programs fails at {of_cache[1]}: {of_cache[2]}" if of_cache else str(message)
            if why not in self._noted:
                self._noted.add(why)
                self.note(f"note: {why}")

        with warnings.catch_warnings():
            original, warnings.showwarning = warnings.showwarning, show
            warnings.simplefilter("always", WanjaxWarning)
            warnings.filterwarnings("always", CACHE_WARNING.pattern)
            yield

    @contextmanager
    def print_compilations(self) -> Iterator[None]:
        """Print each call of the backend's compiler in the `with` block, and their number at its end."""
        from wanjax.compile_cache.compilations import Compilation, watch_compiler
        from wanjax.pipelines.progress import Compilations

        compilations = Compilations()

        def tell(compilation: Compilation) -> None:
            compilations.add(compilation)
            done = "read from the cache" if compilation.cached else "compiled"
            why = f", because what was kept is of no use: {compilation.refused}" if compilation.refused else ""
            self.note(f"program {compilation.name}: {done} in {duration(compilation.seconds)}{why}")

        with watch_compiler(tell):
            yield
        compiled, cached = compilations.compiled, compilations.cached
        self.note(f"{quantity(compiled, 'program')} compiled, {cached} read from the cache")

    @contextmanager
    def stage(self, name: str, *, at_once: bool = False) -> Iterator[None]:
        """Show a stage while it runs, and record its time and its peak memory for the table.

        Ctrl-C ends one that keeps nothing `at_once`.
        """
        from wanjax.pipelines import progress

        _reset_host_peak()
        self._first_stage = self._first_stage or time.time()
        with nullcontext() if at_once else handle_interrupts(self._on_interrupt):
            try:
                with progress.on_console(name, None if self._silent else self.console) as stage:
                    self._current, self._name, self._steps, self._saved = stage, name, 0, 0
                    yield
            finally:
                self._current = None
        row = self._rows.setdefault(name, Row())
        row.add(stage)
        self.seconds[name] = round(row.seconds, 3)

    def table(self) -> None:
        """Print the time and the peak memory of each stage, and with `stats` where all time went."""
        names = ("stage", "time", "compiling", "peak memory", "peak device memory")
        texts = [(name, *row.cells()) for name, row in self._rows.items()]
        used = [i for i in range(len(names)) if any(row[i] for row in texts)]  # CPUs report no device memory
        rows = [[row[i] for i in used] for row in texts]
        print_table(self.console, [names[i] for i in used], rows)
        if self.stats:
            self._account()

    def _account(self) -> None:
        """Print the time of the process in parts, which make up all of it until now."""
        import psutil

        began, now = psutil.Process().create_time(), time.time()
        first = self._first_stage or now
        parts = [("starting Python", self._start_time - began), ("getting ready", first - self._start_time)]
        parts += [part for name, row in self._rows.items() for part in row.parts(name)]
        total = now - began
        parts.append(("between the stages", total - sum(seconds for _, seconds in parts)))
        rows = [(name, duration(seconds), f"{seconds / total:.0%}") for name, seconds in parts if seconds >= 0.0005]
        print_table(self.console, ["where the time went", "time", "share"], [*rows, ("in all", duration(total), "")])


def _reset_host_peak() -> None:
    with suppress(OSError):
        CLEAR_REFS.write_text("5")


def _host_peak() -> int | None:
    """Return the peak memory of the process in bytes, since the last reset if the system supports resets."""
    with suppress(OSError):
        if match := re.search(r"VmHWM:\s*(\d+) kB", STATUS.read_text()):
            return int(match[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _device_peak() -> int | None:
    """Return the peak bytes in use on any local accelerator since the process began, or None without accelerators."""
    if "jax" not in sys.modules:
        return None
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices() if device.platform != "cpu"]
    return max((stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat), default=None)


STOP_BYTE = b"\0"
SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def handle_interrupts(on_interrupt: Callable[[], None]) -> Iterator[None]:
    """Call `on_interrupt` from a thread at each Ctrl-C or SIGTERM, in place of raising KeyboardInterrupt or ending.

    Does nothing outside the main thread, which alone may handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while (received := reader.recv(1)) not in (b"", STOP_BYTE):
            if received[0] in previous:
                on_interrupt()

    previous = {number: signal.signal(number, lambda number, frame: None) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not Python's
        writer.send(STOP_BYTE)
        thread.join()
        reader.close()
        writer.close()


def end_at_once(message: str, terminal: bool) -> NoReturn:
    """End the process at once; clean up what is under way, print a text, and show a terminal's cursor again."""
    run_cleanups()
    os.write(2, f"{SHOW_CURSOR if terminal else ''}{message}".encode())
    os._exit(INTERRUPTED)
