# SPDX-License-Identifier: Apache-2.0
"""The library's training loop, with batches that are drawn when they are needed, and with printed progress."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from wanjax.training import Trainer

SAVE_EVERY = 500
PRINT_EVERY = 100


class ClipTrainer(Trainer):
    """A named training with an EMA of the weights. `loss(model, batch, key)` returns the loss and metrics."""

    def __init__(
        self,
        name: str,
        model: nnx.Module,
        loss: Callable,
        optimizer: optax.GradientTransformation,
        workdir: Path,
        seed: int,
        ema_decay: float = 0.998,
    ):
        super().__init__(model, loss, optimizer, Path(workdir) / name, seed, ema_decay=ema_decay)
        self.name = name
        if self.step:
            print(f"{name}: resumed at step {self.step}", flush=True)

    def train(self, last: int, draw_batch: Callable[[np.random.Generator], Any]) -> None:
        """Train up to step `last`; do nothing if that step is already done."""
        start_time, start_step = time.monotonic(), self.step

        def report(step: int, metrics: Mapping[str, jax.Array]) -> None:
            if step % PRINT_EVERY == 0 or step == last:
                values = "  ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
                pace = (time.monotonic() - start_time) / (step - start_step)
                print(f"{self.name} {step}/{last}  {values}  {pace:.3f} s/step", flush=True)

        self.run(last, lambda step, generator: draw_batch(generator), report, SAVE_EVERY)

    def model(self) -> Any:
        """Return the model with the averaged weights."""
        return self.network()
