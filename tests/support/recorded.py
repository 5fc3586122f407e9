# SPDX-License-Identifier: Apache-2.0
"""The programs of a video, from its program trace."""

from collections.abc import Iterator

import jax
from jax.extend.core import Jaxpr

from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.tracing import needed_pictures, trace_programs
from wanjax.plan.video_programs import VideoProgram, programs_of
from wanjax.pricing.roofline_price import Work, count_work


def programs(pipe: Pipeline, settings: Settings) -> Iterator[VideoProgram]:
    """Yield the programs of a video, with blank pictures if the model needs pictures."""
    yield from programs_of(trace_programs(pipe, settings, needed_pictures(pipe, settings)))


def run_counts(pipe: Pipeline, settings: Settings, stage: str = "denoise") -> dict[str, int]:
    """Return how often each program of a stage runs."""
    return {x.name: x.times for x in programs(pipe, settings) if x.stage == stage}


def jaxpr_of(program: VideoProgram) -> Jaxpr:
    """Trace a program."""
    return jax.make_jaxpr(program.abstract_call.function)(*program.abstract_call.arguments).jaxpr


def counted(program: VideoProgram) -> Work:
    """Count the operations of a program on one device."""
    return count_work(jaxpr_of(program), attention="attention")
