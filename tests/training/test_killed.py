# SPDX-License-Identifier: Apache-2.0
"""A training whose process is killed at random moments, again and again, ends with the bits of one left alone."""

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
    with (tmp_path / "said.txt").open("wb") as output:
        return subprocess.Popen(list(map(str, arguments)), env=environment, stderr=output)


def lines(tmp_path):
    file = tmp_path / "b/metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
def test_kills(tmp_path):
    tiny_checkpoint(tmp_path / "model")
    write_clips(tmp_path / "data", 3)
    uninterrupted = start(tmp_path, "a")
    assert uninterrupted.wait() == 0, (tmp_path / "said.txt").read_text()
    rng, kills = random.Random(0), 0
    while kills < KILLS:
        process, before = start(tmp_path, "b"), time.monotonic()
        steps, more = lines(tmp_path), rng.randint(1, 30)
        while lines(tmp_path) < steps + more and process.poll() is None and time.monotonic() - before < 240:
            time.sleep(0.02)
            steps = min(steps, lines(tmp_path))  # those after the last checkpoint are dropped
        time.sleep(rng.uniform(0, 0.2))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    print(f"{kills} kills, {lines(tmp_path)} of {STEPS} steps by then")
    last = start(tmp_path, "b")
    assert last.wait() == 0, (tmp_path / "said.txt").read_text()
    assert kills >= KILLS // 2
    ours, theirs = (load_safetensors(tmp_path / name / "lora.safetensors") for name in "ba")
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
