# SPDX-License-Identifier: Apache-2.0
"""A training loop: draws the next batch while a step runs, keeps checkpoints, and goes on from the last one.

The batch and the random key of a step follow from the seed and the step's number. So a run that is stopped and resumed
sees the same as one that is left alone, and ends with the same bits.
"""

import json
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
from wanjax.checkpoints.files import writing
from wanjax.errors import WanjaxError, reason, shown
from wanjax.programs import EXECUTE, Execute, Site
from wanjax.sharding import Partitioner, one_device
from wanjax.training.learning import Filter, Learning, everything
from wanjax.training.objective import Loss

STATES = "checkpoints"
TOLD = "training.json"
STEPS = "steps"  # of what is told, the only thing that may grow
Draw = Callable[[int, np.random.Generator], Any]
After = Callable[[int, Mapping[str, jax.Array]], Any]


class Trainer:
    """Training of a network on `loss(network, batch, key) -> (loss, metrics)`, in a folder of checkpoints.

    `trained` chooses the parameters that change by path and variable; the others are kept as they are. With `average`,
    the state also holds the mean of the weights, which moves to the present ones by 1 - `average` a step. `accumulated`
    batches are joined on the leading axis of what `draw` returns, and their gradients averaged. `told` is JSON on which
    the outcome depends: a folder of another training is refused. More `steps` than it had before are no other training:
    it goes on, and `extended` is the number before.
    """

    def __init__(
        self,
        network: nnx.Module,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        folder: Path,
        seed: int,
        *,
        trained: Filter = everything,
        average: float | None = None,
        accumulated: int = 1,
        partitioner: Partitioner | None = None,
        told: Mapping[str, Any] | None = None,
        kept: int = 1,
    ):
        self.seed, self.folder = seed, Path(folder).absolute()
        how = {"trained": trained, "average": average, "accumulated": accumulated}
        self.extended = self._check_told(told)
        site = Site(one_device() if partitioner is None else partitioner)
        self.learning = Learning(network, loss, optimizer, Execute(EXECUTE.kept), site, seed=seed, **how)
        self.state = self.learning.begin()
        options = ocp.CheckpointManagerOptions(max_to_keep=kept)
        self.manager = ocp.CheckpointManager(self.folder / STATES, options=options)
        self.step = self.manager.latest_step() or 0
        if self.step:
            self._restore()

    def _check_told(self, told: Mapping[str, Any] | None) -> int | None:
        """Writes what the training is; raises WanjaxError where the folder holds another one.

        Returns the number of steps that it had, if there are more now.
        """
        file = self.folder / TOLD
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if told is None:
                return None
            text = json.dumps(told, indent=2, sort_keys=True)
            before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else json.loads(text)
        except (OSError, ValueError) as error:
            raise WanjaxError(f"{file} cannot be used: {reason(error)}") from error
        now, more = json.loads(text), None
        if not isinstance(before, dict):
            raise WanjaxError(f"{file} tells no training: wanjax did not write it, or something rewrote it")
        if type(before.get(STEPS)) is int and now.get(STEPS, 0) > before[STEPS]:
            more = before.pop(STEPS)
            before[STEPS] = now[STEPS]
        if differs := _difference(before, now):
            name, was, present = differs
            raise WanjaxError(
                f"{self.folder} holds another training, whose {name} was {_short(was)} and is {_short(present)}: the "
                "same settings resume it, and more steps extend it"
            )
        if more is not None or not file.is_file():
            with _written(self.folder), writing(file) as beside:
                beside.write_text(text + "\n", encoding="utf-8")
        return more

    def _restore(self) -> None:
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
        self.state = dict(self.manager.restore(self.step, args=ocp.args.StandardRestore(abstract)))

    def run(self, last: int, draw: Draw, after: After = lambda step, metrics: None, every: int = 500) -> None:
        """Trains up to step `last`, and keeps a checkpoint every so many steps; does nothing if `last` is past.

        `draw(step, generator)` returns a batch. `after(steps, metrics)` is called after each step, with arrays that
        the device may still be computing.
        """
        try:
            self._take(last, draw, after, every)
        except KeyboardInterrupt:
            self.save()
            self._wait()
            raise
        self._wait()

    def _take(self, last: int, draw: Draw, after: After, every: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(draw, self.step, self._generator(self.step)) if self.step < last else None
            while ahead is not None:
                batch, step = ahead.result(), self.step
                ahead = pool.submit(draw, step + 1, self._generator(step + 1)) if step + 1 < last else None
                self.state, metrics = self.learning.take(self.state, batch, np.int32(step))
                self.step += 1
                after(self.step, metrics)
                if self.step % every == 0 or self.step == last:
                    self.save()

    def save(self) -> None:
        """Begins to write a checkpoint, unless there is one of this step."""
        if self.manager.latest_step() != self.step:
            with _written(self.folder):
                self.manager.save(self.step, args=ocp.args.StandardSave(self.state))

    def _wait(self) -> None:
        """Waits for the checkpoints that are being written."""
        with _written(self.folder):
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Ends the writing of checkpoints."""
        self._wait()
        self.manager.close()

    def _generator(self, step: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, 0, step])

    def network(self, *, averaged: bool = False) -> Any:
        """Returns the network with its present weights, or with their mean."""
        return self.learning.network(self.state["average" if averaged else "weights"])


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Raises WanjaxError in place of an error in writing a checkpoint, of this moment or of an earlier one."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise WanjaxError(f"{folder} cannot be written: {arrays.reason(error)}") from error


def _difference(before: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Returns the name of the first value that differs, such as optimizer.rate, and both; None where all are equal."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return None if before == now else (name, before, now)
    pairs = ((key, before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys()))
    return next(filter(None, (_difference(x, y, f"{name}.{key}".strip(".")) for key, x, y in pairs)), None)


def _short(value: Any) -> str:
    """Returns a value as a message shows it: only the length of a list, which may be long."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "a table" if isinstance(value, dict) else "none" if value is None else shown(value)
