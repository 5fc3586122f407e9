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
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from wanjax.checkpoints.arrays import reason
from wanjax.compilation import Jitted, devices_of
from wanjax.errors import WanjaxError
from wanjax.kernels.compiler_options import products
from wanjax.sharding import Partitioner, use
from wanjax.training.adapters import DropoutKey, dropped
from wanjax.training.objective import Loss

STATES = "checkpoints"
TOLD = "training.json"
Filter = Callable[[Any, Any], bool]
Draw = Callable[[int, np.random.Generator], Any]
After = Callable[[int, Mapping[str, jax.Array]], Any]


def everything(path: Any, weight: Any) -> bool:
    """Chooses all parameters of a network."""
    return isinstance(weight, nnx.Param)


class Trainer:
    """Training of a network on `loss(network, batch, key) -> (loss, metrics)`, in a folder of checkpoints.

    `trained` chooses the parameters that change by path and variable; the others are kept as they are. With `average`,
    the state also holds the mean of the weights, which moves to the present ones by 1 - `average` a step. `accumulated`
    batches are joined on the leading axis of what `draw` returns, and their gradients averaged. `told` is JSON on which
    the outcome depends: a folder of another training is refused.
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
        self.seed, self.folder, self.partitioner = seed, Path(folder).absolute(), partitioner
        self.graphdef, weights, self.keys, self.frozen = nnx.split(network, trained, DropoutKey, ...)
        self.state: dict[str, Any] = {"weights": weights, "optimizer": optimizer.init(weights)}
        if average is not None:
            self.state["average"] = jax.tree.map(jnp.copy, weights)
        self.state = jax.device_put(self.state, jax.tree.map(self._settled, self.state))
        self._check_told(told)
        options = ocp.CheckpointManagerOptions(max_to_keep=kept)
        self.manager = ocp.CheckpointManager(self.folder / STATES, options=options)
        self.step = self.manager.latest_step() or 0
        if self.step:
            self._restore()
        step = step_of(self.graphdef, loss, optimizer, average, accumulated)
        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        options = products(devices_of(partitioner))
        self._step = Jitted(step, options, donate_argnums=0, out_shardings=(shardings, None))

    def _settled(self, x: Any) -> Any:
        """Returns the sharding that an array of the state keeps."""
        if self.partitioner is None or isinstance(x.sharding, NamedSharding):
            return x.sharding
        return NamedSharding(self.partitioner.mesh, PartitionSpec())

    def _check_told(self, told: Mapping[str, Any] | None) -> None:
        """Writes what the training is; raises WanjaxError where the folder holds another one."""
        file = self.folder / TOLD
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if told is None:
                return
            text = json.dumps(told, indent=2, sort_keys=True)
            if not file.is_file():
                file.write_text(text + "\n", encoding="utf-8")
                return
            before = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise WanjaxError(f"{file} cannot be used: {error}") from error
        now = json.loads(text)
        if differs := [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]:
            shown = f"{differs[0]} was {_short(before.get(differs[0]))} and is {_short(now.get(differs[0]))}"
            raise WanjaxError(f"{self.folder} holds another training, whose {shown}: the same settings resume it")

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
        key = jax.random.key(self.seed)
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(draw, self.step, self._generator(self.step)) if self.step < last else None
            while ahead is not None:
                batch, step = ahead.result(), self.step
                ahead = pool.submit(draw, step + 1, self._generator(step + 1)) if step + 1 < last else None
                with use(self.partitioner):
                    self.state, metrics = self._step(
                        self.state, self.keys, self.frozen, batch, jax.random.fold_in(key, step)
                    )
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
        weights = self.state["average" if averaged else "weights"]
        return nnx.merge(self.graphdef, weights, self.keys, self.frozen)


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Raises WanjaxError in place of an error in writing a checkpoint, of this moment or of an earlier one."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise WanjaxError(f"{folder} cannot be written: {reason(error)}") from error


def step_of(
    graphdef: Any,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    average: float | None = None,
    accumulated: int = 1,
) -> Callable[..., tuple[dict[str, Any], dict[str, jax.Array]]]:
    """Returns a step as a function of the state, the keys of dropout, the frozen weights, a batch and a key."""

    def step(state: dict[str, Any], keys: Any, frozen: Any, batch: Any, key: jax.Array) -> tuple[dict, dict]:
        def compute(weights: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict]:
            drawn = dropped(keys, jax.random.fold_in(key, 1)) if jax.tree.leaves(keys) else keys
            return loss(nnx.merge(graphdef, weights, drawn, frozen), batch, key)

        gradient = jax.value_and_grad(compute, has_aux=True)
        weights = state["weights"]
        if accumulated == 1:
            (value, told), gradients = gradient(weights, batch, key)
        else:
            (value, told), gradients = _mean(gradient, weights, batch, key, accumulated)
        with jax.numpy_dtype_promotion("standard"):  # which optax relies on
            updates, of_optimizer = optimizer.update(gradients, state["optimizer"], weights)
            weights = optax.apply_updates(weights, updates)
        after = {"weights": weights, "optimizer": of_optimizer}
        if average is not None:
            after["average"] = optax.incremental_update(weights, state["average"], 1.0 - average)
        return after, {"loss": value, "gradient": optax.tree.norm(gradients), **told}

    return step


def _mean(gradient: Callable[..., Any], weights: Any, batch: Any, key: jax.Array, parts: int) -> Any:
    """Returns the means of the losses, metrics and gradients of the parts of a batch, computed one after the other."""
    split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
    first, keys = jax.tree.map(lambda x: x[0], split), jax.random.split(key, parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, weights, first, key))

    def add(total: Any, part: Any) -> tuple[Any, None]:
        found = gradient(weights, *part)
        return jax.tree.map(lambda a, b: a + b / jnp.asarray(parts, b.dtype), total, found), None

    return jax.lax.scan(add, zeros, (split, keys))[0]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]} …"
