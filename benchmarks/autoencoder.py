# SPDX-License-Identifier: Apache-2.0
"""Measure compile times and prices of an autoencoder's programs at each optimisation level of the TPU compiler.

wanjax compiles them at O1; the compiler's default is O2.

    python -m benchmarks.autoencoder [MODEL] [--chip v6e-8] [--levels O0 O1 O2] [--encode] [--dtype float32]
"""

import argparse
import math

from rich.console import Console
from rich.table import Table

from benchmarks.video_programs import video_programs
from wanjax.kernels.compiler_options import XLA_LEVEL_O1, XLA_LEVEL_O2
from wanjax.pipelines.settings import DTYPES
from wanjax.plan.price import PRICER
from wanjax.pricing.chips import abstract_mesh, find_slice
from wanjax.pricing.lowering import AbstractCall
from wanjax.registry import presets

LEVELS = {"O0": 9, "O1": XLA_LEVEL_O1, "O2": XLA_LEVEL_O2}  # XLA's numbers


def at_level(program: AbstractCall, level: int) -> AbstractCall:
    """Return the program with another optimisation level."""
    return program._replace(compiler_options={**(program.compiler_options or {}), "optimization_level": level})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [name for name, preset in presets().items() if preset.model]
    parser.add_argument("model", nargs="?", default="wan2.1-t2v-14b", choices=models)
    parser.add_argument("--chip", default="v6e-8", help="a slice of TPUs; frames are sharded over all of it")
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the computation; default: the model's")
    parser.add_argument("--encode", action="store_true", help="the encoder, for models that take pictures")
    options = parser.parse_args()
    video, tpu_slice = presets()[options.model].defaults, find_slice(options.chip)
    video = video.updated({"vae_dtype": options.dtype} if options.dtype else {})
    mesh = abstract_mesh(tpu_slice, {"dp": 1, "sp": 1, "tp": tpu_slice.devices})
    stage = "encode" if options.encode else "decode"
    names = (f"{stage}_first", f"{stage}_next")
    columns = "program", "level", "compiled in, s", "priced, ms", "runs", "peak, GiB"
    table = Table(*columns, title=f"{options.model}, {video.width}x{video.height}, {options.chip}")
    for run in (run for run in video_programs(options.model, video, mesh) if run.name in names):
        for level in options.levels:
            [price] = PRICER.price_all(tpu_slice, [at_level(run.abstract_call, LEVELS[level])])
            cost, peak = f"{1e3 * (price.seconds or math.nan):.1f}", f"{price.peak_bytes / 2**30:.2f}"
            table.add_row(run.name, level, f"{price.compile_seconds:.0f}", cost, str(run.times), peak)
    Console().print(table)


if __name__ == "__main__":
    main()
