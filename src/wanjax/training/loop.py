# SPDX-License-Identifier: Apache-2.0
"""A training loop: draws the next batch while a step runs, keeps checkpoints, and goes on from the last one.

The batch and the random key of a step follow from the seed and the step's number. So a run that is stopped and resumed
sees the same as one that is left alone, and ends with the same bits.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from wanjax.errors import WanjaxError, reason
from wanjax.execution import EXECUTE, Execute, Program, Site
from wanjax.sharding import Partitioner, one_device
from wanjax.stores.writing import writing
from wanjax.training.objective import Loss
from wanjax.training.step import FINITE, Filter, all_parameters, begin_training, prepare_step, train

STATES = "checkpoints"
IDENTITY = "training.json"
STEPS, RATE = "steps", "optimizer.learning_rate"  # of an identity: the first may grow, and the second be another
MAX_LISTED = 5  # entries that differ
MAX_VALUE_CHARS, CONTEXT_CHARS = 60, 20  # characters of a value, and those before the first that differs
Draw = Callable[[int, np.random.Generator], Any]
After = Callable[[int, Mapping[str, jax.Array]], Any]


class OtherTrainingError(WanjaxError):
    """A folder holds a training with other settings.

    Attributes:
        names: The settings that differ, such as "lora.rank".
    """

    def __init__(self, message: str, names: Sequence[str]):
        super().__init__(message)
        self.names = names


class NotFiniteError(WanjaxError):
    """The loss or the gradient of a training is no longer finite; its checkpoints are.

    Attributes:
        start_step: The step of a checkpoint after which it fails at any learning rate, None if there is none.
    """

    def __init__(self, message: str, start_step: int | None = None):
        super().__init__(message)
        self.start_step = start_step


class Trainer:
    """Training of a network, in a folder of checkpoints, from the last of which it goes on.

    A folder of another training is refused. One with more `steps` or another learning rate is no other training: it
    goes on, and `changed_settings` has what these were before. A state that is not finite is never kept. `state` is
    what a step replaces, `step` its number, and `start_step` that of the state which was there before, or 0.

    Args:
        network: The network, whose parameters a step replaces.
        loss: `loss(network, batch, key) -> (loss, metrics)`.
        optimizer: The optimiser.
        folder: The folder of the checkpoints.
        seed: Seed of the batches and of each step's random key.
        trained: Chooses the parameters to train by path and variable; the others stay as they are.
        ema_decay: Decay of a moving average of the weights, which the state then holds too. None keeps none.
        grad_accum_steps: Parts of a batch, along the leading axis of what `draw` returns, whose gradients are averaged.
        partitioner: The mesh. None is one device.
        identity: JSON on which the outcome depends, by which the training is recognised. None accepts any folder.
        max_checkpoints: Checkpoints that are kept: the last may be finite and too large to go on from.

    Raises:
        WanjaxError: The folder holds another training, or cannot be written.
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
            self.manager = ocp.CheckpointManager(self.folder / STATES, options=options)
        self.start_step = self.step = self.manager.latest_step() or 0
        self.changed_settings = self._check_identity(identity)
        self._strategy, self._site = (
            Execute(EXECUTE.executables),
            Site(one_device() if partitioner is None else partitioner),
        )
        self.static, weights, self._fixed = prepare_step(
            network, loss, optimizer, seed=seed, trained=trained, ema_decay=ema_decay, grad_accum_steps=grad_accum_steps
        )
        self.state: dict[str, Any] = {"weights": weights, **self._call(begin_training, weights)}
        self._finite: Any = True
        if self.step:
            self._restore()

    def _call(self, program: Program, *arguments: Any) -> Any:
        return self._strategy.call(program, self._site, self.static, *arguments)

    def _check_identity(self, identity: Mapping[str, Any] | None) -> dict[str, Any]:
        """Write what the training is; raise WanjaxError where the folder holds another one.

        Returns the steps and the learning rate that it had, where these are others now.
        """
        file = self.folder / IDENTITY
        if identity is None:
            return {}
        try:
            text = json.dumps(identity, indent=2, sort_keys=True)
            before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else json.loads(text)
            previous, current = dict(_entries(before)), dict(_entries(json.loads(text)))
        except (OSError, ValueError, RecursionError) as error:
            raise WanjaxError(f"{file} cannot be used: {reason(error)}") from error
        if not isinstance(before, dict):
            raise WanjaxError(f"{file} tells no training: wanjax did not write it, or something rewrote it")
        names = sorted({**current, **previous}, key=lambda name: "[" in name)  # a list may be long
        names = [name for name in names if previous.get(name) != current.get(name)]
        steps_left = current.get(STEPS, math.inf) > self.step  # a finished training keeps the rate that it had
        allowed = [
            name for name in names if _is_allowed_change(name, previous.get(name), current.get(name), steps_left)
        ]
        if differs := [name for name in names if name not in allowed]:
            rest = f", and {len(differs) - MAX_LISTED} more of them" if len(differs) > MAX_LISTED else ""
            changes = ", ".join(
                _describe_difference(name, previous.get(name), current.get(name)) for name in differs[:MAX_LISTED]
            )
            raise OtherTrainingError(
                f"{self.folder} holds another training, whose {changes}{rest}: give another --out, or the settings "
                "that it has; only more steps and another learning rate may differ",
                differs,
            )
        if allowed or not file.is_file():
            with _write_errors(self.folder), writing(file) as beside:
                beside.write_text(text + "\n", encoding="utf-8")
        return {name: previous[name] for name in allowed}

    def _restore(self) -> None:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
        for x in jax.tree.leaves(self.state):  # the network has the weights too: no reference is held for long
            x.delete()  # or there would be two states in memory
        self.state = dict(self.manager.restore(self.step, args=ocp.args.StandardRestore(abstract)))

    def run(self, last: int, draw: Draw, after: After = lambda step, metrics: None, every: int = 500) -> None:
        """Train up to step `last`, and keep a checkpoint every so many steps; do nothing if `last` is past.

        `draw(step, generator)` returns a batch. `after(steps, metrics)` is called after each step, with arrays that
        the device may still be computing.
        """
        try:
            self._train_steps(last, draw, after, every)
        except KeyboardInterrupt:
            if not any(x.is_deleted() for x in jax.tree.leaves(self.state)):  # by a step that was cut off
                self.save()
            self._wait()
            raise
        self._wait()

    def _train_steps(self, last: int, draw: Draw, after: After, every: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            next_batch = pool.submit(draw, self.step, self._generator(self.step)) if self.step < last else None
            while next_batch is not None:
                batch, step = next_batch.result(), self.step
                next_batch = pool.submit(draw, step + 1, self._generator(step + 1)) if step + 1 < last else None
                self.state, metrics = self._call(train, self.state, self._fixed, batch, np.int32(step))
                self.step, self._finite = self.step + 1, metrics[FINITE]
                after(self.step, metrics)
                if self.step % every == 0 or self.step == last:
                    self.save()

    def save(self) -> None:
        """Begin to write a checkpoint, unless there is one of this step; raise NotFiniteError."""
        if self.manager.latest_step() != self.step:
            if not self._finite:
                raise self.not_finite_error("state")
            with _write_errors(self.folder):
                self.manager.save(self.step, args=ocp.args.StandardSave(self.state))

    def drop(self, step: int) -> None:
        """Remove the checkpoint of a step."""
        with _write_errors(self.folder):
            self.manager.delete(step)

    def not_finite_error(
        self, quantity_name: str, step: int | None = None, start_step: int | None = None
    ) -> NotFiniteError:
        """Return the error for a quantity that is not finite.

        Args:
            quantity_name: The quantity, such as "loss".
            step: The step after which it was not finite; None is the present one.
            start_step: As of NotFiniteError.
        """
        last = self.manager.latest_step()
        remedy = f"go on from step {last}, which is kept, at a lower" if last else "begin at a lower"
        problem = (
            f"the {quantity_name} is not finite after step {self.step if step is None else step}, as at too high a rate"
        )
        return NotFiniteError(f"{problem}: {remedy} learning rate", start_step)

    def _wait(self) -> None:
        """Wait for the checkpoints that are being written."""
        with _write_errors(self.folder):
            self.manager.wait_until_finished()

    def close(self) -> None:
        """End the writing of checkpoints."""
        self._wait()
        self.manager.close()

    def _generator(self, step: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, 0, step])

    def network(self) -> Any:
        """Return the network with its present weights, or with their mean where the state has one."""
        return self.static.network(self.state.get("ema", self.state["weights"]), self._fixed)


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Raise WanjaxError in place of an error in writing a checkpoint, of this moment or of an earlier one."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise WanjaxError(f"{folder} cannot be written: {arrays.reason(error)}") from error


def _entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested JSON by its name, such as optimizer.rate or clips[2].text."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _entries(entry, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _entries(entry, f"{name}[{index}]")
    else:
        yield name, value


def _is_allowed_change(name: str, previous: Any, current: Any, steps_left: bool) -> bool:
    """Return whether a training, which may have steps left, may go on with another value of an entry."""
    if name not in (STEPS, RATE) or type(previous) not in (int, float) or type(current) not in (int, float):
        return False
    return current > previous if name == STEPS else steps_left


def _describe_difference(name: str, previous: Any, current: Any) -> str:
    """Return an entry with both values; of long texts the part in which they begin to differ."""
    texts = ["none" if x is None else repr(x) for x in (previous, current)]
    equal = next((i for i, (x, y) in enumerate(zip(*texts, strict=False)) if x != y), min(map(len, texts)))
    start = max(0, equal - CONTEXT_CHARS)
    end = start + MAX_VALUE_CHARS
    before, after = (f"{'...' * (start > 0)}{x[start:end]}{'...' * (len(x) > end)}" for x in texts)
    return f"{name if name.isprintable() else repr(name)} was {before} and is {after}"
