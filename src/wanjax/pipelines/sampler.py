# SPDX-License-Identifier: Apache-2.0
"""The sampler: a loop over steps. A step is a prediction for every prompt, guidance, and the scheduler's step.

    for each step t of the schedule:
        p₊, p₋ = predict(x, t) under the prompt and under the negative prompt
        p = p₋ + scale · (p₊ - p₋)                           # Ho and Salimans, Classifier-Free Guidance, 2022
        x = the scheduler's step from t along p

A family implements `Denoiser.predict`; a step cache decides how a prediction goes through the network's blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from wanjax.compilation import Compile, program
from wanjax.kernels.compiler_options import fast_products, products
from wanjax.layers.stack import Through, through_all
from wanjax.pipelines.step_cache import NO_CACHE, StepCache
from wanjax.pipelines.steps import Cancelled, InFlight, Segment, Step, at_step
from wanjax.schedulers import Scheduler, one_step
from wanjax.sharding import replicate

Latents = Float[Array, "B T H W C"]


@dataclass(frozen=True)
class Denoiser(ABC):
    """A network's definition, the scheduler and a step cache, which define a compiled step. A hashable value.

    A step that reuses what another kept is a program of its own, and so is a `dense` one (see `steps.at_step`).
    """

    graphdef: Any
    scheduler: Scheduler
    cache: StepCache = field(default=NO_CACHE, kw_only=True)
    dense: bool | None = field(default=None, kw_only=True)

    @abstractmethod
    def predict(
        self, network: Any, x: Latents, t: Any, prompt: Any, shared: Any, through: Through = through_all
    ) -> Float[Array, "B T H W _C"]:
        """Returns the network's prediction at x and t [B] under a prompt; `through` runs its blocks."""

    @abstractmethod
    def embed_times(self, network: Any, times: Any) -> Float[Array, "B _E"]:
        """Returns the embedding of timesteps as the blocks are given it; `times` is a tree like that of `times`."""

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
    """The values that each step replaces: the latents, the scheduler's state, and what each forward kept.

    A whole step is given None in place of what was kept.
    """

    x: Any  # [B T H W C]
    solver: Any
    kept: Any = None  # a tuple for each forward


@jax.named_scope("guidance")
def guide(predictions: Float[Array, "P T H W C"], videos: int, scale: Float[Array, ""]) -> Latents:
    """Extrapolates from the second half of the predictions, for the negative prompts, through the first.

    There is one half without guidance. The sum is in float32, because the difference is small.
    """
    if len(predictions) == videos:
        return predictions
    conditional, unconditional = predictions[:videos], predictions[videos:]
    return unconditional + scale * (conditional - unconditional)


@program(products, donated=("state",), fast=fast_products)
def take_step(
    denoiser: Denoiser, state: State, inputs: Inputs, scale: Float[Array, ""], schedule: Any
) -> tuple[State, Latents, Bool[Array, ""]]:
    """Takes the only step of a schedule; returns also the predicted clean latents, and whether the new are finite."""
    network = nnx.merge(denoiser.graphdef, inputs.weights)
    videos, *shape = state.x.shape
    x = jnp.broadcast_to(state.x, (inputs.batch // videos, videos, *shape)).reshape(-1, *shape)
    t = jax.tree.map(lambda time: jnp.full((inputs.batch,), time), denoiser.times(schedule))
    forwards = [partial(denoiser.predict, network, x, t, prompt, inputs.shared) for prompt in inputs.prompts]
    predictions, kept = denoiser.cache.predictions(forwards, state.x, state.kept)
    prediction = replicate(guide(jnp.concatenate(predictions), videos, scale))
    x0 = replicate(denoiser.scheduler.x0(schedule, 0, prediction, state.x))
    x, solver = replicate(denoiser.scheduler.step(schedule, 0, prediction, state.x, state.solver))
    return State(x, solver, kept), x0, jnp.isfinite(x).all()


def sample(
    state: State,
    schedule: Any,
    segments: Iterable[Segment],
    prepare: Callable[[Segment, Latents], tuple[Denoiser, Inputs]],
    *,
    compiled: Compile,
    callback: Callable[[Step], bool | None] | None = None,
    done: Callable[[int, int], Any] | None = None,
) -> Latents:
    """Takes the steps of the segments, and returns the last latents.

    `prepare` returns a segment's denoiser and inputs, `compiled` a program's executable. Raises Cancelled where the
    callback returns False, and WanjaxError that names the step after which latents are not finite; the callback may
    have received later steps too. `done(count, total)` is called when the device has finished a step.
    """
    total, step = len(schedule.timesteps), compiled(take_step)
    in_flight = InFlight(total, done)
    for segment in segments:
        denoiser, inputs = prepare(segment, state.x)
        for index, scale in enumerate(segment.scales, segment.start):
            state = replace(state, kept=denoiser.cache.given(index, state.kept))
            now = at_step(denoiser, index, total)
            state, x0, finite = step(now, state, inputs, jnp.float32(scale), one_step(schedule, index))
            in_flight.add(index, finite)
            x, x0 = (jnp.moveaxis(a, -1, 1) for a in (state.x, x0))
            told = Step(index, total, float(schedule.timesteps[index]), x, x0, state, denoiser.cache.reuses(index))
            if callback and callback(told) is False:
                raise Cancelled(index)
        in_flight.wait()
        state = replace(state, kept=None)
        del denoiser, inputs  # the weights are freed before the next network is loaded
    return state.x
