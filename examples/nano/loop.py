# SPDX-License-Identifier: Apache-2.0
"""The library's training loop on batches that are drawn as they are needed, with its progress printed."""

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


class Drawn(Trainer):
    """A training named `name`, which averages the weights; `loss(model, batch, key)` returns the loss and metrics."""

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
        """Train up to step `last`; do nothing if that is past."""
        begun, begun_at = time.monotonic(), self.step

        def tell(step: int, metrics: Mapping[str, jax.Array]) -> None:
            if step % PRINT_EVERY == 0 or step == last:
                values = "  ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
                pace = (time.monotonic() - begun) / (step - begun_at)
                print(f"{self.name} {step}/{last}  {values}  {pace:.3f} s/step", flush=True)

        self.run(last, lambda step, generator: draw_batch(generator), tell, SAVE_EVERY)

    def model(self) -> Any:
        """Return the model with the averaged weights."""
        return self.network()
