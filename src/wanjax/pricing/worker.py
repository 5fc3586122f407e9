# SPDX-License-Identifier: Apache-2.0
"""The process in which the TPU compiler runs, started by compile.py.

Its command is `python -m wanjax.pricing.worker FOLDER AT_ONCE NUMBER...`. The folder holds a subfolder for each job,
named by its number, with `job.json` and `program.bin`. The subfolder receives `result.json` and `module.txt`, or
`error.json` on failure, and the compiler's dump of the schedules if there is one. A line `begun NUMBER` is printed when
a job is begun, and `done NUMBER` once all of it is there.
"""

import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from time import perf_counter

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from wanjax.pricing.chips import devices_of
from wanjax.pricing.compile import DUMPED, PROGRAM, REQUEST, write_error
from wanjax.pricing.lowering import without_refused


def make_mesh(topology: str, devices: int, axes: dict[str, int]) -> Mesh:
    """Returns a mesh of the first described devices of a topology, none of which need be present.

    Its last axes connect neighbouring chips, as far as the links allow.
    """
    sizes = tuple(axes.values())
    # on 4 x 4 chips an axis of 8 takes half of one physical axis, which JAX splits only on request
    placed = mesh_utils.create_device_mesh(sizes, devices_of(topology)[:devices], allow_split_physical_axes=True)
    return Mesh(placed, tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def compile_one(folder: Path) -> None:
    """Compiles the job of a folder and writes its results there."""
    job = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    mesh = make_mesh(job["topology"], job["devices"], dict(job["axes"]))
    exported = jax.export.deserialize(bytearray((folder / PROGRAM).read_bytes()))
    shardings = exported.in_shardings_jax(mesh)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    start = perf_counter()
    refused: list[str] = []
    with jax.set_mesh(mesh):
        lowered = jax.jit(exported.call, donate_argnums=job["donate"], keep_unused=True).lower(*shapes)
        compiled = without_refused(job["options"], lowered.compile, refused.append)
    seconds = perf_counter() - start
    memory, module = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None, "the TPU compiler reports both"
    assert module is not None
    sizes = {"arguments": memory.argument_size_in_bytes, "peak": memory.peak_memory_in_bytes}
    result = {"memory": sizes, "seconds": seconds, "refused": refused}
    (folder / "module.txt").write_text(module, encoding="utf-8")
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def main(root: Path, at_once: int, numbers: Iterable[str]) -> None:
    """Compiles the jobs of a folder that have these numbers, `at_once` of them, or one where it dumps schedules.

    The dump does not tell which program a schedule is of.
    """
    Thread(target=_end_with_parent, daemon=True).start()
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache has no schedule
    dumped = root / DUMPED

    def run(folder: Path) -> None:
        _tell(f"begun {folder.name}")
        try:
            compile_one(folder)
        except Exception as error:  # one failed job must not stop the others
            write_error(folder, type(error).__name__, str(error))
        for path in dumped.glob("*"):
            path.rename(folder / path.name)
        _tell(f"done {folder.name}")

    with ThreadPoolExecutor(1 if dumped.exists() else at_once) as pool:
        list(pool.map(run, [root / number for number in numbers]))


def _tell(line: str) -> None:
    """Writes a line at once, in one piece: threads and processes write to the same pipe."""
    os.write(1, f"{line}\n".encode())


def _end_with_parent() -> None:
    """Ends the process when the one that started it is gone, however that ended: compiling may take minutes."""
    os.read(0, 1)  # returns at the end of standard input
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
