# SPDX-License-Identifier: Apache-2.0
"""Observers of a run: progress, callbacks, saving, a wish to stop; and the monitor that tells them of each step."""

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

IN_FLIGHT = 2  # steps queued on the device: two keep it busy, more would hold memory


@dataclass(frozen=True)
class Step:
    """A denoising step.

    The next step reuses the buffers of `state`, so `latents` [B C T H W], those after the step, are read before it.
    `x0` [B C T H W] are the clean latents predicted in it. Both are the video's; what is denoised with it is in
    `state.x` and `predicted`.

    Args:
        index: Its number, from 0.
        total: Steps of the pass.
        timestep: The timestep from which it started.
        state: All that the next step takes from it.
        predicted: The predicted clean latents, [B T H W C], or streams.
        reuses: Whether the step reused what another kept, or might have where that is decided on the device.
        latent_preview: Returns what makes previews, which is made at the first call; None where there are none.
    """

    index: int
    total: int
    timestep: float
    state: State
    predicted: Streams  # x0, [B T H W C] for each
    reuses: bool = False
    latent_preview: Callable[[], LatentPreview] | None = None

    @property
    def latents(self) -> Float[Array, "B C T H W"]:
        """The latents after the step."""
        return self._latents

    @cached_property  # once they are read, they stay
    def _latents(self) -> Float[Array, "B C T H W"]:
        return jnp.moveaxis(stream_of(self.state.x), -1, 1)

    @property
    def x0(self) -> Float[Array, "B C T H W"]:
        """The clean latents predicted in the step."""
        return self._x0

    @cached_property
    def _x0(self) -> Float[Array, "B C T H W"]:
        return jnp.moveaxis(stream_of(self.predicted), -1, 1)

    def preview(self) -> UInt8[np.ndarray, "B T _H _W 3"]:
        """Return small pictures of the predicted latents, one for each latent frame; waits for the device."""
        assert self.latent_preview is not None, "a step of `Pipeline.denoise` can be previewed"
        return self.latent_preview().pictures(self.x0)


readable(Step)


class Switch(NamedTuple):
    """A change of network.

    Args:
        network: Name of the component that takes over.
        index: The step before which it does, from 0.
        total: Steps of the pass.
        seconds: Time that it took to load.
    """

    network: str
    index: int
    total: int
    seconds: float


class Cancelled(Exception):
    """The exception for a callback that returned False.

    Args:
        step: The last step that was taken, from 0.
    """

    def __init__(self, step: int):
        super().__init__(step)  # which pickles, and so goes from one process to another
        self.step = step

    def __str__(self) -> str:
        return f"cancelled after step {self.step + 1}"


class Progress(NamedTuple):
    """Where a chunk or a pass is in its video.

    Args:
        number: The pass, from 0.
        passes: How many there are.
        before: The steps of the whole video before it.
        total: The steps of the whole video.
    """

    number: int
    passes: int
    before: int
    total: int

    @property
    def last(self) -> bool:
        """True for the last pass."""
        return self.number + 1 == self.passes


class Start(NamedTuple):
    """The state before the first step of a pass, and everything on which the latents depend.

    Args:
        state: The state.
        phases: Which network takes which steps.
        facts: Values that can be JSON.
        arrays: Trees of arrays.
        progress: Which pass it is.
    """

    state: State
    phases: Sequence[Phase]
    facts: Mapping[str, object]
    arrays: Sequence[Any]
    progress: Progress


class Observer:
    """Looks on while a run is executed. Every method does nothing: a subclass has those that it needs."""

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Surround a stage.

        Args:
            name: Name of the stage.
        """
        return nullcontext()

    def count(self, unit: str, done: int, total: int) -> None:
        """Receive how many units of a stage, such as steps, the device has done.

        Args:
            unit: What is counted, such as steps.
            done: Units that are done.
            total: Units in all.
        """

    def window(self, window: Window) -> None:
        """Receive a window of a video of several, before it is made.

        Args:
            window: The window.
        """

    def encoded(self, conditioning: Conditioning) -> None:
        """Receive the output of the first stage.

        Args:
            conditioning: The output of `encode`.
        """

    def started(self, conditioning: Conditioning) -> None:
        """Receive what is denoised: the output of the first stage, of videos that are made together.

        Args:
            conditioning: The output of `encode`, of all videos.
        """

    def resumed(self, start: Start) -> tuple[State, int] | None:
        """Return the state from which to go on, and the number of steps that were taken before it, if there is one.

        Args:
            start: The state before the first step, and all on which the latents depend.
        """

    def switched(self, switch: Switch) -> None:
        """Receive a change of network.

        Args:
            switch: The change.
        """

    def stepped(self, step: Step) -> bool | None:
        """Receive a step, which the device may not have finished; return False to end the run.

        Args:
            step: The step.
        """

    def stopped(self, step: Step) -> None:
        """Receive the last step of a run that ends after it, before its time.

        Args:
            step: The step.
        """

    def denoised(self, latents: AnyLatents, chunk: Chunk) -> None:
        """Receive the latents of a chunk of videos that are made together, [B C T H W] or streams.

        Args:
            latents: The latents of the chunk.
            chunk: The chunk.
        """

    def decoded(self, extras: Mapping[str, Value]) -> None:
        """Receive what was decoded beside the next chunk of a video, by name, such as the samples of sound.

        Args:
            extras: Arrays by name.
        """


class Observers(tuple[Observer, ...]):
    """Observers, each of which is told in its turn."""

    def tell(self, event: str, *arguments: object) -> list[Any]:
        """Tell every observer of an event, a method of `Observer`; return what they answer.

        Args:
            event: Name of the method.
            arguments: Arguments of the method.
        """
        return [getattr(observer, event)(*arguments) for observer in self]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Surround a stage, for each observer.

        Args:
            name: Name of the stage.
        """
        with ExitStack() as stack:
            for observer in self:
                stack.enter_context(observer.stage(name))
            yield


class Monitor:
    """Tells observers of the steps of a chunk, and holds the host back so that few steps are queued on the device.

    In its `with` block the observers are told of the last step where the run ends early. Raises WanjaxError that names
    the first step whose latents are not finite, and Cancelled where an observer ends the run.

    Args:
        observers: They are told.
        chunk: That which is denoised.
        progress: Where it is in its video.
        timesteps: Those of the schedule.
        latent_preview: Returns what makes previews.
        executes: False where a run is traced, of whose steps nobody is told.
    """

    def __init__(
        self,
        observers: Observers,
        chunk: Chunk,
        progress: Progress,
        timesteps: Numbers,
        latent_preview: Callable[[], LatentPreview] | None,
        executes: bool,
    ):
        self.observers, self.chunk, self.timesteps = observers, chunk, timesteps
        self.latent_preview, self.executes = latent_preview, executes
        self._before, self._total, self._steps = progress.before, progress.total, len(timesteps)
        self._queue: deque[tuple[int, Any]] = deque()
        self._last: Step | None = None

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._last is not None and not _deleted(self._last.state):
            self.observers.tell("stopped", self._last)

    def begin(self, done: int) -> None:
        """Count the steps that were taken before.

        Args:
            done: Steps that were taken.
        """
        if self.executes and self.chunk.count == 1:
            self.observers.tell("count", "step", self._before + done, self._total)
        elif self.executes and self.chunk.number == 0:
            self.observers.tell("count", "block", 0, self.chunk.count)

    def switched(self, network: str, index: int, seconds: float) -> None:
        """Tell of a network that takes over.

        Args:
            network: Name of the component.
            index: The step before which it takes over, from 0.
            seconds: Time that it took to load.
        """
        self.observers.tell("switched", Switch(network, self._before + index, self._total, seconds))

    def stepped(self, index: int, state: State, x0: Streams, finite: Bool[Value, ""], reuses: bool) -> None:
        """Tell of a step, once at most `IN_FLIGHT` steps are queued.

        Args:
            index: The number of the step, from 0.
            state: The state after it.
            x0: The predicted clean latents.
            finite: Whether the new latents are finite, on the device.
            reuses: Whether the step may have reused what another kept.
        """
        if not self.executes:
            return
        step_number = self._before + index
        time = float(self.timesteps[index])
        step = self._last = Step(step_number, self._total, time, state, x0, reuses, self.latent_preview)
        self._queue.append((step_number, finite))
        self._wait(IN_FLIGHT)
        if any(answer is False for answer in self.observers.tell("stepped", step)):  # each is told
            raise Cancelled(step.index)

    def finish_phase(self) -> None:
        """Wait for all steps of a network; what it kept for later steps is freed with it."""
        self._wait(0)
        if self._last is not None:
            self._last = replace(self._last, state=replace(self._last.state, cached=()))

    def _wait(self, max_queued: int) -> None:
        """Wait until at most `max_queued` steps are queued."""
        queue, total = self._queue, self._total
        while len(queue) > max_queued or (queue and queue[0][1].is_ready()):
            index, finite = queue.popleft()
            if not finite:
                raise WanjaxError(f"the latents are not finite after step {index + 1} of {total}: use float32")
            if self.chunk.count == 1:
                self.observers.tell("count", "step", index + 1, total)
            elif (index + 1) % self._steps == 0:
                self.observers.tell("count", "block", (index + 1) // self._steps, self.chunk.count)


def _deleted(state: State) -> bool:
    """Return whether a later step has taken the buffers of a state."""
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state))


class ProgressObserver(Observer):
    """Show stages on stderr.

    Args:
        shown: True or False; None shows them on a terminal and in a notebook.
    """

    def __init__(self, shown: bool | None):
        self.shown = shown

    def stage(self, name: str) -> AbstractContextManager[object]:
        return progress.stage(name, self.shown)

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
        _ = step.latents, step.x0  # for a callback that keeps the step
        return self.callback(step)


class SwitchObserver(Observer):
    """Calls a function when another network takes over.

    Args:
        callback: Called with the change.
    """

    def __init__(self, callback: Callable[[Switch], object]):
        self.callback = callback

    def switched(self, switch: Switch) -> None:
        self.callback(switch)
