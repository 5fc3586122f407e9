# SPDX-License-Identifier: Apache-2.0
"""Step caches: a step keeps a part of its work, which later steps reuse in place of doing it again.

A cache stands between the sampler and a transformer, whose forward it may give a `BlockCache`. It is what a step is
compiled for; `rules` decide which steps reuse.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add, sub
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from wanjax.errors import WanjaxError
from wanjax.layers.stack import BlockCache, constrain_tokens
from wanjax.sharding import replicate

Latents = Any  # [B T H W C], or a mapping of streams
Prediction = Any  # as latents, of one video or more, under one prompt or both
Predict = Callable[..., Prediction]  # a forward, which may be given a `BlockCache` for its blocks
Cached = tuple[Any, ...]  # tuples of arrays
Predictions = tuple[list[Prediction], Cached]  # of each forward, and what the next step may reuse


@dataclass(frozen=True)
class StepCache(ABC):
    """What a step keeps, and how another reuses it: two programs without branches. A hashable value.

    `reused` tells which steps reuse. The programs do not depend on it, so neither does the value.
    """

    reused: tuple[bool, ...] = field(default=(), compare=False, kw_only=True)

    def reuses(self, step: int) -> bool:
        """Return whether a step, counted from 0, may reuse what an earlier one kept."""
        return step < len(self.reused) and self.reused[step]

    def cached_for(self, step: int, cached: Cached | None) -> Cached | None:
        """Return the cached values for a step, or None to run all blocks."""
        return cached if self.reuses(step) else None

    @abstractmethod
    def predictions(
        self, forwards: Sequence[Predict], x: Latents, cached: Cached | None
    ) -> tuple[list[Prediction], Cached]:
        """Return the prediction of each forward of a step from x, in float32, and what the next step may reuse."""


@dataclass(frozen=True)
class ForwardCache(StepCache):
    """A cache that treats each forward of a step on its own, by what it keeps between its blocks: here nothing."""

    blocks: type[BlockCache] = BlockCache

    def predictions(
        self, forwards: Sequence[Predict], x: Latents, cached: Cached | None
    ) -> tuple[list[Prediction], Cached]:
        pairs = [self.run(*pair) for pair in zip(forwards, cached or (None,) * len(forwards), strict=True)]
        return [in_float32(prediction) for prediction, _ in pairs], tuple(part for _, part in pairs)

    def run(self, predict: Predict, cached: Cached | None) -> tuple[Prediction, Cached]:
        """Return a forward's prediction, and what the next may reuse; `cached` is None for a whole forward."""
        blocks = self.blocks(cached)
        return predict(blocks), blocks.cached


def in_float32(prediction: Prediction) -> Prediction:
    return jax.tree.map(lambda x: x.astype(jnp.float32), prediction)


NO_CACHE = ForwardCache()


class LastBlockCache(BlockCache):
    """Keeps the tokens before the last block; a forward that is given them runs the last block alone."""

    def parts(self, layers: int, *cuts: int) -> Sequence[range]:
        parts = super().parts(layers, *cuts, layers - 1)
        self.last = parts[-1]
        return parts if self.previous is None else parts[-1:]

    def before(self, part: range, x: Any) -> Any:
        if part != self.last:
            return x
        x = constrain_tokens(x if self.previous is None else jax.tree.unflatten(jax.tree.structure(x), self.previous))
        self.cached = tuple(jax.tree.leaves(x))
        return x


class ResidualCache(BlockCache):
    """Keeps what all blocks add to the tokens that heads read; a forward that is given it runs no block.

    Of a tuple of streams of tokens heads read the first alone, which may be a tree: a video's and that of its sound.
    """

    def __init__(self, cached: tuple[Any, ...] | None = None):
        super().__init__(cached)
        self.cached = constrain_tokens(cached or ())

    def parts(self, layers: int, *cuts: int) -> Sequence[range]:
        return super().parts(layers, *cuts) if self.previous is None else ()

    def before(self, part: range, x: Any) -> Any:
        if part.start == 0:
            self.first = jax.tree.leaves(x[0] if isinstance(x, tuple) else x)
        return x

    def after(self, x: Any) -> Any:
        tokens, tree = jax.tree.flatten(x)
        if self.previous is None:
            self.cached = constrain_tokens(
                tuple(map(sub, tokens, self.first))
            )  # those that are read, which are the first
            return x
        read = constrain_tokens(list(map(add, tokens, self.cached)))
        return jax.tree.unflatten(tree, [*read, *tokens[len(read) :]])


class History(NamedTuple):
    """The part of an `OutputCache` that all forwards share. Errors and changes are those of each video and stream."""

    at: Latents  # the latents at the last step that was computed
    before: Latents  # the latents at the last step
    rate: Any  # [B], how much the output changed for each change of the latents, between computed steps
    error: Any  # [B], the relative change of the output that is expected since the last computed step
    count: Any  # the number of steps that reused
    threshold: Any  # of the error; the host sets it for each step, below 0 for one that has to be computed


@dataclass(frozen=True)
class OutputCache(StepCache):
    """Keeps the output of a step, and decides on the device, from the prompt's own output, whether to reuse it.

    A step that reuses adds to its latents what the last computed step added, without running the network. Of videos
    that are made together all reuse or none, and so do their streams. One program makes the first step, and another,
    with a branch, all others.
    """

    threshold: float = field(default=0.0, compare=False)

    def cached_for(self, step: int, cached: Cached | None) -> Cached | None:
        threshold = np.float32(self.threshold if self.reuses(step) else -1)
        return cached and (*cached[:-1], (*cached[-1][:-1], threshold))  # the last of a history

    def predictions(
        self, forwards: Sequence[Predict], x: Latents, cached: Cached | None
    ) -> tuple[list[Prediction], Cached]:
        def computed() -> list[Prediction]:
            return replicate([in_float32(predict()) for predict in forwards])

        streams, each = jax.tree.structure(x), jax.tree.map
        if cached is None:
            outputs, none = computed(), each(lambda x: jnp.zeros(len(x)), x)
            first = History(x, x, each(lambda none: none + jnp.inf, none), none, jnp.int32(0), jnp.float32(-1))
            return outputs, _leaves(*outputs, tuple(first))
        *parts, past = cached
        old = [jax.tree.unflatten(streams, output) for output in parts]
        past = jax.tree.unflatten(jax.tree.structure(History(x, x, x, x, 0, 0)), past)

        def expect(x: Any, before: Any, rate: Any, error: Any, output: Any) -> Float[Array, "B"]:
            return error + rate * mean_size(x - before) / mean_size(output[: len(x)])

        expected = each(expect, x, past.before, past.rate, past.error, old[0])
        reuse = reduce(jnp.logical_and, [jnp.all(one < past.threshold) for one in jax.tree.leaves(expected)])

        def moved(x: Any, at: Any, output: Any) -> Prediction:
            return _like(x, output) + (output - _like(at, output))

        def again() -> tuple[list[Prediction], list[Prediction], History]:
            outputs = [each(moved, x, past.at, output) for output in old]
            return outputs, old, past._replace(before=x, error=expected, count=past.count + 1)

        def rate(x: Any, at: Any, new: Any, old: Any) -> Float[Array, "B"]:
            return mean_size(new[: len(x)] - old[: len(x)]) / mean_size(x - at)

        def anew() -> tuple[list[Prediction], list[Prediction], History]:
            new = computed()
            rates, none = each(rate, x, past.at, new[0], old[0]), each(jnp.zeros_like, past.error)
            return new, new, past._replace(at=x, before=x, rate=rates, error=none)

        predictions, outputs, past = jax.lax.cond(reuse, again, anew)
        return list(predictions), _leaves(*outputs, tuple(past))


@dataclass(frozen=True)
class GuidanceCache(StepCache):
    """Keeps how the negative prompt's output differs from the prompt's, at low and at high frequencies.

    A step that reuses it runs the prompt alone. Before `half` the low frequencies count more, and then the high ones.
    """

    half: int = field(default=0, compare=False)
    more: ClassVar[float] = 1.2

    def cached_for(self, step: int, cached: Cached | None) -> Cached | None:
        weights = (self.more, 1.0) if step < self.half else (1.0, self.more)
        return cached and (cached[0], (np.array(weights, np.float32),)) if self.reuses(step) else None

    def predictions(
        self, forwards: Sequence[Predict], x: Latents, cached: Cached | None
    ) -> tuple[list[Prediction], Cached]:
        if len(forwards) != 2:
            raise WanjaxError("a guidance cache needs both prompts, one after the other: give a mesh without dp")
        if cached is None:
            prompt, negative = (in_float32(predict()) for predict in forwards)
            low = jax.tree.map(low_frequencies, change := replicate(jax.tree.map(sub, negative, prompt)))
            return [prompt, negative], (*_leaves((low, jax.tree.map(sub, change, low))), (jnp.ones(2, jnp.float32),))
        parts, (weights,) = cached
        prompt = in_float32(forwards[0]())
        low, high = jax.tree.unflatten(jax.tree.structure((prompt, prompt)), parts)
        negative = jax.tree.map(lambda x, low, high: x + weights[0] * low + weights[1] * high, prompt, low, high)
        return [prompt, negative], cached


def low_frequencies(x: Float[Array, "_P ... C"]) -> Float[Array, "_P ... C"]:
    """Return the part of the lowest quarter of the frequencies along height and of those along width.

    Of a stream [P L C] it is that along its only axis.
    """
    for axis in (2, 3) if x.ndim == 5 else range(1, x.ndim - 1):
        length = x.shape[axis]
        matrix = _low_pass(length, (length // 2 + 1 if axis == x.ndim - 2 else length) // 4)
        x = jnp.moveaxis(jnp.tensordot(matrix, x, axes=(1, axis), precision="highest"), 0, axis)
    return x


def _low_pass(length: int, count: int) -> Float[np.ndarray, "L L"]:
    """Return the matrix that keeps the `count` lowest frequencies of a signal, 0 among them, and at least that."""
    along = np.arange(length)
    waves = 2 * np.pi * np.arange(1, max(count, 1)) / length
    ripples = np.cos(waves[:, None, None] * (along[:, None] - along)).sum(axis=0)
    return ((1 + 2 * ripples) / length).astype(np.float32)


def mean_size(x: Float[Array, "_P ... C"]) -> Float[Array, " _P"]:
    """Return the mean absolute value of each video's array."""
    return jnp.abs(x).mean(axis=tuple(range(1, x.ndim)))


def _leaves(*trees: Any) -> Cached:
    """Return the arrays of each tree, which a file can keep."""
    return tuple(tuple(jax.tree.leaves(tree)) for tree in trees)


def _like(x: Float[Array, "B ... C"], output: Float[Array, "_P ... C"]) -> Float[Array, "_P ... C"]:
    """Return latents as often as an output has them: once for each prompt."""
    return jnp.concatenate([x] * (len(output) // len(x)))
