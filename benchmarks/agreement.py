# SPDX-License-Identifier: Apache-2.0
"""How near prices come to steps that were measured: Wan 2.1 14B with JAX's own splash attention, as others ran it.

The steps are those of a torchax port on v6e, guided, 81 frames, with prompts on dp=2 and heads on tp. Its attention was
splash with powers of two for exponentials, which it found a tenth faster, and its step around the attention less lean
than wanjax's: the two make up for each other in part. Prices are to be within a fifth.

    python -m benchmarks.agreement [--json FILE]
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from benchmarks.attention_prices import splash_kernel
from wanjax.kernels.attention import IMPLEMENTATIONS
from wanjax.networks import PUBLISHED
from wanjax.plan import stages as programs
from wanjax.plan.chips import find_slice
from wanjax.plan.digest import digest
from wanjax.plan.program import Program
from wanjax.registry import PRESETS

MODEL = "wan2.1-t2v-14b"
NEAR = 0.2
TILES = (3328, 2816, 256)  # theirs: of queries, keys, and keys computed at a time


class Measured(NamedTuple):
    """A guided step that others measured, in seconds."""

    chip: str
    size: tuple[int, int]  # height and width
    seconds: float


MEASURED = (
    Measured("v6e-8", (720, 1280), 4.59),
    Measured("v6e-8", (480, 832), 1.26),
    Measured("v6e-16", (720, 1280), 2.5),
)


def step(mesh: Mesh, **video: Any) -> Program:
    """The pipeline's step with splash attention in it.

    Splash puts arrays on a device when it is built, which cannot be done while a program for absent devices is traced:
    a first trace tells the shapes.
    """
    shapes = set()

    def shape_of(q: jax.Array, k: jax.Array) -> tuple[int, int, int]:
        return q.shape[2], q.shape[1], k.shape[1]

    def recorded(q, k, v, **options: Any) -> jax.Array:
        shapes.add(shape_of(q, k))
        return q

    program = programs.step(mesh, attention="splash", **video)
    _register(recorded)
    jax.eval_shape(program.function, *program.arguments)
    built = {shape: splash_kernel(*shape, TILES) for shape in shapes}

    def splash(q, k, v, *, scale: float, **options: Any) -> jax.Array:
        return built[shape_of(q, k)](q, k, v, scale)

    _register(splash)
    return program


def _register(function: Any) -> None:
    module = SimpleNamespace(attention=function, unsupported=lambda *arrays, **options: None)
    cast(dict[str, Any], IMPLEMENTATIONS)["splash"] = module


def priced(measured: Measured) -> float:
    """Seconds of the step by the compiler."""
    settings = replace(PRESETS[MODEL].defaults, height=measured.size[0], width=measured.size[1])
    mesh = {"dp": 2, "sp": 1, "tp": find_slice(measured.chip).devices // 2}
    runs = programs.stages(PUBLISHED[MODEL], settings, measured.chip, mesh)
    job = next(run.job for run in runs["denoise"] if run.name == "step")
    taken = {name: value for name, value in job.settings.items() if name != "attention"}
    found = digest(replace(job, builder="benchmarks.agreement:step", settings=taken))
    assert found.seconds is not None, "it fits"
    return found.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go too")
    options = parser.parse_args()
    table = Table(title=f"{MODEL}, a guided step, 81 frames, dp=2, splash attention")
    for column in ("chip", "size", "measured by others, s", "priced, s", "priced / measured"):
        table.add_column(column)
    rows = []
    for measured in MEASURED:
        seconds = priced(measured)
        height, width = measured.size
        rows.append(measured._asdict() | {"priced": seconds})
        ratio = seconds / measured.seconds
        table.add_row(measured.chip, f"{width}x{height}", f"{measured.seconds}", f"{seconds:.2f}", f"{ratio:.2f}")
    Console().print(table)
    far = [row for row in rows if abs(row["priced"] / row["seconds"] - 1) > NEAR]
    print(f"{len(rows) - len(far)} of {len(rows)} within {NEAR:.0%}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
