# SPDX-License-Identifier: Apache-2.0
"""What `--profile DIR` writes: a trace of some steps, and what each step took beside what the device could do."""

import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from wanjax.pipelines.base import Settings, Step
from wanjax.pipelines.text import TEXT_LENGTH
from wanjax.pipelines.wan import WanPipeline
from wanjax.plan.chips import KINDS
from wanjax.plan.flops import forward_flops
from wanjax.plan.roofline import peak_flops

TRACED = (1, 2)  # steps, from 0: the first compiles
STEPS = "steps.json"


def trace_with_scopes() -> None:
    """Has a program's scopes and lines stand for it in the cache: an older one would show those of older code."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


class StepProfile:
    """The steps of a video as they end: traced, timed, and reported on."""

    def __init__(self, folder: Path, pipe: WanPipeline, settings: Settings, image_tokens: int):
        self.folder = folder
        self.settings = settings
        self.devices = 1 if pipe.layout is None else pipe.layout.mesh.size
        forwards = 2 if settings.guidance_scale > 1 else 1
        config, tokens = pipe.configs.transformer, pipe.configs.tokens(settings)
        self.parts = {
            part: forwards * count
            for part, count in forward_flops(config, tokens=tokens, text=TEXT_LENGTH, image=image_tokens).items()
        }
        self._ends: list[float] = []
        self._tracing = False

    def after(self, step: Step) -> None:
        """Waits for the step, so that times are those of the device."""
        jax.block_until_ready(step.latents)
        self._ends.append(perf_counter())
        if step.index + 1 == TRACED[0] and step.total > TRACED[0]:
            jax.profiler.start_trace(self.folder)
            self._tracing = True
        elif self._tracing and step.index + 1 >= min(TRACED[-1] + 1, step.total):
            jax.profiler.stop_trace()
            self._tracing = False
            self._ends[-1] = perf_counter()  # the next step begins when the trace is written

    def report(self) -> str:
        """Writes the report; returns its sum, what a step took and how much of the peak that is."""
        found = self._found()
        (self.folder / STEPS).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        of_peak = "" if found["mfu"] is None else f", {found['mfu']:.1%} of the bfloat16 peak"
        return (
            f"a step: {found['step_seconds']:.3g} s, {found['step_flops'] / 1e12:.4g} TFLOP, "
            f"{found['achieved_flops_per_second'] / 1e12:.3g} TFLOP/s{of_peak}; the trace is in {self.folder}"
        )

    def _found(self) -> dict[str, Any]:
        seconds = [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]
        untraced = [time for index, time in enumerate(seconds, 1) if index not in TRACED]
        step = statistics.median(untraced or seconds or [float("nan")])
        kind = jax.devices()[0].device_kind
        peak = KINDS[kind].flops if kind in KINDS else peak_flops(kind)
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
