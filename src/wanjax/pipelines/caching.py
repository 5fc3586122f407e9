# SPDX-License-Identifier: Apache-2.0
"""A step cache for each network of a video that is made, once the network is there."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from wanjax.compilation import Compile, program
from wanjax.kernels.compiler_options import scanned
from wanjax.pipelines.cache_rules import CacheRule, TeaCache, check_reused, turns_of
from wanjax.pipelines.cache_tables import Tables
from wanjax.pipelines.sampler import Denoiser, Inputs
from wanjax.pipelines.step_cache import StepCache
from wanjax.pipelines.steps import Segment
from wanjax.schedulers import one_step


@program(scanned)
def time_changes(denoiser: Denoiser, weights: Any, times: Any) -> Float[Array, " steps"]:
    """Returns the relative change of the timestep's embedding before each step, 0 before the first."""
    embedded = denoiser.embed_times(nnx.merge(denoiser.graphdef, weights), times)
    changes = jnp.abs(jnp.diff(embedded, axis=0)).mean(axis=1) / jnp.abs(embedded[:-1]).mean(axis=1)
    return jnp.concatenate([jnp.zeros(1, changes.dtype), changes])


def changes_of(denoiser: Denoiser, inputs: Inputs, schedule: Any, segment: Segment, compiled: Compile) -> list[float]:
    """Returns the changes of the timestep's embedding before each step of a segment."""
    steps = range(segment.start, segment.start + len(segment.scales))
    times = [denoiser.times(one_step(schedule, step)) for step in steps]
    stacked = jax.tree.map(lambda *of_steps: jnp.stack(of_steps), *times)
    return np.asarray(compiled(time_changes)(denoiser, inputs.weights, stacked)).tolist()


class Caching:
    """The step caches of a video by a rule: of each network of its segments, all of whose steps they hold."""

    def __init__(self, rule: CacheRule, tables: Tables, segments: Sequence[Segment], schedule: Any, steps: int):
        self.rule = rule
        self.tables = tables
        self.segments = segments
        self.schedule = schedule
        self.turns = turns_of(segments, steps)

    def of(self, network: str, denoiser: Denoiser, inputs: Inputs, compiled: Compile) -> StepCache:
        """Returns a network's cache; raises WanjaxError where every step that may would reuse, or none."""
        number = next(i for i, segment in enumerate(self.segments) if segment.network == network)
        segment, turn, changes = self.segments[number], self.turns[number], None
        if isinstance(self.rule, TeaCache):
            changes = changes_of(denoiser, inputs, self.schedule, segment, compiled)
        reused = self.rule.reused(turn, self.tables, changes)
        if changes is not None and len(self.turns) == 1:
            check_reused(self.rule, [reused])
        return self.rule.cache(turn, (False,) * turn.start + reused)
