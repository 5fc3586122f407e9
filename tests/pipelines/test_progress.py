# SPDX-License-Identifier: Apache-2.0
"""Progress: the count is that of what the device has done, and the time left that of the pace without compiling."""

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
    """A terminal that keeps what is written to it, and when."""

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


ENDS: list[float] = []  # of the steps on the device


class SlowDenoiser(WanDenoiser):
    """A denoiser whose steps take a fixed time on the device."""

    seconds = SECONDS

    def predict(self, *arguments: Any, **how: Any) -> Any:
        prediction = super().predict(*arguments, **how)
        return jax.pure_callback(self.wait, prediction, prediction)

    @staticmethod
    def wait(prediction: Any) -> Any:
        time.sleep(SlowDenoiser.seconds)
        ENDS.append(time.perf_counter())
        return prediction


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    return wanjax.load(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def slow(pipe, monkeypatch):
    """The pipeline with steps that take a fixed time."""
    monkeypatch.setattr(type(pipe.model), "denoiser", SlowDenoiser())
    ENDS.clear()
    return pipe


def test_a_recorded_terminal(slow):
    """No line reports a step before the device has made it. After half of the steps, the remaining time is right within
    25 %."""
    encoded, recorder = slow.encode("a"), Recorder()
    with progress.stage_on_console("denoise", Console(file=recorder, force_terminal=True, width=120)):
        jax.block_until_ready(slow.denoise(encoded, steps=STEPS, **SMALL))
    assert len(ENDS) == STEPS
    counts, lefts = [], 0
    for when, text in recorder.written:
        for count in re.findall(rf"step (\d+) of {STEPS}", text):
            counts.append(int(count))
            assert counts[-1] <= sum(end <= when for end in ENDS)
        left = re.search(rf"step (\d+) of {STEPS}, (\d+) s left, [\d.]+ ms each", text)
        if left and int(left[1]) >= STEPS / 2:
            expected = ENDS[-1] - when
            assert abs(int(left[2]) - expected) <= 0.25 * expected + 0.5  # it is printed in whole seconds
            lefts += 1
    assert counts == sorted(counts)
    assert set(range(STEPS // 2, STEPS)) <= {*counts}
    assert lefts > STEPS / 2


def test_plain_lines_where_there_is_no_terminal(slow, monkeypatch):
    monkeypatch.setattr(SlowDenoiser, "seconds", SECONDS / 5)
    monkeypatch.setattr(progress, "LINE_INTERVAL", 4 * SECONDS / 5)
    written = StringIO()
    encoded = slow.encode("a")
    with progress.stage_on_console("denoise", Console(file=written, width=120)):
        jax.block_until_ready(slow.denoise(encoded, steps=STEPS, **SMALL))
    lines = written.getvalue().splitlines()
    assert len(lines) >= STEPS / 8
    assert all(re.match(rf"denoise: step \d+ of {STEPS}", line) for line in lines)
    assert re.fullmatch(rf"denoise: step {STEPS} of {STEPS}, [\d.]+ ms each, [\d.]+ s in all", lines[-1])


def test_unchanged_progress_is_not_printed(monkeypatch):
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.01)
    written = StringIO()
    with progress.stage_on_console("plan", Console(file=written, width=120)) as stage:
        for done in range(3):
            stage.set_progress("program", done, 8)
            time.sleep(0.1)
    *lines, last = written.getvalue().splitlines()
    assert len(lines) == len({*lines}) <= 4
    assert lines[-1] == "plan: program 2 of 8"  # each is unlike the others, so no pace tells when the last one is ready
    assert re.fullmatch(r"plan: program 2 of 8, [\d.]+ m?s in all", last)


def test_compiling_is_reported_and_excluded_from_the_pace():
    recorder = Recorder()
    with progress.stage_on_console("denoise", Console(file=recorder, force_terminal=True, width=120)) as stage:
        stage.set_progress("step", 0, 9)
        for done in range(1, 5):
            if done == 2:

                def unlike_others(x):
                    for i in range(200):  # a second and more
                        x = jnp.sort(x * (i + 1.5))
                    return x

                jax.block_until_ready(jax.jit(unlike_others)(jnp.arange(8.0)))
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


def test_the_pace(clock):
    stage = Stage("denoise")
    stage.set_progress("step", 0, 20)
    assert stage.unit_seconds is None
    for done, seconds in enumerate([100, 2, 2, 4, 4], 1):  # it begins with compiling
        clock[0] += seconds
        stage.set_progress("step", done, 20)
    assert stage.unit_seconds == 3
    assert str(stage) == "step 5 of 20, 45 s left, 3 s each"
    clock[0] += 2
    assert stage.remaining_seconds == 15 * 3 - 2
    clock[0] += 30
    assert stage.remaining_seconds == 14 * 3  # the present unit takes longer than any before
    stage.set_progress("chunk", 5, 20)  # another unit has a pace of its own
    assert str(stage) == "chunk 5 of 20"


def test_steps_that_are_noticed_together_have_no_pace(clock):
    """The host saw the first steps late, because it compiled the next program."""
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


def test_a_stage_that_continues(clock):
    """The steps that an earlier run took have no pace."""
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


def test_a_narrow_terminal(clock):
    """The words stay complete, with a short bar."""
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
    """So small networks are loaded between two looks of a terminal."""
    loaded = []
    monkeypatch.setattr(Stage, "load", lambda self, component, done, total: loaded.append((self.name, component)))
    pipe.free()
    pipe("a", steps=1, **SMALL)
    assert set(loaded) == {("encode", "text_encoder"), ("denoise", "transformer"), ("decode", "vae")}


def test_a_sample_s_steps_are_not_those_of_its_training():
    with progress.stage_on_console("train", None) as stage:
        units = []
        for work in ("", "sample", ""):
            with progress.unit_prefix(work):
                progress.set_progress("step", 1, 20)
            units.append(stage.unit)
    assert units == ["step", "sample step", "step"]
