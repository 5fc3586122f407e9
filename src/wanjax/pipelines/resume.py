# SPDX-License-Identifier: Apache-2.0
"""The saved state of denoising. A run that resumes from it computes the same latents, bit for bit."""

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
from wanjax.stores.writing import check_folder

MAX_SAVING_SHARE = 0.02  # saving may take at most this share of a run's time


class ResumeObserver(Observer):
    """An observer that saves the state of denoising to a file from time to time, and resumes from it.

    Args:
        file: The file. A file of another video, or of other settings, is replaced.
        partitioner: The mesh.
        resumed_at: Called when a run resumes, with the number of completed steps and the number of all steps.
        on_save: Called when the saved state changes. The argument is the number of steps in the file after the file is
            written, and None once a later step is completed.
        on_mismatch: Called before a file of other settings is replaced, with the number of completed steps in the file.
    """

    def __init__(
        self,
        file: str | Path,
        partitioner: Partitioner,
        resumed_at: Callable[[int, int], Any] | None = None,
        on_save: Callable[[int | None], Any] = lambda steps: None,
        on_mismatch: Callable[[int], Any] = lambda steps: None,
    ):
        self.file, self.partitioner = Path(file), partitioner
        self.resumed_at, self.on_save, self.on_mismatch = resumed_at, on_save, on_mismatch
        self._video_file, self._window_file, self._has_windows = self.file, self.file, False
        self._earlier_steps = 0  # the number of steps in earlier passes
        self._always_saved_step = 0  # the state after this step is always saved
        self.inputs_digest = ""  # a digest of everything that determines the latents
        self._last_saved = perf_counter()
        self._save_seconds = self._wait_seconds = 0.0  # of the last save; the wait is for the device
        self._saved_steps = 0  # the number of steps in the files

    def window(self, window: Window) -> None:
        """Use one file per window. Files of finished windows are kept, because later windows depend on them."""
        self.file = self._window_file = self._video_file.with_stem(f"{self._video_file.stem}_{window.index + 1}")
        self._has_windows = True

    def resumed(self, start: Start) -> tuple[State, int] | None:
        """Read the state of a pass from its file.

        Each pass has its own file, which stays after the pass is finished.
        """
        progress, steps = start.progress, sum(len(phase.scales) for phase in start.phases)
        if progress.num_passes > 1:
            self.file = self._window_file.with_stem(f"{self._window_file.stem}_pass_{progress.pass_index + 1}")
        saves_end = self._has_windows or not progress.is_last
        self._earlier_steps = progress.earlier_steps
        self._always_saved_step = progress.earlier_steps + steps if saves_end else 0
        self._saved_steps = self._saved_steps if progress.earlier_steps else 0
        self.inputs_digest = digest(start.json_values, start.arrays)
        try:
            file = SafetensorsFile(self.file)
        except WanjaxError:
            return None
        if file.metadata.get("origin") != self.inputs_digest:
            self.on_mismatch(int(file.metadata.get("steps", 0)))
            return None
        arrays: dict[str, Array] = {}
        for name in file.specs:
            x, replicated = file.read(name), self.partitioner.replicated
            arrays[name] = jax.make_array_from_callback(x.shape, replicated, x.__getitem__)  # compiles no program
        state_arrays, tree = _arrays_by_name(start.state), jax.tree.structure(start.state)
        if state_arrays.keys() - arrays.keys():
            return None
        steps = int(file.metadata["steps"])
        starts_phase = steps in [phase.start for phase in start.phases]  # the phase's network has cached nothing yet
        cached = tuple(_numbered_arrays(arrays, f"kept.{i}") for i in range(int(file.metadata["forwards"])))
        if steps and self.resumed_at:
            self.resumed_at(progress.earlier_steps + steps, progress.total_steps)
        self._saved_steps = progress.earlier_steps + steps
        self.on_save(self._saved_steps)
        state = jax.tree.unflatten(tree, [arrays[name] for name in state_arrays])
        return replace(state, cached=None if starts_phase else cached), steps

    def stepped(self, step: Step) -> None:
        """Save the state of a step if saving takes only a small share of the run's time."""
        start = perf_counter()
        interval = self._save_seconds / MAX_SAVING_SHARE
        if step.index + 1 == self._always_saved_step or start + self._wait_seconds - self._last_saved >= interval:
            jax.block_until_ready(step.state)
            self._wait_seconds = perf_counter() - start  # too long if several steps were queued
            self.save_state(step)

    def stopped(self, step: Step) -> None:
        self.save_state(step)

    def save_state(self, step: Step) -> None:
        """Save the state after a step, in the first process only.

        A state is not saved if its latents are not finite, or if its step cache is sharded over several processes.
        """
        if step.index + 1 == self._saved_steps:
            return
        jax.block_until_ready(step.state)
        self.on_save(None)
        is_readable = all(x.is_fully_addressable or x.is_fully_replicated for x in jax.tree.leaves(step.state))
        if jax.process_index() != 0 or not is_readable:
            return
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(step.state.x)):
            return
        start = perf_counter()
        cached = step.state.cached or ()
        arrays = {f"kept.{i}.{j}": np.asarray(x) for i, values in enumerate(cached) for j, x in enumerate(values)}
        steps = str(step.index + 1 - self._earlier_steps)
        metadata = {"origin": self.inputs_digest, "steps": steps, "forwards": str(len(cached))}
        with suppress(OSError, WanjaxError):  # for example, the disk is full: the run continues, but cannot be resumed
            arrays |= {name: np.asarray(x) for name, x in _arrays_by_name(replace(step.state, cached=None)).items()}
            save_safetensors(self.file, arrays, metadata)
            self._saved_steps = step.index + 1
            self.on_save(self._saved_steps)
        self._last_saved = perf_counter()
        self._save_seconds = self._last_saved - start


def check_state_file(path: str | Path) -> None:
    """Raise WanjaxError unless a path can hold the saved state: a new file, or a file with a saved state, which may be
    broken.

    Another file is not replaced, because it may be the user's.
    """
    file = Path(path)
    if file.is_dir():
        raise WanjaxError(f"{file} is a folder: give the name of a file in it for the state")
    check_folder(file.parent, "keep")
    if not file.exists():
        return
    try:
        is_state = {"origin", "steps"} <= SafetensorsFile(file).metadata.keys()
    except WanjaxError:
        is_state = file.suffix in ("", ".safetensors")
    if not is_state:
        raise WanjaxError(f"{file} contains no saved state and would be replaced: give another name")


def digest(json_values: Mapping[str, Any], arrays: Sequence[Array | np.ndarray]) -> str:
    """Compute one digest of values that can be written as JSON, and of arrays."""
    sha = hashlib.sha256(json.dumps(json_values, sort_keys=True).encode())
    for array in arrays:
        sha.update(f"{array.dtype} {array.shape}".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def _arrays_by_name(state: State) -> dict[str, Any]:
    """Return the arrays of a state by their names in a file."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _numbered_arrays(arrays: Mapping[str, Array], prefix: str) -> tuple[Array, ...]:
    """Return the arrays named `prefix.0`, `prefix.1` and so on."""
    return tuple(arrays[f"{prefix}.{i}"] for i in range(sum(name.startswith(f"{prefix}.") for name in arrays)))
