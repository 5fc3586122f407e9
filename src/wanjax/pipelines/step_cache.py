# SPDX-License-Identifier: Apache-2.0
"""Step caches: a step keeps a part of its work, which later steps reuse in place of doing it again.

A cache stands between the sampler and a transformer, which hands it the way through its blocks: `Through`.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float

from wanjax.errors import WanjaxError, shown
from wanjax.layers.stack import Through, Trunk, through_all

Predict = Callable[[Through], Float[Array, "B T H W C"]]  # a forward, which goes through its blocks in this way
Kept = tuple[Array, ...]


@dataclass(frozen=True)
class StepCache(ABC):
    """A rule for the steps that reuse what another kept, and for what that is. A hashable value.

    Which steps reuse depends on their number alone, so that each of the two kinds is a program without branches.
    """

    name: ClassVar[str]

    @abstractmethod
    def reuses(self, step: int) -> bool:
        """Tells whether a step, counted from 0, may reuse what an earlier one kept."""

    @abstractmethod
    def keep(self, predict: Predict) -> tuple[Float[Array, "B T H W C"], Kept]:
        """Returns a whole forward's prediction, and what it keeps."""

    @abstractmethod
    def reuse(self, predict: Predict, kept: Kept) -> Float[Array, "B T H W C"]:
        """Returns a prediction made of what was kept."""

    def run(self, predict: Predict, kept: Kept | None) -> tuple[Float[Array, "B T H W C"], Kept]:
        """Returns a prediction, and what the next step may reuse; `kept` is None for a whole forward."""
        return self.keep(predict) if kept is None else (self.reuse(predict, kept), kept)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name, in the order in which they are written."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __str__(self) -> str:
        return ":".join(filter(None, [self.name, ",".join(map(str, self.settings.values()))]))


@dataclass(frozen=True)
class NoCache(StepCache):
    """Keeps nothing: every step is whole."""

    name = "none"

    def reuses(self, step: int) -> bool:
        return False

    def keep(self, predict: Predict) -> tuple[Float[Array, "B T H W C"], Kept]:
        return predict(through_all), ()

    def reuse(self, predict: Predict, kept: Kept) -> Float[Array, "B T H W C"]:
        raise AssertionError("no step reuses anything")


NO_CACHE = NoCache()


@dataclass(frozen=True)
class DeepCache(StepCache):
    """Reuses the tokens before the last block: a step then runs the last block and the head alone.

    Of the steps from `start` to before `end` every `interval`-th is whole; the others there reuse. Follows Ma et al.,
    DeepCache, 2024, as HunyuanVideo 1.5's authors apply it to a transformer: hyvideo/commons/cache_helper.py.
    """

    name = "deepcache"
    start: int = 11
    end: int = 45
    interval: int = 4

    def __post_init__(self) -> None:
        if not (0 <= self.start < self.end and self.interval > 1):
            raise WanjaxError(f"{self} keeps nothing to reuse: 0 <= start < end and an interval from 2 on would do")

    def reuses(self, step: int) -> bool:
        return self.start <= step < self.end and (step - self.start) % self.interval != 0

    def keep(self, predict: Predict) -> tuple[Float[Array, "B T H W C"], Kept]:
        kept: list[Array] = []

        def through(trunk: Trunk, x: Any) -> Any:
            before = trunk.before_last(x)
            kept.extend(jax.tree.leaves(before))
            return trunk.last(before)

        return predict(through), tuple(kept)

    def reuse(self, predict: Predict, kept: Kept) -> Float[Array, "B T H W C"]:
        return predict(lambda trunk, x: trunk.last(jax.tree.unflatten(jax.tree.structure(x), kept)))


CACHES: Mapping[str, type[StepCache]] = {cache.name: cache for cache in (DeepCache, NoCache)}


def step_cache(text: str) -> StepCache:
    """Returns the cache that a text such as `deepcache`, `deepcache:11,45,4` or `none` describes.

    Raises WanjaxError for any other text.
    """
    name, _, listed = text.partition(":")
    if name not in CACHES:
        raise WanjaxError(f"there is no step cache {shown(text)}: {' or '.join(CACHES)} would do")
    usual = CACHES[name]()
    settings, values = usual.settings, listed.split(",") if listed else []
    try:
        given = {key: type(settings[key])(value) for key, value in zip(settings, values, strict=False)}
    except ValueError:
        given = {}
    if len(given) != len(values):
        raise WanjaxError(f"the step cache {shown(text)} is not written like {usual}, which has {list(settings)}")
    return CACHES[name](**given)


def reused_steps(cache: StepCache, steps: int) -> int:
    """Returns the number of steps that reuse what another kept."""
    return sum(map(cache.reuses, range(steps)))
