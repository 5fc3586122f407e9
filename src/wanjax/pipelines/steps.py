# SPDX-License-Identifier: Apache-2.0
"""Denoising steps for callbacks, and the queue of steps on the device."""

from collections import deque
from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float

from wanjax.errors import WanjaxError

IN_FLIGHT = 2  # steps queued on the device: two keep it busy, more would hold memory


class Step(NamedTuple):
    """A denoising step, `index` of `total` from 0: the latents after it, and the clean latents predicted in it."""

    index: int
    total: int
    timestep: float
    latents: Float[Array, "B C T H W"]
    x0: Float[Array, "B C T H W"]


class Switch(NamedTuple):
    """A change of network: before step `index` of `total`, from 0, `network` took over after `seconds` of loading."""

    network: str
    index: int
    total: int
    seconds: float


class Cancelled(Exception):
    """The exception for a callback that returned False; `step` is the last step taken, from 0."""

    def __init__(self, step: int):
        super().__init__(f"cancelled after step {step + 1}")
        self.step = step


class InFlight:
    """The queue of steps that the device may not have finished; detects the first whose latents are not finite."""

    def __init__(self, total: int):
        self.total = total
        self._finite: deque[tuple[int, jax.Array]] = deque()

    def add(self, index: int, finite: Bool[Array, ""]) -> None:
        """Adds a step, whose latents are finite if `finite` is True; waits for the oldest if too many are queued."""
        self._finite.append((index, finite))
        self.wait(IN_FLIGHT)

    def wait(self, left: int = 0) -> None:
        """Waits until `left` steps are left; raises WanjaxError that names the first step with latents not finite."""
        while len(self._finite) > left:
            index, finite = self._finite.popleft()
            if not finite:
                raise WanjaxError(f"the latents are not finite after step {index + 1} of {self.total}: use float32")
