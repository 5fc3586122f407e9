# SPDX-License-Identifier: Apache-2.0
"""A worker as an actor of Ray, in a process of its own. Nothing is imported here before the process gives way."""

import os
import pickle
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wanjax.serve.worker import Told, Worker

NICE = 10  # by which a worker on a CPU gives way to those who answer


class Making:
    """A worker, which `start`, a pickled function, returns; it gives way to other processes if it is to."""

    def __init__(self, start: bytes, gives_way: bool):
        if gives_way:
            os.nice(NICE)  # before JAX is imported, and has threads
        self._start = start

    @cached_property
    def worker(self) -> "Worker":
        return pickle.loads(self._start)()

    def told(self) -> "Told":
        """Loads the model's description, and tells of it; raises WanjaxError where there is none."""
        return self.worker.told()

    def run(self) -> None:
        """Makes videos until it is told to end."""
        self.worker.run()
