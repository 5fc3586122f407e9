# SPDX-License-Identifier: Apache-2.0
"""Denoising that was stopped continues from its last saved state to the same latents, bit for bit."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import small_wan
from tests.support.commands import succeeded, wanjax
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint
from tests.support.words import line_with_words
from wanjax.media import stage_files
from wanjax.media.metadata import load_settings
from wanjax.pipelines.denoiser import State
from wanjax.pipelines.observers import Cancelled, Observer, Step
from wanjax.pipelines.request import PreparedRequest
from wanjax.pipelines.resume import ResumeObserver
from wanjax.pipelines.run import Run
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.schedulers import UniPC
from wanjax.sharding import one_device_partitioner

SETTINGS = {"size": (12, 12), "frames": 5, "steps": 6, "seed": 3}


def make_conditioning(value: float = 0.5) -> WanConditioning:
    return WanConditioning(jnp.full((1, 3, 8), value), jnp.zeros((1, 3, 8)))


def pipeline(experts: bool):
    pipe = small_wan.pipeline(2, None)
    pipe.components.override("scheduler", UniPC())
    if experts:
        pipe.model = replace(pipe.model, has_experts=True)
        pipe.defaults = replace(pipe.defaults, boundary=0.6, guidance_scale_2=2.0)
        pipe.components.override("transformer_2", pipe.transformer)
    return pipe


def run(pipe, keep=None, stop_at=None, prompt=0.5, **changes):
    """Return the latents (None if the run was stopped), the indices of steps, and the reports of resumed steps."""
    step_indices, resumed_from = [], []

    def callback(step):
        step_indices.append(step.index)
        return False if step.index == stop_at else None

    try:
        latents = pipe.denoise(
            make_conditioning(prompt),
            callback=callback,
            keep=keep,
            continued=lambda *message: resumed_from.append(message),
            **SETTINGS | changes,
        )
    except Cancelled:
        return None, step_indices, resumed_from
    return np.asarray(latents), step_indices, resumed_from


STOPS = [(experts, stop_at) for experts in (False, True) for stop_at in range(6)]


@pytest.mark.parametrize(("experts", "stop_at"), quick([(False, 0), (True, 1), (True, 4)], STOPS))
def test_a_stopped_run_continues_to_the_same_latents(tmp_path, experts, stop_at):
    file = tmp_path / "state"
    pipe = pipeline(experts)
    uninterrupted, _, _ = run(pipe)
    assert run(pipe, file, stop_at)[0] is None
    latents, step_indices, resumed_from = run(pipe, file)
    np.testing.assert_array_equal(latents, uninterrupted)
    assert step_indices == list(range(stop_at + 1, 6))
    assert resumed_from == [(stop_at + 1, 6)]


def test_other_weights_under_the_same_name_restart(tmp_path):
    pipe, file = pipeline(False), tmp_path / "state"
    pipe.components.options |= {"digests": {"style.safetensors": "0"}}
    run(pipe, file, 2)
    pipe.components.options |= {"digests": {"style.safetensors": "1"}}
    assert run(pipe, file)[2] == []


CACHED_STOPS = [*(("deepcache:1,5,3", step) for step in (1, 2, 3, 4)), ("easycache:9,2", 3), ("guidance:2", 2)]


@pytest.mark.parametrize(
    ("cache", "stop_at"),
    quick([CACHED_STOPS[2], CACHED_STOPS[4]], CACHED_STOPS),
)
def test_the_state_of_a_step_cache_is_restored(tmp_path, cache, stop_at):
    file = tmp_path / "state"
    pipe = pipeline(False)
    uninterrupted, _, _ = run(pipe, cache=cache)
    assert run(pipe, file, stop_at, cache=cache)[0] is None
    latents, step_indices, _ = run(pipe, file, cache=cache)
    np.testing.assert_array_equal(latents, uninterrupted)
    assert step_indices == list(range(stop_at + 1, 6))


def test_the_tests_stop_before_and_after_the_boundary():
    pipe = pipeline(True)
    settings = pipe.settings(**SETTINGS)
    schedule = pipe.scheduler.schedule(settings.steps, shift=settings.flow_shift)
    assert [phase.start for phase in pipe.model.spec.phases(schedule, settings)] in ([0, n] for n in range(1, 6))


def test_an_exception_saves_the_state_too(tmp_path):
    def interrupt(step):
        if step.index == 2:
            raise KeyboardInterrupt

    pipe, file = pipeline(False), tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        pipe.denoise(make_conditioning(), callback=interrupt, keep=file, **SETTINGS)
    assert run(pipe, file)[1] == [3, 4, 5]


class InterruptingObserver(Observer):
    """An observer that interrupts the run after a number of steps."""

    def __init__(self, after: int):
        self.after, self.taken = after, []

    def progressed(self, unit, done, total):
        if done == self.after:
            raise KeyboardInterrupt

    def stepped(self, step):
        self.taken.append(step.index)


@pytest.mark.parametrize("after", [2, 6, None])
def test_ctrl_c_between_two_saves_saves_the_last_step(tmp_path, monkeypatch, after):
    """Ctrl-C comes while the host waits for the device, or, if `after` is None, while another network is loaded."""
    pipe, file = pipeline(experts=True), tmp_path / "state"
    uninterrupted, _, _ = run(pipe)
    resume_observer, observer = ResumeObserver(file, pipe.partitioner), InterruptingObserver(after)
    resume_observer._save_seconds = 1e9  # so that no single step is saved
    swap_in = pipe.components.swap_in

    def swap_in_or_interrupt(name, other_networks):
        if after is None and name == "transformer_2":
            raise KeyboardInterrupt
        return swap_in(name, other_networks)

    monkeypatch.setattr(pipe.components, "swap_in", swap_in_or_interrupt)
    settings = pipe.settings(**SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        list(
            Run(pipe, [PreparedRequest(settings)], observers=[resume_observer, observer]).latents(
                make_conditioning(), settings, [settings.seed]
            )
        )
    monkeypatch.undo()
    latents, step_indices, resumed_from = run(pipe, file)
    np.testing.assert_array_equal(latents, uninterrupted)
    assert resumed_from == [(6 - len(step_indices), 6)]
    assert observer.taken == list(range(len(observer.taken)))
    assert 0 <= 6 - len(step_indices) - len(observer.taken) <= 1  # observers may have missed the last step


@pytest.mark.parametrize("change", [{"seed": 4}, {"steps": 7}, {"prompt": 0.6}, {"flow_shift": 2.0}])
def test_another_video_does_not_resume(tmp_path, change):
    pipe, file = pipeline(False), tmp_path / "state"
    run(pipe, file, stop_at=2)
    _, step_indices, resumed_from = run(pipe, file, **change)
    assert step_indices[0] == 0
    assert resumed_from == []


def test_another_noise_does_not_resume(tmp_path):
    pipe, file = pipeline(False), tmp_path / "state"
    run(pipe, file, stop_at=2)
    assert run(pipe, file, noise=np.zeros((1, 4, 3, 6, 6), np.float32))[1][0] == 0


def test_a_broken_state_file_is_ignored(tmp_path):
    file = tmp_path / "state"
    file.write_bytes(b"no state")
    assert run(pipeline(False), file)[1] == list(range(6))


def test_states_that_are_not_finite_are_not_saved(tmp_path):
    pipe, file = pipeline(False), tmp_path / "state"
    noise = np.full((1, 4, 3, 6, 6), 3e38, np.float32)  # sums of these numbers overflow
    with pytest.raises(Exception, match=line_with_words("finite step 1 6")):
        pipe.denoise(make_conditioning(), noise=noise, keep=file, **SETTINGS)
    assert not file.exists()


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time in seconds, which the test advances."""
    clock = [0.0]
    monkeypatch.setattr("wanjax.pipelines.resume.perf_counter", lambda: clock[0])
    return clock


def test_saving_takes_little_of_the_run_s_time(tmp_path, monkeypatch, clock):
    """A state that takes a second to write is written once in fifty seconds."""
    writes = []
    resume_observer = ResumeObserver(tmp_path / "state", one_device_partitioner())

    def save(step):
        writes.append(clock[0])
        clock[0] += 1
        resume_observer._last_saved, resume_observer._save_seconds = clock[0], 1.0

    monkeypatch.setattr(resume_observer, "save_state", save)
    x = jnp.zeros((1, 1, 1, 1, 1))
    while clock[0] < 200:
        resume_observer.stepped(Step(0, 1, 0.0, State(x, None), x, False, pipeline(False).latent_preview))
        clock[0] += 1
    assert len(writes) == 4


@pytest.mark.parametrize(("seconds", "expected"), [(60, [1, 2, 3, 4, 5, 6]), (20, [1, 5])])
def test_each_long_step_is_saved_at_once(tmp_path, monkeypatch, clock, seconds, expected):
    """A step that takes at least fifty times as long as a save is saved at once; shorter steps are saved less often."""
    saves = []
    monkeypatch.setattr("jax.block_until_ready", lambda state: wait(state.x.item()))

    def wait(step):
        clock[0] = max(clock[0], seconds * step)

    def save(file, tensors, metadata):
        clock[0] += 1

    monkeypatch.setattr("wanjax.pipelines.resume.save_safetensors", save)
    resume_observer = ResumeObserver(tmp_path / "state", one_device_partitioner(), on_save=saves.append)
    for index in range(6):
        wait(index - 1)  # the host waits if more than two steps are queued
        x = jnp.full((1, 1, 1, 1, 1), index + 1.0)
        resume_observer.stepped(Step(index, 9, 0.0, State(x, None, cached=()), x))
    assert [steps for steps in saves if steps is not None] == expected
    assert saves[::2] == [None] * len(expected)  # None while a state is written


@pytest.mark.skipif(os.name != "posix", reason="sends signals of POSIX")
@pytest.mark.usefixtures("cached_programs")
@pytest.mark.parametrize("sent_signal", quick([signal.SIGKILL], [signal.SIGKILL, signal.SIGINT]))
def test_a_killed_command_resumes(tmp_path, sent_signal):
    steps = "200"
    model = str(tiny_checkpoint(tmp_path / "tiny"))
    command = [sys.executable, "-m", "wanjax", "a", "--model", model, "--size", "32x32", "--frames", "5"]
    command += ["--guidance-scale", "1"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    stopped_folder, uninterrupted_folder = tmp_path / "stopped", tmp_path / "uninterrupted"

    def start(folder: Path) -> subprocess.Popen:
        return subprocess.Popen(
            [*command, "--steps", steps, "--dir", str(folder)], env=environment, stderr=subprocess.PIPE, text=True
        )

    stopped = start(stopped_folder)
    deadline = time.monotonic() + 300
    while (
        not (stopped_folder / stage_files.STATE_FILE).exists()
        and stopped.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    stopped.send_signal(sent_signal)
    _, output = stopped.communicate(timeout=300)
    assert stopped.returncode == (130 if sent_signal == signal.SIGINT else -signal.SIGKILL), output
    assert (stopped_folder / stage_files.STATE_FILE).exists()
    continued = succeeded(wanjax("denoise", "--dir", stopped_folder))
    assert f" of {steps} steps" in continued.stderr
    assert not (stopped_folder / stage_files.STATE_FILE).exists()
    succeeded(wanjax(*command[3:], "--steps", steps, "--dir", str(uninterrupted_folder)))
    latents = [
        stage_files.load_latents(folder, load_settings(folder)) for folder in (stopped_folder, uninterrupted_folder)
    ]
    np.testing.assert_array_equal(*map(np.asarray, latents))
