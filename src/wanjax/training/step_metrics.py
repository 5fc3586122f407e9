# SPDX-License-Identifier: Apache-2.0
"""Metrics of a training: a line of JSON for each step, and curves for TensorBoard where it is installed."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from wanjax.errors import write_errors
from wanjax.stores.writing import writing

METRICS = "metrics.jsonl"
CURVES = "tensorboard"  # the folder of TensorBoard's files, beside it


class Metrics:
    """The metrics of steps, in a training's folder. Those after the step from which it goes on are dropped.

    Every method raises WriteError where a file cannot be written.
    """

    def __init__(self, folder: Path, step: int):
        self.file, lines = folder / METRICS, []
        with suppress(OSError):
            for line in self.file.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    if json.loads(line)["step"] <= step:
                        lines.append(line)
        with writing(self.file) as beside:
            beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        with write_errors(folder / CURVES):
            self._curves = _writer(folder / CURVES)

    def add(self, step: int, time: float, **values: float) -> None:
        """Write the values of a step, and the time at which it was done, in seconds since 1970."""
        with write_errors(self.file), self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values, "time": round(time, 3)}) + "\n")
        if self._curves:
            with write_errors(self.file.with_name(CURVES)):
                for name, value in values.items():
                    self._curves.add_scalar(name, value, step, wall_time=time)

    def close(self) -> None:
        """End the writing of curves."""
        if self._curves:
            with write_errors(self.file.with_name(CURVES)):
                self._curves.close()


def _writer(folder: Path) -> Any:
    """Return TensorBoard's writer of curves; None where TensorBoard is not installed."""
    try:
        from tensorboard.summary import Writer
    except ImportError:
        return None
    return Writer(str(folder))
