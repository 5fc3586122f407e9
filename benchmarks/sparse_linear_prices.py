# SPDX-License-Identifier: Apache-2.0
"""Sparse-linear attention priced for a described TPU beside dense attention: its kernels and what is around them.

    python -m benchmarks.sparse_linear_prices [WORKLOAD] [--chip v6e] [--top .15 --top .1]

WORKLOAD is self-attention of benchmarks.workloads. The last column is the cost of steps that are taken again with care,
if all were.
"""

import argparse
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.attention_prices import compile_forms
from benchmarks.workloads import WORKLOADS, Workload
from wanjax.compilers import Compiled, CompilerError, price_compiled
from wanjax.compilers.kernels import LISTS, kernel_calls, rare_work
from wanjax.kernels.attention import Projection, SparseLinear, attention, sparse_linear_attention


def sparse_linear(top: float) -> Callable[..., jax.Array]:
    """Returns sparse-linear attention of q, k and v, with a projection whose weights do not matter to its price."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        size = q.shape[3]
        weights = Projection(jnp.ones((size, size), jnp.bfloat16), jnp.ones(size, jnp.bfloat16))
        return sparse_linear_attention(q, k, v, weights, SparseLinear(top), implementation="tpu")

    return run


def price_table(workload: Workload, chip: str, tops: list[float]) -> Table:
    compared = {None: partial(attention, implementation="flash_tpu"), **{top: sparse_linear(top) for top in tops}}
    table = Table(title=f"{workload.name} on one {chip}, bfloat16, priced")
    for column in ("top", "ms", "attention", "means and state", "lists", "around", "MXU", "with care, ms more"):
        table.add_column(column)
    for top, result in compile_forms(workload, chip, compared).items():
        name = "dense" if top is None else f"{top:g}"
        table.add_row(name, *([str(result)[:60]] if isinstance(result, CompilerError) else _row(result)))
    return table


def _row(compiled: Compiled) -> list[str]:
    rare, calls = rare_work(compiled), {call.kernel: name for name, call in kernel_calls(compiled).items()}
    main = calls.get(LISTS) or calls["flash_attention"]
    priced = price_compiled(compiled, skip={main: rare.get(main, ())})
    seconds = {item.name: item.cost.mid for item in priced.items}
    parts = [main, *(calls.get(name) for name in ("sparse_linear_prepare", "sparse_linear_lists"))]
    times = [priced.total.mid, *(seconds.get(part or "", 0.0) for part in parts)]
    times.append(times[0] - sum(times[1:]))
    schedule = compiled.schedules[main]
    runs = schedule.run(rare.get(main, ())).times
    body = max(schedule.blocks, key=lambda block: block.bundles * runs[block.start])
    again = body.bundles + sum(block.bundles for block in schedule.blocks if not runs[block.start])
    care = f"{1e3 * again * runs[body.start] / compiled.slice.chip.clock:.2f}" if main == calls.get(LISTS) else ""
    return [*(f"{1e3 * part:.2f}" for part in times), f"{schedule.occupancy(runs)['MXU']:.0%}", care]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default="wan_14b_720p_self_on_8")
    parser.add_argument("--chip", choices=("v5e", "v5p", "v6e", "v7x"), default="v6e")
    parser.add_argument("--top", type=float, action="append")
    options = parser.parse_args()
    Console(width=120).print(price_table(WORKLOADS[options.workload], options.chip, options.top or [0.15, 0.1]))


if __name__ == "__main__":
    main()
