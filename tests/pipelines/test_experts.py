# SPDX-License-Identifier: Apache-2.0
"""Two experts share the steps, and the memory if only one expert fits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as some

from tests.support.small_wan import network, pipeline, transformer_config
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.models.wan.transformer import WanTransformer
from wanjax.pipelines.components import Components, MakeRoom
from wanjax.pipelines.model import phases_of
from wanjax.pipelines.observers import Step
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.pipelines.wan.model import EXPERTS
from wanjax.registry import presets
from wanjax.schedulers import UniPC

T2V, I2V = (presets()[name].defaults for name in ("wan2.2-t2v-a14b", "wan2.2-i2v-a14b"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (T2V, [("transformer", 0, (4.0,) * 26), ("transformer_2", 26, (3.0,) * 14)]),
        (I2V, [("transformer", 0, (3.5,) * 15), ("transformer_2", 15, (3.5,) * 25)]),
        (replace(T2V, boundary=None), [("transformer", 0, (4.0,) * 40)]),
        (replace(T2V, boundary=1.0), [("transformer_2", 0, (3.0,) * 40)]),
        (replace(T2V, boundary=0.0), [("transformer", 0, (4.0,) * 40)]),
        (replace(T2V, boundary_step=2), [("transformer", 0, (4.0,) * 2), ("transformer_2", 2, (3.0,) * 38)]),
        (replace(T2V, boundary_step=40), [("transformer", 0, (4.0,) * 40)]),
        (
            replace(T2V, boundary=None, boundary_step=39),
            [("transformer", 0, (4.0,) * 39), ("transformer_2", 39, (3.0,))],
        ),
    ],
)
def test_experts_share_the_steps_at_the_boundary(settings, expected):
    timesteps = UniPC().schedule(settings.steps, shift=settings.flow_shift).timesteps
    assert [phase[:3] for phase in phases_of(EXPERTS, np.asarray(timesteps), settings)] == expected


@given(some.integers(1, 60), some.floats(0.5, 20), some.floats(0, 1))
def test_every_step_is_taken_once_by_its_expert(steps, shift, boundary):
    timesteps = np.trunc(1000 * shift / (shift - 1 + 1 / np.linspace(1, 0.001, steps)))
    phases = phases_of(EXPERTS, timesteps, replace(T2V, steps=steps, boundary=boundary))
    assert [i for phase in phases for i in range(phase.start, phase.start + len(phase.scales))] == list(range(steps))
    for phase in phases:
        high = timesteps[phase.start : phase.start + len(phase.scales)] >= 1000 * boundary
        assert high.all() if phase.network == "transformer" else not high.any()


@pytest.mark.parametrize(("skipped", "high"), [(0, 10), (4, 6), (10, 0), (15, 0)])
def test_a_boundary_step_counts_skipped_steps(skipped, high):
    """`boundary_step` counts the steps of a run from noise, also if a run from a clip skips the first of them."""
    settings = replace(T2V, steps=20, boundary_step=10)
    timesteps = UniPC().schedule(20, shift=5.0, skip=skipped).timesteps
    steps_of_expert = {
        phase.network: len(phase.scales) for phase in phases_of(EXPERTS, np.asarray(timesteps), settings)
    }
    assert (steps_of_expert.get("transformer", 0), steps_of_expert["transformer_2"]) == (high, 20 - skipped - high)


def test_a_boundary_step_beyond_the_last_step_is_refused():
    pipe = pipeline(4, None)
    pipe.model = replace(pipe.model, has_experts=True)
    pipe.defaults = replace(pipe.defaults, boundary=0.9, boundary_step=0, guidance_scale_2=1.0)
    assert pipe.settings(steps=4, boundary_step=4).boundary_step == 4
    with pytest.raises(WanjaxError, match=line_with_words("boundary_step at most steps 4 5")):
        pipe.settings(steps=4, boundary_step=5)


def live_bytes() -> int:
    """Return the bytes of all arrays that JAX holds."""
    return sum(array.nbytes for array in jax.live_arrays())


def expert() -> nnx.Module:
    """Return an expert of 4 MB."""
    return nnx.Linear(1024, 1024, use_bias=False, param_dtype=jnp.float32, rngs=nnx.Rngs(0))


def load_expert(make_room: MakeRoom) -> nnx.Module:
    make_room(nnx.eval_shape(expert))
    return expert()


@pytest.fixture
def experts() -> Components:
    return Components({"transformer": load_expert, "transformer_2": load_expert})


@pytest.mark.parametrize(("free", "num_loaded"), [(3e6, 1), (5e6, 2)])
def test_both_experts_stay_loaded_where_they_fit(experts, machine, free, num_loaded):
    machine.has_free_memory(free)
    bytes_before = live_bytes()
    for phase, name in enumerate(["transformer", "transformer_2", "transformer"]):
        _, seconds = experts.swap_in(name, EXPERTS)
        assert seconds >= 0
        assert sum(experts.has(expert) for expert in EXPERTS) == min(num_loaded, phase + 1)
        assert live_bytes() - bytes_before < (num_loaded if phase else 1) * 4.5e6


def test_the_first_expert_is_freed_before_the_second_is_loaded(machine):
    machine.has_free_memory(0)
    bytes_before, bytes_at_load = live_bytes(), []

    def load(make_room: MakeRoom) -> nnx.Module:
        make_room(nnx.eval_shape(expert))
        bytes_at_load.append(live_bytes() - bytes_before)
        return expert()

    experts = Components({"transformer": load, "transformer_2": load})
    for name in EXPERTS:
        experts.swap_in(name, EXPERTS)
    assert max(bytes_at_load) < 1e6


def test_the_first_expert_s_context_is_freed_too(machine):
    machine.has_free_memory(0)
    pipe, contexts_at_load = pipeline(4, None), []
    key_shape = (2, 1, 7, 24)  # two layers, one prompt of seven tokens

    def load(make_room: MakeRoom) -> nnx.Module:
        make_room(nnx.eval_shape(expert))
        contexts_at_load.append(sum(array.shape == key_shape for array in jax.live_arrays()))
        return network(partial(WanTransformer, transformer_config(4)), None)

    pipe.components = Components({"transformer": load, "transformer_2": load})
    pipe.model = replace(pipe.model, has_experts=True)
    pipe.defaults = replace(pipe.defaults, boundary=0.7, guidance_scale_2=4.0)
    contexts_at_step = []

    def count_contexts(step: Step) -> None:
        contexts_at_step.append(sum(array.shape == key_shape for array in jax.live_arrays()))

    prompts = WanConditioning(*(jnp.zeros((1, 7, 8)) for _ in range(2)))
    video = {"size": (12, 12), "frames": 5, "steps": 2, "guidance_scale": 4.0, "flow_shift": 1.0}
    pipe.denoise(prompts, callback=count_contexts, boundary=0.7, **video)
    assert (contexts_at_load, contexts_at_step) == ([0, 0], [4, 4])  # keys and values of both prompts
