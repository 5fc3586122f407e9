# SPDX-License-Identifier: Apache-2.0
"""A training loop that prefetches batches, writes checkpoints, and resumes from the last checkpoint.

The batch and the random key of a step depend only on the seed and the step's number. The weights of a run that was
stopped and resumed are therefore bit-identical to those of an uninterrupted run.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from wanjax.checkpoints import arrays
from wanjax.errors import WanjaxError, WriteError, reason
from wanjax.execution import EXECUTE, CompileContext, Execute, Program
from wanjax.figures import format_bytes
from wanjax.media.training_data import RUN_IDENTITY_FILE
from wanjax.sharding import Partitioner, one_device_partitioner
from wanjax.stores.writing import atomic_write
from wanjax.training.objective import Loss
from wanjax.training.step import FINITE, Filter, all_parameters, begin_training, prepare_step, train

STATES_FOLDER = "checkpoints"
STEPS, LEARNING_RATE = "steps", "optimizer.learning_rate"  # the entries of the identity that a resumed run may change
MAX_DIFFERENCES = 5  # the maximum number of differences in a message
# the maximum number of characters of a value in a message, in total and before the first difference
MAX_VALUE_CHARS, CONTEXT_CHARS = 60, 20
DrawBatch = Callable[[int, np.random.Generator], Any]
AfterStep = Callable[[int, Mapping[str, jax.Array]], Any]


class OtherTrainingError(WanjaxError):
    """A folder has a training run with other settings.

    Args:
        folder: The folder.
        differences: Each setting that differs, such as "lora.rank", with how it differs, such as "was 2 and is 4".
        advice: What to do.
    """

    def __init__(self, folder: Path, differences: Mapping[str, str], advice: str):
        self.folder, self.differences, self.advice = folder, differences, advice
        super().__init__(self.message())

    def message(self, display_name: Callable[[str], str] = str) -> str:
        """Return the message, with a setting's name as `display_name` returns it."""
        names = {name: display_name(name if name.isprintable() else repr(name)) for name in self.differences}
        texts = [f"{names[name]} {text}" for name, text in self.differences.items()]
        if len(texts) > MAX_DIFFERENCES:
            texts[MAX_DIFFERENCES:] = [f"and {len(texts) - MAX_DIFFERENCES} more values differ"]
        return f"{self.folder} has another training run, whose {', '.join(texts)}: {self.advice}"


class NotFiniteError(WanjaxError):
    """The loss or the state is no longer finite. All checkpoints are still finite.

    Attributes:
        start_step: The step of a checkpoint from which training diverges at once, with any learning rate. None if there
            is no such checkpoint.
    """

    def __init__(self, message: str, start_step: int | None = None):
        super().__init__(message)
        self.start_step = start_step


class Trainer:
    """Train a network, with checkpoints in a folder, and resume from the last checkpoint.

    If the folder has a training run with other settings, an error is raised. There are two exceptions: `steps` may
    increase, and the learning rate may change. A state that is not finite is never saved.

    Attributes:
        state: The current weights, optimizer state and moving average.
        step: The number of steps that were taken.
        start_step: The step of the checkpoint from which this run resumed, or 0.
        changed_settings: The previous values of `steps` and the learning rate, as far as they differ from the new ones.

    Args:
        network: The network.
        loss: `loss(network, batch, key) -> (loss, metrics)`.
        optimizer: The optimizer.
        folder: The folder of the checkpoints.
        seed: Seed of the batches and of each step's random key.
        trained: A function that selects the parameters to train, by path and variable; all other parameters are frozen.
        ema_decay: Decay of an exponential moving average of the weights. None disables it.
        grad_accum_steps: The number of microbatches along the leading axis of a batch. The gradients of the
            microbatches are averaged.
        partitioner: The mesh. None is one device.
        identity: JSON with everything that determines the result. On resume it must equal the folder's identity. None
            accepts any folder.
        max_checkpoints: The number of checkpoints to keep. The number must be above 1, because training may diverge
            from the last checkpoint.

    Raises:
        WanjaxError: The folder holds a training run with other settings, or cannot be written.
    """

    def __init__(
        self,
        network: nnx.Module,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        folder: Path,
        seed: int,
        *,
        trained: Filter = all_parameters,
        ema_decay: float | None = None,
        grad_accum_steps: int = 1,
        partitioner: Partitioner | None = None,
        identity: Mapping[str, Any] | None = None,
        max_checkpoints: int = 2,
    ):
        self.seed, self.folder = seed, Path(folder).absolute()
        with _write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(max_to_keep=max_checkpoints)
            self.manager = ocp.CheckpointManager(self.folder / STATES_FOLDER, options=options)
        self.start_step = self.step = self.manager.latest_step() or 0
        self.changed_settings = self._check_and_save_identity(identity)
        self._strategy, self._compile_context = (
            Execute(EXECUTE.executables),
            CompileContext(one_device_partitioner() if partitioner is None else partitioner),
        )
        self.static, weights, self._constants = prepare_step(
            network, loss, optimizer, seed=seed, trained=trained, ema_decay=ema_decay, grad_accum_steps=grad_accum_steps
        )
        self.state: dict[str, Any] = {"weights": weights, **self._call(begin_training, weights)}
        self._finite: Any = True
        if self.step:
            self._restore()

    def _call(self, program: Program, *arguments: Any) -> Any:
        return self._strategy.call(program, self._compile_context, self.static, *arguments)

    def _check_and_save_identity(self, identity: Mapping[str, Any] | None) -> dict[str, Any]:
        """Save the identity in the folder. Raises WanjaxError if the folder has steps of a run with another identity.

        Returns the previous number of steps and the previous learning rate, if they differ from the new values.
        """
        file = self.folder / RUN_IDENTITY_FILE
        if identity is None:
            return {}
        try:
            text = json.dumps(identity, indent=2, sort_keys=True)
            saved = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else json.loads(text)
            previous, current = dict(_flatten_json(saved)), dict(_flatten_json(json.loads(text)))
        except (OSError, ValueError, RecursionError) as error:
            raise WanjaxError(f"{file} cannot be used: {reason(error)}") from error
        if not isinstance(saved, dict):
            raise WanjaxError(
                f"{file} is not a training run's file: wanjax did not write it, or another program rewrote it"
            )
        names = sorted({**current, **previous}, key=lambda name: "[" in name)  # list the items of long lists last
        names = [name for name in names if previous.get(name) != current.get(name)]
        steps_left = current.get(STEPS, math.inf) > self.step  # a finished run must keep its learning rate
        allowed = [
            name for name in names if _is_allowed_change(name, previous.get(name), current.get(name), steps_left)
        ]
        # no step of the other run was saved, and no other program wrote the file
        is_replaceable = self.step == 0 and saved.keys() == identity.keys()
        if (differing := [name for name in names if name not in allowed]) and not is_replaceable:
            lists = dict.fromkeys(name.partition("[")[0] for name in differing if "[" in name)
            values = [name for name in differing if "[" not in name]
            differences = {name: _describe_difference(previous.get(name), current.get(name)) for name in values}
            differences |= {name: "differ" if name.endswith("s") else "differs" for name in lists}
            advice = (
                "all its steps are taken: to use another learning rate, also give more steps, or give another --out"
                if differing == [LEARNING_RATE]
                else "give another --out, or the settings that it has; only the number of steps may be higher, and "
                "while steps remain, the learning rate may differ"
            )
            raise OtherTrainingError(self.folder, differences, advice)
        if names or not file.is_file():
            with _write_errors(self.folder), atomic_write(file) as partial_file:
                partial_file.write_text(text + "\n", encoding="utf-8")
        return {name: previous[name] for name in allowed}

    def _restore(self) -> None:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
        for x in jax.tree.leaves(self.state):  # also if the network shares these arrays
            x.delete()  # frees the old state before the new state is read
        self.state = dict(self.manager.restore(self.step, args=ocp.args.StandardRestore(abstract)))

    def run(
        self,
        last_step: int,
        draw_batch: DrawBatch,
        after_step: AfterStep = lambda step, metrics: None,
        save_every: int = 500,
    ) -> None:
        """Train up to step `last_step`. Do nothing if an earlier run has already taken this step.

        Args:
            last_step: The step after which training ends.
            draw_batch: `draw_batch(step, generator)` returns the batch of a step; it is called in another thread.
            after_step: `after_step(step, metrics)` is called after each step, with the number of steps taken. The
                device may still be computing the metrics.
            save_every: Steps between checkpoints.
        """
        try:
            self._train_steps(last_step, draw_batch, after_step, save_every)
        except KeyboardInterrupt:
            if not any(x.is_deleted() for x in jax.tree.leaves(self.state)):  # a stopped step may consume arrays
                self.save()
            self._wait()
            raise
        self._wait()

    def _train_steps(self, last_step: int, draw_batch: DrawBatch, after_step: AfterStep, save_every: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            next_batch = (
                pool.submit(draw_batch, self.step, self._generator(self.step)) if self.step < last_step else None
            )
            while next_batch is not None:
                batch, step = next_batch.result(), self.step
                next_batch = (
                    pool.submit(draw_batch, step + 1, self._generator(step + 1)) if step + 1 < last_step else None
                )
                self.state, metrics = self._call(train, self.state, self._constants, batch, np.int32(step))
                self.step, self._finite = self.step + 1, metrics[FINITE]
                after_step(self.step, metrics)
                if self.step % save_every == 0 or self.step == last_step:
                    self.save()

    def save(self) -> None:
        """Start writing a checkpoint, unless this step has one.

        Raises NotFiniteError if the state is not finite, and WriteError if the disk has no room for it.
        """
        if self.manager.latest_step() != self.step:
            if not self._finite:
                raise self.not_finite_error("state")
            self._check_room()
            with _write_errors(self.folder):
                self.manager.save(self.step, args=ocp.args.StandardSave(self.state))

    def _check_room(self) -> None:
        """Raise WriteError if the disk has no room for the state. On a full disk, threads of Orbax print their errors
        and leave a part of the checkpoint."""
        needed, free = sum(x.nbytes for x in jax.tree.leaves(self.state)), shutil.disk_usage(self.folder).free
        if free < needed:
            sizes = f"a checkpoint has {format_bytes(needed)}, and {format_bytes(free)} are free"
            cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise WriteError(f"{self.folder} cannot be written, because {sizes}: free some space") from cause

    def delete_checkpoint(self, step: int) -> None:
        """Delete the checkpoint of a step."""
        with _write_errors(self.folder):
            self.manager.delete(step)

    def not_finite_error(
        self, quantity_name: str, step: int | None = None, start_step: int | None = None
    ) -> NotFiniteError:
        """Build the error for a quantity that is not finite.

        Args:
            quantity_name: The quantity, such as "loss".
            step: The step after which it was not finite; None is the current step.
            start_step: As in NotFiniteError.
        """
        last_saved = self.manager.latest_step()
        remedy = f"resume from step {last_saved}, which is saved, with" if last_saved else "start again with"
        problem = f"the {quantity_name} is not finite after step {self.step if step is None else step}"
        return NotFiniteError(f"{problem}; the learning rate may be too high: {remedy} a lower one", start_step)

    def _wait(self) -> None:
        """Wait until all checkpoints are written."""
        with _write_errors(self.folder):
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Wait until all checkpoints are written, and close their manager."""
        self._wait()
        self.manager.close()

    def _generator(self, step: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, 0, step])

    def network(self) -> Any:
        """Return the network with its current weights. If there is a moving average of the weights, use the average."""
        return self.static.network(self.state.get("ema", self.state["weights"]), self._constants)


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Convert errors in writing checkpoints to WanjaxError. An error may come from an earlier asynchronous write."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise WanjaxError(f"{folder} cannot be written: {arrays.reason(error)}") from error


def _flatten_json(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of nested JSON with its name, such as optimizer.learning_rate or clips[2].text."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _flatten_json(entry, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _flatten_json(entry, f"{name}[{index}]")
    else:
        yield name, value


def _is_allowed_change(name: str, previous: Any, current: Any, steps_left: bool) -> bool:
    """Return whether a resumed run may have another value for an entry of the identity."""
    if name not in (STEPS, LEARNING_RATE) or type(previous) not in (int, float) or type(current) not in (int, float):
        return False
    return current > previous if name == STEPS else steps_left


def _describe_difference(previous: Any, current: Any) -> str:
    """Describe how an entry's values differ. Long values are shortened to the text around their first difference."""
    texts = ["none" if x is None else repr(x) for x in (previous, current)]
    common_length = next((i for i, (x, y) in enumerate(zip(*texts, strict=False)) if x != y), min(map(len, texts)))
    start = max(0, common_length - CONTEXT_CHARS)
    end = start + MAX_VALUE_CHARS
    previous_text, current_text = (f"{'...' * (start > 0)}{x[start:end]}{'...' * (len(x) > end)}" for x in texts)
    return f"was {previous_text} and is {current_text}"
