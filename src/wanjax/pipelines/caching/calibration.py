# SPDX-License-Identifier: Apache-2.0
"""Measure the tables that step caches need for a checkpoint, in runs that compute every step in full."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.polynomial import Polynomial

from wanjax.errors import WanjaxError
from wanjax.figures import pluralize
from wanjax.pipelines.caching.cache_tables import CacheTables, MagCacheTable, TeaCacheTable
from wanjax.pipelines.caching.phase_cache import GAPS, embedding_changes, gap_changes
from wanjax.pipelines.caching.rules import CacheRule, TeaCache
from wanjax.pipelines.caching.step_cache import (
    CachedArrays,
    ForwardCache,
    Predict,
    Prediction,
    ResidualCache,
    in_float32,
    mean_absolute,
)
from wanjax.pipelines.denoiser import select_modality
from wanjax.pipelines.model import VideoModel
from wanjax.pipelines.observers import Observer, Observers, Progress, Step
from wanjax.pipelines.phases import Phase
from wanjax.pipelines.runtime import Runtime
from wanjax.pipelines.sampling import sample_pass
from wanjax.pipelines.settings import Settings
from wanjax.schedulers.base import TRAIN_STEPS

MAGCACHE_SETTINGS = 0.12, 2, 0.2  # delta, most and whole, for a checkpoint without published settings
DEGREE = 4  # the degree of TeaCache's polynomial, as in the code of its authors
MIN_STEPS = 2 * (DEGREE + 1)  # the minimum number of steps: two for each coefficient of the polynomial
REUSED_SHARE = 0.5  # TeaCache's threshold is chosen so that this share of steps reuses


@dataclass(frozen=True)
class MeasuringCache(ForwardCache):
    """Compute every step in full. For each prompt of a forward pass, measure the change since the previous step. With
    several modalities, the residual covers the tokens of all modalities, and the output is the video's output.
    """

    def cached_for(self, step: int, cached: CachedArrays | None) -> CachedArrays | None:
        return cached

    def run(self, predict: Predict, cached: CachedArrays | None) -> tuple[Prediction, CachedArrays]:
        prediction, residuals = ForwardCache(ResidualCache).run(predict, None)
        output = select_modality(in_float32(prediction))
        if cached is None:
            ones = jnp.ones(len(output))
            return prediction, (*residuals, output, ones, 0 * ones)
        *past_residuals, past_output, _, _ = cached
        norms, past_norms = (jnp.concatenate([*map(_norm, x)], axis=1) for x in (residuals, past_residuals))
        ratio = norms / jnp.maximum(past_norms, jnp.finfo(jnp.float32).tiny)
        change = mean_absolute(output - past_output) / mean_absolute(past_output)
        return prediction, (*residuals, output, ratio.mean(axis=1), change)


def _norm(tokens: Float[Array, "B L E"]) -> Float[Array, "B L"]:
    return jnp.linalg.norm(tokens.astype(jnp.float32), axis=-1)


class Measurements(NamedTuple):
    """Measurements of each step of a run, [prompts, steps]: the ratio of residuals and the relative change of the
    output.

    `embedding_changes` are the changes of the timestep's embedding, and `phases` the steps of each network.
    `gap_changes` are the changes over steps of several lengths; None for a network with more than one timestep.
    """

    ratios: Float[np.ndarray, "_P steps"]
    output_changes: Float[np.ndarray, "_P steps"]
    embedding_changes: Float[np.ndarray, " steps"]
    phases: tuple[Phase, ...]
    gap_changes: Float[np.ndarray, "_T _S"] | None = None


class Recorder(Observer):
    """Collect the ratios of each step. Also acts as the step cache of the run, which computes every step in full."""

    def __init__(self) -> None:
        self.embedding_changes: list[float] = []
        self.gap_changes: list[np.ndarray | None] = []
        self.phases: list[Phase] = []
        self.ratios: list[np.ndarray] = []

    def cache(self, *arguments: Any) -> MeasuringCache:
        """Return the cache that measures a phase. `arguments` are the last six arguments of `step_cache`."""
        self.phases.append(arguments[-1])
        self.embedding_changes += embedding_changes(*arguments) or []
        self.gap_changes.append(gap_changes(*arguments))
        return MeasuringCache()

    def stepped(self, step: Step) -> None:
        rows = [np.concatenate([np.asarray(part[index]) for part in step.state.cached or ()]) for index in (-2, -1)]
        # Without guidance, use the prompt's values for both prompts
        self.ratios.append(np.resize(np.stack(rows, axis=1), (2, 2)))


def measure(runtime: Runtime, model: VideoModel[Any], conditioning: Any, settings: Settings) -> Measurements:
    """Denoise a video for an output of `encode`, and return the measurements of its steps."""
    recorder = Recorder()
    first = model.spec.passes_of(settings)[0]  # only the first of several passes has a step cache
    progress = Progress(0, 1, 0, first.steps)
    options: dict[str, Any] = {"noise": {}, "observers": Observers([recorder]), "make_cache": recorder.cache}
    deque(sample_pass(runtime, model, conditioning, first, [settings.seed], progress, **options), maxlen=0)
    ratios, output_changes = np.moveaxis(np.array(recorder.ratios, np.float64), 0, -1).swapaxes(0, 1)
    embedding_change_array, phases = np.array(recorder.embedding_changes), tuple(recorder.phases)
    gaps = recorder.gap_changes[0] if len(phases) == 1 else None  # two networks embed timesteps differently
    return Measurements(ratios, output_changes, embedding_change_array, phases, gaps)


def check_step_count(steps: int) -> None:
    """Raise WanjaxError if a run has too few steps to measure a model."""
    if steps < MIN_STEPS:
        raise WanjaxError(f"{pluralize(steps, 'step')} are too few to measure a model: give at least {MIN_STEPS}")


def tables_from(runs: Sequence[Measurements]) -> CacheTables:
    """Build tables from runs with equal settings. With the default settings of these tables, about half of the steps
    reuse."""
    check_step_count(steps := runs[0].ratios.shape[1])
    ratios = np.mean([run.ratios for run in runs], axis=0).round(5)
    magnitudes = MagCacheTable(tuple(ratios[0].tolist()), tuple(ratios[1].tolist()), *MAGCACHE_SETTINGS)
    phase_starts = {phase.start for phase in runs[0].phases}
    measured_steps = [step for step in range(steps) if step not in phase_starts]
    embedding_changes = np.concatenate(
        [np.tile(run.embedding_changes[measured_steps], len(run.output_changes)) for run in runs]
    )
    output_changes = np.concatenate([run.output_changes[:, measured_steps].ravel() for run in runs])
    polynomial = Polynomial.fit(embedding_changes, output_changes, DEGREE).convert().coef[::-1]
    changes = TeaCacheTable(tuple(float(f"{c:.9g}") for c in polynomial), 1.0, max(1, round(steps / 10)))
    changes = changes._replace(threshold=_threshold(changes, runs[0]))
    return CacheTables(magnitudes, changes._replace(gaps=gaps_for(changes, runs[0].gap_changes)))


def gaps_for(changes: TeaCacheTable, gap_changes: Float[np.ndarray, "_T _S"] | None) -> tuple[float, ...]:
    """Compute the field `gaps` of a table from the changes of the embedding over steps of several lengths."""
    if gap_changes is None:
        return ()
    never_reused = np.append(GAPS[1:], TRAIN_STEPS)  # for each gap, the next longer gap
    below_threshold = np.polyval(changes.polynomial, gap_changes) < changes.threshold
    gaps = [float(max(never_reused[row], default=GAPS[0])) for row in below_threshold]
    return (gaps[1], *gaps[1:])  # no step starts at timestep 0


def _threshold(changes: TeaCacheTable, run: Measurements) -> float:
    """Return the smallest threshold of TeaCache, with two digits, at which half of the steps of a run reuse cached
    values."""
    for tenths in range(-30, 11):  # from 0.001 to 10
        threshold = float(f"{10 ** (tenths / 10):.2g}")
        if reused_steps(TeaCache(threshold), CacheTables(changes=changes), run) >= REUSED_SHARE * run.ratios.shape[1]:
            return threshold
    return 1.0


def reused_steps(rule: CacheRule, tables: CacheTables, run: Measurements) -> int:
    """Return the number of steps of a run that a rule would reuse."""
    return sum(sum(rule.reused(phase, tables, run.embedding_changes[phase.start :].tolist())) for phase in run.phases)
