# SPDX-License-Identifier: Apache-2.0
"""The commands `bench`, `selftest` and `calibrate`: measurements of this machine's devices, and of a checkpoint."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from wanjax import registry
from wanjax.bench.suite import SIZES, Bench, BenchSize, Row
from wanjax.bench.suite import bench as run
from wanjax.cli.parsed import PipelineOptions
from wanjax.cli.processes import init_distributed
from wanjax.cli.report import Report
from wanjax.cli.stages import loaded
from wanjax.cli.tables import print_table
from wanjax.figures import digits, duration, mesh_text, quantity, scaled
from wanjax.jobs.notes import domain_of
from wanjax.kernels.admitted import rejected_kernels
from wanjax.kernels.compiler_options import save_set, saved_set
from wanjax.pipelines import progress
from wanjax.pipelines.caching.cache_tables import measured_file, to_json
from wanjax.pipelines.caching.calibration import Measurements, measure, reused_steps, tables_from
from wanjax.pipelines.caching.rules import MagCache, TeaCache
from wanjax.pipelines.request import VideoRequest
from wanjax.selftest.checks import checks, timings
from wanjax.selftest.summary import CHECKED, TIMED, summary_of
from wanjax.sharding import platform
from wanjax.stores.writing import check_folder, write_whole, writing

HEADINGS = ("what", "compiling", "first run", "measured", "runs", "spread", "modelled", "measured / modelled")


def bench(report: Report, *, model: str, quick: bool, keep: bool, as_json: bool) -> None:
    """Run the measurements, print them, and keep the better set of compiler options."""
    init_distributed(report, None)
    scale: BenchSize = SIZES["cpu" if platform() == "cpu" else "other", quick]
    with report.stage("bench", at_once=True):
        result = run(registry.outline(model), scale, quick=quick, tell=report.note)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        show(result, progress.console(stderr=False))
    if keep and result.better is not None:
        save_set(result.better)
        if saved_set() == result.better:  # not where the cache folder cannot be written
            report.note(f"{result.better} is what --compiler is from now on, unless it is given")
    if result.faults:
        raise click.exceptions.Exit(1)


def show(result: Bench, console: Console) -> None:
    """Print the measurements as a table, and what follows from them as sentences."""
    console.print(
        f"{result.model}, {result.size}, {quantity(result.frames, 'frame')}, {result.dtype}, random weights, on "
        f"{result.devices} ({mesh_text(result.mesh, ', ')}), modelled by {result.modelled_by}",
    )
    several = len({row.compiler for row in result.rows}) > 1
    rows = []
    for row in result.rows:
        name = f"{row.name}, {row.compiler}" if several and row.name == "a step" else row.name
        rows.append((f"{name}: {row.what}", *_figures(row)))
    print_table(console, HEADINGS, rows)
    for line in _sentences(result):
        console.print(line)


def _figures(row: Row) -> list[str]:
    times = [duration(x) if x is not None else "" for x in (row.compiling, row.first, row.seconds)]
    spread = "" if row.spread is None else f"{row.spread:.0%}"
    modelled = "" if row.modelled is None else duration(row.modelled)
    return [*times, str(row.runs or ""), spread, modelled, "" if row.ratio is None else digits(row.ratio)]


def _sentences(result: Bench) -> Iterator[str]:
    """Yield sentences on what is exact, what was reached, the sets of compiler options, and what is wrong."""
    exact = ", ".join(f"{name} {far:.1e}" for name, far in result.exact.items())
    yield f"attention's relative distance from the reference: {exact}"
    yield from (f"the kernel {name} is not used: {reason}" for name, reason in rejected_kernels().items())
    yield from (f"{row.name}, {row.what}: {scaled(row.rate, 'FLOP/s')}" for row in result.rows if row.rate)
    yield from (f"{row.name}: {row.note}" for row in result.rows if row.note)
    if result.better is None:
        yield "the sets of compiler options are the same on these devices"
    elif result.differ is not None:
        yield f"the sets' answers are {result.differ:.1e} apart, and {result.better} is the better one"
    if len(result.mesh) and all(size == 1 for size in result.mesh.values()):
        yield "one device sends no messages"
    yield from (f"wrong: {fault}" for fault in result.faults)


def selftest(report: Report, *, out: Path, timed: bool, as_json: bool) -> None:
    """Run the checks and the measurements, print them, and write both files; exit with 1 if a check failed."""
    check_folder(out)
    init_distributed(report, None)
    with report.stage("selftest", at_once=True):
        outcomes = list(checks(report.note))
        summary = summary_of(outcomes, list(timings(report.note)) if timed else [])
    texts = {"json": json.dumps(summary.to_json(), indent=2) + "\n", "md": summary.to_markdown()}
    for suffix, text in texts.items():
        write_whole(out / f"selftest-{summary.slug}.{suffix}", text.encode())
    console = progress.console(stderr=False)
    if as_json:
        click.echo(texts["json"], nl=False)
    else:
        print_table(console, CHECKED, summary.check_rows())
        if summary.timings:
            console.print()
            print_table(console, TIMED, summary.timing_rows())
        console.print(f"{summary.sentence}; selftest-{summary.slug}.json and .md in {out} are ready for an issue")
    if summary.faults:
        raise click.exceptions.Exit(1)


PROMPTS = (
    "a cat plays the piano in a sunlit room",
    "waves break on a rocky shore at dusk, seen from above",
    "a woman walks through a crowded market and laughs",
    "a red circle moving right",
    "a blue square growing",
    "a green triangle staying still",
    "a yellow cross moving up",
)
MAX_PROMPTS = 4  # prompts, where none are given


def calibrate(report: Report, request: VideoRequest, options: PipelineOptions, texts: Sequence[str]) -> None:
    """Make the latents of a few videos, and write the tables that their steps tell."""
    model = str(options.model)
    pipe = loaded(options, request, progress=report.load, note=report.note)
    file, runs = measured_file(registry.tables_key(model)), []
    pipe.model.spec.check_whole(model, "calibrating")
    check_folder(file.parent)
    prompts = texts or suitable_prompts(model)
    pictures, complete = pipe.prepare(**request.inputs, **request.settings)
    for number, prompt in enumerate(prompts, 1):
        report.note(f"prompt {number} of {len(prompts)}: {prompt}")
        runs.append(_measure_prompt(report, pipe, pictures, complete.updated({"prompt": prompt})))
    tables = tables_from(runs)
    origin = {"model": model, "steps": complete.steps, "prompts": list(prompts)}
    with writing(file) as partial_path:
        partial_path.write_text(json.dumps(to_json(tables) | origin) + "\n", encoding="utf-8")
    for rule in (MagCache(), TeaCache()):
        count = reused_steps(rule, tables, runs[0])
        report.note(f"steps that reuse what another kept with --cache {rule.name}: {count} of {complete.steps}")
    report.note(f"the tables are in {file}")


def suitable_prompts(model: str) -> list[str]:
    """Return prompts whose words a model knows."""
    domain = domain_of(model)
    return [prompt for prompt in PROMPTS if domain is None or not domain.unknown(prompt)][:MAX_PROMPTS]


def _measure_prompt(report: Report, pipe: Any, pictures: Any, settings: Any) -> Measurements:
    with report.stage("encode"):
        conditioning = pipe.encode_prompts(settings.prompt, settings.negative_prompt, follow=settings.follow)
        conditioning = conditioning._replace(**pipe.model.encode_inputs(pipe.runtime, pictures, settings))
    with report.stage("denoise"):
        return measure(pipe.runtime, pipe.model, conditioning, settings)
