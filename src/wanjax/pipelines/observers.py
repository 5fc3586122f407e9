# SPDX-License-Identifier: Apache-2.0
"""Observers of a run, such as progress and callbacks, and the monitor that notifies them of each step."""

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

from wanjax.dims import readable_signature
from wanjax.errors import WanjaxError
from wanjax.execution import ArrayOrShape
from wanjax.pipelines import progress
from wanjax.pipelines.denoiser import LatentTree, State, select_modality
from wanjax.pipelines.frames import AnyLatents
from wanjax.pipelines.model import Chunk, Conditioning
from wanjax.pipelines.phases import Phase
from wanjax.pipelines.previews.latent_preview import LatentPreview
from wanjax.pipelines.windows import Seam, Window
from wanjax.schedulers.base import AnyArray

MAX_QUEUED_STEPS = 2  # on the device: two steps keep it busy, and more would use more memory


@dataclass(frozen=True)
class Step:
    """A denoising step.

    `latents` [B C T H W] are the latents after the step. Read them before the next step, which reuses the buffers of
    `state`. `x0` [B C T H W] are the predicted clean latents. `latents` and `x0` belong to the video. `state.x` and
    `predicted` also have other modalities, such as sound.

    Args:
        index: The number of the step, from 0.
        total: The number of steps of the pass.
        timestep: The timestep at the start of the step.
        state: The input of the next step.
        predicted: The predicted clean latents, [B T H W C], or a mapping by modality.
        reuses: Whether the step reuses cached values. Also True if the device decides whether to reuse, because the
            host does not know the decision.
        latent_preview: Creates the preview map at the first call; None if there are no previews.
    """

    index: int
    total: int
    timestep: float
    state: State
    predicted: LatentTree  # the clean latents of each modality, [B T H W C]
    reuses: bool = False
    latent_preview: Callable[[], LatentPreview] | None = None

    @property
    def latents(self) -> Float[Array, "B C T H W"]:
        """The latents after the step."""
        return self._latents

    @cached_property  # cached: the next step reuses the buffers, but a copy that was read stays valid
    def _latents(self) -> Float[Array, "B C T H W"]:
        return jnp.moveaxis(select_modality(self.state.x), -1, 1)

    @property
    def x0(self) -> Float[Array, "B C T H W"]:
        """The clean latents that the step predicts."""
        return self._x0

    @cached_property
    def _x0(self) -> Float[Array, "B C T H W"]:
        return jnp.moveaxis(select_modality(self.predicted), -1, 1)

    def preview(self) -> UInt8[np.ndarray, "B T _H _W 3"]:
        """Make small images of the predicted latents, one for each latent frame. The call waits for the device."""
        assert self.latent_preview is not None, "only steps of `Pipeline.denoise` have previews"
        return self.latent_preview().pictures(self.x0)


readable_signature(Step)


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
        super().__init__(step)  # pickling lets another process raise the error
        self.step = step

    def __str__(self) -> str:
        return f"cancelled after step {self.step + 1}"


class Progress(NamedTuple):
    """The position of a chunk or a pass in its video.

    Args:
        pass_index: The index of the sampling pass, from 0.
        num_passes: The number of sampling passes; each starts from the latents of the previous one.
        earlier_steps: The number of steps of the video before this pass or chunk.
        total_steps: The number of steps of the whole video.
    """

    pass_index: int
    num_passes: int
    earlier_steps: int
    total_steps: int

    @property
    def is_last(self) -> bool:
        """True for the last pass."""
        return self.pass_index + 1 == self.num_passes


class Start(NamedTuple):
    """The state before the first step of a pass, and everything else that determines the pass's latents.

    Args:
        state: The state.
        phases: Which network runs which steps.
        json_values: The values that can be written as JSON.
        arrays: The values that are trees of arrays.
        progress: The position of the pass.
    """

    state: State
    phases: Sequence[Phase]
    json_values: Mapping[str, object]
    arrays: Sequence[Any]
    progress: Progress


class Observer:
    """Watches a run. All methods do nothing by default. A subclass overrides the methods that it needs."""

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager to run a stage in.

        Args:
            name: The name of the stage.
        """
        return nullcontext()

    def progressed(self, unit: str, done: int, total: int) -> None:
        """Receive the progress of a stage: how many units, such as steps, the device has completed.

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

    def joined(self, seam: Seam) -> None:
        """Receive the seam of a window, before its frames are yielded.

        Args:
            seam: The seam.
        """

    def encoded(self, conditioning: Conditioning) -> None:
        """Receive the output of the encode stage.

        Args:
            conditioning: The output of `encode`.
        """

    def started(self, conditioning: Conditioning) -> None:
        """Receive the conditioning of a batch of videos before they are denoised.

        Args:
            conditioning: The output of `encode`, of all videos.
        """

    def resumed(self, start: Start) -> tuple[State, int] | None:
        """Return a saved state and its number of completed steps, to continue from; return None to start from noise.

        Args:
            start: The state before the first step, and everything else that determines the latents.
        """

    def switched(self, switch: Switch) -> None:
        """Receive a change to another network.

        Args:
            switch: The change.
        """

    def stepped(self, step: Step) -> bool | None:
        """Receive a step; return False to end the run. The device may not have completed the step yet.

        Args:
            step: The step.
        """

    def stopped(self, step: Step) -> None:
        """Receive the last step of a run that ends early.

        Args:
            step: The step.
        """

    def denoised(self, latents: AnyLatents, chunk: Chunk) -> None:
        """Receive the latents of one chunk, for a batch of videos: [B C T H W], or a mapping by modality.

        Args:
            latents: The latents of the chunk.
            chunk: The chunk.
        """

    def decoded(self, extras: Mapping[str, ArrayOrShape]) -> None:
        """Receive arrays other than frames, such as sound samples, that were decoded together with the next frames.

        Args:
            extras: Arrays by name.
        """


class Observers(tuple[Observer, ...]):
    """A list of observers that acts as one: each event goes to all of them, in order."""

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
    """Notify observers of the steps of a chunk, and wait so that few steps are queued on the device.

    If the run ends early within the `with` block, the monitor passes the last step to `Observer.stopped`. Raises
    WanjaxError if latents are not finite, with the number of the step, and Cancelled if an observer ends the run.

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
        timesteps: AnyArray,
        latent_preview: Callable[[], LatentPreview] | None,
        executes: bool,
        dtype: str,
    ):
        self.observers, self.chunk, self.timesteps = observers, chunk, timesteps
        self.latent_preview, self.executes, self.dtype = latent_preview, executes, dtype
        self._earlier_steps, self._total, self._steps = progress.earlier_steps, progress.total_steps, len(timesteps)
        self._queue: deque[tuple[int, Any]] = deque()
        self._last: Step | None = None

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._last is not None and not _deleted(self._last.state):
            self.observers.notify("stopped", self._last)

    def begin(self, done: int) -> None:
        """Report how many steps an earlier, stopped run completed.

        Args:
            done: The number of completed steps.
        """
        if self.executes and self.chunk.num_chunks == 1:
            self.observers.notify("progressed", "step", self._earlier_steps + done, self._total)
        elif self.executes and self.chunk.index == 0:
            self.observers.notify("progressed", "denoised chunk", 0, self.chunk.num_chunks)

    def switched(self, network: str, index: int, seconds: float) -> None:
        """Report a change to another network.

        Args:
            network: The name of the new component.
            index: The first step of the new network, from 0.
            seconds: The time that loading took.
        """
        self.observers.notify("switched", Switch(network, self._earlier_steps + index, self._total, seconds))

    def stepped(self, index: int, state: State, x0: LatentTree, finite: Bool[ArrayOrShape, ""], reuses: bool) -> None:
        """Report a step, after waiting until at most `MAX_QUEUED_STEPS` steps are queued.

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
        self._wait(MAX_QUEUED_STEPS)
        if any(result is False for result in self.observers.notify("stepped", step)):  # notifies all
            raise Cancelled(step.index)

    def finish_phase(self) -> None:
        """Wait for all steps of the current network, and free the values that it cached for its next steps."""
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
            if self.chunk.num_chunks == 1:
                self.observers.notify("progressed", "step", index + 1, total)
            elif (index + 1) % self._steps == 0:
                self.observers.notify("progressed", "denoised chunk", (index + 1) // self._steps, self.chunk.num_chunks)


def not_finite_advice(dtype: str) -> str:
    """Choose the advice for the user if latents are not finite.

    Args:
        dtype: The dtype in which the networks compute.
    """
    if dtype != "float32":
        return "use float32"
    return "use a lower guidance_scale, other weights or another attention (the networks already use float32)"


def _deleted(state: State) -> bool:
    """Return True if a later step has reused, and so deleted, the buffers of a state."""
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state))


class ProgressObserver(Observer):
    """Show the progress of stages on stderr.

    Args:
        show: True or False; None shows it on a terminal and in a notebook.
    """

    def __init__(self, show: bool | None):
        self.show = show

    def stage(self, name: str) -> AbstractContextManager[object]:
        return progress.stage(name, self.show)

    def progressed(self, unit: str, done: int, total: int) -> None:
        progress.set_progress(unit, done, total)


class CallbackObserver(Observer):
    """Call a function after every step.

    Args:
        callback: Called with each step; it returns False to end the run.
    """

    def __init__(self, callback: Callable[[Step], bool | None]):
        self.callback = callback

    def stepped(self, step: Step) -> bool | None:
        _ = step.latents, step.x0  # read now, so that the latents stay valid if the callback stores the step
        result: Any = self.callback(step)
        return bool(result) if isinstance(result, np.bool_) else result  # a comparison of arrays gives NumPy's False


class SwitchObserver(Observer):
    """Call a function when the run changes to another network.

    Args:
        callback: Called with the change.
    """

    def __init__(self, callback: Callable[[Switch], object]):
        self.callback = callback

    def switched(self, switch: Switch) -> None:
        self.callback(switch)
