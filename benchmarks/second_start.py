# SPDX-License-Identifier: Apache-2.0
"""Measure the start of a second process on a TPU, part by part, with programs that a first process compiled.

python -m benchmarks.second_start [--model wan2.1-t2v-14b] [--chip v6e-8] [--cache FOLDER]

A first process compiles every program of a video for a chip, which may be absent, into an empty cache, as
`wanjax warmup --chip` does. A second process starts as a run does: it imports the library, traces the run, lowers each
program to get its key, and reads and decompresses its executable. The table does not include the time to load an
executable into a TPU or to read the weights. All times are those of this machine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

PROCESS_START = perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wan2.1-t2v-14b")
    parser.add_argument("--chip", default="v6e-8")
    parser.add_argument("--cache", type=Path, help="default: a temporary folder, which is removed")
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)  # the second process
    options = parser.parse_args()
    if options.read:
        read(options.model, options.chip, options.cache)
        return
    with tempfile.TemporaryDirectory() as temporary:
        cache = options.cache or Path(temporary)
        command = [sys.executable, "-m", "benchmarks.second_start", "--model", options.model, "--chip", options.chip]
        for name in ("first", "second"):
            print(f"{name} process", flush=True)
            subprocess.run([*command, "--cache", str(cache), "--read"], check=True)


def read(model: str, chip: str, folder: Path) -> None:
    """Trace a run of a model, and get each of its programs from the cache or compile it."""
    from wanjax.pricing.compile import ENVIRONMENT

    os.environ.update(ENVIRONMENT)  # before libtpu is loaded
    import jax
    from jax._src.compilation_cache import decompress_executable, extract_executable_and_time

    from wanjax.compile_cache.cache import compile_cache
    from wanjax.compile_cache.shared import EntryExists, share_cache
    from wanjax.execution import warn_rejected_option
    from wanjax.loading import abstract_pipeline
    from wanjax.pipelines.meshes import auto_mesh, step_cost
    from wanjax.pipelines.tracing import needed_pictures, trace_programs
    from wanjax.plan.video_programs import program_names
    from wanjax.pricing.chips import find_slice, topology_devices
    from wanjax.pricing.lowering import retry_without_rejected_options
    from wanjax.registry import model_description
    from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh, substitute_devices

    print(f"{perf_counter() - PROCESS_START:8.2f} s  import JAX and wanjax", flush=True)
    jax.config.update("jax_platforms", "cpu")
    with print_seconds("open the compiler for the chip (with a TPU, its own start replaces this)"):
        devices = topology_devices(find_slice(chip).topology, one_host=True)
    share_cache(folder, ahead_of_time=True)
    with substitute_devices(devices):
        with print_seconds("trace the run"):
            description = model_description(model)
            settings = description.settings.updated({"dtype": "bfloat16"})
            cost = step_cost(description.family, description.model, settings)
            mesh = make_mesh(*auto_mesh(cost, devices), devices=devices)
            pipe = abstract_pipeline(description, Partitioner(mesh, SHARDING_RULES["fsdp"]))
            trace = trace_programs(pipe, settings, needed_pictures(pipe, settings))
        for name, program in zip(program_names(trace), trace.programs, strict=True):
            instance, start = program.traced_program, perf_counter()
            try:
                options = instance.program.compiler_options(instance.compile_context)
                retry_without_rejected_options(
                    options,
                    lambda remaining_options, traced=instance: traced.compile(remaining_options, compile_cache),
                    warn_rejected_option,
                )
                print(f"{perf_counter() - start:8.2f} s  compile {name}", flush=True)
            except EntryExists as entry:
                lookup_seconds, start = perf_counter() - start, perf_counter()
                content = (folder / f"{entry}-cache").read_bytes()
                executable, _ = extract_executable_and_time(decompress_executable(content))
                sizes = f"{len(content) / 2**20:.1f} MiB, {len(executable) / 2**20:.1f} decompressed"
                print(f"{lookup_seconds:8.2f} s  lower {name} and find its entry", flush=True)
                print(f"{perf_counter() - start:8.2f} s  read {name}: {sizes}", flush=True)
    print(f"{perf_counter() - PROCESS_START:8.2f} s  in all")


@contextmanager
def print_seconds(label: str) -> Iterator[None]:
    """Print the seconds of a block."""
    start = perf_counter()
    yield
    print(f"{perf_counter() - start:8.2f} s  {label}", flush=True)


if __name__ == "__main__":
    main()
