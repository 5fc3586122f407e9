# SPDX-License-Identifier: Apache-2.0
"""Step caches: a step keeps a part of its work, which later steps reuse in place of doing it again.

A cache stands between the sampler and a transformer, whose forward it may give a `BlockCache`. It is what a step is
compiled for; `rules` decide which steps reuse.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from wanjax.errors import WanjaxError
from wanjax.layers.stack import BlockCache, as_tokens
from wanjax.sharding import replicate

Latents = Float[Array, "B T H W C"]
Prediction = Float[Array, "_P T H W C"]  # of one video or more, under one prompt or both
Predict = Callable[..., Prediction]  # a forward, which may be given a `BlockCache` for its blocks
Kept = tuple[Any, ...]  # tuples of arrays


@dataclass(frozen=True)
class StepCache(ABC):
    """What a step keeps, and how another reuses it: two programs without branches. A hashable value.

    `reused` tells which steps reuse. The programs do not depend on it, so neither does the value.
    """

    reused: tuple[bool, ...] = field(default=(), compare=False, kw_only=True)

    def reuses(self, step: int) -> bool:
        """Tells whether a step, counted from 0, may reuse what an earlier one kept."""
        return step < len(self.reused) and self.reused[step]

    def given(self, step: int, kept: Kept | None) -> Kept | None:
        """Returns what a step is given of what the step before it kept; None makes it whole."""
        return kept if self.reuses(step) else None

    @abstractmethod
    def predictions(self, forwards: Sequence[Predict], x: Latents, kept: Kept | None) -> tuple[list[Prediction], Kept]:
        """Returns the prediction of each forward of a step from x, in float32, and what the next step may reuse."""


@dataclass(frozen=True)
class ForwardCache(StepCache):
    """A cache that treats each forward of a step on its own, by what it keeps between its blocks: here nothing."""

    blocks: type[BlockCache] = BlockCache

    def predictions(self, forwards: Sequence[Predict], x: Latents, kept: Kept | None) -> tuple[list[Prediction], Kept]:
        pairs = [self.run(*pair) for pair in zip(forwards, kept or (None,) * len(forwards), strict=True)]
        return [prediction.astype(jnp.float32) for prediction, _ in pairs], tuple(part for _, part in pairs)

    def run(self, predict: Predict, kept: Kept | None) -> tuple[Prediction, Kept]:
        """Returns a forward's prediction, and what the next may reuse; `kept` is None for a whole forward."""
        blocks = self.blocks(kept)
        return predict(blocks), blocks.kept


NO_CACHE = ForwardCache()


class LastBlockCache(BlockCache):
    """Keeps the tokens before the last block; a forward that is given them runs the last block alone."""

    def parts(self, layers: int, *cuts: int) -> Sequence[range]:
        parts = super().parts(layers, *cuts, layers - 1)
        self.last = parts[-1]
        return parts if self.given is None else parts[-1:]

    def before(self, part: range, x: Any) -> Any:
        if part != self.last:
            return x
        x = as_tokens(x if self.given is None else jax.tree.unflatten(jax.tree.structure(x), self.given))
        self.kept = tuple(jax.tree.leaves(x))
        return x


class ResidualCache(BlockCache):
    """Keeps what all blocks add to the video's tokens; a forward that is given it runs no block.

    Of several streams of tokens the video's is the first, and all that a head reads.
    """

    def __init__(self, given: tuple | None = None):
        super().__init__(given)
        self.kept = as_tokens(given or ())

    def parts(self, layers: int, *cuts: int) -> Sequence[range]:
        return super().parts(layers, *cuts) if self.given is None else ()

    def before(self, part: range, x: Any) -> Any:
        if part.start == 0:
            self.first = jax.tree.leaves(x)[0]
        return x

    def after(self, x: Any) -> Any:
        (video, *others), tree = jax.tree.flatten(x)
        if self.given is None:
            self.kept = (as_tokens(video - self.first),)
            return x
        return jax.tree.unflatten(tree, [as_tokens(video + self.kept[0]), *others])


class History(NamedTuple):
    """The part of an `OutputCache` that all forwards share. Errors and changes are those of each video."""

    at: Latents  # the latents at the last step that was computed
    before: Latents  # the latents at the last step
    rate: Float[Array, "B"]  # how much the output changed for each change of the latents, between computed steps
    error: Float[Array, "B"]  # the relative change of the output that is expected since the last computed step
    count: Any  # the number of steps that reused
    threshold: Any  # of the error; the host sets it for each step, below 0 for one that has to be computed


@dataclass(frozen=True)
class OutputCache(StepCache):
    """Keeps the output of a step, and decides on the device, from the prompt's own output, whether to reuse it.

    A step that reuses adds to its latents what the last computed step added, without running the network. Of videos
    that are made together all reuse or none. One program makes the first step, and another, with a branch, all others.
    """

    threshold: float = field(default=0.0, compare=False)

    def given(self, step: int, kept: Kept | None) -> Kept | None:
        threshold = np.float32(self.threshold if self.reuses(step) else -1)
        return kept and (*kept[:-1], tuple(History(*kept[-1])._replace(threshold=threshold)))

    def predictions(self, forwards: Sequence[Predict], x: Latents, kept: Kept | None) -> tuple[list[Prediction], Kept]:
        def computed() -> list[Prediction]:
            return replicate([predict().astype(jnp.float32) for predict in forwards])

        if kept is None:
            outputs, none = computed(), jnp.zeros(len(x))
            first = History(x, x, none + jnp.inf, none, jnp.int32(0), jnp.float32(-1))
            return outputs, (*((output,) for output in outputs), tuple(first))
        *parts, past = kept
        old, past = [output for (output,) in parts], History(*past)
        expected = past.error + past.rate * mean_size(x - past.before) / mean_size(old[0][: len(x)])
        reuse = jnp.all(expected < past.threshold)

        def again() -> tuple[list[Prediction], list[Prediction], History]:
            moved = [_like(x, output) + (output - _like(past.at, output)) for output in old]
            return moved, old, past._replace(before=x, error=expected, count=past.count + 1)

        def anew() -> tuple[list[Prediction], list[Prediction], History]:
            new = computed()
            rate = mean_size(new[0][: len(x)] - old[0][: len(x)]) / mean_size(x - past.at)
            return new, new, past._replace(at=x, before=x, rate=rate, error=jnp.zeros_like(past.error))

        predictions, outputs, past = jax.lax.cond(reuse, again, anew)
        return list(predictions), (*((output,) for output in outputs), tuple(past))


@dataclass(frozen=True)
class GuidanceCache(StepCache):
    """Keeps how the negative prompt's output differs from the prompt's, at low and at high frequencies.

    A step that reuses it runs the prompt alone. Before `half` the low frequencies count more, and then the high ones.
    """

    half: int = field(default=0, compare=False)
    more: ClassVar[float] = 1.2

    def given(self, step: int, kept: Kept | None) -> Kept | None:
        weights = (self.more, 1.0) if step < self.half else (1.0, self.more)
        return kept and (kept[0], (np.array(weights, np.float32),)) if self.reuses(step) else None

    def predictions(self, forwards: Sequence[Predict], x: Latents, kept: Kept | None) -> tuple[list[Prediction], Kept]:
        if len(forwards) != 2:
            raise WanjaxError("a guidance cache needs both prompts, one after the other: a mesh without dp would do")
        if kept is None:
            prompt, negative = (predict().astype(jnp.float32) for predict in forwards)
            low = low_frequencies(change := replicate(negative - prompt))
            return [prompt, negative], ((low, change - low), (jnp.ones(2, jnp.float32),))
        (low, high), (weights,) = kept
        prompt = forwards[0]().astype(jnp.float32)
        return [prompt, prompt + weights[0] * low + weights[1] * high], kept


def low_frequencies(x: Prediction) -> Prediction:
    """Returns the part of the lowest quarter of the frequencies along height and of those along width."""
    height, width = x.shape[2:4]
    for axis, matrix in ((2, _low_pass(height, height // 4)), (3, _low_pass(width, (width // 2 + 1) // 4))):
        x = jnp.moveaxis(jnp.tensordot(matrix, x, axes=(1, axis), precision="highest"), 0, axis)
    return x


def _low_pass(length: int, count: int) -> Float[np.ndarray, "L L"]:
    """Returns the matrix that keeps the `count` lowest frequencies of a signal, 0 among them, and at least that."""
    along = np.arange(length)
    waves = 2 * np.pi * np.arange(1, max(count, 1)) / length
    ripples = np.cos(waves[:, None, None] * (along[:, None] - along)).sum(axis=0)
    return ((1 + 2 * ripples) / length).astype(np.float32)


def mean_size(x: Prediction) -> Float[Array, " _P"]:
    """Returns the mean absolute value of each video's array."""
    return jnp.abs(x).mean(axis=(1, 2, 3, 4))


def _like(x: Latents, output: Prediction) -> Prediction:
    """Returns latents as often as an output has them: once for each prompt."""
    return jnp.concatenate([x] * (len(output) // len(x)))
