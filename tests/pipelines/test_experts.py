# SPDX-License-Identifier: Apache-2.0
"""Two experts: who takes which steps, and whose weights are in memory meanwhile."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as some

from tests.test_sharding import network, pipeline, transformer_config
from wanjax.models.wan.transformer import WanTransformer
from wanjax.pipelines import experts
from wanjax.pipelines.base import Embeddings, Parts, Step
from wanjax.pipelines.experts import Stretch, stretches, take_over
from wanjax.registry import PRESETS
from wanjax.schedulers import FlowEuler, UniPC

T2V, I2V = (PRESETS[name].defaults for name in ("wan2.2-t2v-a14b", "wan2.2-i2v-a14b"))


@pytest.mark.parametrize(
    ("settings", "right"),
    [
        (T2V, [Stretch("transformer", 4.0, 0, 26), Stretch("transformer_2", 3.0, 26, 40)]),
        (I2V, [Stretch("transformer", 3.5, 0, 15), Stretch("transformer_2", 3.5, 15, 40)]),
        (replace(T2V, boundary=None), [Stretch("transformer", 4.0, 0, 40)]),
        (replace(T2V, boundary=1.0), [Stretch("transformer_2", 3.0, 0, 40)]),
        (replace(T2V, boundary=0.0), [Stretch("transformer", 4.0, 0, 40)]),
    ],
)
def test_stretches(settings, right):
    timesteps = UniPC(settings.flow_shift).schedule(settings.steps).timesteps
    assert stretches(np.asarray(timesteps), settings) == right


@given(some.integers(1, 60), some.floats(0.5, 20), some.floats(0, 1))
def test_every_step_is_taken_once_and_by_the_right_one(steps, shift, boundary):
    timesteps = np.trunc(1000 * shift / (shift - 1 + 1 / np.linspace(1, 0.001, steps)))
    taken = stretches(timesteps, replace(T2V, boundary=boundary))
    assert [i for stretch in taken for i in range(stretch.start, stretch.stop)] == list(range(steps))
    for stretch in taken:
        high = timesteps[stretch.start : stretch.stop] >= 1000 * boundary
        assert high.all() if stretch.transformer == "transformer" else not high.any()


def alive() -> int:
    """The bytes that JAX holds."""
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture
def parts() -> Parts:
    """Two experts of 4 MB each."""

    def load() -> nnx.Module:
        return nnx.Linear(1024, 1024, use_bias=False, param_dtype=jnp.float32, rngs=nnx.Rngs(0))

    return Parts({"transformer": load, "transformer_2": load})


@pytest.mark.parametrize(("free", "kept"), [(3e6, 1), (5e6, 2)])
def test_both_stay_where_they_fit(parts, monkeypatch, free, kept):
    monkeypatch.setattr(experts, "_free_memory", lambda device: free)
    before = alive()
    for turn, name in enumerate(["transformer", "transformer_2", "transformer"]):
        _, seconds = take_over(parts, name)
        assert seconds >= 0
        assert sum(parts.has(expert) for expert in experts.EXPERTS) == min(kept, turn + 1)
        assert alive() - before < (kept if turn else 1) * 4.5e6


def test_the_first_is_gone_when_the_second_is_loaded(monkeypatch):
    monkeypatch.setattr(experts, "_free_memory", lambda device: 0)
    before, seen = alive(), []

    def load() -> nnx.Module:
        seen.append(alive() - before)
        return nnx.Linear(1024, 1024, use_bias=False, param_dtype=jnp.float32, rngs=nnx.Rngs(0))

    parts = Parts({"transformer": load, "transformer_2": load})
    take_over(parts, "transformer")
    take_over(parts, "transformer_2")
    assert max(seen) < 1e6


def test_so_is_its_context(monkeypatch):
    monkeypatch.setattr(experts, "_free_memory", lambda device: 0)
    pipe, seen = pipeline(4, None), []
    keys = (2, 1, 7, 24)  # of two layers, one prompt of seven tokens

    def load() -> nnx.Module:
        seen.append(sum(array.shape == keys for array in jax.live_arrays()))
        return network(partial(WanTransformer, transformer_config(4)), None)

    pipe.parts = Parts({"transformer": load, "transformer_2": load, "scheduler": lambda: FlowEuler(1.0)})
    pipe.configs = pipe.configs._replace(experts=True)
    held = []

    def hold(step: Step) -> None:
        held.append(sum(array.shape == keys for array in jax.live_arrays()))

    prompts = Embeddings(*(jnp.zeros((1, 7, 8)) for _ in range(2)))
    video = {"size": (12, 12), "frames": 5, "steps": 2, "guidance_scale": 4.0, "flow_shift": 1.0}
    pipe.denoise(prompts, callback=hold, boundary=0.7, **video)
    assert (seen, held) == ([0, 0], [4, 4])  # keys and values of both prompts


def test_some_memory_is_free_here():
    assert experts._free_memory(jax.devices()[0]) >= 0
