# SPDX-License-Identifier: Apache-2.0
"""Build the step cache of each phase of a run, after the network of the phase is loaded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from wanjax.execution import program
from wanjax.kernels.compiler_options import scan_options
from wanjax.pipelines.caching.cache_tables import CacheTables
from wanjax.pipelines.caching.rules import PLAIN, CacheRule, TeaCache, check_any_reused
from wanjax.pipelines.caching.step_cache import StepCache
from wanjax.pipelines.denoiser import Denoiser
from wanjax.pipelines.phases import Phase
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.schedulers import one_step
from wanjax.schedulers.base import TRAIN_STEPS, Schedule


@program(scan_options)
def time_changes(
    static: tuple[Denoiser, nnx.GraphDef[Any], bool], weights: Any, times: object
) -> Float[Array, " steps"]:
    """Return the relative change of the timestep's embedding before each step, 0 before the first.

    `static` has the denoiser, the network's definition, and whether to read the embedding before its projection.
    """
    denoiser, graphdef, unprojected = static
    embedded = denoiser.embed_timesteps(nnx.merge(graphdef, weights), times, unprojected)
    changes = jnp.abs(jnp.diff(embedded, axis=0)).mean(axis=1) / jnp.abs(embedded[:-1]).mean(axis=1)
    return jnp.concatenate([jnp.zeros(1, changes.dtype), changes])


def embedding_changes(
    runtime: Runtime,
    denoiser: Denoiser,
    network: SplitNetwork,
    schedule: Schedule,
    phase: Phase,
    unprojected: bool = False,
) -> list[float] | None:
    """Return the change of the timestep's embedding before each step of a phase. Return None while a run is traced."""
    times = [denoiser.timesteps(one_step(schedule, step)) for step in phase.steps]
    stacked = jax.tree.map(lambda *of_steps: np.stack(of_steps), *times)
    changes = runtime.strategy.to_host(
        runtime.call(time_changes, (denoiser, network.graphdef, unprojected), network.weights, stacked), None
    )
    return None if changes is None else changes.tolist()


GAP_TIMESTEPS = np.linspace(0, TRAIN_STEPS, 11)  # `gap_changes` measures steps that start at these timesteps
GAPS = np.arange(5.0, 205.0, 5.0)  # the lengths of steps that `gap_changes` measures


def gap_changes(
    runtime: Runtime, denoiser: Denoiser, network: SplitNetwork, schedule: Schedule, phase: Phase
) -> Float[np.ndarray, "_T _S"] | None:
    """Return the change of the timestep's embedding over steps of each length in `GAPS` from each of `GAP_TIMESTEPS`.

    Return None while a run is traced, and for a network with more than one timestep.
    """
    time = denoiser.timesteps(one_step(schedule, phase.start))
    if not isinstance(time, np.ndarray | np.generic):
        return None
    pairs = np.stack(np.broadcast_arrays(GAP_TIMESTEPS[:, None], np.maximum(GAP_TIMESTEPS[:, None] - GAPS, 0)), axis=-1)
    arguments = (denoiser, network.graphdef, False), network.weights, pairs.reshape(-1).astype(time.dtype)
    changes = runtime.strategy.to_host(runtime.call(time_changes, *arguments), None)
    return None if changes is None else changes[1::2].reshape(pairs.shape[:-1])


def step_cache(
    rule: CacheRule,
    tables: CacheTables,
    runtime: Runtime,
    denoiser: Denoiser,
    network: SplitNetwork,
    schedule: Schedule,
    phase: Phase,
) -> StepCache:
    """Return the cache of a phase. Raises WanjaxError if no step would reuse cached values, or if every step that may
    reuse them does.

    TeaCache reads the weights. A traced run has no weights. Of its steps, only the last step that may reuse cached
    values reuses them.
    """
    if not isinstance(rule, TeaCache):
        return rule.cache(phase, (False,) * phase.start + rule.reused(phase, tables))
    changes = embedding_changes(runtime, denoiser, network, schedule, phase, rule.table_name == PLAIN)
    reused = rule.reused(phase, tables, changes)
    if changes is None:
        last = max((step for step, may_reuse in enumerate(reused) if may_reuse), default=-1)
        reused = tuple(step == last for step in range(len(reused)))
    elif len(phase.scales) == phase.total:
        check_any_reused(rule, getattr(tables, rule.table_name), changes, reused)
    return rule.cache(phase, (False,) * phase.start + reused)
