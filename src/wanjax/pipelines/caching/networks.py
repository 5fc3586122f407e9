# SPDX-License-Identifier: Apache-2.0
"""A step cache for each network of a video that is made, once the network is there."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from wanjax.kernels.compiler_options import scanned
from wanjax.pipelines.caching.rules import PLAIN, CacheRule, TeaCache, check_reused, turns_of
from wanjax.pipelines.caching.step_cache import StepCache
from wanjax.pipelines.caching.tables import Tables
from wanjax.pipelines.family import Pipe
from wanjax.pipelines.sampler import Denoiser, Inputs
from wanjax.pipelines.steps import Segment
from wanjax.programs import program
from wanjax.schedulers import one_step


@program(scanned)
def time_changes(static: tuple[Denoiser, bool], weights: Any, times: Any) -> Float[Array, " steps"]:
    """Returns the relative change of the timestep's embedding before each step, 0 before the first.

    static: the denoiser, and whether the embedding is the one before it is projected for the blocks.
    """
    denoiser, plain = static
    embed = denoiser.embed_times_plainly if plain else denoiser.embed_times
    embedded = embed(nnx.merge(denoiser.graphdef, weights), times)
    changes = jnp.abs(jnp.diff(embedded, axis=0)).mean(axis=1) / jnp.abs(embedded[:-1]).mean(axis=1)
    return jnp.concatenate([jnp.zeros(1, changes.dtype), changes])


def changes_of(
    denoiser: Denoiser, inputs: Inputs, schedule: Any, segment: Segment, pipe: Pipe, *, plain: bool = False
) -> list[float] | None:
    """Returns the changes of the timestep's embedding before each step of a segment; None where weights have none.

    `plain` is that of `time_changes`.
    """
    steps = range(segment.start, segment.start + len(segment.scales))
    times = [denoiser.times(one_step(schedule, step)) for step in steps]
    stacked = jax.tree.map(lambda *of_steps: np.stack(of_steps), *times)
    changes = pipe.strategy.read(pipe.call(time_changes, (denoiser, plain), inputs.weights, stacked), None)
    return None if changes is None else changes.tolist()


class Caching:
    """The step caches of a video by a rule: of each network of its segments, all of whose steps they hold."""

    def __init__(self, rule: CacheRule, tables: Tables, segments: Sequence[Segment], schedule: Any, steps: int):
        self.rule = rule
        self.tables = tables
        self.segments = segments
        self.schedule = schedule
        self.turns = turns_of(segments, steps)

    def of(self, network: str, denoiser: Denoiser, inputs: Inputs, pipe: Pipe) -> StepCache:
        """Returns a network's cache; raises WanjaxError where every step that may would reuse, or none.

        Where the weights' values decide, and there are none, a single step counts as reusing: the last that may.
        """
        number = next(i for i, segment in enumerate(self.segments) if segment.network == network)
        segment, turn, changes = self.segments[number], self.turns[number], None
        if isinstance(self.rule, TeaCache):
            plain = self.rule.table == PLAIN
            changes = changes_of(denoiser, inputs, self.schedule, segment, pipe, plain=plain)
        reused = self.rule.reused(turn, self.tables, changes)
        if isinstance(self.rule, TeaCache) and changes is None:
            last = max((step for step, may in enumerate(reused) if may), default=-1)
            reused = tuple(step == last for step in range(len(reused)))
        if changes is not None and len(self.turns) == 1:
            check_reused(self.rule, [reused])
        return self.rule.cache(turn, (False,) * turn.start + reused)
