# SPDX-License-Identifier: Apache-2.0
"""Price radial attention on a TPU for several block sizes, compared with dense attention.

    python -m benchmarks.radial_prices [WORKLOAD] [--chip v6e] [--decay .2 --decay 1] [--block 512,128 ...]

WORKLOAD is a self-attention of benchmarks.workloads. Its tokens are those of a video in the order of the frames, for
HunyuanVideo followed by those of the text.
"""

import argparse
from functools import partial

from rich.console import Console
from rich.table import Table

from benchmarks.attention_prices import CHIPS, DEFAULT_WORKLOAD, compile_functions
from benchmarks.workloads import WORKLOADS, Workload
from wanjax.kernels.attention import attention
from wanjax.kernels.attention.flash_tiles import Q_BLOCKS_PER_STEP
from wanjax.kernels.attention.radial import Radial, kernel_lists
from wanjax.kernels.attention.typical_scalars import typical_branch_scalars
from wanjax.pricing.compile import Compiled
from wanjax.pricing.exporting import CompilerError
from wanjax.pricing.pallas_kernels import kernel_calls, kernel_seconds, mean_seconds

VIDEO_TOKENS = {"wan": (21, 0, True), "hunyuanvideo": (31, 1985, False)}  # latent frames, text tokens, and the sink
MAX_PRICED_STEPS = 37  # grid steps whose numbers of blocks are priced
BLOCKS = ("128,128", "256,128", "256,256", "512,128", "512,256", "1024,128")


def price_listed_blocks(compiled: Compiled, mask: Radial, workload: Workload) -> float:
    """Price the kernel from the number of key blocks of each grid step. The kernel has all keys in VMEM at once."""
    counts = kernel_lists(
        mask, workload.num_queries, workload.num_keys, workload.num_keys + mask.block_kv, Q_BLOCKS_PER_STEP
    )[1]
    return mean_seconds(compiled, [int(count) for count in counts[:: max(1, len(counts) // MAX_PRICED_STEPS)]])


def price_table(workload: Workload, chip: str, decays: list[float], blocks: list[tuple[int, int]]) -> Table:
    frames, text, has_sink = VIDEO_TOKENS[workload.name.partition("_")[0]]
    frame = (workload.num_keys - text) // frames
    masks = [Radial(frames, frame, decay, has_sink, *block) for decay in decays for block in blocks]
    run = partial(attention, implementation="flash_tpu")
    functions = {mask: run if mask is None else partial(run, window=mask) for mask in (None, *masks)}
    columns = "decay", "queries × keys of a block", "share of the scores", "ms", "of dense", "ms / share"
    table = Table(*columns, title=f"{workload.name} on one {chip}, bfloat16: the kernel, priced")
    dense = float("nan")
    for mask, result in compile_functions(workload, chip, functions).items():
        decay, block = ("", "dense") if mask is None else (f"{mask.decay:g}", f"{mask.block_q} × {mask.block_kv}")
        if isinstance(result, CompilerError):
            table.add_row(decay, block, str(result)[:60])
            continue
        [call] = kernel_calls(result).values()
        seconds = (
            kernel_seconds(result, typical_branch_scalars(*call)).typical
            if mask is None
            else price_listed_blocks(result, mask, workload)
        )
        dense = seconds if mask is None else dense
        density = 1.0 if mask is None else mask.density(workload.num_keys)
        numbers = f"{density:.3f}", f"{1e3 * seconds:.2f}", f"{seconds / dense:.3f}", f"{1e3 * seconds / density:.2f}"
        table.add_row(decay, block, *numbers)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", default=DEFAULT_WORKLOAD)
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument("--decay", type=float, action="append")
    parser.add_argument("--block", action="append", help="queries and keys of a block, such as 512,128")
    options = parser.parse_args()
    blocks = [(int(q), int(kv)) for q, kv in (block.split(",") for block in options.block or BLOCKS)]
    table = price_table(WORKLOADS[options.workload], options.chip, options.decay or [0.2, 1.0], blocks)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
