# SPDX-License-Identifier: Apache-2.0
"""Compiling for a described slice of TPUs, in a process of its own, and reading what the compiler says.

The process needs its own environment from its first import on, may take gigabytes, and holds a lock of the TPU runtime:
none of it is left behind, the dumps included.
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
from wanjax.plan.schedule import Schedule, read_dump

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # asks no cloud what machine this is
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # beside another such process
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
DUMP = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"


class CompilerError(RuntimeError):
    """The program does not compile for the chip, and what was said about it: too much memory, most often."""


@dataclass(frozen=True)
class Operand:
    """An array argument: its shape, its dtype, and for each axis the mesh axes that it is split over."""

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[str | tuple[str, ...] | None, ...] = ()


@dataclass(frozen=True)
class Job:
    """What to compile, for what.

    `builder` is the import path `package.module:name` of a function that is called with the mesh and with the settings
    (which JSON can hold) and gives a `Program`. `mesh` names the axes and their sizes; none is one axis of all devices.
    """

    slice: str
    builder: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes of one device's memory; `peak` is the most that is alive at a time, arguments and results included."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    peak: int


@dataclass(frozen=True)
class Compiled:
    """What the compiler made: memory, the final module as text, and the schedules of its operations by their names."""

    slice: Slice
    memory: Memory
    module: str = field(repr=False)
    schedules: Mapping[str, Schedule] = field(repr=False)
    seconds: float = 0.0  # that compiling took, here


def compile_function(
    slice_name: str,
    function: str,
    *operands: Operand,
    keywords: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    schedules: bool = True,
) -> Compiled:
    """A function named by its import path, for arrays of these shapes; raises as `compile_job` does."""
    settings = {"function": function, "operands": [asdict(operand) for operand in operands], "keywords": keywords or {}}
    return compile_job(Job(slice_name, "wanjax.plan.program:of_function", settings, mesh), schedules=schedules)


def compile_job(job: Job, *, schedules: bool = False) -> Compiled:
    """Compiles for a chip that need not be there.

    `schedules` asks for the bundles of each operation, which takes far more memory: for kernels and small programs.
    Raises WanjaxError where the slice or the mesh cannot be, where libtpu is missing or of another version than jax
    wants, and where wanjax itself refuses what is asked of the program; CompilerError where it does not compile.
    """
    (result,) = compile_all([job], schedules=schedules)
    if isinstance(result, CompilerError):
        raise result
    return result


def _check_compiler() -> None:
    """Raises WanjaxError unless libtpu is here, in a version that goes with this jax."""
    if find_spec("libtpu") is None:
        raise WanjaxError(
            "prices come from the TPU compiler, libtpu, which is missing: pip install 'wanjax[plan]' adds it"
        )
    wanted = [wanted.specifier for wanted in map(Requirement, requires("jax") or ()) if wanted.name == "libtpu"]
    if wanted and not wanted[0].contains(found := version("libtpu"), prereleases=True):
        raise WanjaxError(
            f"libtpu {found} does not go with jax {version('jax')}, which asks for {wanted[0]}: "
            "pip install 'wanjax[plan]' brings that"
        )


def compile_all(jobs: Sequence[Job], *, schedules: bool = False) -> list[Compiled | CompilerError]:
    """Each job in turn, in one process, which spares its start; a program that does not compile gives its error."""
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
        told = json.loads(error.read_text(encoding="utf-8"))
        if told["ours"]:
            raise WanjaxError(told["said"])
        return CompilerError(f"{job.builder} does not compile for {place.name}: {told['kind']}: {told['said']}")
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    module = (folder / "module.txt").read_text(encoding="utf-8")
    dump = read_dump(folder, place.chip) if schedules else {}
    return Compiled(place, Memory(**result["memory"]), module, dump, result["seconds"])
