# SPDX-License-Identifier: Apache-2.0
"""A training loop that draws the next batch while a step runs, prints its progress, and resumes where it stopped."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

SAVE_EVERY = 500
PRINT_EVERY = 100


class Trainer:
    """Training of a model with `optimizer` on `loss(model, batch, key) -> (loss, metrics)`; also averages the weights.

    The batch of step i is drawn from a generator seeded with (seed, i), and the key is folded with i. So a run that is
    stopped and resumed sees the same batches and keys as an uninterrupted one.
    """

    def __init__(
        self,
        name: str,
        model: nnx.Module,
        loss: Callable,
        optimizer: optax.GradientTransformation,
        workdir: Path,
        seed: int,
        average: float = 0.998,
    ):
        self.name, self.seed = name, seed
        self.graphdef, weights = nnx.split(model)
        self.state = {
            "weights": weights,
            "average": jax.tree.map(jax.numpy.copy, weights),
            "optimizer": optimizer.init(weights),
        }
        self.manager = ocp.CheckpointManager(
            Path(workdir).absolute() / name, options=ocp.CheckpointManagerOptions(max_to_keep=1)
        )
        self.step = self.manager.latest_step() or 0
        if self.step:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
            self.state = self.manager.restore(self.step, args=ocp.args.StandardRestore(abstract))
            print(f"{name}: resumed at step {self.step}", flush=True)

        def train_step(state: dict, batch, key: jax.Array) -> tuple[dict, dict]:
            def compute(weights):
                return loss(nnx.merge(self.graphdef, weights), batch, key)

            (value, metrics), gradients = jax.value_and_grad(compute, has_aux=True)(state["weights"])
            updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["weights"])
            weights = optax.apply_updates(state["weights"], updates)
            mean = optax.incremental_update(weights, state["average"], 1.0 - average)
            return {"weights": weights, "average": mean, "optimizer": optimizer_state}, {"loss": value, **metrics}

        self._train_step = jax.jit(train_step, donate_argnums=0)

    def run(self, last: int, draw_batch: Callable[[np.random.Generator], object]) -> None:
        """Trains up to step `last`; does nothing if that is past."""
        if self.step >= last:
            return
        key = jax.random.key(self.seed)
        begun, begun_at = time.monotonic(), self.step
        with ThreadPoolExecutor(1) as pool:
            draw = lambda step: pool.submit(draw_batch, np.random.default_rng([self.seed, 0, step]))  # noqa: E731
            ahead = draw(self.step)
            while self.step < last:
                batch, ahead = ahead.result(), draw(self.step + 1)
                self.state, metrics = self._train_step(self.state, batch, jax.random.fold_in(key, self.step))
                self.step += 1
                if self.step % PRINT_EVERY == 0 or self.step == last:
                    values = "  ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
                    pace = (time.monotonic() - begun) / (self.step - begun_at)
                    print(f"{self.name} {self.step}/{last}  {values}  {pace:.3f} s/step", flush=True)
                if self.step % SAVE_EVERY == 0 or self.step == last:
                    self.manager.save(self.step, args=ocp.args.StandardSave(self.state))
        self.manager.wait_until_finished()

    def model(self) -> nnx.Module:
        """Returns the model with the averaged weights."""
        return nnx.merge(self.graphdef, self.state["average"])
