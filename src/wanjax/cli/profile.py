# SPDX-License-Identifier: Apache-2.0
"""The option `--profile`: a trace of some steps, their times, and the share of the device's peak that they reach."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from wanjax.figures import duration, scaled
from wanjax.jobs.multihost import is_first
from wanjax.pipelines.observers import Observer, Step
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings
from wanjax.pricing.roofline import peak_flops
from wanjax.stores.writing import writing

TRACED = (1, 2)  # steps, from 0: the first compiles
STEPS = "steps.json"


class StepProfile(Observer):
    """Traces and times the steps of a video, and notes a sentence on them after the last."""

    def __init__(self, folder: Path, pipe: Pipeline, settings: Settings, note: Callable[[str], object]):
        self.folder = folder
        self.pipe = pipe
        self.settings = settings
        self.note = note
        self.devices = pipe.partitioner.mesh.size
        rule = pipe.model.spec.cache_rule(settings)
        reuses = rule.decided_on_device or any(pipe.model.spec.reused(settings))
        self.counts_all_work = pipe.attention.is_dense and not reuses  # else some of the work is left out

    def started(self, conditioning: Any) -> None:
        forwards = 2 if self.settings.guided else 1
        work = self.pipe.model.cost(self.settings, conditioning)
        self.parts = {part: forwards * count for part, count in work.flops.items()}
        self._ends: list[float] = []
        self._tracing = self._traced = False

    def stepped(self, step: Step) -> None:
        """Wait for the end of a step on the device and record the time; starts and stop the trace."""
        jax.block_until_ready(step.latents)
        self._ends.append(perf_counter())
        if step.index + 1 == TRACED[0] and step.total > TRACED[0]:
            jax.profiler.start_trace(self.folder)
            self._tracing = self._traced = True
        elif self._tracing and step.index + 1 >= min(TRACED[-1] + 1, step.total):
            jax.profiler.stop_trace()
            self._tracing = False
            self._ends[-1] = perf_counter()  # the next step begins after the trace is written
        if step.index + 1 == step.total and is_first():
            self.note(self.report())

    def report(self) -> str:
        """Write the report; return one sentence: seconds and operations of a step, and the share of the peak."""
        figures = self._found()
        with writing(self.folder / STEPS) as beside:
            beside.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        of_peak = "" if figures["mfu"] is None else f", {figures['mfu']:.1%} of the bfloat16 peak"
        trace = f"the trace is in {self.folder}" if self._traced else "there is no trace, which has the second step"
        if figures["step_seconds"] is None:
            return f"a step: no time is known, which takes two steps; {trace}"
        flops, pace = figures["step_flops"], figures["achieved_flops_per_second"]
        work = "" if flops is None else f", {scaled(flops, 'FLOP')}, {scaled(pace, 'FLOP/s')}{of_peak}"
        return f"a step: {duration(figures['step_seconds'])}{work}; {trace}"

    def _found(self) -> dict[str, Any]:
        seconds = [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]
        untraced = [time for index, time in enumerate(seconds, 1) if index not in TRACED]
        step = statistics.median(untraced or seconds) if seconds else None
        kind = jax.devices()[0].device_kind
        peak = peak_flops(kind)
        flops = (
            sum(self.parts.values()) if self.counts_all_work else None
        )  # a window, a mask or a cache leaves some of it out
        pace = flops and step and flops / step
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
            "step_flops_by_part": self.parts if self.counts_all_work else None,
            "achieved_flops_per_second": pace,
            "peak_flops_per_second": peak and self.devices * peak,
            "mfu": peak and pace and pace / (self.devices * peak),
        }
