# SPDX-License-Identifier: Apache-2.0
"""The metrics of a training: lines of JSON, and TensorBoard's curves where it is installed."""

import json
import sys
from contextlib import closing

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from wanjax.training.step_metrics import METRICS_FILE, TENSORBOARD_FOLDER, Metrics


def write(folder, first_step, steps):
    with closing(Metrics(folder, first_step)) as metrics:
        for step in steps:
            metrics.add(step, 1e9 + step, loss=1 / step)


def lines(folder):
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_a_resumed_training_drops_metrics_after_its_step(tmp_path):
    write(tmp_path, 0, [1, 2, 3])
    write(tmp_path, 2, [3, 4])
    assert lines(tmp_path) == [{"step": step, "loss": 1 / step, "time": 1e9 + step} for step in (1, 2, 3, 4)]


def test_tensorboard_shows_the_same_numbers(tmp_path):
    write(tmp_path, 0, [1, 2, 4])
    events = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER)).Reload().Tensors("loss")
    scalars = [(event.step, event.wall_time, make_ndarray(event.tensor_proto).item()) for event in events]
    assert scalars == [(line["step"], line["time"], line["loss"]) for line in lines(tmp_path)]


def test_without_tensorboard_the_lines_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    write(tmp_path, 0, [1, 2])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert not (tmp_path / TENSORBOARD_FOLDER).exists()
