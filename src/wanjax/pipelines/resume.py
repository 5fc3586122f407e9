# SPDX-License-Identifier: Apache-2.0
"""The state of denoising in a file, from which a run that was stopped continues to the same latents, bit for bit."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from wanjax.checkpoints.files import SafetensorsFile, save_safetensors
from wanjax.errors import WanjaxError
from wanjax.pipelines.sampler import State
from wanjax.pipelines.steps import Segment, Step

Callback = Callable[[Step], bool | None]
SHARE = 0.02  # the share of a run's time that writing the state may take


class Keeper:
    """Writes the state of denoising to a file from time to time, and reads it back.

    `origin` is a digest of everything from which the video is made. A file of another origin is not read.
    """

    def __init__(self, file: Path, origin: str):
        self.file = file
        self.origin = origin
        self._last = perf_counter()
        self._cost = 0.0

    def continued(self, state: State, segments: Sequence[Segment]) -> tuple[State, int]:
        """Returns the kept state and the number of steps taken; the given state and 0 where none is kept."""
        try:
            found = SafetensorsFile(self.file)
        except WanjaxError:
            return state, 0
        if found.metadata.get("origin") != self.origin:
            return state, 0
        arrays = {name: jnp.asarray(found.read(name)) for name in found.keys()}  # noqa: SIM118
        solver = jax.tree.unflatten(jax.tree.structure(state.solver), _listed(arrays, "solver"))
        steps = int(found.metadata["steps"])
        begins = steps in [segment.start for segment in segments]  # another network, which has kept nothing yet
        kept = tuple(_listed(arrays, f"kept.{i}") for i in range(int(found.metadata["forwards"])))
        return State(arrays["x"], solver, None if begins else kept), steps

    def keeping(self, callback: Callback | None) -> Callback:
        """Returns a callback that also keeps the state: now and then, and when `callback` stops the run."""

        def run(step: Step) -> bool | None:
            try:
                answer = callback(step) if callback else None
            except BaseException:  # Ctrl-C too
                self.save(step)
                raise
            if answer is False or perf_counter() - self._last >= self._cost / SHARE:
                self.save(step)
            return answer

        return run

    def save(self, step: Step) -> None:
        """Writes the state after a step, in the first process alone, unless its latents are not finite.

        Nothing is written where a step cache keeps a part in each of several processes.
        """
        jax.block_until_ready(step.state)
        whole = all(leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in jax.tree.leaves(step.state))
        if jax.process_index() != 0 or not whole or not np.isfinite(step.state.x).all():
            return
        start = perf_counter()
        kept = step.state.kept
        listed = {"solver": jax.tree.leaves(step.state.solver)} | {f"kept.{i}": part for i, part in enumerate(kept)}
        arrays = {f"{name}.{i}": np.asarray(leaf) for name, part in listed.items() for i, leaf in enumerate(part)}
        metadata = {"origin": self.origin, "steps": str(step.index + 1), "forwards": str(len(kept))}
        with suppress(OSError, WanjaxError):  # a full disk; what is lost is the way back, not the run
            save_safetensors(self.file, {"x": np.asarray(step.state.x), **arrays}, metadata)
        self._last = perf_counter()
        self._cost = self._last - start


def continuing(
    keep: str | Path | None,
    origin: str,
    state: State,
    segments: Sequence[Segment],
    callback: Callback | None,
    told: Callable[[int, int], Any] | None,
) -> tuple[State, int, Callback | None]:
    """Returns the state from which to go on, the number of steps taken before, and a callback that keeps the state.

    `keep` is the file of the state; None keeps none. `told` receives the steps taken before, if any, and those in all.
    """
    if keep is None:
        return state, 0, callback
    keeper = Keeper(Path(keep), origin)
    state, done = keeper.continued(state, segments)
    if done and told:
        told(done, sum(len(segment.scales) for segment in segments))
    return state, done, keeper.keeping(callback)


def digest(settings: Mapping[str, Any], arrays: Sequence[Array | np.ndarray]) -> str:
    """Returns a digest of settings, which JSON can hold, and of arrays."""
    found = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for array in arrays:
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _listed(arrays: Mapping[str, Array], part: str) -> tuple[Array, ...]:
    """Returns the arrays named `part.0`, `part.1` and so on."""
    return tuple(arrays[f"{part}.{i}"] for i in range(sum(name.startswith(f"{part}.") for name in arrays)))
