# SPDX-License-Identifier: Apache-2.0
"""Observers of a run: progress, callbacks, saving, stopping; and the monitor that notifies them of each step."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt8

from wanjax.dims import readable
from wanjax.errors import WanjaxError
from wanjax.execution import Value
from wanjax.pipelines import progress
from wanjax.pipelines.denoiser import State, Streams, stream_of
from wanjax.pipelines.frames import AnyLatents
from wanjax.pipelines.model import Chunk, Conditioning
from wanjax.pipelines.phases import Phase
from wanjax.pipelines.previews.latent_preview import LatentPreview
from wanjax.pipelines.windows import Window
from wanjax.schedulers.base import Numbers

IN_FLIGHT = 2  # steps queued on the device: two keep it busy, more would use memory


@dataclass(frozen=True)
class Step:
    """A denoising step.

    The next step reuses the buffers of `state`: read `latents` [B C T H W], the latents after this step, before it.
    `x0` [B C T H W] are the clean latents that the step predicts. Both are the video's; other streams, such as sound,
    are in `state.x` and `predicted`.

    Args:
        index: The number of the step, from 0.
        total: The number of steps of the pass.
        timestep: The timestep at the start of the step.
        state: The input of the next step.
        predicted: The predicted clean latents, [B T H W C], or streams.
        reuses: Whether the step reuses cached values, or may if that is decided on the device.
        latent_preview: Creates the preview map at the first call; None if there are no previews.
    """

    index: int
    total: int
    timestep: float
    state: State
    predicted: Streams  # x0, [B T H W C] each
    reuses: bool = False
    latent_preview: Callable[[], LatentPreview] | None = None

    @property
    def latents(self) -> Float[Array, "B C T H W"]:
        """The latents after the step."""
        return self._latents

    @cached_property  # kept once it is read
    def _latents(self) -> Float[Array, "B C T H W"]:
        return jnp.moveaxis(stream_of(self.state.x), -1, 1)

    @property
    def x0(self) -> Float[Array, "B C T H W"]:
        """The clean latents that the step predicts."""
        return self._x0

    @cached_property
    def _x0(self) -> Float[Array, "B C T H W"]:
        return jnp.moveaxis(stream_of(self.predicted), -1, 1)

    def preview(self) -> UInt8[np.ndarray, "B T _H _W 3"]:
        """Return small images of the predicted latents, one for each latent frame. Waits for the device."""
        assert self.latent_preview is not None, "a step of `Pipeline.denoise` can be previewed"
        return self.latent_preview().pictures(self.x0)


readable(Step)


class Switch(NamedTuple):
    """A change to another network.

    Args:
        network: The name of the new component.
        index: The first step of the new network, from 0.
        total: The number of steps of the pass.
        seconds: The time that loading took.
    """

    network: str
    index: int
    total: int
    seconds: float


class Cancelled(Exception):
    """Raised when a callback returns False.

    Args:
        step: The last completed step, from 0.
    """

    def __init__(self, step: int):
        super().__init__(step)  # picklable, so that it can be raised in another process
        self.step = step

    def __str__(self) -> str:
        return f"cancelled after step {self.step + 1}"


class Progress(NamedTuple):
    """The position of a chunk or a pass in its video.

    Args:
        number: The number of the pass, from 0.
        passes: The number of passes.
        earlier_steps: The number of earlier steps of the whole video.
        total: The number of steps of the whole video.
    """

    number: int
    passes: int
    earlier_steps: int
    total: int

    @property
    def last(self) -> bool:
        """True for the last pass."""
        return self.number + 1 == self.passes


class Start(NamedTuple):
    """The state before the first step of a pass, and everything that the latents depend on.

    Args:
        state: The state.
        phases: Which network runs which steps.
        facts: Values that can be JSON.
        arrays: Trees of arrays.
        progress: The position of the pass.
    """

    state: State
    phases: Sequence[Phase]
    facts: Mapping[str, object]
    arrays: Sequence[Any]
    progress: Progress


class Observer:
    """Watches a run. All methods do nothing by default; a subclass overrides those that it needs."""

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager to run a stage in.

        Args:
            name: The name of the stage.
        """
        return nullcontext()

    def count(self, unit: str, done: int, total: int) -> None:
        """Receive how many units of a stage, such as steps, the device has completed.

        Args:
            unit: The name of the unit, such as "step".
            done: The number of completed units.
            total: The number of all units.
        """

    def window(self, window: Window) -> None:
        """Receive a window of a video before it is denoised.

        Args:
            window: The window.
        """

    def encoded(self, conditioning: Conditioning) -> None:
        """Receive the output of the encode stage.

        Args:
            conditioning: The output of `encode`.
        """

    def started(self, conditioning: Conditioning) -> None:
        """Receive the conditioning of all videos of a batch before they are denoised.

        Args:
            conditioning: The output of `encode`, of all videos.
        """

    def resumed(self, start: Start) -> tuple[State, int] | None:
        """Return a saved state to continue from and its number of completed steps, or None to start from noise.

        Args:
            start: The state before the first step, and everything that the latents depend on.
        """

    def switched(self, switch: Switch) -> None:
        """Receive a change to another network.

        Args:
            switch: The change.
        """

    def stepped(self, step: Step) -> bool | None:
        """Receive a step, which may still run on the device; return False to end the run.

        Args:
            step: The step.
        """

    def stopped(self, step: Step) -> None:
        """Receive the last step of a run that ends early.

        Args:
            step: The step.
        """

    def denoised(self, latents: AnyLatents, chunk: Chunk) -> None:
        """Receive the latents of a chunk of all videos of a batch, [B C T H W] or streams.

        Args:
            latents: The latents of the chunk.
            chunk: The chunk.
        """

    def decoded(self, extras: Mapping[str, Value]) -> None:
        """Receive what was decoded along with the next frames of a video, such as its sound's samples.

        Args:
            extras: Arrays by name.
        """


class Observers(tuple[Observer, ...]):
    """Observers, which are notified in their order."""

    def notify(self, event: str, *arguments: object) -> list[Any]:
        """Call a method of every observer; return the results.

        Args:
            event: The name of the method.
            arguments: The arguments of the method.
        """
        return [getattr(observer, event)(*arguments) for observer in self]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run a stage in the contexts of all observers.

        Args:
            name: The name of the stage.
        """
        with ExitStack() as stack:
            for observer in self:
                stack.enter_context(observer.stage(name))
            yield


class Monitor:
    """Notifies observers of the steps of a chunk, and waits so that only few steps are queued on the device.

    If the run ends early within its `with` block, the observers receive the last step. Raises WanjaxError if latents
    are not finite, naming the first such step, and Cancelled if an observer ends the run.

    Args:
        observers: The observers.
        chunk: The chunk that is denoised.
        progress: The position of the pass in its video.
        timesteps: The timesteps of the schedule.
        latent_preview: Creates the preview map.
        executes: False while a run is traced; then the observers receive no steps.
        dtype: The dtype in which the networks compute.
    """

    def __init__(
        self,
        observers: Observers,
        chunk: Chunk,
        progress: Progress,
        timesteps: Numbers,
        latent_preview: Callable[[], LatentPreview] | None,
        executes: bool,
        dtype: str,
    ):
        self.observers, self.chunk, self.timesteps = observers, chunk, timesteps
        self.latent_preview, self.executes, self.dtype = latent_preview, executes, dtype
        self._earlier_steps, self._total, self._steps = progress.earlier_steps, progress.total, len(timesteps)
        self._queue: deque[tuple[int, Any]] = deque()
        self._last: Step | None = None

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._last is not None and not _deleted(self._last.state):
            self.observers.notify("stopped", self._last)

    def begin(self, done: int) -> None:
        """Report the steps that were completed earlier.

        Args:
            done: The number of completed steps.
        """
        if self.executes and self.chunk.count == 1:
            self.observers.notify("count", "step", self._earlier_steps + done, self._total)
        elif self.executes and self.chunk.number == 0:
            self.observers.notify("count", "block", 0, self.chunk.count)

    def switched(self, network: str, index: int, seconds: float) -> None:
        """Report a change to another network.

        Args:
            network: The name of the new component.
            index: The first step of the new network, from 0.
            seconds: The time that loading took.
        """
        self.observers.notify("switched", Switch(network, self._earlier_steps + index, self._total, seconds))

    def stepped(self, index: int, state: State, x0: Streams, finite: Bool[Value, ""], reuses: bool) -> None:
        """Report a step, once at most `IN_FLIGHT` steps are queued.

        Args:
            index: The number of the step, from 0.
            state: The state after the step.
            x0: The predicted clean latents.
            finite: Whether the new latents are finite, on the device.
            reuses: Whether the step may have reused cached values.
        """
        if not self.executes:
            return
        step_number = self._earlier_steps + index
        timestep = float(self.timesteps[index])
        step = self._last = Step(step_number, self._total, timestep, state, x0, reuses, self.latent_preview)
        self._queue.append((step_number, finite))
        self._wait(IN_FLIGHT)
        if any(result is False for result in self.observers.notify("stepped", step)):  # each is told
            raise Cancelled(step.index)

    def finish_phase(self) -> None:
        """Wait for all steps of a network, and free the values that it cached for later steps."""
        self._wait(0)
        if self._last is not None:
            self._last = replace(self._last, state=replace(self._last.state, cached=()))

    def _wait(self, max_queued: int) -> None:
        """Wait until at most `max_queued` steps are queued."""
        queue, total = self._queue, self._total
        while len(queue) > max_queued or (queue and queue[0][1].is_ready()):
            index, finite = queue.popleft()
            if not finite:
                advice = not_finite_advice(self.dtype)
                raise WanjaxError(f"the latents are not finite after step {index + 1} of {total}: {advice}")
            if self.chunk.count == 1:
                self.observers.notify("count", "step", index + 1, total)
            elif (index + 1) % self._steps == 0:
                self.observers.notify("count", "block", (index + 1) // self._steps, self.chunk.count)


def not_finite_advice(dtype: str) -> str:
    """Return what to do if latents are not finite.

    Args:
        dtype: The dtype in which the networks compute.
    """
    if dtype != "float32":
        return "use float32"
    return "use a lower guidance_scale, other weights or another attention, as the networks compute in float32 already"


def _deleted(state: State) -> bool:
    """Return whether a later step has reused the buffers of a state."""
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state))


class ProgressObserver(Observer):
    """Shows stages on stderr.

    Args:
        show: True or False; None shows them on a terminal and in a notebook.
    """

    def __init__(self, show: bool | None):
        self.show = show

    def stage(self, name: str) -> AbstractContextManager[object]:
        return progress.stage(name, self.show)

    def count(self, unit: str, done: int, total: int) -> None:
        progress.count(unit, done, total)


class CallbackObserver(Observer):
    """Calls a function after every step, which may return False to end the run.

    Args:
        callback: Called with each step; False ends the run.
    """

    def __init__(self, callback: Callable[[Step], bool | None]):
        self.callback = callback

    def stepped(self, step: Step) -> bool | None:
        _ = step.latents, step.x0  # so that they stay valid if the callback stores the step
        return self.callback(step)


class SwitchObserver(Observer):
    """Calls a function when the run changes to another network.

    Args:
        callback: Called with the change.
    """

    def __init__(self, callback: Callable[[Switch], object]):
        self.callback = callback

    def switched(self, switch: Switch) -> None:
        self.callback(switch)
