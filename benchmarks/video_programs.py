# SPDX-License-Identifier: Apache-2.0
"""Trace the programs of a model's video on a mesh."""

from dataclasses import replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from wanjax.loading import abstract_pipeline
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.tracing import needed_pictures, trace_programs
from wanjax.plan.video_programs import VideoProgram, programs_of
from wanjax.registry import model_description
from wanjax.sharding import SHARDING_RULES, Partitioner


def video_programs(
    model: str, settings: Settings, mesh: Mesh | AbstractMesh, **pipeline_options: Any
) -> list[VideoProgram]:
    """Return the programs of a video with these settings. `abstract_pipeline` takes the `pipeline_options`."""
    pipe = abstract_pipeline(
        replace(model_description(model), settings=settings),
        Partitioner(mesh, SHARDING_RULES["fsdp"]),
        **pipeline_options,
    )
    return programs_of(trace_programs(pipe, settings, needed_pictures(pipe, settings)))
