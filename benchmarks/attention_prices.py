# SPDX-License-Identifier: Apache-2.0
"""Price attention on a TPU: wanjax's kernel, JAX's splash attention, and the plain formula compiled by XLA.

Operands are [1 L N·D] in bfloat16, as projections write them, so a kernel's price includes its padding and transposes.
Splash attention needs lengths that are multiples of its tiles. Shorter lengths are padded with zero keys without a
mask, as users of splash attention do.
"""

from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from rich.table import Table

from benchmarks.workloads import Workload
from wanjax.kernels.alignment import round_up
from wanjax.kernels.attention import IMPLEMENTATIONS, attention
from wanjax.pricing.chips import SLICES, abstract_mesh, find_slice
from wanjax.pricing.compile import Compiled, compile_programs
from wanjax.pricing.costs import price_compiled
from wanjax.pricing.exporting import CompilerError
from wanjax.pricing.lowering import AbstractCall, replicated
from wanjax.pricing.pallas_kernels import rare_work
from wanjax.sharding import pad_to

CHIPS = ("v5e", "v5p", "v6e", "v7x")
DEFAULT_WORKLOAD = "wan_14b_720p_self_on_8"
SPLASH_TILES = ((2048, 1024, 512), (3328, 2816, 256))  # block_q, block_kv and block_kv_compute
LARGEST_SCORES = 16e9  # bytes; with more, the plain formula fits no chip
INT8 = "flash_tpu:qk=int8"
WITH_RARE_WORK = dict.fromkeys(
    ("flash_tpu", INT8), "every head on the running-max path"
)  # priced without and with its data-dependent branches
Name = TypeVar("Name")
PRICED_IMPLEMENTATIONS = [name for name in IMPLEMENTATIONS if name not in ("reference", "cudnn")]


def wanjax_attention(implementation: str) -> Callable:
    return partial(attention, implementation=implementation)


def gradients(function: Callable) -> Callable:
    """Return the gradients of q, k and v, including the forward pass that they need."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(function, q, k, v)[1](q)  # any gradient of the result will do

    return run


def splash(workload: Workload, tiles: tuple[int, int, int]) -> Callable:
    kernel = splash_kernel(workload.heads, workload.num_queries, workload.num_keys, tiles)
    return partial(kernel, scale=workload.head_dim**-0.5)


def splash_kernel(heads: int, queries: int, keys: int, tiles: tuple[int, int, int]) -> Callable[..., jax.Array]:
    """Return splash attention (q, k, v, scale) of one device's operands [1 L N D].

    tiles: block_q, block_kv and block_kv_compute.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    block_q, block_kv, block_kv_compute = tiles
    block_kv = min(block_kv, round_up(keys, block_kv_compute))
    padded_queries, padded_keys = round_up(queries, block_q), round_up(keys, block_kv)
    kernel: Any = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([splash_attention_mask.FullMask((padded_queries, padded_keys))] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_kv_compute=block_kv_compute,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_kv_dkv_compute=block_kv_compute,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
    )

    def run(q: jax.Array, k: jax.Array, v: jax.Array, scale: float) -> jax.Array:
        def heads_first(x: jax.Array, length: int) -> jax.Array:  # [N L D]
            return pad_to(jnp.moveaxis(x[0], 1, 0), 1, length)

        out = kernel(heads_first(q * scale, padded_queries), heads_first(k, padded_keys), heads_first(v, padded_keys))
        return jnp.moveaxis(out[:, :queries], 0, 1)[None]

    return run


def program(mesh: AbstractMesh, workload: Workload, function: Callable) -> AbstractCall:
    """Build the program that runs a function, replicated on every device, on operands [1 L N·D]."""
    shapes = (
        jax.ShapeDtypeStruct((*x.shape[:2], x.shape[2] * x.shape[3]), x.dtype) for x in workload.operands(jnp.bfloat16)
    )

    def run(*operands: jax.Array) -> Any:
        heads = (x.reshape(*x.shape[:2], workload.heads, workload.head_dim) for x in operands)
        return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1), function(*heads))

    return replicated(run, mesh, shapes)


def smallest_slice(chip: str) -> str:
    """Return the smallest slice of a chip."""
    slices = (tpu_slice for tpu_slice in SLICES.values() if tpu_slice.chip.name == chip)
    return min(slices, key=lambda tpu_slice: tpu_slice.devices).name


def compile_functions(
    workload: Workload, chip: str, functions: Mapping[Name, Callable]
) -> dict[Name, Compiled | CompilerError]:
    """Compile named functions of q, k and v for one chip, with their schedules; return the results by name."""
    tpu_slice = smallest_slice(chip)
    mesh = abstract_mesh(find_slice(tpu_slice))
    programs = [(program(mesh, workload, function), tpu_slice) for function in functions.values()]
    return dict(zip(functions, compile_programs(programs, reads_schedules=True), strict=True))


def functions_to_compare(workload: Workload, qk: str | None = None) -> Mapping[str, Callable]:
    """Return the functions by their names in the table. With `qk`, compare only flash_tpu with and without `qk`."""
    if qk:
        return {name: wanjax_attention(name) for name in ("flash_tpu", f"flash_tpu:qk={qk}")}
    functions: dict[str, Callable] = {name: wanjax_attention(name) for name in PRICED_IMPLEMENTATIONS}
    for tiles in SPLASH_TILES:
        functions[f"splash {', '.join(map(str, tiles))}"] = splash(workload, tiles)
    if 4 * workload.scores <= LARGEST_SCORES:
        functions["plain XLA"] = partial(jax.nn.dot_product_attention, implementation="xla")
    return functions


def gradient_table(workload: Workload, chip: str) -> Table:
    """Price attention with its gradients, and attention alone."""
    functions = {
        "flash_tpu alone": wanjax_attention("flash_tpu"),
        "flash_tpu": gradients(wanjax_attention("flash_tpu")),
        "chunked": gradients(wanjax_attention("chunked")),
        "splash": gradients(splash(workload, SPLASH_TILES[0])),
    }
    title = f"{workload.name} on one {chip}, bfloat16, priced: attention and its gradients"
    table = Table("", "ms", "kernels", "around them", "memory, MiB", title=title)
    for name, result in compile_functions(workload, chip, functions).items():
        if isinstance(result, CompilerError):
            table.add_row(name, _short_message(result))
            continue
        priced = price_compiled(result)
        if name.startswith("flash_tpu"):  # with all keys valid, rare branches are not taken
            priced = price_compiled(result, skip=rare_work(result, workload.num_keys), input_word=workload.num_keys)
        total, kernels = priced.total.mid, priced.by_kind["kernels"].mid
        cells = (f"{1e3 * seconds:.2f}" for seconds in (total, kernels, total - kernels))
        table.add_row(name, *cells, f"{result.memory.peak / 2**20:.0f}")
    return table


def price_table(workload: Workload, chip: str, qk: str | None = None) -> Table:
    """Compile and price all implementations of a workload on one chip; for `qk` see `functions_to_compare`."""
    results = compile_functions(workload, chip, functions_to_compare(workload, qk))
    compiled = {name: result for name, result in results.items() if isinstance(result, Compiled)}
    prices = {name: price_compiled(result, skip=_rare(name, result)).total.mid for name, result in compiled.items()}
    splash_best = min((prices[name] for name in prices if name.startswith("splash")), default=float("nan"))
    shape = f"[1 {workload.num_queries:,} {workload.heads} {workload.head_dim}] × {workload.num_keys:,}"
    columns = ("", "ms", "low to high", "kernel", "around it", "splash / this", "of peak", "MXU", "VALU")
    columns += ("fills, spills a bundle", "VMEM, MiB", "memory, MiB")
    table = Table(*columns, title=f"{workload.name} on one {chip}, bfloat16, priced: {shape}")
    for name, result in results.items():
        if isinstance(result, CompilerError):
            table.add_row(name, _short_message(result))
            continue
        table.add_row(name, *_row(result, _rare(name, result), workload, splash_best))
        if name in WITH_RARE_WORK:
            table.add_row(f"{name}, {WITH_RARE_WORK[name]}", *_row(result, {}, workload, splash_best))
    return table


def _rare(name: str, compiled: Compiled) -> Mapping[str, Container[int]]:
    """Return a kernel's blocks of instructions that only few inputs run."""
    return rare_work(compiled) if name in WITH_RARE_WORK else {}


def _row(compiled: Compiled, skip: Mapping[str, Container[int]], workload: Workload, splash_best: float) -> list[str]:
    priced = price_compiled(compiled, skip=skip)
    total, kernel = priced.total, priced.by_kind["kernels"].mid
    units = ["", "", "", ""]
    kernels = [compiled.schedules[item.name] for item in priced.items if item.kind == "kernels"]
    if kernels:
        largest = max(kernels, key=lambda schedule: schedule.bundles)
        occupancy = largest.occupancy(largest.run(skip.get(largest.name, ())).run_counts)
        spills = [occupancy[unit] * largest.slots[unit] for unit in ("VLOAD:FILL", "VSTORE:SPILL")]
        units = [f"{occupancy['MXU']:.0%}", f"{occupancy['VALU']:.0%}", f"{spills[0]:.2f}, {spills[1]:.2f}"]
        units.append(f"{largest.vmem / 2**20:.1f}")
    return [
        f"{1e3 * total.mid:.2f}",
        f"{1e3 * total.low:.2f} to {1e3 * total.high:.2f}",
        f"{1e3 * kernel:.2f}",
        f"{1e3 * (total.mid - kernel):.2f}",
        f"{splash_best / total.mid:.2f}",
        f"{workload.flops / total.mid / compiled.slice.chip.flops:.0%}",
        *units,
        f"{(compiled.memory.peak) / 2**20:.0f}",
    ]


def _short_message(error: CompilerError) -> str:
    return str(error).partition(": ")[2].splitlines()[0][:60]
