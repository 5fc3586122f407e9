# SPDX-License-Identifier: Apache-2.0
"""Progress counts what the device has finished, and predicts the remaining time without the time of compiling."""

import re
import sys
import time
from copy import copy
from io import StringIO
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import wanjax
from tests.support.tiny import tiny_checkpoint
from wanjax.pipelines import progress
from wanjax.pipelines.progress import Stage
from wanjax.pipelines.wan.denoisers import WanDenoiser

pytestmark = pytest.mark.usefixtures("cached_programs")

STEPS, SECONDS = 24, 0.25
SMALL: dict[str, Any] = {"size": (16, 32), "frames": 5, "guidance_scale": 1.0, "seed": 0}


class Recorder(StringIO):
    """A terminal that records what is written to it, with the times."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[float, str]] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.append((time.perf_counter(), text))
        return len(text)

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.written)


STEP_END_TIMES: list[float] = []  # of steps on the device


class SlowDenoiser(WanDenoiser):
    """A denoiser whose steps take a fixed time on the device."""

    seconds = SECONDS

    def predict(self, *arguments: Any, **options: Any) -> Any:
        prediction = super().predict(*arguments, **options)
        return jax.pure_callback(self.wait, prediction, prediction)

    @staticmethod
    def wait(prediction: Any) -> Any:
        time.sleep(SlowDenoiser.seconds)
        STEP_END_TIMES.append(time.perf_counter())
        return prediction


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return wanjax.load(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def slow_pipe(pipe, monkeypatch):
    """The pipeline with steps that take a fixed time."""
    monkeypatch.setattr(type(pipe.model), "denoiser", SlowDenoiser())
    STEP_END_TIMES.clear()
    return pipe


def test_a_terminal_shows_finished_steps_and_the_remaining_time(slow_pipe):
    """No line reports a step before the device has finished it. After half of the steps, the remaining time is correct
    to 25 %."""
    conditioning, recorder = slow_pipe.encode("a"), Recorder()
    with progress.stage_on_console("denoise", Console(file=recorder, force_terminal=True, width=120)):
        jax.block_until_ready(slow_pipe.denoise(conditioning, steps=STEPS, **SMALL))
    assert len(STEP_END_TIMES) == STEPS
    counts, num_predictions = [], 0
    for written_at, text in recorder.written:
        for count in re.findall(rf"step (\d+) of {STEPS}", text):
            counts.append(int(count))
            assert counts[-1] <= sum(end <= written_at for end in STEP_END_TIMES)
        prediction = re.search(rf"step (\d+) of {STEPS}, (\d+) s left, [\d.]+ ms each", text)
        if prediction and int(prediction[1]) >= STEPS / 2:
            expected = STEP_END_TIMES[-1] - written_at
            assert abs(int(prediction[2]) - expected) <= 0.25 * expected + 0.5  # it is printed in whole seconds
            num_predictions += 1
    assert counts == sorted(counts)
    assert set(range(STEPS // 2, STEPS)) <= {*counts}
    assert num_predictions > STEPS / 2


def test_output_to_a_file_has_plain_lines(slow_pipe, monkeypatch):
    monkeypatch.setattr(SlowDenoiser, "seconds", SECONDS / 5)
    monkeypatch.setattr(progress, "LINE_INTERVAL", 4 * SECONDS / 5)
    output = StringIO()
    conditioning = slow_pipe.encode("a")
    with progress.stage_on_console("denoise", Console(file=output, width=120)):
        jax.block_until_ready(slow_pipe.denoise(conditioning, steps=STEPS, **SMALL))
    lines = output.getvalue().splitlines()
    assert len(lines) >= STEPS / 8
    assert all(re.match(rf"denoise: step \d+ of {STEPS}", line) for line in lines)
    assert re.fullmatch(rf"denoise: step {STEPS} of {STEPS}, [\d.]+ ms each, [\d.]+ s in all", lines[-1])


def test_unchanged_progress_is_not_printed(monkeypatch):
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.01)
    output = StringIO()
    with progress.stage_on_console("plan", Console(file=output, width=120)) as stage:
        for done in range(3):
            stage.set_progress("program", done, 8)
            time.sleep(0.1)
    *lines, last = output.getvalue().splitlines()
    assert len(lines) == len({*lines}) <= 4
    assert lines[-1] == "plan: program 2 of 8"  # programs differ, so that no pace predicts the end
    assert re.fullmatch(r"plan: program 2 of 8, [\d.]+ m?s in all", last)


def test_compiling_is_reported_and_excluded_from_the_pace():
    recorder = Recorder()
    with progress.stage_on_console("denoise", Console(file=recorder, force_terminal=True, width=120)) as stage:
        stage.set_progress("step", 0, 9)
        for done in range(1, 5):
            if done == 2:

                def slow_to_compile(x):
                    for i in range(200):  # compiles for more than a second
                        x = jnp.sort(x * (i + 1.5))
                    return x

                jax.block_until_ready(jax.jit(slow_to_compile)(jnp.arange(8.0)))
            time.sleep(0.02)
            stage.set_progress("step", done, 9)
        seconds = stage.compilations.seconds
    assert "step 1 of 9, compiling for" in recorder.text
    assert stage.unit_seconds is not None
    assert stage.unit_seconds < seconds / 4


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])
    return now


def test_the_pace_is_the_mean_without_compiling(clock):
    stage = Stage("denoise")
    stage.set_progress("step", 0, 20)
    assert stage.unit_seconds is None
    for done, seconds in enumerate([100, 2, 2, 4, 4], 1):  # the first step includes compiling
        clock[0] += seconds
        stage.set_progress("step", done, 20)
    assert stage.unit_seconds == 3
    assert str(stage) == "step 5 of 20, 45 s left, 3 s each"
    clock[0] += 2
    assert stage.remaining_seconds == 15 * 3 - 2
    clock[0] += 30
    assert stage.remaining_seconds == 14 * 3  # the current step takes longer than all before
    stage.set_progress("chunk", 5, 20)  # chunks have their own pace
    assert str(stage) == "chunk 5 of 20"


def test_steps_that_end_at_the_same_time_have_no_pace(clock):
    """The host noticed the first two steps at the same time, because it was compiling the next program."""
    stage = Stage("denoise")
    stage.set_progress("step", 0, 5)
    clock[0] += 9
    stage.set_progress("step", 1, 5)
    clock[0] += 44e-6
    stage.set_progress("step", 2, 5)
    assert stage.unit_seconds is None
    assert str(stage) == "step 2 of 5"
    for done in (3, 4):
        clock[0] += 2
        stage.set_progress("step", done, 5)
    assert stage.unit_seconds == 2


def test_steps_before_a_resume_do_not_affect_the_pace(clock):
    """The pace does not include steps of an earlier run."""
    stage = Stage("denoise")
    stage.set_progress("step", 10, 20)
    assert str(stage) == "step 10 of 20"
    for done in (11, 12, 13):
        clock[0] += 60
        stage.set_progress("step", done, 20)
    assert str(stage) == "step 13 of 20, 7 min 0 s left, 1 min 0 s each"
    stage.load("transformer_2", 10**9, 28 * 10**9)
    assert str(stage) == "step 13 of 20, loading transformer_2, 1 GB of 28 GB, 1 min 0 s each"
    stage.load("transformer_2", 28 * 10**9, 28 * 10**9)
    for done in (14, 15):
        clock[0] += 30
        stage.set_progress("step", done, 20)
    assert str(stage) == "step 15 of 20, 2 min 30 s left, 30 s each"  # the other network has its own pace


def test_a_narrow_terminal_shows_all_words(clock):
    """The words are complete, and the bar is short."""
    recorder = Recorder()
    with progress.stage_on_console("denoise", Console(file=recorder, force_terminal=True, width=60)) as stage:
        for done in (0, 1, 2):
            clock[0] += 1.5
            stage.set_progress("step", done, 20)
        stage.row.refresh()
        recorder.written.clear()
        stage.row.refresh()
    row = re.sub(r"\x1b\[[\d;?]*\w", "", recorder.written[0][1])
    assert re.search(r"denoise [━╸╺]+ 0:00:04 step 2 of 20, 27 s left, 1\.5 s each", row)


def test_the_library_shows_its_stages_on_a_terminal_only(pipe, monkeypatch, capsys):
    copied = copy(pipe)

    def generate_with(progress: bool | None) -> None:
        copied.progress = progress
        copied("a", steps=2, **SMALL)

    generate_with(None)
    assert capsys.readouterr().err == ""
    generate_with(True)
    assert re.findall(r"^(\w+): ([^,]*), ", capsys.readouterr().err, re.MULTILINE) == [
        ("encode", "done"),
        ("denoise", "step 2 of 2"),
        ("decode", "chunk 2 of 2"),
    ]
    terminal = Recorder()
    monkeypatch.setattr(sys, "stderr", terminal)
    generate_with(False)
    assert terminal.text == ""
    generate_with(None)
    for words in ("encode", "denoise", "step 2 of 2", "decode", "chunk 2 of 2"):
        assert words in terminal.text
    with pytest.raises(AttributeError, match=r"pipe\.progress = False hides the progress"):
        pipe.set_progress_bar_config(disable=True)


def test_loading_is_shown_with_the_stage_that_loads(pipe, monkeypatch):
    """The test records calls, because networks as small as these load between two updates of a terminal."""
    loads = []
    monkeypatch.setattr(Stage, "load", lambda self, component, done, total: loads.append((self.name, component)))
    pipe.free()
    pipe("a", steps=1, **SMALL)
    assert set(loads) == {("encode", "text_encoder"), ("denoise", "transformer"), ("decode", "vae")}


def test_steps_of_a_sample_are_distinguished_from_training_steps():
    with progress.stage_on_console("train", None) as stage:
        units = []
        for work in ("", "sample", ""):
            with progress.unit_prefix(work):
                progress.set_progress("step", 1, 20)
            units.append(stage.unit)
    assert units == ["step", "sample step", "step"]
