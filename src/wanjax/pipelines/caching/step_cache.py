# SPDX-License-Identifier: Apache-2.0
"""Step caches: a step stores a part of its results, and later steps reuse it instead of computing it again. A cache
wraps the forward passes of a step, and may give each forward pass a `BlockCache`. A step is compiled for its cache. The
rules in `rules` decide which steps reuse.
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

Latents = Any  # [B T H W C], or a mapping of modalities
Prediction = Any  # in the layout of latents, for one or more videos, and for one prompt or both
Predict = Callable[..., Prediction]  # a forward pass, which accepts a `BlockCache` for its blocks
CachedArrays = tuple[Any, ...]  # a tuple of arrays for each forward pass


@dataclass(frozen=True)
class StepCache(ABC):
    """Defines what a step caches, and how a later step reuses it. A computed step and a reusing step are two programs
    without branches. A `StepCache` is hashable.

    `reused` has a flag for each step: True if the step reuses. Comparisons ignore `reused`, because the programs do not
    depend on it.
    """

    reused: tuple[bool, ...] = field(default=(), compare=False, kw_only=True)

    def reuses(self, step: int) -> bool:
        """Return whether a step, counted from 0, may reuse cached values."""
        return step < len(self.reused) and self.reused[step]

    def cached_for(self, step: int, cached: CachedArrays | None) -> CachedArrays | None:
        """Return the cached values for a step, or None to run all blocks."""
        return cached if self.reuses(step) else None

    @abstractmethod
    def predictions(
        self, forwards: Sequence[Predict], x: Latents, cached: CachedArrays | None
    ) -> tuple[list[Prediction], CachedArrays]:
        """Return the float32 prediction of each forward pass at the latents x, and the values that the next step may
        reuse."""


@dataclass(frozen=True)
class ForwardCache(StepCache):
    """Cache each forward pass of a step separately, by a `BlockCache` of the type `blocks`. The default type caches
    nothing."""

    blocks: type[BlockCache] = BlockCache

    def predictions(
        self, forwards: Sequence[Predict], x: Latents, cached: CachedArrays | None
    ) -> tuple[list[Prediction], CachedArrays]:
        pairs = [self.run(*pair) for pair in zip(forwards, cached or (None,) * len(forwards), strict=True)]
        return [in_float32(prediction) for prediction, _ in pairs], tuple(forward_cached for _, forward_cached in pairs)

    def run(self, predict: Predict, cached: CachedArrays | None) -> tuple[Prediction, CachedArrays]:
        """Return the prediction of a forward pass, and the values that the next step may reuse.

        If `cached` is None, all blocks run.
        """
        blocks = self.blocks(cached)
        return predict(blocks), blocks.cached


def in_float32(prediction: Prediction) -> Prediction:
    return jax.tree.map(lambda x: x.astype(jnp.float32), prediction)


NO_CACHE = ForwardCache()


class LastBlockCache(BlockCache):
    """Cache the tokens before the last block. A forward pass that reuses them runs only the last block."""

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
    """Cache the residual that all blocks add to the tokens that the head reads. A forward pass that reuses the
    residual runs no block.

    If the tokens are a tuple of streams, the head reads only the first entry. This entry may be a tree, such as the
    tokens of a video and of its sound.
    """

    def __init__(self, cached: tuple[Any, ...] | None = None):
        super().__init__(cached)
        self.cached = constrain_tokens(cached or ())

    def parts(self, layers: int, *cuts: int) -> Sequence[range]:
        return super().parts(layers, *cuts) if self.previous is None else ()

    def before(self, part: range, x: Any) -> Any:
        if part.start == 0:
            self.block_input = jax.tree.leaves(x[0] if isinstance(x, tuple) else x)
        return x

    def after(self, x: Any) -> Any:
        tokens, tree = jax.tree.flatten(x)
        if self.previous is None:
            # the head reads only the first entry
            self.cached = constrain_tokens(tuple(map(sub, tokens, self.block_input)))
            return x
        head_tokens = constrain_tokens(list(map(add, tokens, self.cached)))
        return jax.tree.unflatten(tree, [*head_tokens, *tokens[len(head_tokens) :]])


class History(NamedTuple):
    """The state that all forward passes of an `OutputCache` share. Rates and errors are per video and modality."""

    computed_latents: Latents  # the latents of the last computed step
    last_latents: Latents  # the latents of the last step
    rate: Any  # [B], the change of the output divided by the change of the latents, between computed steps
    error: Any  # [B], the expected relative change of the output since the last computed step
    count: Any  # the number of reused steps
    # The threshold of the error. The host sets it for each step. A negative threshold forces the step to be computed.
    threshold: Any


@dataclass(frozen=True)
class OutputCache(StepCache):
    """Cache the output of a step. The device decides from the prompt's output whether to reuse it.

    A step that reuses does not run the network. The step adds the difference between output and latents of the last
    computed step to its own latents. Either all videos and modalities of a batch reuse, or none of them. The first step
    is one program. The later steps are another program, which has a branch.
    """

    threshold: float = field(default=0.0, compare=False)

    def cached_for(self, step: int, cached: CachedArrays | None) -> CachedArrays | None:
        threshold = np.float32(self.threshold if self.reuses(step) else -1)
        return cached and (*cached[:-1], (*cached[-1][:-1], threshold))  # the last field of `History`

    def predictions(
        self, forwards: Sequence[Predict], x: Latents, cached: CachedArrays | None
    ) -> tuple[list[Prediction], CachedArrays]:
        def compute_outputs() -> list[Prediction]:
            return replicate([in_float32(predict()) for predict in forwards])

        modality_tree, tree_map = jax.tree.structure(x), jax.tree.map
        if cached is None:
            outputs, zeros = compute_outputs(), tree_map(lambda x: jnp.zeros(len(x)), x)
            first_history = History(
                x, x, tree_map(lambda zero: zero + jnp.inf, zeros), zeros, jnp.int32(0), jnp.float32(-1)
            )
            return outputs, _flatten(*outputs, tuple(first_history))
        *cached_outputs, history = cached
        old_outputs = [jax.tree.unflatten(modality_tree, output) for output in cached_outputs]
        history = jax.tree.unflatten(jax.tree.structure(History(x, x, x, x, 0, 0)), history)

        def expected_error(x: Any, last_latents: Any, change_rate: Any, error: Any, output: Any) -> Float[Array, "B"]:
            return error + change_rate * mean_absolute(x - last_latents) / mean_absolute(output[: len(x)])

        expected_errors = tree_map(expected_error, x, history.last_latents, history.rate, history.error, old_outputs[0])
        reuses = reduce(
            jnp.logical_and, [jnp.all(errors < history.threshold) for errors in jax.tree.leaves(expected_errors)]
        )

        def shift_output(x: Any, computed_latents: Any, output: Any) -> Prediction:
            return _repeat_for(x, output) + (output - _repeat_for(computed_latents, output))

        def reuse_outputs() -> tuple[list[Prediction], list[Prediction], History]:
            outputs = [tree_map(shift_output, x, history.computed_latents, output) for output in old_outputs]
            return (
                outputs,
                old_outputs,
                history._replace(last_latents=x, error=expected_errors, count=history.count + 1),
            )

        def change_rate(x: Any, computed_latents: Any, new_output: Any, old_outputs: Any) -> Float[Array, "B"]:
            return mean_absolute(new_output[: len(x)] - old_outputs[: len(x)]) / mean_absolute(x - computed_latents)

        def compute_step() -> tuple[list[Prediction], list[Prediction], History]:
            new_output = compute_outputs()
            rates, zeros = (
                tree_map(change_rate, x, history.computed_latents, new_output[0], old_outputs[0]),
                tree_map(jnp.zeros_like, history.error),
            )
            return new_output, new_output, history._replace(computed_latents=x, last_latents=x, rate=rates, error=zeros)

        predictions, outputs, history = jax.lax.cond(reuses, reuse_outputs, compute_step)
        return list(predictions), _flatten(*outputs, tuple(history))


@dataclass(frozen=True)
class GuidanceCache(StepCache):
    """Cache the low and the high frequencies of the difference between the negative prompt's output and the prompt's
    output.

    A step that reuses the difference runs only the prompt. Before step `half_step`, the low frequencies have the larger
    weight. From `half_step` on, the high frequencies have the larger weight.
    """

    half_step: int = field(default=0, compare=False)
    LARGER_WEIGHT: ClassVar[float] = 1.2

    def cached_for(self, step: int, cached: CachedArrays | None) -> CachedArrays | None:
        weights = (self.LARGER_WEIGHT, 1.0) if step < self.half_step else (1.0, self.LARGER_WEIGHT)
        return cached and (cached[0], (np.array(weights, np.float32),)) if self.reuses(step) else None

    def predictions(
        self, forwards: Sequence[Predict], x: Latents, cached: CachedArrays | None
    ) -> tuple[list[Prediction], CachedArrays]:
        if len(forwards) != 2:
            raise WanjaxError("a guidance cache needs both prompts, one after the other: leave the cache out")
        if cached is None:
            prompt, negative = (in_float32(predict()) for predict in forwards)
            low = jax.tree.map(low_frequencies, difference := replicate(jax.tree.map(sub, negative, prompt)))
            return [prompt, negative], (
                *_flatten((low, jax.tree.map(sub, difference, low))),
                (jnp.ones(2, jnp.float32),),
            )
        cached_bands, (weights,) = cached
        prompt = in_float32(forwards[0]())
        low, high = jax.tree.unflatten(jax.tree.structure((prompt, prompt)), cached_bands)
        negative = jax.tree.map(lambda x, low, high: x + weights[0] * low + weights[1] * high, prompt, low, high)
        return [prompt, negative], cached


def low_frequencies(x: Float[Array, "_P ... C"]) -> Float[Array, "_P ... C"]:
    """Keep the lowest quarter of the frequencies of x along its height and its width.

    A modality [P L C] is filtered along its only axis, L.
    """
    for axis in (2, 3) if x.ndim == 5 else range(1, x.ndim - 1):
        length = x.shape[axis]
        matrix = _low_pass(length, (length // 2 + 1 if axis == x.ndim - 2 else length) // 4)
        x = jnp.moveaxis(jnp.tensordot(matrix, x, axes=(1, axis), precision="highest"), 0, axis)
    return x


def _low_pass(length: int, count: int) -> Float[np.ndarray, "L L"]:
    """Return the matrix that keeps the `count` lowest frequencies of a signal; it always keeps frequency 0."""
    positions = np.arange(length)
    waves = 2 * np.pi * np.arange(1, max(count, 1)) / length
    kernel_sums = np.cos(waves[:, None, None] * (positions[:, None] - positions)).sum(axis=0)
    return ((1 + 2 * kernel_sums) / length).astype(np.float32)


def mean_absolute(x: Float[Array, "_P ... C"]) -> Float[Array, " _P"]:
    """Return the mean absolute value of each video's array."""
    return jnp.abs(x).mean(axis=tuple(range(1, x.ndim)))


def _flatten(*trees: Any) -> CachedArrays:
    """Flatten each tree to a tuple of arrays, as a file stores them."""
    return tuple(tuple(jax.tree.leaves(tree)) for tree in trees)


def _repeat_for(latents: Float[Array, "B ... C"], output: Float[Array, "_P ... C"]) -> Float[Array, "_P ... C"]:
    """Repeat latents to the batch size of an output: once per prompt."""
    return jnp.concatenate([latents] * (len(output) // len(latents)))
