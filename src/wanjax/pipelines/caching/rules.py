# SPDX-License-Identifier: Apache-2.0
"""Rules of step caches: which steps of a video reuse cached values, and how a text names a rule.

All rules but EasyCache decide on the host, before a step is compiled; EasyCache decides on the device.
"""

import dataclasses
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from wanjax.errors import SettingError, WanjaxError, WanjaxWarning, repr_short, user_stack_level
from wanjax.figures import pluralize
from wanjax.layers.stack import BlockCache
from wanjax.pipelines.caching.cache_tables import CacheTables, MagCacheTable, TeaCacheTable
from wanjax.pipelines.caching.step_cache import (
    NO_CACHE,
    ForwardCache,
    GuidanceCache,
    LastBlockCache,
    OutputCache,
    ResidualCache,
    StepCache,
)
from wanjax.pipelines.phases import Phase
from wanjax.pipelines.rule_text import parse_rule

MAX_SEARCHED_STEPS = 200  # the largest number of steps that a message suggests
PLAIN = "plain"  # TeaCache's mode without --use_ret_steps, its authors' default; also the name of its table


@dataclass(frozen=True)
class CacheRule(ABC):
    """A rule that decides which steps reuse cached values. The first step of a network never reuses them."""

    name: ClassVar[str]
    reuse_is_known_before_run: ClassVar[bool] = True
    """True if the rule can tell before the weights are loaded which steps reuse."""
    blocks: ClassVar[type[BlockCache]] = BlockCache
    """What each forward pass caches between its blocks, for a rule that caches each forward pass separately."""
    decided_on_device: ClassVar[bool] = False
    """True if a step decides on the device whether it reuses."""
    num_forwards: ClassVar[int] = 0
    """The number of forward passes that a reusing step with guidance still runs."""
    needs_separate_forwards: ClassVar[bool] = False
    """True if a step has to run its two prompts in separate forward passes."""

    @property
    def table_name(self) -> str | None:
        """The field of `CacheTables` that the rule reads."""
        return None

    def with_defaults(self, tables: CacheTables) -> "CacheRule":
        """Return the rule with the checkpoint's settings in place of those that are None."""
        return self

    @abstractmethod
    def reused(self, phase: Phase, tables: CacheTables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        """Return a flag for each step of a phase: True if the step reuses cached values. If the rule is not
        `reuse_is_known_before_run`, True means that the step may reuse them."""

    def cache(self, phase: Phase, reused: tuple[bool, ...]) -> StepCache:
        """Return the cache of a phase. The first entry of `reused` belongs to the video's first step."""
        return ForwardCache(self.blocks, reused=reused)

    def __str__(self) -> str:
        texts, needs_name = [], False
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # After a missing setting, later settings are written with their names
            needs_name = needs_name or value is None or isinstance(value, str)
            if value is not None:
                texts.append(f"{field.name}={value}" if needs_name else str(value))
        return ":".join(filter(None, [self.name, ",".join(texts)]))


@dataclass(frozen=True)
class NoRule(CacheRule):
    """Compute every step in full."""

    name = "none"

    def reused(self, phase: Phase, tables: CacheTables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        return (False,) * len(phase.steps)

    def cache(self, phase: Phase, reused: tuple[bool, ...]) -> StepCache:
        return NO_CACHE


@dataclass(frozen=True)
class AutoRule(NoRule):
    """The best rule for a model: MagCache if the checkpoint has a table for MagCache, else EasyCache."""

    name = "auto"

    def with_defaults(self, tables: CacheTables) -> CacheRule:
        return MagCache().with_defaults(tables) if tables.magnitudes else EasyCache()


@dataclass(frozen=True)
class DeepCache(CacheRule):
    """Cache the tokens before the last block. A step that reuses them runs only the last block and the head.

    From step `start` until before step `end`, every `interval`-th step is computed in full, and the steps between
    reuse. Follows Ma et al., DeepCache, 2024, and, for transformers, the file
    hyvideo/commons/cache_helper.py of HunyuanVideo 1.5.
    """

    name = "deepcache"
    blocks = LastBlockCache
    start: int = 11
    end: int = 45
    interval: int = 4

    def __post_init__(self) -> None:
        if not (0 <= self.start < self.end and self.interval > 1):
            raise WanjaxError(
                f"{self} never reuses a step: give a start of at least 0, an end above it and an interval of at least 2"
            )

    def reused(self, phase: Phase, tables: CacheTables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        return _compute_first(
            [self.start <= i < self.end and (i - self.start) % self.interval != 0 for i in phase.steps]
        )


@dataclass(frozen=True)
class MagCache(CacheRule):
    """Reuse the residual that all blocks add to the tokens, while the table predicts little change of its magnitude.

    Follows Ma et al., MagCache, 2025: magcache_generate.py in MagCache4Wan2.1 and MagCache4Wan2.2. A step reuses only
    if the rule allows it for both prompts. At most `most` steps in a row reuse. The first steps of a network, which
    make up the share `whole` of its steps, are computed in full.
    """

    name = "magcache"
    blocks = ResidualCache
    delta: float | None = None
    most: int | None = None
    whole: float | None = None

    def __post_init__(self) -> None:
        if self.delta is not None and not 0 < self.delta < math.inf:
            raise WanjaxError(f"the threshold of {self} must be above 0 and finite: 0.06 is usual")
        if self.most is not None and self.most < 1:
            raise WanjaxError(f"{self} allows {self.most} reused steps in a row: give at least 1")
        if self.whole is not None and not 0 <= self.whole < 1:
            raise WanjaxError(
                f"the share of steps that {self} computes in full is {self.whole:g}: give at least 0 and less than 1"
            )

    @property
    def table_name(self) -> str:
        return "magnitudes"

    def with_defaults(self, tables: CacheTables) -> "CacheRule":
        assert tables.magnitudes is not None
        defaults = {name: getattr(tables.magnitudes, name) for name in ("delta", "most", "whole")}
        return dataclasses.replace(
            self, **{name: value for name, value in defaults.items() if getattr(self, name) is None}
        )

    def reused(self, phase: Phase, tables: CacheTables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        table = tables.magnitudes
        assert table is not None
        delta, max_reused = self.delta or table.delta, self.most or table.most
        uncached_share = table.whole if self.whole is None else self.whole
        if not table.turns[phase.index]:
            return (False,) * len(phase.steps)
        ratio_lists = (table.prompt, table.negative) if phase.guided else (table.prompt,)
        ratios = np.stack(
            [resample_nearest(table_ratios, phase.skipped + phase.total) for table_ratios in ratio_lists]
        )[:, phase.skipped :]
        flags, (growth, errors, count) = [], INITIAL_STATISTICS
        for step in range(len(phase.steps)):
            if step == 0 or not _may_reuse(step, phase, uncached_share, table):
                flags.append(False)
                continue
            growth = growth * ratios[:, phase.start + step]
            errors, count = errors + np.abs(1 - growth), count + 1
            flags.append(bool((errors < delta).all()) and count <= max_reused)
            if not flags[-1]:
                growth, errors, count = INITIAL_STATISTICS
        return _compute_first(flags)


# the initial growth, errors and count of MagCache, also after each step that is computed in full
INITIAL_STATISTICS = (1.0, 0.0, 0)


def _may_reuse(step: int, phase: Phase, uncached_share: float, table: MagCacheTable) -> bool:
    """Return whether a step of a phase may reuse, counting as MagCache's authors do: two forward passes a step.

    MagCache's authors round the number of full forwards down, but for the second of two networks that both reuse, they
    round it up.
    """
    forward, full_forwards = 2 * step, 2 * len(phase.steps) * uncached_share
    return forward > full_forwards if phase.index == 1 and table.turns[0] else forward >= int(full_forwards)


def resample_nearest(ratios: Sequence[float], steps: int) -> Float[np.ndarray, " steps"]:
    """Resample a list of ratios to another number of steps, by the nearest index."""
    if steps == 1:
        return np.array(ratios[-1:])
    indices = np.round(np.arange(steps) * ((len(ratios) - 1) / (steps - 1))).astype(int)
    return np.array(ratios)[indices]


@dataclass(frozen=True)
class TeaCache(CacheRule):
    """Reuse the residual that all blocks add to the tokens, while the timestep's embedding has changed little.

    A polynomial maps the change of the embedding to the change of the output. Follows Liu et al., TeaCache, 2024:
    teacache_generate.py in TeaCache4Wan2.1 with --use_ret_steps, and teacache_sample_video.py in TeaCache4CogVideoX1.5.
    The mode `plain` follows teacache_generate.py without --use_ret_steps: it uses the embedding before its projection
    for the blocks.
    """

    name = "teacache"
    blocks = ResidualCache
    reuse_is_known_before_run = False
    threshold: float | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in (None, PLAIN):
            raise WanjaxError(f"TeaCache has no mode {repr_short(self.mode)}: give {PLAIN} or no mode")
        if self.threshold is not None and not 0 < self.threshold < math.inf:
            raise WanjaxError(f"the threshold of {self} must be above 0 and finite: 0.1 is usual")

    @property
    def table_name(self) -> str:
        return PLAIN if self.mode == PLAIN else "changes"

    def with_defaults(self, tables: CacheTables) -> "CacheRule":
        default = getattr(tables, self.table_name).threshold
        return self if self.threshold is not None else dataclasses.replace(self, threshold=default)

    def reused(self, phase: Phase, tables: CacheTables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        """`changes` has the change of the embedding before each step. Without `changes`, every step that may reuse
        reuses."""
        table: TeaCacheTable = getattr(tables, self.table_name)
        threshold = self.threshold or table.threshold
        has_gaps = changes is None and table.gaps and phase.timesteps and threshold <= table.threshold
        flags, error = [], 0.0
        for step in range(len(phase.steps)):
            may_reuse = step > 0 and table.first <= phase.start + step < phase.total - table.last
            if may_reuse and has_gaps:
                timestep = phase.timesteps[step - 1]
                may_reuse = timestep - phase.timesteps[step] < table.gap_at(timestep)
            error = error + (0.0 if changes is None else float(np.polyval(table.polynomial, changes[step])))
            flags.append(may_reuse and error < threshold)
            error = error if flags[-1] else 0.0
        return _compute_first(flags)


@dataclass(frozen=True)
class EasyCache(CacheRule):
    """Reuse the difference between a step's output and its latents, while the expected error is below a threshold.

    Follows Zhou et al., EasyCache, 2025: easycache_generate.py in EasyCache4Wan2.1. The first `first` steps and the
    last are computed in full. The prompt's forward decides for both prompts.
    """

    name = "easycache"
    reuse_is_known_before_run = False
    decided_on_device = True
    threshold: float = 0.05
    first: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf or self.first < 1:
            raise WanjaxError(f"{self} needs a threshold above 0 and at least 1 first step: easycache:0.05,10 is usual")

    def reused(self, phase: Phase, tables: CacheTables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        return _compute_first([self.first <= i < phase.total - 1 for i in phase.steps])

    def cache(self, phase: Phase, reused: tuple[bool, ...]) -> StepCache:
        return OutputCache(reused=reused, threshold=self.threshold)


@dataclass(frozen=True)
class GuidanceCacheRule(CacheRule):
    """After the first third and before the last tenth of the steps, run the negative prompt only in every `interval`-th
    step. In the steps between, the negative prompt's output is the prompt's output plus the last difference of the two
    outputs. Follows Lv et al., FasterCache, 2024, as in maxdiffusion's pipelines/wan/wan_pipeline_2_1.py.
    """

    name = "guidance"
    num_forwards = 1
    needs_separate_forwards = True
    interval: int = 5

    def __post_init__(self) -> None:
        if self.interval < 2:
            raise WanjaxError(f"{self} never reuses a step: give an interval of at least 2")

    def reused(self, phase: Phase, tables: CacheTables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        start, end = int(phase.total / 3), int(phase.total * 0.9)
        return _compute_first(
            [phase.guided and start <= i < end and (i - start) % self.interval != 0 for i in phase.steps]
        )

    def cache(self, phase: Phase, reused: tuple[bool, ...]) -> StepCache:
        return GuidanceCache(reused=reused, half_step=phase.total // 2) if phase.guided else NO_CACHE


RULES: Mapping[str, type[CacheRule]] = {
    rule.name: rule for rule in (MagCache, TeaCache, EasyCache, DeepCache, GuidanceCacheRule, NoRule, AutoRule)
}
NONE = NoRule()


def cache_rule(rule: Any) -> CacheRule:
    """Parse a text such as `magcache`, `deepcache:11,45,4` or `none`. Return a rule unchanged.

    The settings of a rule follow the colon in the order of its fields. Settings at the end may have names instead, as
    in `teacache:0.1,mode=plain`. Raises WanjaxError for other texts.
    """
    return rule if isinstance(rule, CacheRule) else parse_rule(rule, RULES, "step cache")


def resolve_rule(
    rule: CacheRule, phases_for: Callable[[int], Sequence[Phase]], steps: int, tables: CacheTables, model: str
) -> CacheRule:
    """Fill in a rule's settings for a checkpoint. Replace `AutoRule` by the best rule for the model. If the best rule
    would reuse no step, or all steps, replace `AutoRule` by no rule and issue a WanjaxWarning. `phases_for` returns the
    phases of a video with a number of steps.

    Raises SettingError if the checkpoint lacks the rule's table, or if the rule would reuse no step, or all steps.
    """
    phases = phases_for(steps)  # also checks that the solver has these steps
    if rule == NONE:
        return rule
    if isinstance(rule, AutoRule):
        best = rule.with_defaults(tables)
        reused = [best.reused(phase, tables) for phase in phases]
        if any(map(any, reused)) and _last_computed(best, reused) is None:
            return best
        warn_nothing_reused(steps)
        return NONE
    if rule.table_name and getattr(tables, rule.table_name) is None:
        default_mode = f"give {rule.name} without a mode"
        advice = default_mode if rule.table_name == PLAIN else f"measure one with `wanjax calibrate {model}`"
        raise SettingError(f"{model} has no table for {rule}: {advice}", "cache")
    if isinstance(rule, GuidanceCacheRule) and not any(phase.guided for phase in phases):
        raise SettingError(f"{rule} has no effect without guidance: set guidance_scale above 1", "cache")
    rule = rule.with_defaults(tables)
    reused = [rule.reused(phase, tables) for phase in phases]
    if not any(map(any, reused)):
        problem = f"the step cache {rule} reuses nothing in {pluralize(steps, 'step')}"
        advice = "give it other settings"
    elif (first := _last_computed(rule, reused)) is not None:
        problem, advice = f"{rule} reuses all steps after {first[0]} of {first[1]}", "give a smaller threshold"
    else:
        return rule
    if fewest_steps := min_steps(rule, phases_for, steps, tables):
        advice = f"give at least {fewest_steps} steps"
        if not rule.reuse_is_known_before_run:
            advice = f"give more than {fewest_steps} steps, and still more for a low threshold"
    raise SettingError(f"{problem}: {advice}, or the cache none", "cache")


def warn_nothing_reused(steps: int) -> None:
    """Issue a warning that the best step cache reuses nothing in a video with this number of steps."""
    message = f"cache auto has nothing to reuse in {pluralize(steps, 'step')}, so all steps are whole"
    warnings.warn(message, WanjaxWarning, stacklevel=user_stack_level())


def min_steps(
    rule: CacheRule, phases_for: Callable[[int], Sequence[Phase]], steps: int, tables: CacheTables
) -> int | None:
    """Return the lowest number of steps above `steps` for which a rule reuses some steps and computes others.

    Return None if there is no such number up to `MAX_SEARCHED_STEPS`.
    """
    with suppress(WanjaxError):  # some schedules have few steps
        for count in range(steps + 1, MAX_SEARCHED_STEPS + 1):
            reused = [rule.reused(phase, tables) for phase in phases_for(count)]
            if any(map(any, reused)) and _last_computed(rule, reused) is None:
                return count
    return None


def _last_computed(rule: CacheRule, reused: Sequence[Sequence[bool]]) -> tuple[int, int] | None:
    """Find a phase that computes no step after a step in its first half. Return the number of its computed steps and
    the number of all its steps, or None if there is no such phase."""
    if not rule.reuse_is_known_before_run or rule.table_name is None:
        return None
    for flags in map(list, reused):
        if True in flags and all(remaining := flags[flags.index(True) :]) and len(remaining) >= len(flags) / 2:
            return flags.index(True), len(flags)
    return None


def check_any_reused(rule: TeaCache, table: TeaCacheTable, changes: Sequence[float], reused: Sequence[bool]) -> None:
    """Raise SettingError if TeaCache reuses no step of a video. The message suggests a threshold with which TeaCache
    reuses a step."""
    if any(reused):
        return
    candidates = changes[max(1, table.first) : len(changes) - table.last]
    lowest_threshold = min(
        (estimate for x in candidates if (estimate := float(np.polyval(table.polynomial, x))) > 0), default=None
    )
    advice = "give more steps" + (
        f", or a threshold above {float(f'{1.06 * lowest_threshold:.2g}'):g}" if lowest_threshold else ""
    )
    message = f"the step cache {rule} reuses nothing in {pluralize(len(reused), 'step')}: {advice}"
    raise SettingError(message, "cache")


def check_separate_forwards(
    rule: CacheRule, *, batch_guidance: bool = False, mesh_sizes: Mapping[str, int] | None = None
) -> None:
    """Raise an error for a guidance cache if a step runs both prompts in one forward pass.

    The reason is `batch_guidance`, or an axis `dp` of the mesh with more than one device.
    """
    if not rule.needs_separate_forwards:
        return
    if batch_guidance:
        raise SettingError(
            f"the step cache {rule} has no effect with batched guidance, which runs both prompts together: leave "
            "batch_guidance or the cache out",
            "cache",
        )
    if mesh_sizes and (dp := mesh_sizes.get("dp", 1)) > 1:
        devices = math.prod(mesh_sizes.values())
        raise SettingError(
            f"the step cache {rule} has no effect with dp={dp}, which runs both prompts together: give a mesh without "
            f"dp, such as tp={devices}, or leave the cache out",
            "cache",
        )


def _compute_first(reused: Sequence[bool]) -> tuple[bool, ...]:
    """Clear the flag of a phase's first step, because no earlier step has cached values for it."""
    return (False, *reused[1:]) if reused else ()
