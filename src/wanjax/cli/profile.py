# SPDX-License-Identifier: Apache-2.0
"""The option `--profile`: trace two steps, and report the time of a step and its rate as a share of the device's
peak."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from wanjax.figures import format_duration, format_with_prefix
from wanjax.jobs.multihost import is_first
from wanjax.pipelines.observers import Observer, Step
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings
from wanjax.pricing.roofline import peak_flops
from wanjax.stores.writing import atomic_write

TRACED_STEPS = (1, 2)  # the indices of the traced steps, from 0; the first step compiles
STEPS_FILE = "steps.json"


class StepProfile(Observer):
    """Traces and times the steps of a video, and reports after the last step."""

    def __init__(self, folder: Path, pipe: Pipeline, settings: Settings, note: Callable[[str], object]):
        self.folder = folder
        self.pipe = pipe
        self.settings = settings
        self.note = note
        self.devices = pipe.partitioner.mesh.size
        rule = pipe.model.spec.cache_rule(settings)
        reuses = rule.decided_on_device or any(pipe.model.spec.reused_steps(settings))
        # an upper bound: with sparse attention or caches, a step computes less
        self.counts_all_flops = pipe.attention.is_dense and not reuses

    def started(self, conditioning: Any) -> None:
        num_forwards = 2 if self.settings.guided else 1
        work = self.pipe.model.cost(self.settings, conditioning)
        self.flops_by_part = {part: num_forwards * count for part, count in work.flops.items()}
        self._step_ends: list[float] = []
        self._tracing = self._traced = False

    def stepped(self, step: Step) -> None:
        """Wait until the device has finished a step, and record the time. Start and stop the trace at the right
        steps."""
        jax.block_until_ready(step.latents)
        self._step_ends.append(perf_counter())
        if step.index + 1 == TRACED_STEPS[0] and step.total > TRACED_STEPS[0]:
            jax.profiler.start_trace(self.folder)
            self._tracing = self._traced = True
        elif self._tracing and step.index + 1 >= min(TRACED_STEPS[-1] + 1, step.total):
            jax.profiler.stop_trace()
            self._tracing = False
            self._step_ends[-1] = perf_counter()  # the next step starts after the trace is written
        if step.index + 1 == step.total and is_first():
            self.note(self.report())

    def report(self) -> str:
        """Write the measurements to a file. Return a sentence about the seconds and FLOPs of a step, and the share of
        the peak.
        """
        figures = self._figures()
        with atomic_write(self.folder / STEPS_FILE) as partial_path:
            partial_path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        peak_text = "" if figures["mfu"] is None else f", {figures['mfu']:.1%} of the bfloat16 peak"
        trace_text = (
            f"the trace is in {self.folder}"
            if self._traced
            else "there is no trace, because the run had no second step"
        )
        if figures["step_seconds"] is None:
            return f"a step: no time was measured, which takes two steps; {trace_text}"
        flops, flops_rate = figures["step_flops"], figures["achieved_flops_per_second"]
        work_text = (
            ""
            if flops is None
            else f", {format_with_prefix(flops, 'FLOP')}, {format_with_prefix(flops_rate, 'FLOP/s')}{peak_text}"
        )
        return f"a step: {format_duration(figures['step_seconds'])}{work_text}; {trace_text}"

    def _figures(self) -> dict[str, Any]:
        seconds = [end - start for start, end in zip(self._step_ends, self._step_ends[1:], strict=False)]
        untraced = [time for index, time in enumerate(seconds, 1) if index not in TRACED_STEPS]
        step = statistics.median(untraced or seconds) if seconds else None
        device_kind = jax.devices()[0].device_kind
        peak = peak_flops(device_kind)
        flops = sum(self.flops_by_part.values()) if self.counts_all_flops else None
        flops_rate = flops and step and flops / step
        return {
            "model": self.settings.model,
            "size": f"{self.settings.width}x{self.settings.height}",
            "frames": self.settings.frames,
            "dtype": self.settings.dtype,
            "device": device_kind,
            "devices": self.devices,
            "seconds": seconds,
            "step_seconds": step,
            "step_flops": flops,
            "step_flops_by_part": self.flops_by_part if self.counts_all_flops else None,
            "achieved_flops_per_second": flops_rate,
            "peak_flops_per_second": peak and self.devices * peak,
            "mfu": peak and flops_rate and flops_rate / (self.devices * peak),
        }
