# SPDX-License-Identifier: Apache-2.0
"""The process in which the TPU compiler runs: `python -m wanjax.plan.worker FOLDER`, as compile.py starts it.

The folder holds `jobs.json`; for each job a folder of its number is written with `result.json` and `module.txt`, or
with `error.json`, and with the schedules that the compiler dumps where they were asked for.
"""

import json
import sys
from pathlib import Path
from time import perf_counter

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from wanjax.errors import WanjaxError
from wanjax.plan.program import find
from wanjax.sharding import arrange


def make_mesh(topology: str, devices: int, axes: dict[str, int]) -> Mesh:
    """A mesh of devices that are described and not there."""
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if devices == 1 else {}
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **bounds)
    return arrange(described.devices, axes)


def compile_one(job: dict, folder: Path) -> None:
    mesh = make_mesh(job["topology"], job["devices"], job["mesh"])
    program = find(job["builder"])(mesh, **job["settings"])
    start = perf_counter()
    with jax.set_mesh(mesh):  # what is traced learns from it which chip it is for
        # what a program does not use of its arguments takes memory beside it all the same
        jitted = jax.jit(program.function, donate_argnums=program.donate, keep_unused=True)
        compiled = jitted.lower(*program.arguments).compile(compiler_options=program.compiler_options)
    seconds = perf_counter() - start
    memory, module = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None, "the TPU compiler tells both"
    assert module is not None
    result = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
    }
    (folder / "module.txt").write_text(module, encoding="utf-8")
    told = {"memory": result, "seconds": seconds}
    (folder / "result.json").write_text(json.dumps(told), encoding="utf-8")


def main(root: Path) -> None:
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache has no schedule
    dumped = root / "dump"
    for number, job in enumerate(json.loads((root / "jobs.json").read_text(encoding="utf-8"))):
        folder = root / str(number)
        folder.mkdir()
        try:
            compile_one(job, folder)
        except Exception as error:  # whatever the builder or the compiler refuses: the other jobs go on
            told = {"kind": type(error).__name__, "said": str(error), "ours": isinstance(error, WanjaxError)}
            (folder / "error.json").write_text(json.dumps(told), encoding="utf-8")
        for path in dumped.glob("*"):
            path.rename(folder / path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
