# SPDX-License-Identifier: Apache-2.0
"""The command `bench`: this machine's devices beside their prices, as a table or as JSON."""

import json
import sys

import click
import jax
from rich.console import Console
from rich.table import Table

from wanjax import registry
from wanjax.bench.suite import SCALES, Bench, Row, Scale
from wanjax.bench.suite import bench as run
from wanjax.cli.report import Report
from wanjax.kernels.compiler_options import keep_set
from wanjax.pipelines.progress import brief

WIDTH = 140  # columns where there is no terminal


def bench(report: Report, *, model: str, quick: bool, keep: bool, as_json: bool) -> None:
    """Runs the measurements, prints them, and keeps the better set of compiler options."""
    family, architecture, defaults = registry.outline(model)
    platform = "cpu" if jax.devices()[0].platform == "cpu" else "other"
    scale: Scale = SCALES[platform, quick]
    with report.stage("bench"):
        found = run(family, architecture, defaults, scale, quick=quick, tell=report.note)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        show(found, Console(width=None if sys.stdout.isatty() else WIDTH))
    if keep and found.better is not None:
        report.note(f"{found.better} is what --compiler is from now on, unless it is given: {keep_set(found.better)}")
    if found.faults:
        raise click.exceptions.Exit(1)


def show(found: Bench, console: Console) -> None:
    """Prints the measurements as a table, and what follows from them as sentences."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in found.mesh.items())
    console.print(
        f"{found.model}, {found.size}, {found.frames} frames, {found.dtype}, random weights, on {found.devices} "
        f"({mesh}), modelled by {found.modelled_by}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("what")
    for column in ("compiling", "first run", "measured", "runs", "spread", "modelled", "measured / modelled"):
        table.add_column(column, justify="right")
    several = len({row.compiler for row in found.rows}) > 1
    for row in found.rows:
        name = f"{row.name}, {row.compiler}" if several and row.name == "a step" else row.name
        table.add_row(f"{name}: {row.what}", *_figures(row))
    console.print(table)
    for line in _sentences(found):
        console.print(line, highlight=False, soft_wrap=True)


def _figures(row: Row) -> list[str]:
    times = [brief(x) if x is not None else "" for x in (row.compiling, row.first, row.seconds)]
    spread = "" if row.spread is None else f"{row.spread:.0%}"
    modelled = "" if row.modelled is None else brief(row.modelled)
    return [*times, str(row.runs or ""), spread, modelled, "" if row.ratio is None else f"{row.ratio:.2f}"]


def _sentences(found: Bench) -> list[str]:
    exact = ", ".join(f"{name} {far:.1e}" for name, far in found.exact.items())
    lines = [f"attention's relative distance from the reference: {exact}"]
    lines += [f"{row.name}: {row.note}" for row in found.rows if row.note]
    if found.better is None:
        lines.append("the sets of compiler options are the same on these devices")
    elif found.differ is not None:
        lines.append(f"the sets' answers are {found.differ:.1e} apart, and {found.better} is the better one")
    if len(found.mesh) and all(size == 1 for size in found.mesh.values()):
        lines.append("one device sends no messages")
    return [*lines, *(f"wrong: {fault}" for fault in found.faults)]
