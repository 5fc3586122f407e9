# SPDX-License-Identifier: Apache-2.0
"""Compare prices with published measurements of Wan 2.1 14B with JAX's splash attention.

The measurements are guided steps of a torchax port on v6e with 81 frames, prompts sharded over dp=2 and heads over tp.
Its splash attention uses exp2 in place of exp, which is reported to be 10 % faster. The rest of its step is less
efficient than wanjax's step. The two differences partly cancel. Prices should be within 20 % of the measurements.

    python -m benchmarks.agreement [--json FILE]
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.attention_prices import splash_kernel
from benchmarks.video_programs import video_programs
from wanjax.kernels.attention import IMPLEMENTATIONS, AttentionConfig
from wanjax.kernels.attention.implementation import Implementation
from wanjax.plan.price import PRICER
from wanjax.plan.video_programs import STEP
from wanjax.pricing.chips import abstract_mesh, find_slice
from wanjax.pricing.lowering import AbstractCall
from wanjax.registry import presets

MODEL = "wan2.1-t2v-14b"
TOLERANCE = 0.2
TILES = (3328, 2816, 256)  # the port's block_q, block_kv and block_kv_compute


class Measurement(NamedTuple):
    """A published measurement of a guided step."""

    chip: str
    size: tuple[int, int]  # height and width
    seconds: float


MEASUREMENTS = (
    Measurement("v6e-8", (720, 1280), 4.59),
    Measurement("v6e-8", (480, 832), 1.26),
    Measurement("v6e-16", (720, 1280), 2.5),
)


def with_splash(program: AbstractCall) -> AbstractCall:
    """Register JAX's splash attention as the implementation `splash`, for the shapes of a step; return the step.

    Building a splash kernel puts arrays on a device. This fails while a program for absent devices is traced. So a
    first trace records the shapes, and the kernels are built before the second trace.
    """
    shapes: set[tuple[int, int, int]] = set()

    def shape_of(q: jax.Array, k: jax.Array) -> tuple[int, int, int]:
        return q.shape[2], q.shape[1], k.shape[1]

    def record_shape(q, k, v, **options: Any) -> jax.Array:
        shapes.add(shape_of(q, k))
        return q

    _register(record_shape)
    jax.eval_shape(program.function, *program.arguments)
    kernels = {shape: splash_kernel(*shape, TILES) for shape in shapes}

    def splash(q, k, v, *, scale: float, **options: Any) -> jax.Array:
        return kernels[shape_of(q, k)](q, k, v, scale)

    _register(splash)
    return program


def _register(function: Any) -> None:
    IMPLEMENTATIONS["splash"] = Implementation(function, lambda *arrays, **options: None, function)


def price_step(measurement: Measurement) -> float:
    """Return the price in seconds of the step that was measured."""
    settings = replace(presets()[MODEL].defaults, height=measurement.size[0], width=measurement.size[1])
    tpu_slice = find_slice(measurement.chip)
    mesh = abstract_mesh(tpu_slice, {"dp": 2, "sp": 1, "tp": tpu_slice.devices // 2})
    abstract_calls = video_programs(MODEL, settings, mesh, attention=AttentionConfig("splash"))
    step = next(x.abstract_call for x in abstract_calls if x.name == STEP)
    [price] = PRICER.price_all(tpu_slice, [with_splash(step)])
    assert price.seconds is not None, "it fits"
    return price.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    columns = "chip", "size", "measured, s", "priced, s", "priced / measured"
    table = Table(*columns, title=f"{MODEL}, a guided step, 81 frames, dp=2, splash attention")
    rows = []
    for measurement in MEASUREMENTS:
        seconds = price_step(measurement)
        height, width = measurement.size
        rows.append(measurement._asdict() | {"pricer": seconds})
        ratio = seconds / measurement.seconds
        table.add_row(measurement.chip, f"{width}x{height}", f"{measurement.seconds}", f"{seconds:.2f}", f"{ratio:.2f}")
    Console().print(table)
    outliers = [row for row in rows if abs(row["pricer"] / row["seconds"] - 1) > TOLERANCE]
    print(f"{len(rows) - len(outliers)} of {len(rows)} within {TOLERANCE:.0%}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
