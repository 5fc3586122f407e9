# SPDX-License-Identifier: Apache-2.0
"""The programs of a video for arguments that are shapes and shardings, never weights.

    family, architecture, video = outline("wan2.1-t2v-14b")        # wanjax.registry
    mesh = described(find_slice("v6e-8"), {"dp": 2, "sp": 1, "tp": 4})
    runs = stages(architecture, video, mesh)
    for stage in ("encode", "denoise", "decode"):
        for run in runs[stage]:
            compiled = compile_program(run.lowering, "v6e-8")
            print(stage, run.name, compiled.memory.peak, run.times * price_compiled(compiled).total.mid)

Each program is the function that the pipeline compiles, with arguments of the same shapes and shardings, so that the
priced program is the one that runs.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from wanjax.compilation import Lowering
from wanjax.kernels.compiler_options import SAFE
from wanjax.pipelines.blueprint import Blueprint
from wanjax.pipelines.family import Architecture
from wanjax.pipelines.settings import Settings
from wanjax.sharding import RULES, Partitioner


class Scheduled(NamedTuple):
    """A named program, and the number of times that a video runs it."""

    name: str
    lowering: Lowering
    times: int


def stages(
    architecture: Architecture,
    settings: Settings,
    mesh: Mesh | AbstractMesh,
    *,
    rules: str = "fsdp",
    compiler: str = SAFE,
    attention: str | None = None,
    batch_guidance: bool = False,
) -> dict[str, tuple[Scheduled, ...]]:
    """Returns the programs of `encode`, `denoise` and `decode` on a mesh with the axes dp, sp and tp.

    Its devices need not be present. The keywords are those of `wanjax.load` and `Pipeline.denoise`.
    """
    blueprint = Blueprint(Partitioner(mesh, RULES[rules]), jnp.dtype(settings.dtype), compiler)
    programs = architecture.programs(settings, attention=attention, batch_guidance=batch_guidance)
    return {
        stage: tuple(
            Scheduled(program.name, program.build(blueprint, **program.arguments), program.times)
            for program in planned
            if program.times
        )
        for stage, planned in programs.items()
    }
