# SPDX-License-Identifier: Apache-2.0
"""Report a run: print the progress of each stage and a table of time and memory on stderr, and the result on stdout.
Ctrl-C takes effect at the end of a step.
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
from wanjax.figures import format_bytes, format_duration, pluralize
from wanjax.signals import INTERRUPTED, discard_output, run_cleanups

if TYPE_CHECKING:
    from rich.console import Console

    from wanjax.pipelines.progress import Stage
    from wanjax.pipelines.windows import Seam
    from wanjax.stores.paths import AnyPath

PROC_STATUS = Path("/proc/self/status")  # only Linux lets a process read and reset its peak memory
PROC_CLEAR_REFS = Path("/proc/self/clear_refs")
SAFE_STAGES = ("encode", "denoise", "decode", "preview", "train", "record", "compile")
"""After Ctrl-C, these stages end at most `STOP_TIMEOUT` seconds later, if all completed steps are in a file. Training
always ends in this way."""
CACHE_WARNING = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '[^']*': \w+: (?:\[Errno \d+\] )?(.*)"
)
"""Matches the warning of JAX about an entry of its compilation cache."""
STOP_TIMEOUT = 2.0  # seconds to wait until a stage ends by itself
POLL_INTERVAL = 0.1  # seconds between two checks that the steps are saved
EXIT_GRACE = 5.0  # seconds to wait for other processes that end because of the same error


class StageRow:
    """The time and the peak memory of a stage, summed over the windows of a video."""

    def __init__(self) -> None:
        from wanjax.pipelines.progress import Compilations  # imported late for a quick --help

        self.seconds, self.compilations, self.peaks = 0.0, Compilations(), (0, 0)
        self.loading = self.writing = 0.0
        self.units = ""

    def add(self, stage: "Stage") -> None:
        """Add a completed execution of the stage."""
        self.seconds += stage.elapsed
        self.compilations.join(stage.compilations)
        self.loading += stage.loading_seconds
        self.writing += stage.writing_seconds
        if stage.unit_seconds is not None:
            self.units = f", {pluralize(stage.total, stage.unit)}, {format_duration(stage.unit_seconds)} each"
        self.peaks = tuple(
            max(previous, peak or 0)
            for previous, peak in zip(self.peaks, (_host_peak_memory(), _device_peak_memory()), strict=True)
        )

    def cells(self) -> tuple[str, ...]:
        """Format the row."""
        return (
            format_duration(self.seconds),
            str(self.compilations),
            *(format_bytes(peak) if peak else "" for peak in self.peaks),
        )

    def parts(self, name: str) -> Iterator[tuple[str, float]]:
        """Yield the name and the seconds of each part of the stage's time. The last part is the remaining time."""
        seconds_by_part = {
            "loading weights": self.loading,
            "compiling": self.compilations.seconds,
            "reading programs": self.compilations.cache_seconds,
            "writing": self.writing,
        }
        yield from ((f"{name}: {part}", seconds) for part, seconds in seconds_by_part.items() if seconds)
        yield f"{name}: the work{self.units}", max(0.0, self.seconds - sum(seconds_by_part.values()))


REMOTE_STAGE = "video"  # the stage in which a server makes a video


class Report:
    """The report of one run: notes, the progress of the stages, the final table, and the command that resumes the run.

    Attributes:
        quiet: Whether only the result and errors are printed.
        in_json: Whether the result is printed as a JSON object.
        stats: Whether a table of how the process spent its time follows the final table.
        runs_alone: Whether this command is the only code that runs in the process.
        has_peers: Whether other processes compute together with this process, and so wait for it.
        muted: Whether this process prints nothing, because another process reports.
        seconds: The seconds of all stages until now.
        videos: The number of complete videos if the command makes several; else None.
    """

    def __init__(self) -> None:
        self.resume_command: str | None = None
        self._has_saved_work: Callable[[], bool] = lambda: True
        self.quiet = False
        self.in_json = False
        self.stats = False
        self.runs_alone = False
        self.has_peers = False
        self.muted = False
        self.seconds: dict[str, float] = {}
        self.num_videos: int | None = None
        self._start_time = time.time()
        self._first_stage: float | None = None
        self._rows: dict[str, StageRow] = {}
        self._current: Stage | None = None
        self._is_stopping = False
        self._name, self._num_steps = "", 0  # the name of the current stage, and its number of completed steps
        # Number of steps in the file; None while the last completed step is not in the file
        self._num_saved_steps: int | None = 0
        self._printed_notes: set[str] = set()
        self._seams: list[Seam] = []

    @cached_property
    def console(self) -> "Console":
        from wanjax.pipelines.progress import console  # imported late for a quick --help

        return console(quiet=self._is_silent)

    @property
    def _is_silent(self) -> bool:
        return self.muted or self.quiet

    def print_result(self, file: "AnyPath", metadata: Mapping[str, Any], **fields: Any) -> None:
        """Print the result of a run: the name of the file, or a JSON object with the file's metadata and the other
        `fields`."""
        if self.num_videos is not None:
            self.num_videos += 1
        text: str | bytes = str(file)
        if self.in_json:
            text = json.dumps({"file": text, **fields, "record": dict(metadata)})
        # printed as bytes if possible, because the name of a file may not be valid text
        elif hasattr(sys.stdout, "buffer"):
            text = os.fsencode(text)
        try:
            click.echo(text)
        except BrokenPipeError:  # the output is closed, but the video is written and further videos may follow
            discard_output(sys.stdout)

    def note(self, text: str) -> None:
        """Print a line."""
        self.console.print(text)

    def record_resume(self, resume_command: str, text: str | None = None) -> None:
        """Set the command that resumes the run. If `text` says what is complete, print both."""
        self.resume_command, self._has_saved_work = resume_command, lambda: True
        if text is not None:
            self.note(f"{text}; continue with: {resume_command}")
        self.stop_if_interrupted()

    def load(self, component: str, done: int, total: int) -> None:
        """On the line of the current stage, show that `done` of `total` bytes of a component are loaded."""
        if self._current:
            self._current.load(component, done, total)
            self.stop_if_interrupted()

    def set_progress(self, unit: str, done: int, total: int, *, suffix: str = "") -> None:
        """Show that `done` of `total` units of the current stage, such as steps, are complete. Append a suffix to this
        text."""
        if self._current:
            self._current.set_progress(unit, done, total, suffix)
            self._num_steps = done if unit in ("step", "denoised chunk") else 0
            if unit == "step" and done == total:
                self._num_saved_steps = None  # the latents are about to replace the file
        if done < total:
            self.stop_if_interrupted()

    def record_saved_steps(self, steps: int | None) -> None:
        """Set the number of steps that are in the file; None while a completed step is not yet in the file."""
        self._num_saved_steps = steps

    def stop_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed while a stage ran."""
        if self._is_stopping:
            raise KeyboardInterrupt

    def enable_resume(self, has_saved_work: Callable[[], bool] = lambda: True) -> None:
        """Record that the user can run the same command again. `has_saved_work` returns whether the command then
        resumes from saved work. Otherwise it starts again."""
        self.resume_command = shlex.join(["wanjax", *sys.argv[1:]])
        self._has_saved_work = has_saved_work

    @property
    def outcome(self) -> str:
        """The last line for a run that did not complete: the command that resumes the run, or "" if there is none."""
        if not self.resume_command:
            return ""
        if self.num_videos == 0:
            return f"no video is complete; start again with: {self.resume_command}\n"
        if not self._has_saved_work():
            return f"no work is complete; start again with: {self.resume_command}\n"
        return f"completed work is kept; continue with: {self.resume_command}\n"

    def exit_despite_peers(self, error: BaseException) -> NoReturn:
        """End the process because of an error, although other processes wait for it.

        If all processes have the same error, they end at nearly the same time, so this function waits a moment for
        them. If the other processes are computing, JAX would keep this process for minutes.
        """
        import jax

        if not isinstance(error, click.exceptions.Exit):
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        shutdown_thread = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        shutdown_thread.start()
        shutdown_thread.join(EXIT_GRACE)
        run_cleanups()
        os._exit(getattr(error, "exit_code", 1))

    def interrupted(self) -> None:
        """Handle Ctrl-C outside of a stage: end the process at once.

        An exception is no alternative. While Python imports, collects garbage or waits for C code, an exception would
        be lost or would crash the process.
        """
        exit_immediately(
            f"\nwanjax: stopped\n{self.outcome}", is_terminal=self._current is not None and self.console.is_terminal
        )

    def _on_interrupt(self) -> None:
        """Handle Ctrl-C in a stage. An exception inside JAX could be lost or crash the process. So the run stops after
        the current step."""
        if self._is_stopping:
            message = "" if self.muted else f"\nwanjax: stopped at once\n{self.outcome}"
            exit_immediately(message, self.console.is_terminal)
        self._is_stopping = True
        unit = self._current.unit if self._current else ""
        work = f"the current {unit}s" if unit else "this stage"
        if unit == "video":
            work = "the current steps, whose videos begin again when you run the command again"
        action = "cancelling the video on the server" if self._name == REMOTE_STAGE else f"stopping after {work}"
        self.note(f"{action}; press Ctrl-C again to stop at once")
        if self.runs_alone and self._name in SAFE_STAGES:
            threading.Thread(target=self._exit_when_saved, args=[self._current], daemon=True).start()

    def _exit_when_saved(self, stage: "Stage | None") -> None:
        """If a stage does not end by itself, for example because memory is short, end the process when all completed
        steps are saved."""
        time.sleep(STOP_TIMEOUT)
        while stage is not None and self._current is stage:
            if self._num_saved_steps is not None and self._num_steps <= self._num_saved_steps:
                exit_immediately("" if self.muted else f"\nwanjax: stopped\n{self.outcome}", self.console.is_terminal)
            time.sleep(POLL_INTERVAL)

    @contextmanager
    def print_warnings(self) -> Iterator[None]:
        """Within the block, print each warning of wanjax and of JAX's compilation cache once, as a note."""

        def show(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
            cache_warning = CACHE_WARNING.match(str(message))
            if not (cache_warning or issubclass(category, WanjaxWarning)):
                original(message, category, *location, **options)
                return
            text = (
                f"{cache_warning[1]} the cache of compiled programs failed: {cache_warning[2]}"
                if cache_warning
                else str(message)
            )
            if text not in self._printed_notes:
                self._printed_notes.add(text)
                self.note(f"note: {text}")

        with warnings.catch_warnings():
            original, warnings.showwarning = warnings.showwarning, show
            warnings.simplefilter("always", WanjaxWarning)
            warnings.filterwarnings("always", CACHE_WARNING.pattern)
            yield

    @contextmanager
    def print_compilations(self) -> Iterator[None]:
        """Within the block, print each program that is compiled or read from a cache. At the end, print their
        number."""
        from wanjax.compile_cache.compilations import Compilation, watch_compiler
        from wanjax.pipelines.progress import Compilations

        compilations = Compilations()

        def report_compilation(compilation: Compilation) -> None:
            compilations.add(compilation)
            action = "read from the cache" if compilation.cached else "compiled"
            problem = (
                f", because the cached program cannot be used: {compilation.refusal_reason}"
                if compilation.refusal_reason
                else ""
            )
            self.note(f"program {compilation.name}: {action} in {format_duration(compilation.seconds)}{problem}")

        with watch_compiler(report_compilation):
            yield
        compiled, cached = compilations.compiled, compilations.cached
        self.note(f"{pluralize(compiled, 'program')} compiled, {cached} read from the cache")

    @contextmanager
    def stage(self, name: str, *, at_once: bool = False) -> Iterator[None]:
        """Within the block, show the stage as running. At the end, add its time and its peak memory to the table.

        With `at_once`, Ctrl-C ends the stage immediately. Stages that have nothing to save use `at_once`.
        """
        from wanjax.pipelines import progress

        _reset_host_peak_memory()
        self._first_stage = self._first_stage or time.time()
        with nullcontext() if at_once else handle_interrupts(self._on_interrupt):
            try:
                with progress.stage_on_console(name, None if self._is_silent else self.console) as stage:
                    self._current, self._name, self._num_steps, self._num_saved_steps = stage, name, 0, 0
                    yield
            finally:
                self._current = None
        row = self._rows.setdefault(name, StageRow())
        row.add(stage)
        self.seconds[name] = round(row.seconds, 3)

    def add_seam(self, seam: "Seam") -> None:
        """Add the seam of a window to the table that `stats` prints."""
        self._seams.append(seam)

    def table(self) -> None:
        """Print the time and the peak memory of each stage. With `stats`, also print the drift of windows and the
        shares of the process's time."""
        names = ("stage", "time", "compiling", "peak memory", "peak device memory")
        row_texts = [(name, *row.cells()) for name, row in self._rows.items()]
        used_columns = [
            column for column in range(len(names)) if any(row[column] for row in row_texts)
        ]  # CPUs report no device memory
        rows = [[row[column] for column in used_columns] for row in row_texts]
        print_table(self.console, [names[column] for column in used_columns], rows)
        if self.stats and self._seams:
            self._print_seams()
        if self.stats:
            self._print_time_shares()

    def _print_seams(self) -> None:
        """Print how much the colours of each window had drifted from the previous window's."""
        names = ["window", "lightness", "colour", "after matching"]
        rows = [
            (str(window + 1), f"{drift.lightness:+.2f}", f"{drift.colour:.2f}", remaining)
            for window, drift in self._seams
            for remaining in ["" if drift.remaining is None else f"{drift.remaining:.2f}"]
        ]
        print_table(self.console, names, rows)

    def _print_time_shares(self) -> None:
        """Print how the process spent its time until now."""
        import psutil

        process_start, now = psutil.Process().create_time(), time.time()
        first_stage = self._first_stage or now
        parts = [("starting Python", self._start_time - process_start), ("preparing", first_stage - self._start_time)]
        parts += [part for name, row in self._rows.items() for part in row.parts(name)]
        total = now - process_start
        parts.append(("between stages", total - sum(seconds for _, seconds in parts)))
        rows = [
            (name, format_duration(seconds), f"{seconds / total:.0%}") for name, seconds in parts if seconds >= 0.0005
        ]
        print_table(
            self.console, ["where the time went", "time", "share"], [*rows, ("total", format_duration(total), "")]
        )


def _reset_host_peak_memory() -> None:
    with suppress(OSError):
        PROC_CLEAR_REFS.write_text("5")


def _host_peak_memory() -> int | None:
    """Read the peak memory of the process in bytes. If the system supports resets, it is the peak since the last
    reset."""
    with suppress(OSError):
        if match := re.search(r"VmHWM:\s*(\d+) kB", PROC_STATUS.read_text()):
            return int(match[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _device_peak_memory() -> int | None:
    """Read the peak memory of each local accelerator since the start of the process, and return the largest. Return
    None if there are no accelerators."""
    if "jax" not in sys.modules:
        return None
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices() if device.platform != "cpu"]
    return max((stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat), default=None)


def print_error(message: str) -> None:
    """Print a message on stderr. If no process reads the message, the exit status still shows the error."""
    try:
        click.echo(message, err=True, nl=False)
    except BrokenPipeError:
        discard_output(sys.stderr)


STOP_BYTE = b"\0"
SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def handle_interrupts(on_interrupt: Callable[[], None]) -> Iterator[None]:
    """Within the block, each Ctrl-C or SIGTERM only calls `on_interrupt` from a thread. Outside of the main thread this
    function does nothing, because only the main thread can handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while (signal_byte := reader.recv(1)) not in (b"", STOP_BYTE):
            if signal_byte[0] in previous_handlers:
                on_interrupt()

    previous_handlers = {
        number: signal.signal(number, lambda number, frame: None) for number in (signal.SIGINT, signal.SIGTERM)
    }
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None means that code other than Python set the handler
        writer.send(STOP_BYTE)
        thread.join()
        reader.close()
        writer.close()


def exit_immediately(message: str, is_terminal: bool) -> NoReturn:
    """End the process at once, after running the cleanups, printing a message and restoring the terminal's cursor."""
    run_cleanups()
    with suppress(OSError):  # the pipe may be closed
        os.write(2, f"{SHOW_CURSOR if is_terminal else ''}{message}".encode())
    os._exit(INTERRUPTED)
