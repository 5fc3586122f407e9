# SPDX-License-Identifier: Apache-2.0
"""The commands `plan` and `warmup`: a recorded run, priced for devices that need not be present, or compiled here."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import jax
from rich.console import Console

from wanjax import loading, registry
from wanjax.cli.parsed import BulkOptions, CommandOptions, PipelineOptions, TrainingOptions
from wanjax.cli.processes import init_distributed
from wanjax.cli.report import Report
from wanjax.cli.scaling import SUM, show_scale, why
from wanjax.cli.stages import VideoCommand, loras_of
from wanjax.cli.tables import folded, print_table, stdout_width
from wanjax.compile_cache.cache import compile_cache, compile_cache_folder
from wanjax.compile_cache.shared import EntryExists, current
from wanjax.errors import WanjaxError
from wanjax.execution import EXECUTE, Instance, warn_refused
from wanjax.figures import between, digits, duration, in_bytes, mesh_text, quantity
from wanjax.kernels.attention import AUTO
from wanjax.kernels.compiler_options import SAFE
from wanjax.media.pictures import Pictures
from wanjax.pipelines import progress
from wanjax.pipelines.mesh_sizes import MeshSizes
from wanjax.pipelines.model import with_scheduler
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.tiny_decoder import DecoderFile
from wanjax.pipelines.validation import check_loaded
from wanjax.plan.estimate import ESTIMATED_BY_MODEL, Estimate, estimate
from wanjax.plan.estimate_cache import store_estimate
from wanjax.plan.hardware import find_priceable_hardware
from wanjax.plan.scale import ScaleEstimate, Workload, estimate_at_scale
from wanjax.plan.training_estimate import TrainingEstimate, estimate_training
from wanjax.pricing.chips import Slice, find_slice, topology_devices
from wanjax.pricing.compile import ENVIRONMENT, MAX_CONCURRENT, check_compiler
from wanjax.pricing.lowering import retry_without_rejected_options
from wanjax.sharding import ONE_DEVICE, substitute_devices
from wanjax.stores.temporary import temp_dir
from wanjax.training.adapters import LoraConfig
from wanjax.training.optimizers import OptimizerConfig

STAGE = ("stage", "weights and inputs", "beside them", "kept", "peak a chip", "to spare", "time")
_gib = partial(in_bytes, base=1024)  # chips are sold by these


def plan(
    report: Report,
    request: VideoRequest,
    options: PipelineOptions,
    chip: str,
    training: TrainingOptions,
    bulk: BulkOptions,
    *,
    as_json: bool,
    programs: bool = False,
) -> None:
    """Price a video, a step of training or many videos, and print a table or JSON."""
    jax.config.update("jax_platforms", "cpu")  # the priced chips need not be present
    find_priceable_hardware(chip)
    several = None if bulk.requests is None else Workload(**bulk._asdict())
    if several and training.train:
        raise WanjaxError("--train prices a step, and --requests prices videos: one of them at a time")
    mesh, loras = options.mesh, loras_of(options)
    axes, sp = (mesh, None) if isinstance(mesh, MeshSizes) else (None, mesh and mesh.sp)
    learned = registry.attention_of(lora for lora in loras if Path(lora.file).is_file())  # those that are here
    attention = options.attention or learned or AUTO
    how = {"sp": sp, "rules": options.rules, "compiler": options.compiler or SAFE, "attention": attention}
    outline = registry.with_distillation(registry.outline(str(options.model)), loras, report.note)
    if request.scheduler is not None:
        outline = replace(outline, model=with_scheduler(outline.model, request.scheduler))
    dtypes = {"dtype": "float32", "vae_dtype": "float32"} if chip == "cpu" else {"dtype": "bfloat16"}
    outline = replace(outline, settings=outline.settings.updated(dtypes))
    check_loaded(outline.settings, {"dtype": options.dtype, "vae_dtype": options.vae_dtype})
    pictures, settings = _video(loading.abstract_pipeline(outline, ONE_DEVICE), request)
    outline = replace(outline, settings=settings)
    if training.train:
        lora = None if training.full else LoraConfig(training.lora_rank)
        how |= {"lora": lora, "optimizer_config": OptimizerConfig(training.optimizer), "clips": training.batch_size}
        price = partial(estimate_training, outline, chip, axes, **how)
    else:
        offload = options.offload if settings.windows > 1 else options.offload is not False
        how |= {**options.how, "pictures": pictures, "offload": offload}
        if file := options.decoder:
            how |= {"decoder": DecoderFile.in_place_of(outline.model.vae, file)}
        price = partial(estimate_at_scale, outline, chip, several) if several else partial(estimate, outline, chip)
        price = partial(price, axes, **how)

    def tell(now: Sequence[str], done: int, total: int) -> None:
        report.count("program", done, total, suffix=" and ".join(now))

    with report.stage("plan", at_once=True):
        priced = price(on_progress=tell)
    if isinstance(priced, Estimate):
        store_estimate(priced, settings)
    if as_json:
        reason = {"why": why(priced)} if isinstance(priced, ScaleEstimate) else {}
        click.echo(json.dumps(reason | priced.to_json(), indent=2))
    else:
        SHOWN[type(priced)](priced, progress.console(stderr=False))
        if programs and isinstance(priced, Estimate):
            show_programs(priced, progress.console(stderr=False))


def _video(pipe: Pipeline, request: VideoRequest) -> tuple[Pictures | None, Settings]:
    """Return the pictures of a request, None where there are none, and the settings of its video."""
    if not request.inputs:
        return None, pipe.settings(**request.settings)
    return pipe.prepare(**request.inputs, **request.settings)


def _say(console: Console, sentence: str) -> None:
    """Print a sentence, in lines that end between words where a terminal is narrow."""
    for line in folded(sentence, stdout_width()):
        console.print(line)


def show_training(priced: TrainingEstimate, console: Console) -> None:
    """Print the price of a step of training."""
    _say(
        console,
        f"training of {priced.trained} of {priced.model} by {priced.optimizer}, {priced.clips} x {priced.size}, "
        f"{quantity(priced.frames, 'frame')}, on {priced.chip} ({mesh_text(priced.mesh, ', ')}, rules {priced.rules}), "
        "priced, not measured",
    )
    if priced.step_seconds:
        parts = {**priced.step_breakdown, "in all": priced.step_seconds}
        alone = {**priced.forward_breakdown, "in all": priced.forward_seconds or 0.0}
        rows = [(part, duration(seconds), duration(alone.get(part, 0.0))) for part, seconds in parts.items()]
        print_table(console, ("part", "a step", "forward alone"), rows)
    _say(
        console,
        f"a chip: {_gib(priced.weights_bytes_per_chip)} of weights, state and inputs, "
        f"{_gib(priced.peak_bytes_per_chip)} at the peak, of {_gib(priced.memory_per_chip)}",
    )
    if priced.backward_ratio is not None:
        ratio = digits(priced.backward_ratio)
        _say(console, f"backward and optimiser take {ratio} x the forward; the limit: {priced.limit}")
    for doubt in priced.doubts:
        _say(console, f"in doubt: {doubt}")
    _say(console, priced.advice or f"fits, with {_gib(priced.spare_bytes_per_chip)} to spare on each chip")


def show_video(priced: Estimate, console: Console) -> None:
    """Print the prices as tables and sentences."""
    how = f"priced by {priced.priced_by}, not measured"
    if priced.priced_by == ESTIMATED_BY_MODEL:
        how = f"memory by the card's compiler; times an estimate by {ESTIMATED_BY_MODEL}, not measured"
    options = "" if priced.compiler is None else f", compiler {priced.compiler}"
    _say(
        console,
        f"{priced.model}, {priced.size}, {quantity(priced.frames, 'frame')}, {quantity(priced.steps, 'step')}, "
        f"{priced.dtype}, on {priced.chip} ({mesh_text(priced.mesh, ', ')}, rules {priced.rules}{options}), {how}",
    )
    stages = [
        (
            name,
            _gib(stage.weights_bytes_per_chip),
            _gib(stage.activation_bytes_per_chip),
            _gib(stage.kept_bytes_per_chip),
            _gib(stage.peak_bytes_per_chip),
            "unknown" if priced.fits is None and stage.spare_bytes_per_chip < 0 else _gib(stage.spare_bytes_per_chip),
            "does not fit" if stage.seconds is None else duration(stage.seconds),
        )
        for name, stage in priced.stages.items()
    ]
    print_table(console, STAGE, stages)
    if whole := priced.step_seconds:
        parts = [(part, duration(x), f"{x / whole:.0%}") for part, x in priced.step_breakdown.items()]
        print_table(console, ("a step", "time", "part"), [*parts, ("in all", duration(whole), "")])
    for line in _summary(priced):
        _say(console, line)


def show_programs(priced: Estimate, console: Console) -> None:
    """Print each program, and on cards the kernels that it starts."""
    rows = [
        (
            row.stage,
            row.name,
            str(row.times),
            "does not fit" if row.seconds is None else duration(row.seconds),
            _gib(row.arguments_bytes_per_chip),
            _gib(row.peak_bytes_per_chip),
        )
        for row in priced.programs
    ]
    print_table(console, ("stage", "program", "times", "each", "weights and inputs", "peak a chip"), rows)
    for row in priced.programs:
        if row.kernels:
            kernels = ", ".join(f"{times} {name}" for name, times in row.kernels.items())
            _say(console, f"kernels of {row.stage}'s {row.name}: {kernels}")


def _summary(priced: Estimate) -> Iterator[str]:
    """Yield sentences on the steps, the whole run, what is in doubt and whether it fits."""
    if priced.step_seconds:
        spread = between(*(duration(x or 0) for x in (priced.step_seconds_low, priced.step_seconds_high)))
        share = f", {priced.mfu:.0%} of the chips' {priced.peak_dtype} peak" if priced.mfu else ""
        yield f"a step: {spread}{share}; what limits it: {priced.limit}"
        if priced.step_seconds_worst:
            yield (
                f"at worst: {duration(priced.step_seconds_worst)}, with every head of attention on its safe path; "
                "the fetch of instructions is not priced"
            )
        if priced.compiler:
            trials = ", where the chip passes its trials" if "tpu" in priced.attention else ""
            yield f"attention: {priced.attention}{trials}"
    if priced.dense_step_seconds:
        each = duration(priced.dense_step_seconds)
        yield f"steps that take all of attention: {priced.dense_steps} of {priced.steps}, {each} each"
    if priced.reusing_step_seconds_least is not None:
        either = f"{duration(priced.reusing_step_seconds_least)} each, or {duration(priced.reusing_step_seconds or 0)}"
        yield (
            f"steps that reuse what another kept ({priced.cache}), as the video decides: "
            f"up to {priced.reusing_steps} of {priced.steps}, {either}"
        )
    elif priced.reusing_step_seconds and priced.step_seconds:
        share = priced.reusing_steps / priced.steps
        mean = (1 - share) * priced.step_seconds + share * priced.reusing_step_seconds
        yield (
            f"steps that reuse what another kept ({priced.cache}): {priced.reusing_steps} of {priced.steps}, "
            f"{duration(priced.reusing_step_seconds)} each, {duration(mean)} a step on average"
        )
    for item in priced.collectives:
        yield (
            f"{item['operation']} over {item['devices']} devices: {item['times']} a step, "
            f"{in_bytes(item['bytes'])} a chip, {duration(item['seconds'])}"
        )
    if priced.frames_a_second is not None:
        pace = digits(priced.frames_a_second)
        yield f"streamed: {pace} frames a second with the decoder, where {priced.fps} are played"
    if priced.total_seconds is not None:
        compiling = (
            f", after compiling ({SUM.format(duration(priced.compile_seconds))})" if priced.compile_seconds else ""
        )
        least = priced.total_seconds if priced.total_seconds_least is None else priced.total_seconds_least
        yield f"the whole run: {between(duration(least), duration(priced.total_seconds))}{compiling}"
    yield (
        f"download: at most {in_bytes(priced.download_bytes_at_most)}, if stored in float32; on disk, converted: "
        f"{in_bytes(priced.disk_bytes)}"
    )
    for doubt in priced.doubts:
        yield f"in doubt: {doubt}"
    if priced.fits:
        spare = min(stage.spare_bytes_per_chip for stage in priced.stages.values())
        yield f"fits, with {_gib(spare)} of {_gib(priced.memory_per_chip)} to spare on each chip"
    if priced.advice is not None:
        yield priced.advice


SHOWN: Mapping[type, Callable[[Any, Console], None]] = {
    Estimate: show_video,
    ScaleEstimate: show_scale,
    TrainingEstimate: show_training,
}


def warmup(report: Report, request: VideoRequest, options: PipelineOptions, chip: str | None) -> None:
    """Compile all programs that `generate` runs with these options, here or on a chip; no weights are loaded."""
    if chip is not None:
        _fill(report, request, options, find_slice(chip))
        return
    init_distributed(report, options.processes)
    with _recorded(report, request, options) as instances, report.stage("compile"):
        EXECUTE.compile(*instances, on_start=lambda number, total: report.count("program", number - 1, total))
        report.count("program", len(instances), len(instances))
    report.table()
    report.note(
        f"what was compiled is in {EXECUTE.executables.folder if EXECUTE.executables else compile_cache_folder()}"
    )


def _fill(report: Report, request: VideoRequest, options: PipelineOptions, place: Slice) -> None:
    """Fill a shared cache with the programs for a slice that need not be here, those that it lacks."""
    if options.processes:
        raise WanjaxError("--chip describes all processes of a slice: one compiles for them, without --processes")
    check_compiler()
    jax.config.update("jax_platforms", "cpu")
    init_distributed(report, None, platform_name="tpu")
    if current() is None:
        raise WanjaxError(f"--chip {place.name} fills a cache for other machines: --compile-cache names it")
    os.environ.update(ENVIRONMENT)  # before libtpu is loaded
    compiled = []
    with (
        substitute_devices(topology_devices(place.topology, one_host=True)),
        _recorded(report, request, options) as instances,
        report.stage("compile"),
        ThreadPoolExecutor(MAX_CONCURRENT) as pool,
    ):
        for done, new in enumerate(pool.map(_compiled, instances), 1):
            report.count("program", done, len(instances))
            compiled.append(new)
    report.table()
    summary = f"compiled for {place.name}: {quantity(sum(compiled), 'program')}, there before: {compiled.count(False)}"
    report.note(f"{summary}: they are in {compile_cache_folder()}")


def _compiled(instance: Instance) -> bool:
    """Compile a program for devices that are described into the shared cache; return False where it is there."""
    options = instance.program.options_of(instance.site)
    with suppress(EntryExists):
        retry_without_rejected_options(options, lambda left: instance.compiled(left, compile_cache), warn_refused)
        return True
    return False


@contextmanager
def _recorded(report: Report, request: VideoRequest, options: PipelineOptions) -> Iterator[list[Instance]]:
    """Yield the programs of the run that `generate` would make, recorded."""
    with temp_dir() as folder:
        request = request.under(VideoRequest({"prompt": ""}))
        rendering = VideoCommand(report, request, options, CommandOptions(folder=folder))
        with report.stage("record"):
            instances = rendering.instances()
        yield instances
