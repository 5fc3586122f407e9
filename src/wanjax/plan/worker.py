# SPDX-License-Identifier: Apache-2.0
"""The process in which the TPU compiler runs: `python -m wanjax.plan.worker FOLDER`, started by compile.py.

The folder holds `jobs.json`. For each job, a subfolder named by its number receives `result.json` and `module.txt`, or
`error.json` on failure, and the compiler's dump of the schedules if it was requested.
"""

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from wanjax.compilation import without_refused
from wanjax.errors import WanjaxError
from wanjax.plan.builders import find
from wanjax.sharding import arrange


def make_mesh(topology: str, devices: int, axes: dict[str, int]) -> Mesh:
    """Returns a mesh of described devices, none of which need be present."""
    options: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if devices == 1 else {}
    if topology.startswith("v4:"):  # whose two cores are one device of JAX's; later chips need no word for it
        options["chip_config_name"] = "megacore"
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    return arrange(described.devices, axes)


def compile_one(job: dict, folder: Path) -> None:
    """Compiles one job and writes its results into the folder."""
    mesh = make_mesh(job["topology"], job["devices"], job["mesh"])
    program = find(job["builder"])(mesh, **job["settings"])
    start = perf_counter()
    refused: list[str] = []
    with jax.set_mesh(mesh):  # traced code reads from it which chip it is for
        # unused arguments stay in memory during the run, so they must count
        lowered = jax.jit(program.function, donate_argnums=program.donate, keep_unused=True).lower(*program.arguments)
        compiled = without_refused(dict(program.compiler_options or {}), lowered.compile, refused.append)
    seconds = perf_counter() - start
    memory, module = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None, "the TPU compiler reports both"
    assert module is not None
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
    }
    result = {"memory": sizes, "seconds": seconds, "refused": refused}
    (folder / "module.txt").write_text(module, encoding="utf-8")
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def main(root: Path) -> None:
    """Compiles every job of the folder's `jobs.json`."""
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache has no schedule
    dumped = root / "dump"
    for number, job in enumerate(json.loads((root / "jobs.json").read_text(encoding="utf-8"))):
        folder = root / str(number)
        folder.mkdir()
        try:
            compile_one(job, folder)
        except Exception as error:  # one failed job must not stop the others
            failure = {"kind": type(error).__name__, "message": str(error), "ours": isinstance(error, WanjaxError)}
            (folder / "error.json").write_text(json.dumps(failure), encoding="utf-8")
        for path in dumped.glob("*"):
            path.rename(folder / path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
