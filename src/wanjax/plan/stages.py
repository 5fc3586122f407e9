# SPDX-License-Identifier: Apache-2.0
"""The programs of a video as jobs for the compiler: shapes and shardings, never weights.

    family, architecture, video = outline("wan2.1-t2v-14b")        # wanjax.registry
    runs = stages(architecture, video, "v6e-8", {"dp": 2, "sp": 1, "tp": 4})
    for stage in ("encode", "denoise", "decode"):
        for run in runs[stage]:
            compiled = compile_job(run.job)
            print(stage, run.name, compiled.memory.peak, run.times * price(compiled).total.mid)

Each program is traced from the function that the pipeline compiles, with arguments of the same shapes and shardings,
so that the priced program is the one that runs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from wanjax.compilation import Lowering
from wanjax.kernels.compiler_options import SAFE
from wanjax.pipelines.blueprint import Blueprint
from wanjax.pipelines.family import Architecture
from wanjax.pipelines.settings import Settings
from wanjax.plan.builders import find, from_json, path_of, to_json
from wanjax.plan.compile import Job
from wanjax.sharding import MESH_AXES, RULES, Partitioner


class Scheduled(NamedTuple):
    """A named program, its job for the compiler, and the number of times that a video runs it."""

    name: str
    job: Job
    times: int


def stages(
    architecture: Architecture,
    settings: Settings,
    place: str,
    mesh: Mapping[str, int],
    *,
    rules: str = "fsdp",
    compiler: str = SAFE,
    attention: str | None = None,
    batch_guidance: bool = False,
) -> dict[str, tuple[Scheduled, ...]]:
    """Returns the programs of `encode`, `denoise` and `decode` on all devices of a slice such as v6e-8.

    `mesh` gives the sizes of dp, sp and tp; the other keywords are those of `wanjax.load` and `Pipeline.denoise`.
    `compile_job` checks the slice and the mesh.
    """
    axes = {axis: mesh.get(axis, 1) for axis in MESH_AXES}
    programs = architecture.programs(settings, attention=attention, batch_guidance=batch_guidance)
    shared = {"rules": rules, "dtype": settings.dtype, "compiler": compiler}
    found = {}
    for stage, planned in programs.items():
        jobs = []
        for program in planned:
            given = {"of": path_of(program.build), "arguments": {k: to_json(v) for k, v in program.arguments.items()}}
            jobs.append(Scheduled(program.name, Job(place, path_of(build), given | shared, axes), program.times))
        found[stage] = tuple(job for job in jobs if job.times)
    return found


def build(mesh: Mesh, *, of: str, arguments: Mapping[str, Any], rules: str, dtype: str, compiler: str) -> Lowering:
    """Builds a family's program, named by the import path `of`, for a mesh."""
    blueprint = Blueprint(Partitioner(mesh, RULES[rules]), jnp.dtype(dtype), compiler)
    return find(of)(blueprint, **{name: from_json(value) for name, value in arguments.items()})
