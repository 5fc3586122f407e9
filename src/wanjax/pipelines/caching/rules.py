# SPDX-License-Identifier: Apache-2.0
"""Rules of step caches: which steps of a video reuse what another kept, and the texts that name a rule.

All but one know the steps on the host, before a step is compiled; EasyCache decides on the device.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from wanjax.errors import SettingError, WanjaxError, repr_short
from wanjax.figures import quantity
from wanjax.layers.stack import BlockCache
from wanjax.pipelines.caching.cache_tables import Changes, Magnitudes, Tables
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

PLAIN = "plain"  # the mode of TeaCache that its authors take unless another is asked for, and its table


@dataclass(frozen=True)
class CacheRule(ABC):
    """A rule for the steps that reuse what another kept. A network's first step never does."""

    name: ClassVar[str]
    counted: ClassVar[bool] = True
    """True where the steps that reuse are known before weights are."""
    blocks: ClassVar[type[BlockCache]] = BlockCache
    """What each forward keeps between its blocks, for a rule that treats each on its own."""
    decided_on_device: ClassVar[bool] = False
    """True where a step decides on the device whether it reuses."""
    forwards: ClassVar[int] = 0
    """The number of forwards that a step under guidance still runs where it reuses."""
    apart: ClassVar[bool] = False
    """True where a step has to run its two prompts apart."""

    @property
    def table(self) -> str | None:
        """The field of `Tables` that the rule reads."""
        return None

    def completed(self, tables: Tables) -> "CacheRule":
        """Return the rule with the checkpoint's own settings where none are given."""
        return self

    @abstractmethod
    def reused(self, phase: Phase, tables: Tables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        """Tell of each step of a phase whether it reuses, or may where that is not `counted`."""

    def cache(self, phase: Phase, reused: tuple[bool, ...]) -> StepCache:
        """Return the cache of a phase, whose steps, counted from the video's first, reuse as told."""
        return ForwardCache(self.blocks, reused=reused)

    def __str__(self) -> str:
        texts, named = [], False
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            named = named or value is None or isinstance(value, str)  # and so are those after it
            if value is not None:
                texts.append(f"{field.name}={value}" if named else str(value))
        return ":".join(filter(None, [self.name, ",".join(texts)]))


@dataclass(frozen=True)
class NoRule(CacheRule):
    """Every step is whole."""

    name = "none"

    def reused(self, phase: Phase, tables: Tables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        return (False,) * len(phase.steps)

    def cache(self, phase: Phase, reused: tuple[bool, ...]) -> StepCache:
        return NO_CACHE


@dataclass(frozen=True)
class Auto(NoRule):
    """Stands for the rule that is best for a model: MagCache where there is a table for it, else EasyCache."""

    name = "auto"

    def completed(self, tables: Tables) -> CacheRule:
        return MagCache().completed(tables) if tables.magnitudes else EasyCache()


@dataclass(frozen=True)
class DeepCache(CacheRule):
    """Reuses the tokens before the last block: a step then runs the last block and the head alone.

    Of the steps from `start` to before `end` every `interval`-th is whole; the others there reuse. Follows Ma et al.,
    DeepCache, 2024, as HunyuanVideo 1.5's authors apply it to a transformer: hyvideo/commons/cache_helper.py.
    """

    name = "deepcache"
    blocks = LastBlockCache
    start: int = 11
    end: int = 45
    interval: int = 4

    def __post_init__(self) -> None:
        if not (0 <= self.start < self.end and self.interval > 1):
            raise WanjaxError(
                f"{self} keeps nothing to reuse: give a start from 0 on, an end above it and an interval from 2 on"
            )

    def reused(self, phase: Phase, tables: Tables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        return _first_is_whole(
            [self.start <= i < self.end and (i - self.start) % self.interval != 0 for i in phase.steps]
        )


@dataclass(frozen=True)
class MagCache(CacheRule):
    """Reuses what all blocks add to the tokens, while its magnitude is known to change little.

    Follows Ma et al., MagCache, 2025: magcache_generate.py in MagCache4Wan2.1 and MagCache4Wan2.2. A step reuses if it
    does for both prompts. At most `most` steps in a row reuse, and the share `whole` of a network's steps comes first.
    """

    name = "magcache"
    blocks = ResidualCache
    delta: float | None = None
    most: int | None = None
    whole: float | None = None

    def __post_init__(self) -> None:
        if self.delta is not None and not 0 < self.delta < math.inf:
            raise WanjaxError(f"the threshold of {self} is not a number above 0: 0.06 is usual")
        if self.most is not None and self.most < 1:
            raise WanjaxError(f"{self} lets {self.most} steps in a row reuse: give a number from 1 on")
        if self.whole is not None and not 0 <= self.whole < 1:
            raise WanjaxError(f"{self} has {self.whole:g} as the share of whole steps: give a number from 0 to below 1")

    @property
    def table(self) -> str:
        return "magnitudes"

    def completed(self, tables: Tables) -> "CacheRule":
        assert tables.magnitudes is not None
        usual = {name: getattr(tables.magnitudes, name) for name in ("delta", "most", "whole")}
        return dataclasses.replace(self, **{k: v for k, v in usual.items() if getattr(self, k) is None})

    def reused(self, phase: Phase, tables: Tables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        table = tables.magnitudes
        assert table is not None
        delta, most = self.delta or table.delta, self.most or table.most
        whole = table.whole if self.whole is None else self.whole
        if not table.turns[phase.number]:
            return (False,) * len(phase.steps)
        lists = (table.prompt, table.negative) if phase.guided else (table.prompt,)
        listed = np.stack([nearest(ratios, phase.skipped + phase.total) for ratios in lists])[:, phase.skipped :]
        flags, (grown, errors, count) = [], NEW
        for step in range(len(phase.steps)):
            if step == 0 or not _may(step, phase, whole, table):
                flags.append(False)
                continue
            grown = grown * listed[:, phase.start + step]
            errors, count = errors + np.abs(1 - grown), count + 1
            flags.append(bool((errors < delta).all()) and count <= most)
            if not flags[-1]:
                grown, errors, count = NEW
        return _first_is_whole(flags)


NEW = (1.0, 0.0, 0)  # growth, errors and count of a MagCache after a step that was computed


def _may(step: int, phase: Phase, whole: float, table: Magnitudes) -> bool:
    """Return whether a step of a phase may reuse, as MagCache's authors count: two forwards a step, the negative last.

    They round the count of whole forwards down, but up for the second of two networks that both reuse.
    """
    forward, after = 2 * step, 2 * len(phase.steps) * whole
    return forward > after if phase.number == 1 and table.turns[0] else forward >= int(after)


def nearest(ratios: Sequence[float], steps: int) -> Float[np.ndarray, " steps"]:
    """Return a list of ratios read at the nearest indices for another number of steps."""
    if steps == 1:
        return np.array(ratios[-1:])
    places = np.round(np.arange(steps) * ((len(ratios) - 1) / (steps - 1))).astype(int)
    return np.array(ratios)[places]


@dataclass(frozen=True)
class TeaCache(CacheRule):
    """Reuses what all blocks add to the tokens, while the timestep's embedding has changed little.

    A polynomial turns its change into that of the output. Follows Liu et al., TeaCache, 2024: teacache_generate.py in
    TeaCache4Wan2.1, with --use_ret_steps, and teacache_sample_video.py in TeaCache4CogVideoX1.5. The mode `plain` is
    the former without --use_ret_steps: of the embedding before it is projected for the blocks.
    """

    name = "teacache"
    blocks = ResidualCache
    counted = False
    threshold: float | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in (None, PLAIN):
            raise WanjaxError(f"TeaCache has no mode {repr_short(self.mode)}: give {PLAIN}, or none")
        if self.threshold is not None and not 0 < self.threshold < math.inf:
            raise WanjaxError(f"the threshold of {self} is not a number above 0: 0.1 is usual")

    @property
    def table(self) -> str:
        return PLAIN if self.mode == PLAIN else "changes"

    def completed(self, tables: Tables) -> "CacheRule":
        usual = getattr(tables, self.table).threshold
        return self if self.threshold is not None else dataclasses.replace(self, threshold=usual)

    def reused(self, phase: Phase, tables: Tables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        """`changes` are those of the embedding before each step; without them each step that may reuse does."""
        table: Changes = getattr(tables, self.table)
        threshold = self.threshold or table.threshold
        flags, error = [], 0.0
        for step in range(len(phase.steps)):
            may = step > 0 and table.first <= phase.start + step < phase.total - table.last
            error = error + (0.0 if changes is None else float(np.polyval(table.polynomial, changes[step])))
            flags.append(may and error < threshold)
            error = error if flags[-1] else 0.0
        return _first_is_whole(flags)


@dataclass(frozen=True)
class EasyCache(CacheRule):
    """Reuses what a step added to its latents, while the output is expected to change by less than a threshold.

    Follows Zhou et al., EasyCache, 2025: easycache_generate.py in EasyCache4Wan2.1. The first `first` steps and the
    last are computed; the run with the prompt decides for both prompts.
    """

    name = "easycache"
    counted = False
    decided_on_device = True
    threshold: float = 0.05
    first: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf or self.first < 1:
            raise WanjaxError(f"{self} has no threshold above 0 and first steps from 1 on: easycache:0.05,10 is usual")

    def reused(self, phase: Phase, tables: Tables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        return _first_is_whole([self.first <= i < phase.total - 1 for i in phase.steps])

    def cache(self, phase: Phase, reused: tuple[bool, ...]) -> StepCache:
        return OutputCache(reused=reused, threshold=self.threshold)


@dataclass(frozen=True)
class Guidance(CacheRule):
    """Runs the negative prompt in every `interval`-th step alone, from a third of the steps to nine tenths.

    In between its output is the prompt's and their last difference. Follows Lv et al., FasterCache, 2024, as in
    maxdiffusion's pipelines/wan/wan_pipeline_2_1.py.
    """

    name = "guidance"
    forwards = 1
    apart = True
    interval: int = 5

    def __post_init__(self) -> None:
        if self.interval < 2:
            raise WanjaxError(f"{self} keeps nothing to reuse: give an interval from 2 on")

    def reused(self, phase: Phase, tables: Tables, changes: Sequence[float] | None = None) -> tuple[bool, ...]:
        start, end = int(phase.total / 3), int(phase.total * 0.9)
        return _first_is_whole(
            [phase.guided and start <= i < end and (i - start) % self.interval != 0 for i in phase.steps]
        )

    def cache(self, phase: Phase, reused: tuple[bool, ...]) -> StepCache:
        return GuidanceCache(reused=reused, half=phase.total // 2) if phase.guided else NO_CACHE


RULES: Mapping[str, type[CacheRule]] = {
    rule.name: rule for rule in (MagCache, TeaCache, EasyCache, DeepCache, Guidance, NoRule, Auto)
}
NONE = NoRule()


def cache_rule(rule: Any) -> CacheRule:
    """Return a rule, or the one that a text such as `magcache`, `deepcache:11,45,4` or `none` describes.

    Settings stand in their order, and after those by name: `teacache:0.1,mode=plain`. Raises WanjaxError for anything
    else.
    """
    return rule if isinstance(rule, CacheRule) else parse_rule(rule, RULES, "step cache")


def chosen_rule(rule: CacheRule, phases: Sequence[Phase], tables: Tables, model: str) -> CacheRule:
    """Return a rule with all of its settings for a checkpoint; for `Auto` none where its rule would reuse nothing.

    Raises SettingError where the checkpoint lacks the table, or the rule would reuse nothing, or all.
    """
    if rule == NONE:
        return rule
    if isinstance(rule, Auto):
        best = rule.completed(tables)
        return best if any(any(best.reused(phase, tables)) for phase in phases) else NONE
    if rule.table and getattr(tables, rule.table) is None:
        without = f"give {rule.name} alone"
        right = without if rule.table == PLAIN else f"`wanjax calibrate {model}` measures one"
        raise SettingError(f"there is no table of {model} for {rule}: {right}", "cache")
    if isinstance(rule, Guidance) and not any(phase.guided for phase in phases):
        raise SettingError(f"{rule} has no effect without guidance: set guidance_scale above 1", "cache")
    rule = rule.completed(tables)
    check_reused(rule, [rule.reused(phase, tables) for phase in phases])
    return rule


def check_reused(rule: CacheRule, reused: Sequence[Sequence[bool]]) -> None:
    """Raise SettingError where no step of any phase would reuse, or where all of half a phase would."""
    steps = sum(map(len, reused))
    if not any(map(any, reused)):
        message = f"the step cache {rule} reuses nothing in {quantity(steps, 'step')}: take more steps"
        raise SettingError(message, "cache")
    if not rule.counted or rule.table is None:
        return
    for flags in map(list, reused):
        if True in flags and all(left := flags[flags.index(True) :]) and len(left) >= max(2, len(flags) / 2):
            first = flags.index(True)
            message = f"{rule} reuses all steps after {first} of {len(flags)}: give a smaller threshold"
            raise SettingError(message, "cache")


def check_apart(rule: CacheRule, together: bool) -> None:
    """Raise WanjaxError for a guidance cache where a step runs both prompts together."""
    if together and rule.apart:
        raise WanjaxError(
            "a guidance cache has no effect where dp or --batch-guidance runs both prompts together: give a "
            "mesh without dp, such as tp=8"
        )


def _first_is_whole(reused: Sequence[bool]) -> tuple[bool, ...]:
    """Return which steps of a phase reuse, without the first, for which nothing is kept."""
    return (False, *reused[1:]) if reused else ()
