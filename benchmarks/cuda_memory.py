# SPDX-License-Identifier: Apache-2.0
"""Compile a model's programs for an H100, which may be absent, and print the memory of each.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu python -m benchmarks.cuda_memory MODEL [--attention TEXT]

It needs `jax-cuda13-plugin` and `jax-cuda13-pjrt` of JAX's version, installed without their dependencies, and NVIDIA's
packages of CUDA 13 and cuDNN. The bytes are from the compiler's buffer assignment. The largest array that is not an
argument is printed too: if attention stored all scores, it would be L x L.
"""

import argparse
import math
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks.video_programs import video_programs
from wanjax import registry
from wanjax.figures import format_bytes
from wanjax.kernels.attention import AttentionConfig
from wanjax.pricing.lowering import AbstractCall
from wanjax.sharding import MESH_AXES

H100 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
  l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 28 patch: 1 } runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
SHAPE = re.compile(r"\b(f32|bf16|f16|s32|u32|s8|u8|pred)\[([\d,]+)\]")
BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1}


def largest_array(text: str) -> tuple[int, str]:
    """Return the bytes and the type of the largest array of a compiled module that is not an argument."""
    parameters = {match[0] for line in text.splitlines() if " parameter(" in line for match in SHAPE.finditer(line)}
    arrays = {match[0]: BYTES[match[1]] * math.prod(map(int, match[2].split(","))) for match in SHAPE.finditer(text)}
    return max((size, name) for name, size in arrays.items() if name not in parameters)


def compile_program(abstract_call: AbstractCall) -> jax.stages.Compiled:
    """Compile a program for the devices of its arguments."""
    function = jax.jit(abstract_call.function, donate_argnums=abstract_call.donate)
    return function.lower(*abstract_call.arguments).compile()


def main() -> None:
    """Print a line for each program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--attention", default="auto", type=AttentionConfig.parse)
    parser.add_argument("--size", help="the name of a size, such as 480p")
    parser.add_argument("--only", action="append", help="a program's name; all without it")
    options = parser.parse_args()
    devices = topologies.get_topology_desc("h100", "cuda", topology="1x1x1", target_config=H100).devices
    mesh = Mesh(np.array(devices).reshape([1] * len(MESH_AXES)), MESH_AXES)
    defaults, size = registry.model_description(options.model).settings, options.size
    height, width = defaults.size if size is None else registry.find_size(options.model, {"size": size})
    settings = defaults.updated({"dtype": "bfloat16", "height": height, "width": width})
    for program in video_programs(options.model, settings, mesh, attention=options.attention):
        if options.only and program.name not in options.only:
            continue
        executable: Any = compile_program(program.abstract_call)
        memory = executable.memory_analysis()
        argument_bytes, temp_bytes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        largest_bytes, array_type = largest_array(executable.as_text())
        print(
            f"{program.name}: {format_bytes(argument_bytes, 1024)} of arguments, "
            f"{format_bytes(temp_bytes, 1024)} of temporary memory; "
            f"largest {array_type}, {format_bytes(largest_bytes, 1024)}"
        )


if __name__ == "__main__":
    main()
