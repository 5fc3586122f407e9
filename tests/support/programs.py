# SPDX-License-Identifier: Apache-2.0
"""Calls of programs in tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx

from wanjax.execution import EXECUTE, CompileContext, Execute, Program
from wanjax.pipelines.denoiser import InitStatic, ModelInputs, NoiseOverrides, Preparation, State, StepProgram, begin
from wanjax.pipelines.guidance import CLASSIFIER_FREE, choose_groups
from wanjax.pipelines.model import latents_of
from wanjax.pipelines.runtime import SplitNetwork
from wanjax.pipelines.seeds import seed_to_key_data
from wanjax.sharding import Partitioner, one_device_partitioner


def caller(partitioner: Partitioner | None = None) -> Callable[..., Any]:
    """Return a function that executes a program, on one device or on a mesh."""

    def call(program: Program, static: Any, *arguments: Any) -> Any:
        return EXECUTE.call(program, CompileContext(partitioner or one_device_partitioner()), static, *arguments)

    return call


def num_compiled(program: Program | None = None, strategy: Execute = EXECUTE) -> int:
    """Count the executables that a strategy has compiled, or those of one program."""
    return sum(program is None or key is program for key, *_ in list(strategy._compiled))


def init_state(pipe: Any, encoded: Any, settings: Any, noise: Any = None) -> tuple[Any, State]:
    """Return the schedule of a video, and the state before its first step."""
    schedule, shape = pipe.model.spec.schedule(settings, encoded), pipe.model.spec.noise_shape(settings)
    static, options = InitStatic(pipe.scheduler, shape, pipe.model.spec.posteriors), NoiseOverrides(noise)
    key_data, number = seed_to_key_data([settings.seed]), np.int32(0)
    state, _ = pipe.call(begin, static, key_data, options, schedule, latents_of(encoded), number)
    return schedule, state


def prepare_steps(
    pipe: Any, network: Any, phase: Any, encoded: Any, x: Any, rule: Any = CLASSIFIER_FREE
) -> tuple[Any, Any]:
    """Return the static arguments of a phase's steps, and their inputs."""
    model, parts = pipe.model, SplitNetwork(*nnx.split(network))
    groups = choose_groups(phase.guided, False, pipe.partitioner)
    prompts, shared = model.prepare(pipe.runtime, parts, encoded, x, Preparation(groups, rule.nag))
    step = StepProgram(model.denoiser, parts.graphdef, model.scheduler, guidance=type(rule))
    return step, ModelInputs(parts.weights, prompts, shared, groups.batch * x.shape[0])
