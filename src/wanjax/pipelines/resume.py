# SPDX-License-Identifier: Apache-2.0
"""The saved state of denoising, from which a stopped run continues to bit-identical latents."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from wanjax.checkpoints.files import SafetensorsFile, save_safetensors
from wanjax.errors import WanjaxError
from wanjax.pipelines.denoiser import State
from wanjax.pipelines.observers import Observer, Start, Step
from wanjax.pipelines.windows import Window
from wanjax.sharding import Partitioner

SHARE = 0.02  # the share of a run's time that saving the state may take


class ResumeObserver(Observer):
    """Saves the state of denoising to a file from time to time, and resumes from it.

    The file of another video is ignored. `resumed_at` receives the number of completed steps, if any, and the total.
    `saved` receives the number of steps in the file, and None once a step is completed that the file does not have.
    """

    def __init__(
        self,
        file: str | Path,
        partitioner: Partitioner,
        resumed_at: Callable[[int, int], Any] | None = None,
        saved: Callable[[int | None], Any] = lambda steps: None,
    ):
        self.file, self.partitioner, self.resumed_at, self.saved = Path(file), partitioner, resumed_at, saved
        self._of_all, self._of_window, self._finished = self.file, self.file, False
        self._before, self._end = 0, 0  # the steps before this pass; the step after which the state is always saved
        self.origin = ""
        self._last = perf_counter()
        self._cost = self._duration = 0.0  # the seconds that saving and a step take
        self._steps = 0  # the number of steps of the video that the files hold

    def window(self, window: Window) -> None:
        """Use one file per window. Files of finished windows are kept, since later windows depend on them."""
        self.file = self._of_window = self._of_all.with_stem(f"{self._of_all.stem}_{window.number + 1}")
        self._finished = True

    def resumed(self, start: Start) -> tuple[State, int] | None:
        """Read the state of a pass from its file. With several passes, each has its own file, kept once finished."""
        progress, steps = start.progress, sum(len(phase.scales) for phase in start.phases)
        if progress.passes > 1:
            self.file = self._of_window.with_stem(f"{self._of_window.stem}_pass_{progress.number + 1}")
        goes_on = self._finished or not progress.last
        self._before, self._end = progress.earlier_steps, progress.earlier_steps + steps if goes_on else 0
        self._steps = self._steps if progress.earlier_steps else 0
        self.origin = digest(start.facts, start.arrays)
        try:
            file = SafetensorsFile(self.file)
        except WanjaxError:
            return None
        if file.metadata.get("origin") != self.origin:
            return None
        arrays: dict[str, Array] = {}
        for name in file.specs:
            x, everywhere = file.read(name), self.partitioner.replicated
            arrays[name] = jax.make_array_from_callback(x.shape, everywhere, x.__getitem__)  # without a compilation
        named, tree = _named(start.state), jax.tree.structure(start.state)
        if named.keys() - arrays.keys():
            return None
        steps = int(file.metadata["steps"])
        begins = steps in [phase.start for phase in start.phases]  # another network, which has cached nothing yet
        cached = tuple(_listed(arrays, f"kept.{i}") for i in range(int(file.metadata["forwards"])))
        if steps and self.resumed_at:
            self.resumed_at(progress.earlier_steps + steps, progress.total)
        self._steps = progress.earlier_steps + steps
        self.saved(self._steps)
        state = jax.tree.unflatten(tree, [arrays[name] for name in named])
        return replace(state, cached=None if begins else cached), steps

    def stepped(self, step: Step) -> None:
        """Save the state of a step if saving takes only a small share of the run's time."""
        start = perf_counter()
        if step.index + 1 == self._end or start + self._duration - self._last >= self._cost / SHARE:
            jax.block_until_ready(step.state)
            self._duration = perf_counter() - start  # too long if steps were queued; the next step corrects it
            self.stopped(step)

    def stopped(self, step: Step) -> None:
        """Save the state after a step, in the first process only, unless its latents are not finite.

        Nothing is saved if a step cache is split over several processes.
        """
        if step.index + 1 == self._steps:
            return
        jax.block_until_ready(step.state)
        self.saved(None)
        whole = all(leaf.is_fully_addressable or leaf.is_fully_replicated for leaf in jax.tree.leaves(step.state))
        if jax.process_index() != 0 or not whole:
            return
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(step.state.x)):
            return
        start = perf_counter()
        cached = step.state.cached or ()
        arrays = {f"kept.{i}.{j}": np.asarray(leaf) for i, part in enumerate(cached) for j, leaf in enumerate(part)}
        metadata = {"origin": self.origin, "steps": str(step.index + 1 - self._before), "forwards": str(len(cached))}
        with suppress(OSError, WanjaxError):  # such as a full disk: then the run cannot be resumed, but goes on
            arrays |= {name: np.asarray(leaf) for name, leaf in _named(replace(step.state, cached=None)).items()}
            save_safetensors(self.file, arrays, metadata)
            self._steps = step.index + 1
            self.saved(self._steps)
        self._last = perf_counter()
        self._cost = self._last - start


def digest(facts: Mapping[str, Any], arrays: Sequence[Array | np.ndarray]) -> str:
    """Return a digest of facts, which must be valid JSON, and of arrays."""
    sha = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for array in arrays:
        sha.update(f"{array.dtype} {array.shape}".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def _named(state: State) -> dict[str, Any]:
    """Return the arrays of a state by their names in a file."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _listed(arrays: Mapping[str, Array], part: str) -> tuple[Array, ...]:
    """Return the arrays named `part.0`, `part.1` and so on."""
    return tuple(arrays[f"{part}.{i}"] for i in range(sum(name.startswith(f"{part}.") for name in arrays)))
