# SPDX-License-Identifier: Apache-2.0
"""Compilation for a described slice of TPUs, in a process of its own, and its results.

A separate process, because the TPU runtime needs its own environment from the first import on, may take gigabytes and
holds a lock. Nothing of it remains afterwards, dumps included.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from wanjax.errors import WanjaxError
from wanjax.plan.chips import Slice, find_slice
from wanjax.plan.roofline import machines
from wanjax.plan.schedule import Schedule, read_dump

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked which machine this is
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several such processes may run at once
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"


class CompilerError(RuntimeError):
    """A program that does not compile for the chip, with the compiler's message: most often, too little memory."""


@dataclass(frozen=True)
class Operand:
    """An array argument: its shape, its dtype, and the mesh axes over which each dimension is sharded."""

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[str | tuple[str, ...] | None, ...] = ()


@dataclass(frozen=True)
class Job:
    """A program to compile, and the slice to compile it for.

    `builder` is the import path `package.module:name` of a function that takes the mesh and, as keywords, the settings
    (JSON values) and returns a `Lowering`. `mesh` gives the size of each axis; None is one axis over all devices.
    """

    slice: str
    builder: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes of one device's memory; `peak` is the maximum allocated at a time, arguments and results included."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    peak: int


@dataclass(frozen=True)
class Compiled:
    """A compiled program: its memory, its final HLO module as text, and the schedules of its operations by name.

    `refused` has a sentence on each option that the compiler refused and that was left out.
    """

    slice: Slice
    memory: Memory
    module: str = field(repr=False)
    schedules: Mapping[str, Schedule] = field(repr=False)
    seconds: float = 0.0  # time to compile, on this machine
    refused: Sequence[str] = ()


def compile_function(
    slice_name: str,
    function: str,
    *operands: Operand,
    keywords: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    schedules: bool = True,
) -> Compiled:
    """Compiles a function, named by its import path, for the operands. Raises the errors of `compile_job`."""
    settings = {"function": function, "operands": [asdict(operand) for operand in operands], "keywords": keywords or {}}
    return compile_job(Job(slice_name, "wanjax.plan.builders:of_function", settings, mesh), schedules=schedules)


def compile_job(job: Job, *, schedules: bool = False) -> Compiled:
    """Compiles a program for a chip that need not be present.

    `schedules` also returns the LLO bundles of each operation. That takes far more memory, so it is for kernels and
    small programs. Raises WanjaxError if the slice is unknown, the mesh does not fill it, libtpu is missing or not the
    version that jax requires, or wanjax itself refuses the program; CompilerError if the program does not compile.
    """
    (result,) = compile_all([job], schedules=schedules)
    if isinstance(result, CompilerError):
        raise result
    return result


def _check_compiler() -> None:
    """Raises WanjaxError unless libtpu is installed, in a version that this jax accepts."""
    install = f"pip install 'jax[tpu]=={version('jax')}'"  # which a clone and a package have alike
    if find_spec("libtpu") is None:
        raise WanjaxError(
            f"prices of TPUs come from their compiler, libtpu, which is missing: {install} brings it, and "
            f"{', '.join(machines())} are priced without it"
        )
    wanted = [wanted.specifier for wanted in map(Requirement, requires("jax") or ()) if wanted.name == "libtpu"]
    if wanted and not wanted[0].contains(found := version("libtpu"), prereleases=True):
        raise WanjaxError(
            f"libtpu {found} does not fit jax {version('jax')}, which requires {wanted[0]}: {install} brings that"
        )


def compile_all(jobs: Sequence[Job], *, schedules: bool = False) -> list[Compiled | CompilerError]:
    """Compiles the jobs one after another in one process, which saves start-up time.

    A program that does not compile yields its CompilerError in place of a result. Raises WanjaxError as `compile_job`.
    """
    slices = [find_slice(job.slice) for job in jobs]
    requests = [_request(job, place) for job, place in zip(jobs, slices, strict=True)]
    _check_compiler()
    with tempfile.TemporaryDirectory(prefix="wanjax-plan-") as name:
        root = Path(name)
        (root / "jobs.json").write_text(json.dumps(requests), encoding="utf-8")
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if schedules:
            environment["LIBTPU_INIT_ARGS"] = DUMP.format(root / "dump")
        command = [sys.executable, "-m", "wanjax.plan.worker", str(root)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompilerError(
                f"the TPU compiler's process ended with {done.returncode}: {done.stderr[-2000:].strip()}"
            )
        folders = [root / str(number) for number in range(len(jobs))]
        return [_result(*each, schedules) for each in zip(jobs, slices, folders, strict=True)]


def _request(job: Job, place: Slice) -> dict[str, Any]:
    mesh = {"chips": place.devices} if job.mesh is None else dict(job.mesh)
    if math.prod(mesh.values()) != place.devices:
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
        raise WanjaxError(f"the mesh {axes} has {math.prod(mesh.values())} devices: {place.name} has {place.devices}")
    return {
        "topology": place.topology,
        "devices": place.devices,
        "mesh": mesh,
        "builder": job.builder,
        "settings": dict(job.settings),
    }


def _result(job: Job, place: Slice, folder: Path, schedules: bool) -> Compiled | CompilerError:
    error = folder / "error.json"
    if error.exists():
        failure = json.loads(error.read_text(encoding="utf-8"))
        if failure["ours"]:
            raise WanjaxError(failure["message"])
        return CompilerError(
            f"{job.builder} does not compile for {place.name}: {failure['kind']}: {failure['message']}"
        )
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    module = (folder / "module.txt").read_text(encoding="utf-8")
    dump = read_dump(folder, place.chip) if schedules else {}
    return Compiled(place, Memory(**result["memory"]), module, dump, result["seconds"], result["refused"])
