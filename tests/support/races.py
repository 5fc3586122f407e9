# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels for TPUs under JAX's interpreter with two cores, which detects races and fills new memory with NaN."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from sys import _getframe
from typing import Any
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

CORES = 2  # they share the points of the grid's parallel axes, in random order


@dataclass
class Report:
    """What kernels did while they were interpreted.

    Attributes:
        kernels: The names of all kernels that were traced.
        cores: The cores that computed a point of a grid.
        detectors: The race detector of each run of a kernel.
        branches: The values of each `pl.when`, by file and line.
    """

    kernels: set[str] = field(default_factory=set)
    cores: set[int] = field(default_factory=set)
    detectors: list[Any] = field(default_factory=list)
    branches: dict[tuple[str, int], set[bool]] = field(default_factory=lambda: defaultdict(set))

    @property
    def num_races(self) -> int:
        """Return the number of runs in which a race was detected."""
        return sum(detector.races_found for detector in self.detectors)


@contextmanager
def detect_races() -> Iterator[Report]:
    """Interpret all kernels that are traced in the `with` block, which must also wait for their results."""
    report, detector_type = Report(), interpret_pallas_call.RaceDetectionState
    pallas_call, when = pl.pallas_call, pl.when

    def new_detector(*arguments: Any, **options: Any) -> Any:
        report.detectors.append(detector_type(*arguments, **options))
        return report.detectors[-1]

    def named_call(*arguments: Any, **options: Any) -> Any:
        report.kernels.add(options["name"])
        return pallas_call(*arguments, **options)

    def noted_when(condition: Any) -> Any:
        caller = _getframe(1)
        values = report.branches[Path(caller.f_code.co_filename).name, caller.f_lineno]
        jax.debug.callback(lambda value: values.add(bool(value)), condition)
        return when(condition)

    def note_core(token: Any, _: Any, core: Any) -> Any:
        report.cores.add(int(core))
        return token

    options: dict[str, Any] = {
        "detect_races": True,
        "uninitialized_memory": "nan",
        "num_cores_or_threads": CORES,
        "random_seed": 0,
        "grid_point_recorder": note_core,  # a new function, so that no earlier trace is used again
        "on_race": "warn",
    }
    names = {each.name for each in fields(pltpu.InterpretParams)}  # jax 0.10 has no `on_race`: it always warns
    parameters = pltpu.InterpretParams(**{name: value for name, value in options.items() if name in names})
    patches = (
        mock.patch.object(interpret_pallas_call, "RaceDetectionState", new_detector),
        mock.patch.object(pl, "pallas_call", named_call),
        mock.patch.object(pl, "when", noted_when),
    )
    try:
        with patches[0], patches[1], patches[2], pltpu.force_tpu_interpret_mode(parameters):
            yield report
            jax.effects_barrier()
    finally:
        pltpu.reset_tpu_interpret_mode_state()  # an error leaves its memory behind
