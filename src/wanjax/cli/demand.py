# SPDX-License-Identifier: Apache-2.0
"""The memory and the time that a video takes at least, told before its weights are read."""

import jax

from wanjax.compilers.roofline import peak_flops
from wanjax.kernels.attention import AUTO
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.progress import duration, in_bytes
from wanjax.pipelines.record import devices_of
from wanjax.pipelines.settings import Settings


def demand(pipe: Pipeline, settings: Settings, from_video: bool) -> str | None:
    """Returns a sentence on the memory of the largest network's weights, and on the least time; None if unknown.

    `from_video` tells whether denoising begins from a video, which saves some steps.
    """
    parts = []
    if sizes := pipe.components.sizes:
        largest = max(sizes, key=lambda name: sizes[name])
        parts.append(f"about {in_bytes(sizes[largest])} of memory for the weights of its {largest}")
    steps = settings.strong_steps if from_video else settings.steps
    if seconds := least_seconds(pipe, settings, steps, jax.devices()[0].device_kind):
        parts.append(f"at least {duration(seconds)} of denoising, at the peak of {devices_of(pipe.partitioner)}")
    return f"a video takes {' and '.join(parts)}" if parts else None


def least_seconds(pipe: Pipeline, settings: Settings, steps: int, kind: str) -> float | None:
    """Returns the seconds of so many steps on devices of a kind that work at their peak; None where that is unknown.

    A lower bound: the second forwards of steps that only some of the guidance scales ask for are not counted, nor are
    steps that reuse what another kept or may, nor is self-attention where a window or a mask confines it.
    """
    if (peak := peak_flops(kind)) is None:
        return None
    work = pipe.architecture.forward(settings)
    attention = pipe.components.options.get("attention", AUTO)
    flops = sum(work.flops.values()) - (0 if attention.sees_all else work.scores)
    reused = min(steps - 1, sum(pipe.architecture.reused(settings)))
    again = pipe.architecture.cache_rule(settings).forwards
    forwards = (steps - reused) * (2 if min(settings.guidance_scales) > 1 else 1) + reused * again
    return forwards * flops / (peak * pipe.partitioner.mesh.size)
