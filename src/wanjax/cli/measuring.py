# SPDX-License-Identifier: Apache-2.0
"""The commands `bench`, `selftest` and `calibrate`: measure this machine's devices and a checkpoint."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from wanjax import registry
from wanjax.bench.suite import BENCH_SIZES, BenchReport, BenchSize, Measurement
from wanjax.bench.suite import bench as run
from wanjax.cli.parsed import PipelineOptions
from wanjax.cli.processes import init_distributed
from wanjax.cli.report import Report
from wanjax.cli.stages import load_pipeline
from wanjax.cli.tables import print_table
from wanjax.figures import format_duration, format_mesh, format_number, format_with_prefix, pluralize
from wanjax.kernels.admitted import rejected_kernels
from wanjax.kernels.compiler_options import save_option_set, saved_option_set
from wanjax.pipelines import progress
from wanjax.pipelines.caching.cache_tables import measured_file, to_json
from wanjax.pipelines.caching.calibration import Measurements, check_step_count, measure, reused_steps, tables_from
from wanjax.pipelines.caching.rules import MagCache, TeaCache
from wanjax.pipelines.request import VideoRequest
from wanjax.selftest.checks import checks, timings
from wanjax.selftest.summary import CHECK_HEADINGS, TIMING_HEADINGS, summarize
from wanjax.sharding import device_platform
from wanjax.stores.writing import atomic_write, check_folder, write_atomically

COLUMNS = ("what", "compiling", "first run", "measured", "runs", "spread", "modelled", "measured / modelled")


def bench(report: Report, *, model: str, quick: bool, keep: bool, as_json: bool) -> None:
    """Run the measurements, print them, and save the faster set of compiler options."""
    init_distributed(report, None)
    bench_size: BenchSize = BENCH_SIZES["cpu" if device_platform() == "cpu" else "other", quick]
    with report.stage("bench", at_once=True):
        result = run(registry.model_description(model), bench_size, quick=quick, announce=report.note)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        print_bench(result, progress.console(stderr=False))
    if keep and result.faster_option_set is not None:
        save_option_set(result.faster_option_set)
        if saved_option_set() == result.faster_option_set:  # False if the cache folder cannot be written
            report.note(f"{result.faster_option_set} is now the default of --compiler on this machine")
    if result.faults:
        raise click.exceptions.Exit(1)


def print_bench(result: BenchReport, console: Console) -> None:
    """Print the measurements as a table, and the conclusions as sentences."""
    console.print(
        f"{result.model}, {result.size}, {pluralize(result.frames, 'frame')}, {result.dtype}, random weights, on "
        f"{result.devices} ({format_mesh(result.mesh, ', ')}), modelled by {result.modelled_by}",
    )
    has_several_sets = len({row.compiler for row in result.rows}) > 1
    rows = []
    for row in result.rows:
        name = f"{row.name}, {row.compiler}" if has_several_sets and row.name == "a step" else row.name
        rows.append((f"{name}: {row.what}", *_cells(row)))
    print_table(console, COLUMNS, rows)
    for line in _summary_lines(result):
        console.print(line)


def _cells(row: Measurement) -> list[str]:
    durations = [
        format_duration(seconds) if seconds is not None else "" for seconds in (row.compiling, row.first, row.seconds)
    ]
    spread = "" if row.spread is None else f"{row.spread:.0%}"
    modelled = "" if row.modelled is None else format_duration(row.modelled)
    return [*durations, str(row.runs or ""), spread, modelled, "" if row.ratio is None else format_number(row.ratio)]


def _summary_lines(result: BenchReport) -> Iterator[str]:
    """Yield sentences about the error of attention, the measured rates, the two sets of compiler options, and
    faults."""
    attention_errors = ", ".join(f"{name} {error:.1e}" for name, error in result.attention_errors.items())
    yield f"attention's relative distance from the reference: {attention_errors}"
    yield from (f"the kernel {name} is not used: {reason}" for name, reason in rejected_kernels().items())
    yield from (f"{row.name}, {row.what}: {format_with_prefix(row.rate, 'FLOP/s')}" for row in result.rows if row.rate)
    yield from (f"{row.name}: {row.note}" for row in result.rows if row.note)
    if result.faster_option_set is None:
        yield "both sets of compiler options are the same on these devices"
    elif result.option_sets_error is not None:
        difference = f"the results with the two sets differ by {result.option_sets_error:.1e}"
        yield f"{difference}, and {result.faster_option_set} is the faster set"
    if len(result.mesh) and all(size == 1 for size in result.mesh.values()):
        yield "collectives were not measured: there is one device"
    yield from (f"wrong: {fault}" for fault in result.faults)


def selftest(report: Report, *, out: Path, timed: bool, as_json: bool) -> None:
    """Run the checks and the measurements, print them, and write both files; exit with 1 if a check failed."""
    check_folder(out)
    init_distributed(report, None)
    with report.stage("selftest", at_once=True):
        outcomes = list(checks(report.note))
        summary = summarize(outcomes, list(timings(report.note)) if timed else [])
    texts = {"json": json.dumps(summary.to_json(), indent=2) + "\n", "md": summary.to_markdown()}
    for suffix, text in texts.items():
        write_atomically(out / f"selftest-{summary.slug}.{suffix}", text.encode())
    console = progress.console(stderr=False)
    if as_json:
        click.echo(texts["json"], nl=False)
    else:
        print_table(console, CHECK_HEADINGS, summary.check_rows())
        if summary.timings:
            console.print()
            print_table(console, TIMING_HEADINGS, summary.timing_rows())
        console.print(f"{summary.sentence}; selftest-{summary.slug}.json and .md in {out} can be attached to an issue")
    if summary.faults:
        raise click.exceptions.Exit(1)


DEFAULT_PROMPTS = (
    "a cat plays the piano in a sunlit room",
    "waves break on a rocky shore at dusk, seen from above",
    "a woman walks through a crowded market and laughs",
    "a red circle moving right",
    "a blue square growing",
    "a green triangle staying still",
    "a yellow cross moving up",
)
MAX_PROMPTS = 4  # the number of default prompts to use


def calibrate(report: Report, request: VideoRequest, options: PipelineOptions, texts: Sequence[str]) -> None:
    """Denoise a few videos, compute the tables of the step caches from their steps, and write the tables."""
    model = str(options.model)
    pipe = load_pipeline(options, request, progress=report.load, note=report.note)
    file, runs = measured_file(registry.tables_key(model)), []
    pipe.model.spec.check_not_chunked(model, "calibrating")
    check_folder(file.parent)
    prompts = texts or known_prompts(model)
    pictures, complete = pipe.prepare(**request.inputs, **request.settings)
    check_step_count(complete.steps)
    for number, prompt in enumerate(prompts, 1):
        report.note(f"prompt {number} of {len(prompts)}: {prompt}")
        runs.append(_measure_prompt(report, pipe, pictures, complete.updated({"prompt": prompt})))
    tables = tables_from(runs)
    source = {"model": model, "steps": complete.steps, "prompts": list(prompts)}
    with atomic_write(file) as partial_path:
        partial_path.write_text(json.dumps(to_json(tables) | source) + "\n", encoding="utf-8")
    for rule in (MagCache(), TeaCache()):
        count = reused_steps(rule, tables, runs[0])
        report.note(f"steps that reuse cached values with --cache {rule.name}: {count} of {complete.steps}")
    report.note(f"the tables are in {file}")


def known_prompts(model: str) -> list[str]:
    """Select the default prompts whose words the model knows."""
    domain = registry.domain_of(model)
    return [prompt for prompt in DEFAULT_PROMPTS if domain is None or not domain.unknown_words(prompt)][:MAX_PROMPTS]


def _measure_prompt(report: Report, pipe: Any, pictures: Any, settings: Any) -> Measurements:
    with report.stage("encode"):
        conditioning = pipe.encode_prompts(settings.prompt, settings.negative_prompt, follow=settings.follow)
        conditioning = conditioning._replace(**pipe.model.encode_inputs(pipe.runtime, pictures, settings))
    with report.stage("denoise"):
        return measure(pipe.runtime, pipe.model, conditioning, settings)
