# SPDX-License-Identifier: Apache-2.0
"""A training that is killed many times, at random moments, ends with the weights of an uninterrupted training."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.support.clips import write_clips
from tests.support.tiny import tiny_checkpoint
from wanjax.checkpoints.files import load_safetensors

KILLS = int(os.environ.get("KILLS", "8"))
STEPS = 20 * KILLS
COMMAND = """
import sys
from wanjax import load
from wanjax.training import LoraConfig, OptimizerConfig, TrainConfig, train
train(load(sys.argv[1]), sys.argv[2], sys.argv[3], TrainConfig(
    steps=int(sys.argv[4]), batch_size=2, size=(32, 32), frames=5, buckets=False, save_every=3, validation_every=10**6,
    sample_every=10**6, lora=LoraConfig(rank=2, dropout=0.1), optimizer=OptimizerConfig(learning_rate=1e-3)))
"""


def start(tmp_path, out):
    arguments = [sys.executable, "-c", COMMAND, tmp_path / "model", tmp_path / "data", tmp_path / out, str(STEPS)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with (tmp_path / "errors.txt").open("wb") as output:
        return subprocess.Popen(list(map(str, arguments)), env=environment, stderr=output)


def count_steps(tmp_path):
    file = tmp_path / "b/metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
def test_a_training_that_is_often_killed_ends_with_the_same_weights(tmp_path):
    tiny_checkpoint(tmp_path / "model")
    write_clips(tmp_path / "data", 3)
    uninterrupted = start(tmp_path, "a")
    assert uninterrupted.wait() == 0, (tmp_path / "errors.txt").read_text()
    rng, kills = random.Random(0), 0
    while kills < KILLS:
        process, started_at = start(tmp_path, "b"), time.monotonic()
        steps, steps_until_kill = count_steps(tmp_path), rng.randint(1, 30)
        while (
            count_steps(tmp_path) < steps + steps_until_kill
            and process.poll() is None
            and time.monotonic() - started_at < 240
        ):
            time.sleep(0.02)
            steps = min(steps, count_steps(tmp_path))  # metrics after the last checkpoint are dropped
        time.sleep(rng.uniform(0, 0.2))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    print(f"{kills} kills, {count_steps(tmp_path)} of {STEPS} steps before the last process")
    final = start(tmp_path, "b")
    assert final.wait() == 0, (tmp_path / "errors.txt").read_text()
    assert kills >= KILLS // 2
    resumed_factors, expected_factors = (load_safetensors(tmp_path / name / "lora.safetensors") for name in "ba")
    assert all(np.array_equal(resumed_factors[name], expected_factors[name]) for name in expected_factors)
