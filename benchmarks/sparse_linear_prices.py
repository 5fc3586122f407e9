# SPDX-License-Identifier: Apache-2.0
"""Price sparse-linear attention on a TPU: its kernels, and the operations around them.

    python -m benchmarks.sparse_linear_prices [WORKLOAD] [--chip v6e] [--top .15 --top .1]

WORKLOAD is a self-attention of benchmarks.workloads. The last column is the additional cost if the running-max path
repeats all steps.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.attention_prices import CHIPS, DEFAULT_WORKLOAD, compile_functions
from benchmarks.workloads import WORKLOADS, Workload
from wanjax.kernels.attention import Projection, SparseLinearAttentionConfig, sparse_linear_attention
from wanjax.kernels.attention.typical_scalars import SPARSE_LINEAR_KERNEL
from wanjax.pricing.compile import Compiled
from wanjax.pricing.costs import price_compiled
from wanjax.pricing.exporting import CompilerError
from wanjax.pricing.pallas_kernels import kernel_calls, rare_work


def sparse_linear(top: float) -> Callable[..., jax.Array]:
    """Return sparse-linear attention of q, k and v, with a projection whose weights do not matter to its price."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        size = q.shape[3]
        weights = Projection(jnp.ones((size, size), jnp.bfloat16), jnp.ones(size, jnp.bfloat16))
        return sparse_linear_attention(q, k, v, weights, SparseLinearAttentionConfig(top), implementation="tpu")

    return run


def price_table(workload: Workload, chip: str, tops: list[float]) -> Table:
    columns = "top", "MXU", "ms", "attention", "means and state", "lists", "around", "running-max path, more"
    table = Table(*columns, title=f"{workload.name} on one {chip}, bfloat16, priced")
    for top, result in compile_functions(workload, chip, {top: sparse_linear(top) for top in tops}).items():
        table.add_row(f"{top:g}", *([str(result)[:60]] if isinstance(result, CompilerError) else _row(result)))
    return table


def _row(compiled: Compiled) -> list[str]:
    names = {call.name: name for name, call in kernel_calls(compiled).items()}
    rare_blocks = {names[SPARSE_LINEAR_KERNEL]: rare_work(compiled)[names[SPARSE_LINEAR_KERNEL]]}
    priced = price_compiled(compiled, skip=rare_blocks)
    seconds = {item.name: item.cost.mid for item in priced.items}
    times = [
        priced.total.mid,
        *(seconds[names[x]] for x in (SPARSE_LINEAR_KERNEL, "sparse_linear_prepare", "sparse_linear_lists")),
    ]
    times.append(times[0] - sum(times[1:]))
    schedule = compiled.schedules[names[SPARSE_LINEAR_KERNEL]]
    runs = schedule.run(rare_blocks[names[SPARSE_LINEAR_KERNEL]]).run_counts
    body = max(schedule.blocks, key=lambda block: block.bundles * runs[block.start])
    repeated_bundles = body.bundles + sum(block.bundles for block in schedule.blocks if not runs[block.start])
    times.append(repeated_bundles * runs[body.start] / compiled.slice.chip.clock)
    return [f"{schedule.occupancy(runs)['MXU']:.0%}", *(f"{1e3 * seconds:.2f}" for seconds in times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default=DEFAULT_WORKLOAD)
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument("--top", type=float, action="append")
    options = parser.parse_args()
    Console(width=120).print(price_table(WORKLOADS[options.workload], options.chip, options.top or [0.15, 0.1]))


if __name__ == "__main__":
    main()
