# SPDX-License-Identifier: Apache-2.0
"""The process in which the compiler for TPUs or cards runs. `compile.py` starts it.

The command is `python -m wanjax.pricing.compiler_process FOLDER MAX_CONCURRENT NUMBER...`. The folder has a subfolder
for each job. The subfolder's name is the job's number, and it has `job.json` and `program.bin`. The process writes
`result.json` and `module.txt` to the subfolder, or `error.json` on failure. If the compiler wrote a dump of the
schedules, the process moves the dump to the subfolder. The process prints `started NUMBER` when a job starts, and `done
NUMBER` when all files of the job are written.
"""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh

from wanjax.pricing.chips import card_devices, topology_devices
from wanjax.pricing.compile import DUMP_FOLDER, PROGRAM, REQUEST, write_error
from wanjax.pricing.lowering import retry_without_rejected_options

HOST_MEMORY = "pinned_host"  # JAX's name of host memory from which a device copies directly


def concrete_mesh(topology: str, devices: int, axes: dict[str, int], card: str | None = None) -> Mesh:
    """Return a mesh of the first `devices` chips of a topology, or of cards if `card` is set. This machine need not
    have the devices.

    The last axes of the mesh connect neighbouring chips, as far as the links allow.
    """
    sizes = tuple(axes.values())
    devices_of_target = topology_devices(topology) if card is None else card_devices(card)
    # on 4 x 4 chips, an axis of size 8 uses half of a physical axis; JAX must be told to split it
    mesh_devices = mesh_utils.create_device_mesh(sizes, devices_of_target[:devices], allow_split_physical_axes=True)
    return Mesh(mesh_devices, tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def mark_host_memory(lowered: jax.stages.Lowered, arguments: Sequence[Any]) -> None:
    """Mark the arguments that are in the host's memory. An exported program records this only in their types.

    A sharding could name this memory too, but the devices of a GPU that is only described list no memories.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        symbol = ir.SymbolTable(module.operation)["main"]
        attributes = [_named_attributes(entry) for entry in ir.ArrayAttr(symbol.attributes["arg_attrs"])]
        for argument_attributes, argument in zip(attributes, arguments, strict=True):
            if argument.memory_space == jax.memory.Space.Host:
                argument_attributes["mhlo.memory_kind"] = ir.StringAttr.get(HOST_MEMORY)
        symbol.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in attributes])


def _named_attributes(attributes: Any) -> dict[str, Any]:
    return {named.name: named.attr for named in ir.DictAttr(attributes)}


def compile_job(folder: Path) -> None:
    """Compile the job of a folder and write its results there."""
    job = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    mesh = concrete_mesh(job["topology"], job["devices"], dict(job["axes"]), job["card"])
    exported = jax.export.deserialize(bytearray((folder / PROGRAM).read_bytes()))
    shardings = exported.in_shardings_jax(mesh)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    start = perf_counter()
    rejected_options: list[str] = []
    with jax.set_mesh(mesh):
        lowered = jax.jit(exported.call, donate_argnums=job["donate"], keep_unused=True).lower(*shapes)
        mark_host_memory(lowered, exported.in_avals)
        compiled = retry_without_rejected_options(job["options"], lowered.compile, rejected_options.append)
    seconds = perf_counter() - start
    memory, module = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None, "the compiler reports both"
    assert module is not None
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes
    on_host = memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes + memory.host_temp_size_in_bytes
    # the GPU compiler may report no peak; its peak also counts the host's memory
    peak = memory.peak_memory_in_bytes - on_host if memory.peak_memory_in_bytes else 0
    peak = peak or arguments + memory.temp_size_in_bytes + results
    sizes = {"arguments": arguments, "peak": peak}
    result = {"memory": sizes, "seconds": seconds, "rejected_options": rejected_options}
    (folder / "module.txt").write_text(module, encoding="utf-8")
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def main(root: Path, max_concurrent: int, numbers: Iterable[str]) -> None:
    """Compile the numbered jobs of a folder, at most `max_concurrent` at a time.

    If schedules are dumped, jobs run one by one, because a dump does not say which program a schedule belongs to.
    """
    Thread(target=_end_with_parent, daemon=True).start()
    # no compilation cache: a program from the cache has no schedule
    jax.config.update("jax_enable_compilation_cache", False)
    dump_folder = root / DUMP_FOLDER

    def run(folder: Path) -> None:
        _print_line(f"started {folder.name}")
        try:
            compile_job(folder)
        except Exception as error:  # a failed job must not stop the others
            write_error(folder, type(error).__name__, str(error))
        for path in dump_folder.glob("*"):
            path.rename(folder / path.name)
        _print_line(f"done {folder.name}")

    with ThreadPoolExecutor(1 if dump_folder.exists() else max_concurrent) as pool:
        list(pool.map(run, [root / number for number in numbers]))


def _print_line(line: str) -> None:
    """Write a line in one system call, because several threads and processes write to the same pipe."""
    os.write(1, f"{line}\n".encode())


def _end_with_parent() -> None:
    """Exit when the parent process ends.

    Without this function, a compilation could continue for minutes after the parent has ended.
    """
    os.read(0, 1)  # returns when standard input is closed
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
