# SPDX-License-Identifier: Apache-2.0
"""Denoising steps: their division among networks, what a callback receives, and the queue on the device."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt8

from wanjax.dims import readable
from wanjax.errors import WanjaxError
from wanjax.pipelines.guidance import CLASSIFIER_FREE, GuidanceRule
from wanjax.pipelines.previews.latent_preview import LatentPreview

IN_FLIGHT = 2  # steps queued on the device: two keep it busy, more would hold memory


class Segment(NamedTuple):
    """The consecutive steps from `start` that one network takes, by the guidance scale of each and a rule."""

    network: str
    start: int
    scales: tuple[float, ...]
    rule: GuidanceRule = CLASSIFIER_FREE

    @property
    def guided(self) -> bool:
        return max(self.scales) > 1


def left_of(segments: Sequence[Segment], steps: int) -> list[Segment]:
    """Returns the segments that are left once the first `steps` steps are taken."""
    taken = [min(max(steps - segment.start, 0), len(segment.scales)) for segment in segments]
    left = [s._replace(start=s.start + n, scales=s.scales[n:]) for s, n in zip(segments, taken, strict=True)]
    return [segment for segment in left if segment.scales]


def dense_steps(total: int) -> int:
    """Returns the number of first steps that take all of self-attention where later ones take it sparsely.

    The share is that of Radial Attention's authors, 12 of 50.
    """
    return min(math.ceil(0.24 * total), total - 1)


def at_step(denoiser: Any, index: int, total: int) -> Any:
    """Returns the denoiser as a step of a number of them takes it.

    `dense` is None where self-attention is never sparse. A step that may reuse what another kept is not dense, so that
    it needs no program of its own.
    """
    if denoiser.dense is None:
        return denoiser
    return replace(denoiser, dense=index < dense_steps(total) and not denoiser.cache.reuses(index))


@dataclass(frozen=True)
class Step:
    """A denoising step, `index` of `total` from 0.

    `state` is all that the next step takes from it. The next step reuses its buffers, so `latents` [B C T H W], those
    after the step, are read before it. `x0` [B C T H W] are the clean latents predicted in it. `reuses` tells whether
    the step reused what another kept, or might have where that is decided on the device. `colours` returns what makes
    previews; it is made at the first call.
    """

    index: int
    total: int
    timestep: float
    state: Any
    predicted: Any  # x0 [B T H W C]
    reuses: bool = False
    colours: Callable[[], LatentPreview] | None = None

    @property
    def latents(self) -> Float[Array, "B C T H W"]:
        """The latents after the step."""
        return self._latents

    @cached_property  # once they are read, they stay
    def _latents(self) -> Float[Array, "B C T H W"]:
        return jnp.moveaxis(self.state.x, -1, 1)

    @property
    def x0(self) -> Float[Array, "B C T H W"]:
        """The clean latents predicted in the step."""
        return self._x0

    @cached_property
    def _x0(self) -> Float[Array, "B C T H W"]:
        return jnp.moveaxis(self.predicted, -1, 1)

    def preview(self) -> UInt8[np.ndarray, "B T _H _W 3"]:
        """Returns small pictures of the predicted latents, one for each latent frame; waits for the device."""
        assert self.colours is not None, "a step of `Pipeline.denoise` can be previewed"
        return self.colours().pictures(self.x0)


readable(Step)


class Switch(NamedTuple):
    """A change of network: before step `index` of `total`, from 0, `network` took over after `seconds` of loading."""

    network: str
    index: int
    total: int
    seconds: float


class Cancelled(Exception):
    """The exception for a callback that returned False; `step` is the last step taken, from 0."""

    def __init__(self, step: int):
        super().__init__(step)  # which pickles, and so goes from one process to another
        self.step = step

    def __str__(self) -> str:
        return f"cancelled after step {self.step + 1}"


class InFlight:
    """The queue of steps that the device may not have finished; detects the first whose latents are not finite.

    `done(count, total)` is called when the device has finished a step.
    """

    def __init__(self, total: int, done: Callable[[int, int], Any]):
        self.total = total
        self._done = done
        self._finite: deque[tuple[int, Any]] = deque()

    def add(self, index: int, finite: Bool[Array, ""]) -> None:
        """Adds a step, whose latents are finite if `finite` is True; waits for the oldest if too many are queued."""
        self._finite.append((index, finite))
        self.wait(IN_FLIGHT)

    def wait(self, left: int = 0) -> None:
        """Waits until at most `left` steps are left; raises WanjaxError that names the first that is not finite."""
        while len(self._finite) > left or (self._finite and self._finite[0][1].is_ready()):
            index, finite = self._finite.popleft()
            if not finite:
                raise WanjaxError(f"the latents are not finite after step {index + 1} of {self.total}: use float32")
            self._done(index + 1, self.total)
