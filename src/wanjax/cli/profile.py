# SPDX-License-Identifier: Apache-2.0
"""The option `--profile`: a trace of some steps, their times, and the share of the device's peak that they reach."""

import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from wanjax.compilers.roofline import peak_flops
from wanjax.figures import duration, scaled
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Step
from wanjax.stores.writing import writing

TRACED = (1, 2)  # steps, from 0: the first compiles
STEPS = "steps.json"


class StepProfile:
    """Traces and times the steps of a video, and reports on them."""

    def __init__(self, folder: Path, pipe: Pipeline, settings: Settings, encoded: Any):
        self.folder = folder
        self.settings = settings
        self.devices = pipe.partitioner.mesh.size
        forwards = 2 if settings.guided else 1
        work = pipe.architecture.forward(settings, encoded)
        self.parts = {part: forwards * count for part, count in work.flops.items()}
        self._ends: list[float] = []
        self._tracing = False

    def after(self, step: Step) -> None:
        """Waits for the end of a step on the device and records the time; starts and stops the trace."""
        jax.block_until_ready(step.latents)
        self._ends.append(perf_counter())
        if step.index + 1 == TRACED[0] and step.total > TRACED[0]:
            jax.profiler.start_trace(self.folder)
            self._tracing = True
        elif self._tracing and step.index + 1 >= min(TRACED[-1] + 1, step.total):
            jax.profiler.stop_trace()
            self._tracing = False
            self._ends[-1] = perf_counter()  # the next step begins after the trace is written

    def report(self) -> str:
        """Writes the report; returns one sentence: seconds and operations of a step, and the share of the peak."""
        found = self._found()
        with writing(self.folder / STEPS) as beside:
            beside.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        of_peak = "" if found["mfu"] is None else f", {found['mfu']:.1%} of the bfloat16 peak"
        return (
            f"a step: {duration(found['step_seconds'])}, {scaled(found['step_flops'], 'FLOP')}, "
            f"{scaled(found['achieved_flops_per_second'], 'FLOP/s')}{of_peak}; the trace is in {self.folder}"
        )

    def _found(self) -> dict[str, Any]:
        seconds = [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]
        untraced = [time for index, time in enumerate(seconds, 1) if index not in TRACED]
        step = statistics.median(untraced or seconds or [float("nan")])
        kind = jax.devices()[0].device_kind
        peak = peak_flops(kind)
        flops = sum(self.parts.values())
        return {
            "model": self.settings.model,
            "size": f"{self.settings.width}x{self.settings.height}",
            "frames": self.settings.frames,
            "dtype": self.settings.dtype,
            "device": kind,
            "devices": self.devices,
            "seconds": seconds,
            "step_seconds": step,
            "step_flops": flops,
            "step_flops_by_part": self.parts,
            "achieved_flops_per_second": flops / step,
            "peak_flops_per_second": peak and self.devices * peak,
            "mfu": peak and flops / step / (self.devices * peak),
        }
