# SPDX-License-Identifier: Apache-2.0
"""The commands `plan` and `warmup`: a recorded run, priced for devices that need not be present, or compiled here."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import jax
from rich.console import Console
from rich.table import Table

from wanjax import registry
from wanjax.cli.processes import meet
from wanjax.cli.report import Report
from wanjax.cli.stages import Rendering, given_settings, loras_of, own_settings
from wanjax.compilers.cache import compile_cache_folder
from wanjax.kernels.attention import AUTO
from wanjax.kernels.compiler_options import SAFE
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Pictures
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.recording import record
from wanjax.pipelines.settings import Settings
from wanjax.plan.outlook import Outlook, outlook
from wanjax.plan.training import TrainingOutlook, training_outlook
from wanjax.programs import EXECUTE
from wanjax.sharding import ONE_DEVICE, AutoMesh, MeshSizes, find_rules
from wanjax.training.adapters import LoraConfig
from wanjax.training.optimizers import OptimizerConfig

GIB = 2**30


def plan(
    *, model: str, chip: str, mesh: MeshSizes | AutoMesh | None, compiler: str | None, as_json: bool, **given: Any
) -> None:
    """Prices a video, and prints a table or JSON."""
    jax.config.update("jax_platforms", "cpu")  # the priced chips need not be present
    training = {name: given.pop(name) for name in ("train", "lora_rank", "full", "batch", "optimizer")}
    rules = given.pop("rules") or "fsdp"
    find_rules(rules)
    axes, sp = (mesh, None) if isinstance(mesh, MeshSizes) else (None, mesh and mesh.sp)
    how = {"sp": sp, "rules": rules, "compiler": compiler or SAFE, "attention": given.pop("attention") or AUTO}
    family, architecture, defaults = registry.outline(model)
    if (scheduler := given.pop("scheduler")) is not None:
        architecture = registry.with_scheduler(architecture, scheduler)
    defaults = defaults.updated({"dtype": "float32" if chip == "cpu" else "bfloat16"})
    pictures, settings = _video(registry.outlined(family, architecture, defaults, ONE_DEVICE), given)
    if training["train"]:
        lora = None if training["full"] else LoraConfig(training["lora_rank"])
        how |= {"lora": lora, "optimized": OptimizerConfig(training["optimizer"]), "clips": training["batch"]}
        step = training_outlook(family, architecture, settings, chip, axes, **how)
        click.echo(json.dumps(step.to_json(), indent=2)) if as_json else show_training(step, Console())
        return
    how |= {"batch_guidance": bool(given["batch_guidance"]), "tiling": Tiling() if given["tile"] else None}
    how |= {"pictures": pictures, "offload": given["offload"] is not False}
    found = outlook(family, architecture, settings, chip, axes, **how)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        show(found, Console())


def _video(pipe: Pipeline, given: dict[str, Any]) -> tuple[Pictures | None, Settings]:
    """Returns the given pictures, None where there are none, and the settings of the video."""
    chosen = given_settings(**given)
    loras_of(chosen)  # one that is misspelled is told
    settings = own_settings(chosen, given, pipe.defaults)
    files = {name: chosen[name] for name in Pictures._fields if chosen.get(name)}
    if not files:
        return None, pipe.settings(**settings)
    return pipe.prepare(**files, **settings)


def show_training(found: TrainingOutlook, console: Console) -> None:
    """Prints the price of a step of training."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in found.mesh.items())
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("seconds", "a step", "forward alone"):
        table.add_column(column, justify="left" if column == "seconds" else "right")
    for part, seconds in found.step_breakdown.items():
        table.add_row(part, f"{seconds:.3f}", f"{found.forward_breakdown.get(part, 0.0):.3f}")
    table.add_row("in all", *(f"{x or 0:.3f}" for x in (found.step_seconds, found.forward_seconds)))
    lines = [
        f"training of {found.trained} of {found.model} by {found.optimizer}, {found.clips} x {found.size}, "
        f"{found.frames} frames, on {found.chip} ({mesh}, rules {found.rules}), priced, not measured",
        f"a chip: {found.weights_bytes_per_chip / GIB:.2f} GiB of weights, state and inputs, "
        f"{found.peak_bytes_per_chip / GIB:.2f} at the peak, of {found.memory_per_chip / GIB:.2f}",
    ]
    if found.backward_ratio is not None:
        lines.append(f"backward and optimiser take {found.backward_ratio:.2f} x the forward; the limit: {found.limit}")
    lines += [f"in doubt: {doubt}" for doubt in found.doubts]
    lines.append(found.advice or f"fits, with {found.spare_bytes_per_chip / GIB:.1f} GiB to spare on each chip")
    console.print(lines[0], highlight=False, soft_wrap=True)
    if found.step_seconds:
        console.print(table)
    for line in lines[1:]:
        console.print(line, highlight=False, soft_wrap=True)


def show(found: Outlook, console: Console) -> None:
    """Prints the prices as tables and sentences."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in found.mesh.items())
    options = "" if found.compiler is None else f", compiler {found.compiler}"
    console.print(
        f"{found.model}, {found.size}, {found.frames} frames, {found.steps} steps, {found.dtype}, on {found.chip} "
        f"({mesh}, rules {found.rules}{options}), priced by {found.priced_by}, not measured",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_stages(found))
    if found.step_seconds:
        console.print(_step(found))
    for line in _summary(found):
        console.print(line, highlight=False, soft_wrap=True)


def _stages(found: Outlook) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("stage", "weights and inputs", "beside them", "kept", "peak a chip", "to spare", "seconds"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, stage in found.stages.items():
        sizes = (
            stage.weights_bytes_per_chip,
            stage.activation_bytes_per_chip,
            stage.kept_bytes_per_chip,
            stage.peak_bytes_per_chip,
            stage.spare_bytes_per_chip,
        )
        seconds = "does not fit" if stage.seconds is None else f"{stage.seconds:.2f}"
        table.add_row(name, *(f"{size / GIB:.2f} GiB" for size in sizes), seconds)
    return table


def _step(found: Outlook) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("a step")
    table.add_column("seconds", justify="right")
    table.add_column("part", justify="right")
    assert found.step_seconds
    for part, seconds in found.step_breakdown.items():
        table.add_row(part, f"{seconds:.3f}", f"{seconds / found.step_seconds:.0%}")
    table.add_row("in all", f"{found.step_seconds:.3f}", "")
    return table


def _summary(found: Outlook) -> list[str]:
    lines = []
    if found.step_seconds:
        spread = f"{found.step_seconds_low:.2f} to {found.step_seconds_high:.2f} s"
        share = f", {found.mfu:.0%} of the chips' {found.peak_dtype} peak" if found.mfu else ""
        lines.append(f"a step: {spread}{share}; what limits it: {found.limit}")
    if found.dense_step_seconds:
        lines.append(
            f"{found.dense_steps} of {found.steps} steps take all of attention: {found.dense_step_seconds:.3f} s each"
        )
    if found.reusing_step_seconds_least is not None:
        either = f"{found.reusing_step_seconds_least:.3f} s each, or {found.reusing_step_seconds:.3f} s"
        lines.append(
            f"up to {found.reusing_steps} of {found.steps} steps reuse what another kept ({found.cache}), as the video "
            f"decides: {either}"
        )
    elif found.reusing_step_seconds and found.step_seconds:
        share = found.reusing_steps / found.steps
        mean = (1 - share) * found.step_seconds + share * found.reusing_step_seconds
        lines.append(
            f"{found.reusing_steps} of {found.steps} steps reuse what another kept ({found.cache}): "
            f"{found.reusing_step_seconds:.3f} s each, {mean:.3f} s a step on average"
        )
    for item in found.collectives:
        lines.append(
            f"{item['operation']} over {item['devices']} devices: {item['times']} a step, "
            f"{item['bytes'] / 1e9:.2f} GB a chip, {item['seconds']:.3f} s"
        )
    if found.frames_a_second is not None:
        lines.append(
            f"streamed: {found.frames_a_second:.1f} frames a second with the decoder, where {found.fps} are played"
        )
    if found.total_seconds is not None:
        compiling = f", after {found.compile_seconds:.0f} s of compiling (here)" if found.compile_seconds else ""
        least = "" if found.total_seconds_least is None else f"{found.total_seconds_least:.1f} to "
        lines.append(f"the whole run: {least}{found.total_seconds:.1f} s{compiling}")
    lines.append(
        f"download: at most {found.download_bytes_at_most / 1e9:.1f} GB, if stored in float32; on disk, converted: "
        f"{found.disk_bytes / 1e9:.1f} GB"
    )
    lines += [f"in doubt: {doubt}" for doubt in found.doubts]
    if found.fits:
        spare = min(stage.spare_bytes_per_chip for stage in found.stages.values())
        lines.append(f"fits, with {spare / GIB:.1f} GiB of {found.memory_per_chip / GIB:.2f} to spare on each chip")
    return lines if found.advice is None else [*lines, found.advice]


def warmup(report: Report, **given: Any) -> None:
    """Compiles all programs that `generate` runs with these options; no weights are loaded."""
    meet(report, given.get("processes"))
    with TemporaryDirectory(prefix="wanjax-warmup-") as folder:
        made = Rendering(report, Path(folder), given | {"prompt": given["prompt"] or ""})
        with report.stage("record"):
            told = {"tiling": made.tiling, "batch_guidance": made.batch_guidance}
            programs = record(made.pipe, made.settings, made.pictures, **told).programs
        with report.stage("compile"):
            for done, recorded in enumerate(programs):
                report.count("program", done, len(programs))
                EXECUTE.compile(recorded.instance)
            report.count("program", len(programs), len(programs))
    report.table()
    report.note(f"what was compiled is in {compile_cache_folder()}")
