# SPDX-License-Identifier: Apache-2.0
"""Metrics of a training run: a file with a line of JSON for each step, and TensorBoard curves if it is installed."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from wanjax.errors import wrap_write_errors
from wanjax.stores.writing import atomic_write

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"  # the folder of TensorBoard's files


class Metrics:
    """Write the metrics of steps into a training run's folder.

    When a run is resumed after `step`, lines of later steps are removed. Every method raises WriteError if a file
    cannot be written.
    """

    def __init__(self, folder: Path, step: int):
        self.file, lines = folder / METRICS_FILE, []
        with suppress(OSError):
            for line in self.file.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    if json.loads(line)["step"] <= step:
                        lines.append(line)
        with atomic_write(self.file) as partial_file:
            partial_file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        with wrap_write_errors(folder / TENSORBOARD_FOLDER):
            self._curves = _writer(folder / TENSORBOARD_FOLDER)

    def add(self, step: int, time: float, **values: float) -> None:
        """Write the metrics of a step. `time` is the time at which the step finished, in seconds since 1970."""
        with wrap_write_errors(self.file), self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values, "time": round(time, 3)}) + "\n")
        if self._curves:
            with wrap_write_errors(self.file.with_name(TENSORBOARD_FOLDER)):
                for name, value in values.items():
                    self._curves.add_scalar(name, value, step, wall_time=time)

    def close(self) -> None:
        """Close TensorBoard's files."""
        if self._curves:
            with wrap_write_errors(self.file.with_name(TENSORBOARD_FOLDER)):
                self._curves.close()


def _writer(folder: Path) -> Any:
    """Return TensorBoard's writer, or None if TensorBoard is not installed."""
    try:
        from tensorboard.summary import Writer
    except ImportError:
        return None
    return Writer(str(folder))
