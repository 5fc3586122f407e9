# SPDX-License-Identifier: Apache-2.0
"""The sampler: a step of denoising, and the two ends, from noise to the first state and from the last to latents.

    for each step t of the schedule:
        p₊, p₋ = predict(x, t) under the prompt and under the negative prompt
        p = p₋ + scale · (p₊ - p₋)                           # Ho and Salimans, Classifier-Free Guidance, 2022
                                                             # or another rule of `guidance`
        x = the scheduler's step from t along p

A family implements `Denoiser.predict`, and `Ends` where its ends differ; a step cache decides which of
the network's blocks a prediction runs. `run` has the loop.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from wanjax.kernels.compiler_options import fast_products, products, random_numbers, scanned
from wanjax.layers.stack import EVERY_BLOCK, BlockCache
from wanjax.pipelines.caching.step_cache import NO_CACHE, StepCache
from wanjax.pipelines.guidance import GuidanceRule, Latents
from wanjax.pipelines.seeds import Words, drawn_noise, noise_of_frames, solver_keys
from wanjax.programs import Value, program
from wanjax.schedulers import Scheduler
from wanjax.sharding import replicate

Held = Float[Value, "B T H W C"]  # latents between two programs


@dataclass(frozen=True)
class Denoiser(ABC):
    """A network's definition, the scheduler, a step cache and the kind of guidance, which define a compiled step.

    A hashable value.

    A step that reuses what another kept is a program of its own, and so is a `dense` one (see `steps.at_step`).
    """

    graphdef: Any
    scheduler: Scheduler
    cache: StepCache = field(default=NO_CACHE, kw_only=True)
    guidance: type[GuidanceRule] = field(default=GuidanceRule, kw_only=True)
    dense: bool | None = field(default=None, kw_only=True)

    @abstractmethod
    def predict(
        self, network: Any, x: Latents, t: Any, prompt: Any, shared: Any, cache: BlockCache = EVERY_BLOCK
    ) -> Float[Array, "B T H W _C"]:
        """Returns the network's prediction at x and t [B] under a prompt; `cache` is that of its blocks."""

    @abstractmethod
    def embed_times(self, network: Any, times: Any) -> Float[Array, "B _E"]:
        """Returns the embedding of timesteps as the blocks are given it; `times` is a tree like that of `times`."""

    def embed_times_plainly(self, network: Any, times: Any) -> Float[Array, "B _E"]:
        """Returns the embedding of timesteps before it is projected for the blocks, where it is."""
        return self.embed_times(network, times)

    def times(self, schedule: Any) -> Any:
        """Returns the timestep of a schedule's only step, or a tree of all the timesteps that the network is told."""
        return schedule.timesteps[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """The inputs that no step changes: the weights, the contexts of the prompts, and the inputs that these share.

    `prompts` has one entry for each forward of a step, with `batch` prompts each; those of all videos precede the
    negative ones.
    """

    weights: Any
    prompts: tuple[Any, ...]
    shared: Any
    batch: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The values that each step replaces: the latents, the scheduler's state, what each forward kept, and guidance's.

    A whole step is given None in place of what was kept. `average` is None for a rule of guidance that has none.
    """

    x: Any  # [B T H W C]
    solver: Any
    kept: Any = None  # a tuple for each forward
    average: Any = None  # [B T H W C]


@dataclass(frozen=True)
class Ends:
    """The two ends of denoising, in which families differ. A hashable value, whose methods are traced.

    `pictures` are encoded pictures, the latents [B C T H W] among the output of `encode`, by name.
    """

    def sampled(self, pictures: Mapping[str, Any], words: Words, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the pictures that are drawn from a distribution, by the seeds' words or from the `given` noise."""
        return {}

    def first(self, scheduler: Scheduler, schedule: Any, noise: Latents, pictures: Mapping[str, Any]) -> Latents:
        """Returns the latents at the schedule's first noise level: noise, or a given video with noise added."""
        if "video_latents" not in pictures:
            return scheduler.start(schedule, noise)
        video = jnp.moveaxis(pictures["video_latents"].astype(jnp.float32), 1, -1)
        return scheduler.noised(schedule, led(video, noise.shape[1]), noise)

    def last(self, x: Latents, pictures: Mapping[str, Any]) -> Latents:
        """Returns the latents of the video and its references, from those of the last step."""
        return x


def led(x: Latents, frames: int) -> Float[Array, "B _T H W C"]:
    """Returns latents of `frames` frames, the first of them repeated in front as often as is needed."""
    return jnp.concatenate([x[:, :1]] * (frames - x.shape[1]) + [x], axis=1)


class Beginning(NamedTuple):
    """What a video begins by: the ends, the solver, the shape [B C T H W] of its noise, and the frames of a block.

    A video that is made as a whole is one block, of None. `averages` tells whether guidance keeps an average.
    """

    ends: Ends
    scheduler: Scheduler
    shape: tuple[int, ...]
    block: int | None = None
    averages: bool = False


class Given(NamedTuple):
    """Noise that is given in place of the seeds': of this block, of its steps, and of pictures by name."""

    initial: Any = None  # [B C T H W]
    of_steps: Any = None  # [steps B C T H W]
    pictures: Any = None


@program(random_numbers)
def begin(
    static: Beginning,
    words: Words,
    given: Given,
    schedule: Any,
    pictures: Mapping[str, Any],
    number: Int[Array, ""],
) -> tuple[State, Mapping[str, Any]]:
    """Returns the state before the first step of a block, and the pictures that were drawn, by name.

    `number` is the block's, from 0.
    """
    drawn = static.ends.sampled(pictures, words, given.pictures or {})
    if given.initial is not None:
        noise = given.initial.astype(jnp.float32)
    elif static.block is None:
        noise = drawn_noise(words, static.shape)
    else:
        noise = noise_of_frames(words, static.shape, number * static.block, static.block)
    noise = jax.lax.optimization_barrier(noise)  # the same whatever it is multiplied by
    x = static.ends.first(static.scheduler, schedule, jnp.moveaxis(noise, 1, -1), {**pictures, **drawn})
    keys = solver_keys(words, 0 if static.block is None else number)
    init: Any = static.scheduler.init  # that of a stochastic solver takes noise too
    of_steps = () if given.of_steps is None else (jnp.moveaxis(given.of_steps, 2, -1),)
    average = jnp.zeros_like(x) if static.averages else None
    return State(x, init(schedule, x, keys, *of_steps), average=average), drawn


@program(random_numbers)
def draw(shape: tuple[int, ...], words: Words) -> Float[Array, "B C T H W"]:
    """Returns the seeds' initial noise."""
    return drawn_noise(words, shape)


@program(scanned)
def finish(static: tuple[Ends, int], x: Latents, pictures: Mapping[str, Any]) -> Float[Array, "B _C _T H W"]:
    """Returns the video's latents from those of the last step. static: the ends, the number of the video's frames."""
    ends, frames = static
    return jnp.moveaxis(ends.last(x, pictures)[:, -frames:], -1, 1)


@program(scanned)
def join(axis: int, parts: tuple[Any, ...]) -> Any:
    """Joins trees of arrays along an axis."""
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=axis), *parts)


@program(products, donated=("state",), fast=fast_products)
def take_step(
    denoiser: Denoiser, state: State, inputs: Inputs, guidance: Any, schedule: Any
) -> tuple[State, Latents, Bool[Array, ""]]:
    """Takes the only step of a schedule; returns also the predicted clean latents, and whether the new are finite.

    `guidance` is what the rule of guidance tells this step, in most cases a scale.
    """
    network = nnx.merge(denoiser.graphdef, inputs.weights)
    videos, *shape = state.x.shape
    x = jnp.broadcast_to(state.x, (inputs.batch // videos, videos, *shape)).reshape(-1, *shape)
    t = jax.tree.map(lambda time: jnp.full((inputs.batch,), time), denoiser.times(schedule))
    forwards = [partial(denoiser.predict, network, x, t, prompt, inputs.shared) for prompt in inputs.prompts]
    predictions, kept = denoiser.cache.predictions(forwards, state.x, state.kept)
    clean = partial(denoiser.scheduler.x0, schedule, 0)
    joined = denoiser.guidance.joined(jnp.concatenate(predictions), videos, guidance, state.x, clean, state.average)
    prediction, average = replicate(joined)
    x0 = replicate(clean(prediction, state.x))
    x, solver = replicate(denoiser.scheduler.step(schedule, 0, prediction, state.x, state.solver))
    return State(x, solver, kept, average), x0, jnp.isfinite(x).all()
