# SPDX-License-Identifier: Apache-2.0
"""Compile programs for TPUs or cards that may be absent, in separate processes.

Separate processes are necessary because the TPU runtime needs environment variables before its first import, may use
gigabytes and holds a lock. The processes receive meshes, options and programs as bytes. The processes leave no files
behind.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import requires, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from wanjax.errors import WanjaxError, install_extra
from wanjax.pricing.chips import Card, Slice, find_slice
from wanjax.pricing.exporting import CompileJob, CompilerError, compile_failure, export
from wanjax.pricing.lowering import AbstractCall
from wanjax.pricing.roofline import machines
from wanjax.pricing.schedule import KernelSchedule, read_dump

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # do not query the metadata server
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # lets several processes load libtpu at the same time
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # JAX's plugin checks for a driver, which compiling does not need
}
DUMP_FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"  # per process
DUMP_FOLDER = "dump"  # the folder of the compiler's dump
INPUT_FILES = PROGRAM, REQUEST = "program.bin", "job.json"  # inputs of each job
MAX_CONCURRENT = 2  # concurrent compilations; each uses one core and up to 4 GB


@dataclass(frozen=True)
class Memory:
    """Bytes of one device's memory.

    `peak` is the largest number of bytes that are allocated at one time, including arguments and results.
    """

    arguments: int
    peak: int


@dataclass(frozen=True)
class Compiled:
    """A compiled program: its memory, the text of its final HLO module, and the schedules of its operations by name.

    `rejected_options` has one sentence for each set of options that the compiler rejected.
    """

    slice: Slice
    memory: Memory
    module: str = field(repr=False)
    schedules: Mapping[str, KernelSchedule] = field(repr=False)
    seconds: float = 0.0  # compilation time on this machine
    rejected_options: Sequence[str] = ()


# a context manager that yields a folder, and removes it after the block
Workspace = Callable[[], AbstractContextManager[Path]]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new temporary folder, and remove it after the block."""
    with TemporaryDirectory(prefix="pricing-") as name:
        yield Path(name)


def compile_program(abstract_call: AbstractCall, chip: str, *, reads_schedules: bool = False) -> Compiled:
    """Compile a program for a slice such as v6e-8, whose chips may be absent.

    Raises CompilerError if the program does not compile, and the errors of `compile_programs`.
    """
    (result,) = compile_programs([(abstract_call, chip)], reads_schedules=reads_schedules)
    if isinstance(result, CompilerError):
        raise result
    return result


def compile_programs(
    programs: Sequence[tuple[AbstractCall, str]], *, reads_schedules: bool = False
) -> list[Compiled | CompilerError]:
    """Compile programs, each for a slice such as v6e-8, in one process.

    Args:
        programs: The programs, each with the name of its slice. Their arguments have shardings on a mesh of
            `chips.abstract_mesh`, or no shardings.
        reads_schedules: Whether to return the LLO bundles of each operation too. Schedules need far more memory, so
            request schedules only for kernels and small programs.

    Returns:
        The compiled programs in order. For a program that does not compile, the list has a CompilerError.

    Raises:
        WanjaxError: A slice is unknown, a mesh does not use all chips of its slice, libtpu is missing or has a version
            that jax does not accept, or wanjax rejects a program.
    """
    check_compiler()
    results: dict[int, Compiled | CompilerError] = {}
    jobs: dict[int, CompileJob] = {}
    for index, (abstract_call, chip) in enumerate(programs):
        try:
            jobs[index] = export(abstract_call, find_slice(chip))
        except CompilerError as error:
            results[index] = error
    indices = list(jobs)
    for index, result in compile_jobs(list(jobs.values()), schedules=range(len(indices)) if reads_schedules else ()):
        results[indices[index]] = result
    return [results[index] for index in range(len(programs))]


def compile_jobs(
    jobs: Sequence[CompileJob],
    *,
    schedules: Container[int] = (),
    on_start: Callable[[int], Any] = lambda index: None,
    workspace: Workspace = temporary_folder,
) -> Iterator[tuple[int, Compiled | CompilerError]]:
    """Compile jobs, and yield the index and the result of each as soon as it is done.

    Args:
        jobs: The programs.
        schedules: Indices of the jobs whose schedules to return. These jobs run in a second process, because the
            compiler dumps either all schedules of a process or none.
        on_start: Called with the index of each job when its compilation starts.
        workspace: Context manager of a folder for the compiler's files.

    Raises:
        WanjaxError: A compiler is missing, or has a version that jax does not accept.
    """
    for platform in {job.slice.chip.platform for job in jobs} or {"tpu"}:
        COMPILER_CHECKS[platform]()
    if not jobs:
        return
    with workspace() as folder:
        folders: dict[Path, list[int]] = {}
        for index, job in enumerate(jobs):
            root = folder / ("schedules" if index in schedules else job.slice.chip.platform)
            folders.setdefault(root, []).append(index)
            (root / str(index)).mkdir(parents=True)
            (root / str(index) / PROGRAM).write_bytes(job.program)
            (root / str(index) / REQUEST).write_text(json.dumps(_job_fields(job)), encoding="utf-8")
            if index in schedules:
                (root / DUMP_FOLDER).mkdir(exist_ok=True)
        for root, index in _run_compilers(folders, on_start):
            yield index, _read_result(jobs[index].slice, root / str(index), index in schedules)


def _run_compilers(remaining: dict[Path, list[int]], on_start: Callable[[int], Any]) -> Iterator[tuple[Path, int]]:
    """Run one compiler process for each folder, and yield the folder and the index of each job that is done.

    A signal may end a process if memory runs out or the compiler crashes. The remaining jobs of that process are then
    compiled again, one at a time. If the process ends again, the job that it was compiling fails.
    """
    max_concurrent = MAX_CONCURRENT
    while remaining:
        for root, indices in remaining.items():
            _remove_results(root, indices)
        processes: list[subprocess.Popen] = []
        read_end, write_end = os.pipe()
        with os.fdopen(read_end, encoding="utf-8") as lines:
            try:
                with os.fdopen(write_end, "w") as write_stream:
                    for root, indices in remaining.items():
                        with (root / "errors.txt").open("w", encoding="utf-8") as errors:
                            arguments = [
                                sys.executable,
                                "-m",
                                "wanjax.pricing.compiler_process",
                                root,
                                max_concurrent,
                                *indices,
                            ]
                            streams = {
                                "stdin": subprocess.PIPE,
                                "stdout": write_stream,
                                "stderr": errors,
                            }  # closing stdin ends the processes
                            processes.append(
                                subprocess.Popen([*map(str, arguments)], env=_environment(root), **streams)
                            )
                for line in lines:  # the lines of all processes
                    status, _, index = line.strip().partition(" ")
                    if status == "started":
                        on_start(int(index))
                    elif status == "done":
                        root = next(root for root, indices in remaining.items() if int(index) in indices)
                        remaining[root].remove(int(index))
                        yield root, int(index)
            except BaseException:  # for example GeneratorExit, if the caller stops early
                for process in processes:
                    process.kill()
                raise
            finally:
                for process in processes:
                    process.wait()
                    assert process.stdin is not None
                    process.stdin.close()
        for (root, indices), process in zip(remaining.items(), processes, strict=True):
            if not process.returncode:
                continue
            problem = (root / "errors.txt").read_text(encoding="utf-8", errors="replace")[-2000:].strip()
            if process.returncode > 0:
                raise CompilerError(f"the compiler's process exited with status {process.returncode}: {problem}")
            if max_concurrent == 1 and indices:
                name = signal.Signals(-process.returncode).name
                write_error(root / str(indices[0]), name, f"the compiler's process was killed. {problem}".strip())
                yield root, indices.pop(0)
        remaining, max_concurrent = {root: indices for root, indices in remaining.items() if indices}, 1


def _remove_results(root: Path, indices: Sequence[int]) -> None:
    """Remove the compiler's dump from a folder. Also remove the files of these jobs, except their inputs."""
    paths = [*(root / DUMP_FOLDER).glob("*"), *(path for index in indices for path in (root / str(index)).glob("*"))]
    for path in paths:
        if path.name not in INPUT_FILES:
            path.unlink()


def write_error(folder: Path, kind: str, message: str) -> None:
    """Write the reason why the program of a folder does not compile."""
    (folder / "error.json").write_text(json.dumps({"kind": kind, "message": message}), encoding="utf-8")


def _environment(root: Path) -> dict[str, str]:
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if (root / DUMP_FOLDER).exists():
        environment["LIBTPU_INIT_ARGS"] = DUMP_FLAGS.format(root / DUMP_FOLDER)
    return environment


def _job_fields(job: CompileJob) -> dict:
    return {
        "card": job.slice.name if isinstance(job.slice.chip, Card) else None,
        "topology": job.slice.topology,
        "devices": job.slice.devices,
        "axes": list(job.axes.items()),
        "donate": job.donate,
        "options": dict(job.options),
    }


def _read_result(target: Slice, folder: Path, reads_schedules: bool) -> Compiled | CompilerError:
    error = folder / "error.json"
    if error.exists():
        failure = json.loads(error.read_text(encoding="utf-8"))
        return CompilerError(compile_failure(target, failure["kind"], failure["message"]))
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    module = (folder / "module.txt").read_text(encoding="utf-8")
    dump = {} if isinstance(target.chip, Card) or not reads_schedules else read_dump(folder, target.chip)
    return Compiled(target, Memory(**result["memory"]), module, dump, result["seconds"], result["rejected_options"])


def check_compiler() -> None:
    """Raise WanjaxError unless libtpu is installed in a version that the installed jax accepts."""
    if find_spec("libtpu") is None:
        raise WanjaxError(
            f"libtpu is missing, the compiler that prices a TPU: {install_extra('plan')}; "
            f"{', '.join(machines())} are priced without it"
        )
    if not (required := accepted_libtpu()).contains(installed := version("libtpu"), prereleases=True):
        raise WanjaxError(
            f"jax {version('jax')} requires libtpu {required}, but {installed} is installed: "
            f"run `pip install 'jax[tpu]=={version('jax')}'`"
        )


CUDA_WHEELS = {
    "jax_plugins.xla_cuda13": "jax-cuda13-plugin",
    "jax_cuda13_plugin": "jax-cuda13-plugin",
    "nvidia.cudnn": "nvidia-cudnn-cu13",
    "nvidia.cu13": "nvidia-nvvm",
}
"""Modules that XLA's GPU compiler needs, and the distributions that contain them."""


def has_cuda_compiler() -> bool:
    """Return whether XLA's GPU compiler is installed."""
    return not _missing_cuda()


def check_cuda_compiler() -> None:
    """Raise WanjaxError unless XLA's GPU compiler is installed in the version of the installed jax."""
    if missing := _missing_cuda():
        raise WanjaxError(
            f"{' and '.join(missing)} is missing, a part of XLA's GPU compiler, which compiles for cards: "
            f"{install_extra('plan-cuda')}"
        )
    if (installed := version("jax-cuda13-plugin")) != version("jax"):
        raise WanjaxError(
            f"jax {version('jax')} requires jax-cuda13-plugin of the same version, got {installed}: "
            f"run `pip install 'jax-cuda13-plugin=={version('jax')}'`"
        )


def _missing_cuda() -> list[str]:
    missing = []
    for module, distribution in CUDA_WHEELS.items():
        try:
            spec = find_spec(module)
        except ModuleNotFoundError:  # the parent package is missing
            spec = None
        if spec is None and distribution not in missing:
            missing.append(distribution)
    return missing


COMPILER_CHECKS: Mapping[str, Callable[[], None]] = {
    "tpu": lambda: check_compiler(),
    "cuda": lambda: check_cuda_compiler(),
}


def accepted_libtpu() -> SpecifierSet:
    """Return the versions of libtpu that the installed jax accepts."""
    requirement = [
        requirement.specifier for requirement in map(Requirement, requires("jax") or ()) if requirement.name == "libtpu"
    ]
    return requirement[0] if requirement else SpecifierSet()
