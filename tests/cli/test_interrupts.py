# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C as real signals to real processes: the first stops after a step or chunk, the second at once."""

import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

from tests.support.commands import files, succeeded, wanjax
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint
from wanjax.checkpoints.files import SafetensorsFile
from wanjax.cli.report import Report
from wanjax.media import stage_files

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends signals of POSIX")
ARGUMENTS = ("a", "--size", "32x16", "--frames", "5", "--dtype", "float32", "--dir", "d")
CODE = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from wanjax.cli import main
from wanjax.pipelines.run import Run

def compute():
    jax.block_until_ready(jax.jit(lambda x: lax.while_loop(lambda y: y < 2, jnp.sin, x))(1.0))  # for ever

def compile():
    constant = np.ones(20000, np.float32)  # folded by a slow interpreter, which takes minutes
    jax.jit(lambda: lax.reduce_window(jnp.asarray(constant), 0.0, lax.add, constant.shape, (1,), "SAME"))()

def frames(run, *_, **__):
    run.report_progress("chunk", 0, 2)
    yield np.zeros((1, 16, 32, 3), np.uint8)
    run.report_progress("chunk", 1, 2)
    compute()

Run.{method} = {work}
main()
"""
CONTINUE = "completed work is kept; continue with: "


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder of inputs: the stage files of a video, a list of prompts, and pictures to train on."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "prompts.txt").write_text("a red circle\na blue square\n")
    (folder / "clips").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (32, 32)).save(folder / f"clips/{name}.png")
        (folder / f"clips/{name}.txt").write_text("a red circle")
    small = ("--size", "32x32", "--frames", "5", "--steps", "1")
    succeeded(wanjax("encode", "a red circle", "--dir", folder / "d", *small[:4]))
    succeeded(wanjax("denoise", "--dir", folder / "d", *small))
    return folder


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Run:
    """A command in a process. `output` is its stderr so far, from a pipe or a terminal."""

    def __init__(self, command: list[str], environment: dict[str, str], *, terminal: bool = False):
        self.reader, writer = pty.openpty() if terminal else os.pipe()
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=writer)
        os.close(writer)
        os.set_blocking(self.reader, False)
        self.output = ""

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.reader)

    def wait_for(self, text: str, seconds: float) -> None:
        """Wait until the command has written this text."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            self.read()
            time.sleep(0.05)

    def read(self) -> None:
        with suppress(OSError):  # nothing yet, or the other end of the terminal is closed
            self.output += os.read(self.reader, 65536).decode()

    def press(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait_for_end(self, seconds: float) -> int:
        """Return the exit status; fail if the process runs for longer."""
        status = self.process.wait(seconds)
        self.read()
        return status


def blocked_command(method: str, work: str, *arguments: str) -> list[str]:
    """Return a command whose run has one method replaced."""
    return [sys.executable, "-c", CODE.format(method=method, work=work), *arguments]


COMMANDS = {
    "generate": ["a red circle", "--steps", "200", "--out", "a.mp4"],
    "plan": ["plan", "nano", "--chip", "cpu"],
    "convert": ["convert", "nano", "converted"],
    "serve": ["serve", "--port", "0", "--dir", "served", "--no-rehearse"],
    "encode": ["encode", "a red circle", "--dir", "e"],
    "denoise": ["denoise", "--dir", "d", "--steps", "200", "--force"],
    "decode": ["decode", "--dir", "d"],
    "batch": ["batch", "prompts.txt", "--out", "videos", "--steps", "200"],
    "train": ["train", "nano", "clips", "--out", "trained", "--size", "32x32", "--frames", "1"],
}
MOMENTS = [0.2, 0.5, 1, 2, 3, 5]


@pytest.mark.parametrize(("command", "seconds"), quick([("generate", 2), ("convert", 0.5)], product(COMMANDS, MOMENTS)))
def test_ctrl_c_ends_a_command_at_any_moment(environment, inputs, command, seconds):
    """Also while Python imports, JAX starts, or weights load: the status is 130, without traceback or partial files.

    A folder of stage files stays only if the last line names it.
    """
    shutil.copytree(inputs, ".", dirs_exist_ok=True)
    runs = Path(environment["XDG_CACHE_HOME"], "wanjax", "runs")
    before = set(runs.glob("*"))
    with Run([sys.executable, "-m", "wanjax", *COMMANDS[command]], environment) as run:
        time.sleep(seconds)
        run.press()
        status = run.wait_for_end(20)
    if "Traceback" in run.output:  # Python had not yet imported this library
        assert "wanjax" not in run.output.replace("python -m wanjax", "")
    elif status:
        assert status == 130
        assert "wanjax: stopped" in run.output
    else:  # the command had finished, or the server already listened
        assert command in ("plan", "convert", "serve", "encode", "denoise", "decode")
    assert not (status and Path("converted").exists())
    assert not [path for path in Path().rglob("*.mp4") if status]
    suggests_resuming = "continue with" in run.output or "start again" in run.output
    assert not (status and command in ("denoise", "batch", "train")) or suggests_resuming == (
        f": wanjax {' '.join(COMMANDS[command])}\n" in run.output
    )
    assert all(str(folder) in run.output for folder in set(runs.glob("*")) - before)


@pytest.mark.slow  # the next test is quick
@pytest.mark.parametrize("work", ["compute", "compile"])
def test_a_second_ctrl_c_ends_what_xla_is_doing(model, environment, work):
    command = blocked_command(
        "latents", f"lambda *_, **__: (call() for call in [{work}])", *ARGUMENTS, "--model", model
    )
    with Run(command, environment) as run:
        run.wait_for("encode: done", 300)
        time.sleep(2)
        run.press()
        run.wait_for("stopping after this stage; press Ctrl-C again to stop at once\n", 5)
        time.sleep(1)
        assert run.process.poll() is None
        run.press()
        assert run.wait_for_end(5) == 130
    assert run.output.endswith(
        f"\nwanjax: stopped at once\n{CONTINUE}{shlex.join(['wanjax', *ARGUMENTS, '--model', model])}\n"
    )
    assert files("d") == [stage_files.CONFIG, stage_files.EMBEDDINGS_FILE]


@pytest.mark.parametrize("out", quick(["output_video.mp4"], ["output_video.mp4", "frames"]))
def test_a_second_ctrl_c_leaves_no_unfinished_file(model, environment, out):
    """The encoder of an mp4 would write its file at the end of its input, so it must end too."""
    options = ("--model", model, "--steps", "1", "--out", f"d/{out}")
    with Run(blocked_command("frames", "frames", *ARGUMENTS, *options), environment, terminal=True) as run:
        run.wait_for("chunk 1 of 2", 300)
        run.press()
        run.wait_for("stopping after the current chunks", 5)
        run.press()
        assert run.wait_for_end(5) == 130
    assert run.output.count("\x1b[?25l") == run.output.count("\x1b[?25h")  # the cursor is shown again
    assert ": wanjax decode --dir d" in run.output
    time.sleep(1)
    assert files("d") == [stage_files.CONFIG, stage_files.EMBEDDINGS_FILE, stage_files.LATENTS_FILE]


@pytest.mark.slow  # `test_a_stopped_command_says_that_repeating_it_resumes` stops `denoise` after a step
def test_ctrl_c_stops_after_a_step(model, environment):
    command = [sys.executable, "-m", "wanjax", *ARGUMENTS, "--model", model, "--steps", "100000"]
    with Run(command, environment) as run:
        run.wait_for("encode: done", 300)
        time.sleep(4)
        run.press()
        run.wait_for("; press Ctrl-C again to stop at once\n", 5)
        assert run.wait_for_end(120) == 130
    assert run.output.endswith(f"\nwanjax: stopped\n{CONTINUE}{shlex.join(['wanjax', *command[3:]])}\n")
    assert "Traceback" not in run.output
    assert {stage_files.CONFIG, stage_files.EMBEDDINGS_FILE} <= set(files("d"))
    assert not (Path("d") / stage_files.LATENTS_FILE).exists()


@pytest.mark.slow  # `test_ctrl_c_ends_an_endless_stage` is quick
@pytest.mark.parametrize("done", [0, 1, 2])
def test_ctrl_c_ends_a_long_step(environment, done):
    """The steps before it are saved, and the printed command resumes from the last of them."""
    arguments = ["a red circle", "--size", "1152x1152", "--frames", "5", "--steps", "6", "--dir", "d"]
    with Run([sys.executable, "-m", "wanjax", *arguments], environment, terminal=True) as run:
        run.wait_for(f"step {done} of 6", 300)
        for _ in range(20):  # a process waits for a terminal that nobody reads
            run.read()
            time.sleep(0.1)
        run.press()
        run.wait_for(CONTINUE + shlex.join(["wanjax", *arguments]), 3)
        assert run.wait_for_end(1) == 130
    state = Path("d") / stage_files.STATE_FILE
    assert state.exists() == (done > 0)
    assert done == 0 or SafetensorsFile(state).metadata["steps"] == str(done)


RESUMABLE = {  # the arguments of a command, and a text that it writes during its stage
    "denoise": (["-m", "wanjax", "denoise", "--dir", "d", "--steps", "20000", "--force"], "denoise: step"),
    "decode": (["-c", CODE.format(method="frames", work="frames"), "decode", "--dir", "d"], "decode: chunk 1 of 2"),
    "train": (["-m", "wanjax", *COMMANDS["train"], "--steps", "100000"], "train: step"),
    "batch": (["-m", "wanjax", *COMMANDS["batch"][:-1], "20000"], "videos: video 0 of 2"),
}


@pytest.mark.parametrize("command", quick(["denoise"], RESUMABLE))
def test_a_stopped_command_says_that_repeating_it_resumes(environment, inputs, command):
    shutil.copytree(inputs, ".", dirs_exist_ok=True)
    arguments, running_text = RESUMABLE[command]
    with Run([sys.executable, *arguments], environment) as run:
        run.wait_for(running_text, 300)
        run.press()
        if command == "decode":  # the chunk never ends
            run.wait_for("stopping after", 5)
            run.press()
        assert run.wait_for_end(30) == 130
    again = " ".join(["wanjax", *arguments[arguments.index(command) :]])
    before = "no video is complete; start again with" if command == "batch" else CONTINUE.rstrip(": ")
    assert run.output.endswith(f"{before}: {again}\n")
    assert (command == "batch") == ("stopping after the current steps, whose videos begin again" in run.output)
    assert "Traceback" not in run.output
    assert not [*Path().rglob("*.mp4")]


STATELESS = {"selftest": (["selftest"], "attention"), "bench": (["bench", "nano", "--no-keep"], "a step, ")}
"""Commands that save no measurements, and the text that they write when they measure."""


@pytest.mark.parametrize("command", quick(["selftest"], STATELESS))
def test_ctrl_c_ends_a_command_without_state(environment, command):
    arguments, running_text = STATELESS[command]
    with Run([sys.executable, "-m", "wanjax", *arguments], environment) as run:
        run.wait_for(running_text, 300)
        run.press()
        assert run.wait_for_end(10) == 130
    assert run.output.endswith("\nwanjax: stopped\n")
    assert "Ctrl-C again" not in run.output
    assert files(".") == []


def denoising(report: Report, last: int, number: int = signal.SIGINT) -> None:
    """Count steps up to `last` of 3; raise a signal before the last."""
    with report.stage("denoise"):
        report.set_progress("step", 1, 3)
        signal.raise_signal(number)
        time.sleep(0.1)
        report.set_progress("step", last, 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_waits_for_the_step(number):
    """An exception that a signal raises inside JAX is lost, or crashes the process."""
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        denoising(Report(), 2, number)
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_keeps_complete_files():
    message = Report()
    denoising(message, 3)
    with pytest.raises(KeyboardInterrupt):
        message.record_resume("wanjax decode", "the latents are there")
    assert message.resume_command == "wanjax decode"


def test_ctrl_c_ends_an_endless_stage(monkeypatch):
    """For example, if memory is exhausted. Denoising first saves its finished steps, even after the timeout."""
    ended = threading.Event()
    monkeypatch.setattr("wanjax.cli.report.exit_immediately", lambda *_: ended.set())
    monkeypatch.setattr("wanjax.cli.report.STOP_TIMEOUT", 0.2)
    cases = [("encode", 0, 0, True), ("denoise", 0, 0, True), ("denoise", 3, 0, False), ("denoise", 3, 2, False)]
    cases += [("denoise", 3, None, False), ("denoise", 3, 3, True), ("decode", 0, 0, True)]
    cases += [("train", 0, 0, True), ("train", 3, 0, False)]  # while a step compiles, and with steps to save
    cases += [("record", 0, 0, True), ("compile", 0, 0, True)]
    for stage, done, saved, ends in cases:
        report = Report()
        report.quiet = report.runs_alone = True
        ended.clear()
        with report.stage(stage):
            report.set_progress("step", done, 20)
            report.record_saved_steps(saved)
            os.kill(os.getpid(), signal.SIGINT)
            assert ended.wait(1) == ends
            report.record_saved_steps(done)
            assert ended.wait(1)
