# SPDX-License-Identifier: Apache-2.0
"""Compare the speed and memory of attention with torch, at real sizes, for every implementation that runs here.

    python -m benchmarks.attention [WORKLOAD ...] [--dtype float32] [--one-core] [--block-q N --block-kv N]
    python -m benchmarks.attention [WORKLOAD ...] --price v6e [--gradient | --qk int8]

benchmarks.workloads has the names of the workloads; `all` selects all of them. The reference is omitted if its scores
exceed 1 GB. With `--one-core` everything runs on one core, and the benchmark measures CPU time, because other processes
hardly change it. With `--price` nothing runs: the benchmark prices the TPU compiler's schedules, and compares them with
those of JAX's splash attention (benchmarks/attention_prices.py). With `--qk int8` it compares flash_tpu with the
variant that computes q kᵀ in int8; benchmarks.int8_attention_error measures the error of this variant.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.attention_prices import CHIPS, gradient_table, price_table
from benchmarks.timing import speed_ratio, time_alternately
from benchmarks.workloads import WORKLOADS, Workload
from wanjax.kernels.attention import IMPLEMENTATIONS, attention, choose_implementation, chunked

DEFAULT_WORKLOADS = ("wan_1_3b_256x256x17_self", "wan_1_3b_256x256x17_cross", "wan_1_3b_480x832x17_self")
PRICED_WORKLOADS = (
    "wan_14b_720p_self_on_4",
    "wan_14b_720p_self_on_8",
    "wan_14b_480p_self_on_4",
    "wan_14b_480p_self_on_8",
    "wan_14b_720p_cross_on_4",
    "wan_14b_480p_cross_on_4",
    "cogvideox_768x1360_self_on_4",
    "hunyuanvideo_720p_self_on_4",
)
LARGEST_SCORES = 1e9  # bytes
TARGET_SPEED, TARGET_MEMORY = 0.9, 0.25


def torch_attention(arrays: list[np.ndarray], dtype: str) -> Callable[[], Any]:
    """Return torch's fused attention of the operands [B L N D]; torch's axis order [B N L D] is a view of them."""
    import torch

    q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)).transpose(1, 2) for x in arrays)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return run


def compile_implementation(workload: Workload, dtype: str, name: str, config: Any) -> tuple[Callable, int]:
    """Return the compiled call, and the bytes that it needs in addition to its operands and its result."""
    function = jax.jit(partial(attention, implementation=name, config=config))
    compiled: Any = function.lower(*workload.operands(jnp.dtype(dtype))).compile()
    return compiled, compiled.memory_analysis().temp_size_in_bytes


def measure(workload: Workload, dtype: str, config: Any, repeats: int, one_core: bool) -> Table:
    """Check every implementation against torch's result, then measure its speed and memory."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(x.shape, np.float32) for x in workload.operands()]
    operands = [jnp.asarray(x, dtype) for x in arrays]
    scores = 4 * workload.scores
    functions, memory = {"torch": torch_attention(arrays, dtype)}, {}
    for name in IMPLEMENTATIONS:
        if name == "reference" and scores > LARGEST_SCORES:
            continue
        try:
            choose_implementation(*operands, implementation=name)
        except NotImplementedError as refusal:
            print(f"{name} is left out: {refusal}")
            continue
        compiled, memory[name] = compile_implementation(workload, dtype, name, config if name == "chunked" else None)
        functions[name] = partial(compiled, *operands)
    expected = functions["torch"]().float().numpy()
    for name in memory:
        relative_error = np.linalg.norm(np.asarray(functions[name](), np.float32) - expected) / np.linalg.norm(expected)
        assert relative_error < {"float32": 1e-5, "bfloat16": 1e-2}[dtype], (name, relative_error)
    clock = time.process_time if one_core else time.perf_counter
    timings = time_alternately(functions, repeats, warm_up=0, clock=clock)  # the functions have just run
    shape = f"[1 {workload.num_queries} {workload.heads} {workload.head_dim}] × {workload.num_keys}"
    title = f"{workload.name}, {dtype}: {shape}"
    table = Table("", "best, ms", "GFLOP/s", "torch / this", "memory, MB", "memory / scores", title=title)
    for name, timing in timings.items():
        memory_cells = [f"{memory[name] / 1e6:.1f}", f"{memory[name] / scores:.3f}"] if name in memory else ["", ""]
        rate = f"{workload.flops / timing.best / 1e9:.0f}"
        table.add_row(
            name, f"{1e3 * timing.best:.1f}", rate, f"{speed_ratio(timing, timings['torch']):.2f}", *memory_cells
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="*")
    parser.add_argument("--price", metavar="CHIP", choices=CHIPS)
    parser.add_argument("--gradient", action="store_true", help="with --price: attention with its gradients")
    parser.add_argument("--qk", choices=("int8",), help="with --price: flash_tpu with q kᵀ in int8, and without")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--block-q", type=int)
    parser.add_argument("--block-kv", type=int)
    parser.add_argument("--one-core", action="store_true", help="run on one core and count CPU time")
    options = parser.parse_args()
    names = list(WORKLOADS) if options.workload == ["all"] else options.workload
    if options.price:
        for name in names or PRICED_WORKLOADS:
            table = gradient_table if options.gradient else partial(price_table, qk=options.qk)
            Console(width=150).print(table(WORKLOADS[name], options.price))
        return
    if options.one_core:  # before JAX starts its threads, which inherit the affinity
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        import torch

        torch.set_num_threads(1)
    sizes = {"block_q": options.block_q, "block_kv": options.block_kv}
    chosen_sizes = {name: size for name, size in sizes.items() if size}
    for name in names or DEFAULT_WORKLOADS:
        config = replace(chunked.default_config("cpu", WORKLOADS[name].head_dim), **chosen_sizes)
        Console(width=120).print(measure(WORKLOADS[name], options.dtype, config, options.repeats, options.one_core))
    print(f"targets for chunked on a CPU: {TARGET_SPEED} × torch's speed, memory {TARGET_MEMORY} × the scores")


if __name__ == "__main__":
    main()
