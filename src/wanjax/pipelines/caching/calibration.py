# SPDX-License-Identifier: Apache-2.0
"""Measurement of what step caches need to know of a checkpoint, in runs whose steps are all whole."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.polynomial import Polynomial

from wanjax.errors import WanjaxError
from wanjax.figures import quantity
from wanjax.pipelines.caching.cache_tables import Changes, Magnitudes, Tables
from wanjax.pipelines.caching.phase_cache import changes_of
from wanjax.pipelines.caching.rules import CacheRule, TeaCache
from wanjax.pipelines.caching.step_cache import (
    Cached,
    ForwardCache,
    Predict,
    Prediction,
    ResidualCache,
    in_float32,
    mean_size,
)
from wanjax.pipelines.denoiser import stream_of
from wanjax.pipelines.model import VideoModel
from wanjax.pipelines.observers import Observer, Observers, Progress, Step
from wanjax.pipelines.phases import Phase
from wanjax.pipelines.runtime import Runtime
from wanjax.pipelines.sampling import sample_pass
from wanjax.pipelines.settings import Settings

DELTA, MOST, WHOLE = 0.12, 2, 0.2  # settings of MagCache for a checkpoint without published ones
DEGREE = 4  # of TeaCache's polynomial, as its authors have it
LEAST = 2 * (DEGREE + 1)  # steps, so that each coefficient is told by two
HALF = 0.5  # the share of the steps that reuse at TeaCache's measured threshold


@dataclass(frozen=True)
class MeasuringCache(ForwardCache):
    """Runs every step whole, and measures how it differs from the step before it, for each prompt of a forward.

    Of several streams the residual is that of all tokens, and the output that of the video.
    """

    def cached_for(self, step: int, cached: Cached | None) -> Cached | None:
        return cached

    def run(self, predict: Predict, cached: Cached | None) -> tuple[Prediction, Cached]:
        prediction, residuals = ForwardCache(ResidualCache).run(predict, None)
        output = stream_of(in_float32(prediction))
        if cached is None:
            nothing = jnp.ones(len(output))
            return prediction, (*residuals, output, nothing, 0 * nothing)
        *past_residuals, past_output, _, _ = cached
        norms, past_norms = (jnp.concatenate([*map(_norm, x)], axis=1) for x in (residuals, past_residuals))
        ratio = norms / jnp.maximum(past_norms, jnp.finfo(jnp.float32).tiny)
        changed = mean_size(output - past_output) / mean_size(past_output)
        return prediction, (*residuals, output, ratio.mean(axis=1), changed)


def _norm(tokens: Float[Array, "B L E"]) -> Float[Array, "B L"]:
    return jnp.linalg.norm(tokens.astype(jnp.float32), axis=-1)


class Measured(NamedTuple):
    """What a run told of each step, [prompts, steps]: the residual's growth, and the output's relative change.

    `embedded` are the changes of the timestep's embedding, and `phases` the steps of each network.
    """

    ratios: Float[np.ndarray, "_P steps"]
    changed: Float[np.ndarray, "_P steps"]
    embedded: Float[np.ndarray, " steps"]
    phases: tuple[Phase, ...]


class Measurement(Observer):
    """Reads the ratios of each step; it is the step caches of a run too, whose steps are all whole."""

    def __init__(self) -> None:
        self.embedded: list[float] = []
        self.phases: list[Phase] = []
        self.ratios: list[np.ndarray] = []

    def cache(self, *arguments: Any) -> MeasuringCache:
        """Return the cache that measures a phase; the arguments are the last six of `step_cache`."""
        self.phases.append(arguments[-1])
        self.embedded += changes_of(*arguments) or []
        return MeasuringCache()

    def stepped(self, step: Step) -> None:
        rows = [np.concatenate([np.asarray(part[index]) for part in step.state.cached or ()]) for index in (-2, -1)]
        self.ratios.append(np.resize(np.stack(rows, axis=1), (2, 2)))  # without guidance the prompt's, twice


def measure(runtime: Runtime, model: VideoModel[Any], conditioning: Any, settings: Settings) -> Measured:
    """Make the latents of a video of an output of `encode`, and return what its steps measured."""
    measurement = Measurement()
    first = model.spec.passes_of(settings)[0]  # of several passes, which alone has a step cache
    whole = Progress(0, 1, 0, first.steps)
    how: dict[str, Any] = {"noise": {}, "observers": Observers([measurement]), "caches": measurement.cache}
    deque(sample_pass(runtime, model, conditioning, first, [settings.seed], whole, **how), maxlen=0)
    ratios, changed = np.moveaxis(np.array(measurement.ratios, np.float64), 0, -1).swapaxes(0, 1)
    return Measured(ratios, changed, np.array(measurement.embedded), tuple(measurement.phases))


def tables_from(runs: Sequence[Measured]) -> Tables:
    """Return the tables that runs of equal settings tell, with settings at which about half of the steps reuse."""
    steps = runs[0].ratios.shape[1]
    if steps < LEAST:
        raise WanjaxError(f"{quantity(steps, 'step')} tell too little of a model: measure at least {LEAST}")
    ratios = np.mean([run.ratios for run in runs], axis=0).round(5)
    magnitudes = Magnitudes(tuple(ratios[0].tolist()), tuple(ratios[1].tolist()), DELTA, MOST, WHOLE)
    first = {phase.start for phase in runs[0].phases}
    later = [step for step in range(steps) if step not in first]
    embedded = np.concatenate([np.tile(run.embedded[later], len(run.changed)) for run in runs])
    changed = np.concatenate([run.changed[:, later].ravel() for run in runs])
    polynomial = Polynomial.fit(embedded, changed, DEGREE).convert().coef[::-1]
    changes = Changes(tuple(float(f"{c:.9g}") for c in polynomial), 1.0, max(1, round(steps / 10)))
    return Tables(magnitudes, changes._replace(threshold=_threshold(changes, runs[0])))


def _threshold(changes: Changes, run: Measured) -> float:
    """Return TeaCache's least threshold, of two digits, at which half of the steps of a run reuse."""
    for tenths in range(-30, 11):  # from 0.001 to 10
        threshold = float(f"{10 ** (tenths / 10):.2g}")
        if reused_steps(TeaCache(threshold), Tables(changes=changes), run) >= HALF * run.ratios.shape[1]:
            return threshold
    return 1.0


def reused_steps(rule: CacheRule, tables: Tables, run: Measured) -> int:
    """Return the number of steps of a run that a rule would reuse."""
    return sum(sum(rule.reused(one, tables, run.embedded[one.start :].tolist())) for one in run.phases)
