# SPDX-License-Identifier: Apache-2.0
"""The training step that a plan traces is the step that a training executes."""

from collections import Counter
from dataclasses import replace

import pytest

import wanjax
from tests.support.calls import Call, Counting, differences, traced_call, wrong_shardings
from tests.support.clips import write_clips
from tests.support.tiny import TEXT_LENGTH, tiny_checkpoint, tiny_cogvideox_checkpoint, tiny_image_checkpoint
from wanjax.loading import abstract_pipeline
from wanjax.plan.training_estimate import _trace_step
from wanjax.registry import inspect_checkpoint
from wanjax.training import LoraConfig, OptimizerConfig, TrainConfig, Training, loop
from wanjax.training.step import begin_training, train

pytestmark = pytest.mark.usefixtures("cached_programs")

slow = pytest.mark.slow
MODELS = {"wan": tiny_checkpoint, "wan-i2v": tiny_image_checkpoint, "cogvideox": tiny_cogvideox_checkpoint}
RATE = OptimizerConfig(learning_rate=1e-3)
SMALL = TrainConfig(steps=1, batch_size=2, size=(32, 32), frames=5, buckets=False, optimizer=RATE)
LORA = LoraConfig(rank=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: make(folder / name) for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("data"), 2)


@pytest.fixture
def executed_calls(monkeypatch) -> Counting:
    """Count the program calls of a trainer."""
    strategy = Counting()
    monkeypatch.setattr(loop, "Execute", lambda executables: strategy)
    return strategy


def without_step_functions(calls: Counter[Call]) -> Counter[Call]:
    """Replace the step of each call by its definition, because steps of different trainings are never equal."""
    calls_by_definition: Counter[Call] = Counter()
    for call, count in calls.items():
        step = call.static
        definition = step.graphdef, repr(step.specs), step.ema_decay, step.grad_accum_steps
        calls_by_definition[call._replace(static=definition)] += count
    return calls_by_definition


@pytest.mark.parametrize(
    ("model", "mesh", "lora"),
    [
        *(pytest.param("wan", None, lora, marks=slow) for lora in (LORA, None)),
        ("wan", "dp=2,sp=2,tp=2", LORA),
        pytest.param("wan", "dp=2,sp=2,tp=2", None, marks=slow),
        *(pytest.param(name, mesh, LORA, marks=slow) for name in [*MODELS][1:] for mesh in (None, "dp=2,sp=2,tp=2")),
    ],
    ids=lambda x: x if isinstance(x, str) else "LoRA" if x is LORA else "",
)
def test_a_plan_traces_the_executed_training_step(models, data, executed_calls, tmp_path, model, mesh, lora):
    pipe = wanjax.load(models[model], mesh=mesh)
    Training(pipe, data, tmp_path, TrainConfig(**{**vars(SMALL), "lora": lora}), note=lambda message: None).run()
    checkpoint = inspect_checkpoint(models[model], reads_encoder_configs=True)
    settings = checkpoint.settings.updated(
        {"height": 32, "width": 32, "frames": 5, "guidance_scale": 1.0, "dtype": "float32"}
    )
    family = replace(checkpoint.family, prompt_lengths=lambda video_model: {"tokenizer": (TEXT_LENGTH,) * 2})
    planned = abstract_pipeline(replace(checkpoint, family=family, settings=settings), pipe.partitioner)
    traced_programs = _trace_step(planned, settings, SMALL.batch_size, lora, RATE)
    calls = Counter({traced_call(traced_programs[program]): 1 for program in (begin_training, train)})
    assert not differences(without_step_functions(executed_calls.calls), without_step_functions(calls))
    assert not wrong_shardings(executed_calls.shardings)
