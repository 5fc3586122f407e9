# SPDX-License-Identifier: Apache-2.0
"""The commands `plan` and `warmup`: trace a run, then price it for devices that need not be present, or compile its
programs."""

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
from wanjax.cli.options import is_given
from wanjax.cli.parsed import CommandOptions, PipelineOptions, TrainingOptions, WorkloadOptions
from wanjax.cli.processes import init_distributed
from wanjax.cli.report import Report
from wanjax.cli.scaling import COMPILE_SUM, print_scale, reason_for_best
from wanjax.cli.stages import VideoCommand, loras_of
from wanjax.cli.tables import fold_text, print_table, stdout_width
from wanjax.compile_cache.cache import compile_cache, compile_cache_folder
from wanjax.compile_cache.shared import EntryExists, current_shared_cache
from wanjax.errors import WanjaxError
from wanjax.execution import EXECUTE, TracedProgram, warn_rejected_option
from wanjax.figures import format_bytes, format_duration, format_mesh, format_number, format_range, pluralize
from wanjax.kernels.attention import AUTO
from wanjax.kernels.compiler_options import SAFE_SET
from wanjax.layers.offload import AUTO_OFFLOAD, STAGES
from wanjax.layers.precision import UNQUANTIZED
from wanjax.media.pictures import Pictures
from wanjax.pipelines import progress
from wanjax.pipelines.decoder_files import read_decoder
from wanjax.pipelines.mesh_sizes import MeshSizes
from wanjax.pipelines.model import with_scheduler
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.validation import check_loaded
from wanjax.plan.estimate import ESTIMATED_BY_MODEL, Estimate, estimate_video
from wanjax.plan.estimate_cache import store_estimate
from wanjax.plan.hardware import find_priceable_hardware
from wanjax.plan.scale import ScaleEstimate, Workload, estimate_at_scale
from wanjax.plan.training_estimate import TrainingEstimate, estimate_training
from wanjax.pricing.chips import Slice, find_slice, topology_devices
from wanjax.pricing.compile import ENVIRONMENT, MAX_CONCURRENT, check_compiler
from wanjax.pricing.lowering import retry_without_rejected_options
from wanjax.sharding import ONE_DEVICE_PARTITIONER, substitute_devices
from wanjax.stores.temporary import temp_dir
from wanjax.training.adapters import LoraConfig
from wanjax.training.optimizers import OptimizerConfig

STAGE_COLUMNS = ("stage", "weights and inputs", "beside them", "kept", "peak a chip", "to spare", "time")
_format_gib = partial(format_bytes, base=1024)  # the memory of chips is given in GiB


def plan(
    report: Report,
    request: VideoRequest,
    options: PipelineOptions,
    chip: str,
    training_options: TrainingOptions,
    workload_options: WorkloadOptions,
    *,
    as_json: bool,
    programs: bool = False,
    fit: bool = False,
) -> None:
    """Price a video, a step of training or many videos, and print a table or JSON."""
    jax.config.update("jax_platforms", "cpu")  # the priced chips need not be present
    find_priceable_hardware(chip)
    workload = None if workload_options.requests is None else Workload(**workload_options._asdict())
    if fit and (workload or training_options.train):
        raise WanjaxError("--fit is for one video, not for --train or --requests: leave out --fit")
    if workload and training_options.train:
        raise WanjaxError("--train prices a step of training and --requests prices videos: give one of them")
    mesh, loras = options.mesh, loras_of(options)
    mesh_sizes, sp = (mesh, None) if isinstance(mesh, MeshSizes) else (None, mesh and mesh.sp)
    lora_attention = registry.first_lora_attention(
        lora for lora in loras if Path(lora.file).is_file()
    )  # use only files on this machine; download nothing
    attention = options.attention or lora_attention or AUTO
    price_options = {"sp": sp, "rules": options.rules, "compiler": options.compiler or SAFE_SET, "attention": attention}
    if not is_given("model"):
        report.note(f"note: no MODEL is given, so this prices {options.model}: `wanjax models` lists the others")
    description = registry.apply_distilled_loras(registry.model_description(str(options.model)), loras, report.note)
    if request.scheduler is not None:
        description = replace(description, model=with_scheduler(description.model, request.scheduler))
    dtypes = {"dtype": "float32", "vae_dtype": "float32"} if chip == "cpu" else {"dtype": "bfloat16"}
    description = replace(description, settings=description.settings.updated(dtypes))
    check_loaded(description.settings, {"dtype": options.dtype, "vae_dtype": options.vae_dtype})
    description = loading.with_precision(description, options.precision)
    pictures, settings = _complete_request(loading.abstract_pipeline(description, ONE_DEVICE_PARTITIONER), request)
    description = replace(description, settings=settings)
    if training_options.train:
        lora = None if training_options.full else LoraConfig(training_options.lora_rank)
        price_options |= {
            "lora": lora,
            "optimizer_config": OptimizerConfig(training_options.optimizer),
            "batch_size": training_options.batch_size,
        }
        estimator = partial(estimate_training, description, chip, mesh_sizes, **price_options)
    else:
        offload = (AUTO_OFFLOAD if settings.windows > 1 else STAGES).overridden_by(options.offload)
        price_options |= {**options.run_options, "pictures": pictures, "offload": offload}
        if file := options.decoder:
            price_options |= {"decoder": read_decoder(file, description.model.vae, description.family)}
        estimator = (
            partial(estimate_at_scale, description, chip, workload)
            if workload
            else partial(estimate_video, description, chip)
        )
        price_options |= {"finds_options": True} if fit else {}
        estimator = partial(estimator, mesh_sizes, **price_options)

    def count_programs(current_names: Sequence[str], done: int, total: int) -> None:
        report.set_progress("program", done, total, suffix=" and ".join(current_names))

    with report.stage("plan", at_once=True):
        estimate = estimator(on_progress=count_programs)
    if isinstance(estimate, Estimate) and not (options.offload and options.offload.blocks):
        store_estimate(estimate, settings)
    if as_json:
        reason = {"why": reason_for_best(estimate)} if isinstance(estimate, ScaleEstimate) else {}
        click.echo(json.dumps(reason | estimate.to_json(), indent=2))
    else:
        PRINTERS[type(estimate)](estimate, progress.console(stderr=False))
        if programs and isinstance(estimate, Estimate):
            print_programs(estimate, progress.console(stderr=False))


def _complete_request(pipe: Pipeline, request: VideoRequest) -> tuple[Pictures | None, Settings]:
    """Return the pictures of a request, or None if it has no pictures, and the complete settings of its video."""
    if not request.inputs:
        return None, pipe.settings(**request.settings)
    return pipe.prepare(**request.inputs, **request.settings)


def _print_sentence(console: Console, sentence: str) -> None:
    """Print a sentence. On a narrow terminal, fold it between words."""
    for line in fold_text(sentence, stdout_width()):
        console.print(line)


def _format_precision(estimate: TrainingEstimate) -> str:
    """Return a part of a sentence about the frozen weights of a training run. It is empty for floats."""
    return "" if estimate.precision == UNQUANTIZED.name else f" in {estimate.precision}"


def print_training(estimate: TrainingEstimate, console: Console) -> None:
    """Print the price of a step of training."""
    _print_sentence(
        console,
        f"training of {estimate.trained} of {estimate.model}{_format_precision(estimate)} by {estimate.optimizer}, "
        f"{estimate.batch_size} x {estimate.size}, "
        f"{pluralize(estimate.frames, 'frame')}, on {estimate.chip} ({format_mesh(estimate.mesh, ', ')}, rules "
        f"{estimate.rules}), "
        "priced, not measured",
    )
    if estimate.step_seconds:
        parts = {**estimate.step_breakdown, "total": estimate.step_seconds}
        forward_only = {**estimate.forward_breakdown, "total": estimate.forward_seconds or 0.0}
        rows = [
            (part, format_duration(seconds), format_duration(forward_only.get(part, 0.0)))
            for part, seconds in parts.items()
        ]
        print_table(console, ("part", "a step", "forward alone"), rows)
    _print_sentence(
        console,
        f"a chip: {_format_gib(estimate.weights_bytes_per_chip)} of weights, state and inputs, "
        f"{_format_gib(estimate.peak_bytes_per_chip)} at the peak, of {_format_gib(estimate.memory_per_chip)}",
    )
    if estimate.backward_ratio is not None:
        ratio = format_number(estimate.backward_ratio)
        _print_sentence(
            console, f"the backward pass and the optimiser take {ratio} x the forward pass; limited by {estimate.limit}"
        )
    for doubt in estimate.doubts:
        _print_sentence(console, f"in doubt: {doubt}")
    _print_sentence(
        console, estimate.advice or f"fits, with {_format_gib(estimate.spare_bytes_per_chip)} to spare on each chip"
    )


def print_estimate(estimate: Estimate, console: Console) -> None:
    """Print the estimate of a video as tables and sentences."""
    price_source = f"priced by {estimate.priced_by}, not measured"
    if estimate.priced_by == ESTIMATED_BY_MODEL:
        price_source = f"memory by the card's compiler; times an estimate by {ESTIMATED_BY_MODEL}, not measured"
    options = "" if estimate.compiler is None else f", compiler {estimate.compiler}"
    precision = f", {estimate.precision}" if estimate.full_precision else ""
    _print_sentence(
        console,
        f"{estimate.model}, {estimate.size}, {pluralize(estimate.frames, 'frame')}, "
        f"{pluralize(estimate.steps, 'step')}, "
        f"{estimate.dtype}{precision}, "
        f"on {estimate.chip} ({format_mesh(estimate.mesh, ', ')}, rules {estimate.rules}{options}), "
        f"{price_source}",
    )
    stages = [
        (
            name,
            _format_gib(stage.weights_bytes_per_chip),
            _format_gib(stage.activation_bytes_per_chip),
            _format_gib(stage.kept_bytes_per_chip),
            _format_gib(stage.peak_bytes_per_chip),
            "unknown"
            if estimate.fits is None and stage.spare_bytes_per_chip < 0
            else _format_gib(stage.spare_bytes_per_chip),
            "does not fit" if stage.seconds is None else format_duration(stage.seconds),
        )
        for name, stage in estimate.stages.items()
    ]
    print_table(console, STAGE_COLUMNS, stages)
    if step_seconds := estimate.step_seconds:
        parts = [
            (part, format_duration(part_seconds), f"{part_seconds / step_seconds:.0%}")
            for part, part_seconds in estimate.step_breakdown.items()
        ]
        print_table(console, ("a step", "time", "part"), [*parts, ("total", format_duration(step_seconds), "")])
    for line in _summary_lines(estimate):
        _print_sentence(console, line)


def print_programs(estimate: Estimate, console: Console) -> None:
    """Print each program. For NVIDIA's cards, also print the kernels of each program."""
    rows = [
        (
            row.stage,
            row.name,
            str(row.times),
            "does not fit" if row.seconds is None else format_duration(row.seconds),
            _format_gib(row.arguments_bytes_per_chip),
            _format_gib(row.peak_bytes_per_chip),
        )
        for row in estimate.programs
    ]
    print_table(console, ("stage", "program", "times", "each", "weights and inputs", "peak a chip"), rows)
    for row in estimate.programs:
        if row.kernels:
            kernels = ", ".join(f"{times} {name}" for name, times in row.kernels.items())
            _print_sentence(console, f"kernels of {row.stage}'s {row.name}: {kernels}")


def _summary_lines(estimate: Estimate) -> Iterator[str]:
    """Yield sentences about the steps, the whole run, the uncertainty of the estimate, and whether the video fits in
    memory."""
    if estimate.step_seconds:
        step_range = format_range(
            *(format_duration(seconds or 0) for seconds in (estimate.step_seconds_low, estimate.step_seconds_high))
        )
        peak_share = f", {estimate.mfu:.0%} of the chips' {estimate.peak_dtype} peak" if estimate.mfu else ""
        yield f"a step: {step_range}{peak_share}; limited by {estimate.limit}"
        if estimate.step_seconds_worst:
            yield (
                f"at worst: {format_duration(estimate.step_seconds_worst)}, with every head of attention on "
                "its running-max path; "
                "the fetch of instructions is not priced"
            )
        if estimate.compiler:
            trials_text = ", where the chip passes its trials" if "tpu" in estimate.attention else ""
            yield f"attention: {estimate.attention}{trials_text}"
    if estimate.dense_step_seconds:
        dense_time = format_duration(estimate.dense_step_seconds)
        yield f"steps with dense attention: {estimate.dense_steps} of {estimate.steps}, {dense_time} each"
    if estimate.reusing_step_seconds_least is not None:
        reuse_time = format_duration(estimate.reusing_step_seconds or 0)
        reuse_times = f"{format_duration(estimate.reusing_step_seconds_least)} each, or {reuse_time}"
        yield (
            f"steps that reuse cached values ({estimate.cache}), depending on the video: "
            f"up to {estimate.reusing_steps} of {estimate.steps}, {reuse_times}"
        )
    elif estimate.reusing_step_seconds and estimate.step_seconds:
        peak_share = estimate.reusing_steps / estimate.steps
        mean = (1 - peak_share) * estimate.step_seconds + peak_share * estimate.reusing_step_seconds
        yield (
            f"steps that reuse cached values ({estimate.cache}): {estimate.reusing_steps} of {estimate.steps}, "
            f"{format_duration(estimate.reusing_step_seconds)} each, {format_duration(mean)} a step on average"
        )
    if estimate.host_bytes:
        yield (
            f"in the host's memory: {format_bytes(estimate.host_bytes, 1024)} of blocks (--offload {estimate.offload})"
        )
    if estimate.full_precision:
        yield f"not quantized by {estimate.precision}: {', '.join(estimate.full_precision)}"
    for item in estimate.collectives:
        yield (
            f"{item['operation']} over {item['devices']} devices: {item['times']} a step, "
            f"{format_bytes(item['bytes'])} a chip, {format_duration(item['seconds'])}"
        )
    if estimate.frames_per_second is not None:
        frame_rate = format_number(estimate.frames_per_second)
        yield f"streamed: {frame_rate} frames a second with the decoder, for playback at {estimate.fps}"
    if estimate.total_seconds is not None:
        compiling = (
            f", after compiling ({COMPILE_SUM.format(format_duration(estimate.compile_seconds))})"
            if estimate.compile_seconds
            else ""
        )
        lowest = estimate.total_seconds if estimate.total_seconds_least is None else estimate.total_seconds_least
        yield (
            "the whole run: "
            f"{format_range(format_duration(lowest), format_duration(estimate.total_seconds))}{compiling}"
        )
    yield (
        f"download: at most {format_bytes(estimate.download_bytes_at_most)}, if stored in float32; on disk, converted: "
        f"{format_bytes(estimate.disk_bytes)}"
    )
    for doubt in estimate.doubts:
        yield f"in doubt: {doubt}"
    if estimate.fits:
        spare_bytes = min(stage.spare_bytes_per_chip for stage in estimate.stages.values())
        yield f"fits, with {_format_gib(spare_bytes)} of {_format_gib(estimate.memory_per_chip)} to spare on each chip"
    if estimate.advice is not None:
        yield estimate.advice
    if estimate.fits_in:
        yield _format_fits(estimate.fits_in, is_compiled=estimate.compiler is not None)


def _format_fits(fits_in: Mapping[str, str | None], *, is_compiled: bool) -> str:
    """Write, for each option, the smallest size of memory with which the video fits."""
    basis = "estimated from the compiled programs" if is_compiled else "for the weights and inputs alone"
    sizes: dict[str, str] = {}
    for size, options in fits_in.items():
        if options is not None:
            sizes.setdefault(f"with {options}" if options else "as it is", size)
    if not sizes:
        return f"no option suffices for {', '.join(fits_in)} a chip, {basis}"
    return f"memory a chip, {basis}: {'; '.join(f'{size} {answer}' for answer, size in sizes.items())}"


PRINTERS: Mapping[type, Callable[[Any, Console], None]] = {
    Estimate: print_estimate,
    ScaleEstimate: print_scale,
    TrainingEstimate: print_training,
}


def warmup(report: Report, request: VideoRequest, options: PipelineOptions, chip: str | None) -> None:
    """Compile all programs that `generate` runs with these options, on this machine or for a chip. No weights are
    loaded."""
    if chip is not None:
        _fill_shared_cache(report, request, options, find_slice(chip))
        return
    init_distributed(report, options.processes)
    with _traced_programs(report, request, options) as traced_programs, report.stage("compile"):
        EXECUTE.compile(
            *traced_programs, on_start=lambda number, total: report.set_progress("program", number - 1, total)
        )
        report.set_progress("program", len(traced_programs), len(traced_programs))
    report.table()
    report.note(
        f"the compiled programs are in {EXECUTE.executables.folder if EXECUTE.executables else compile_cache_folder()}"
    )


def _fill_shared_cache(report: Report, request: VideoRequest, options: PipelineOptions, target: Slice) -> None:
    """Compile the programs that a shared cache lacks, for a slice that this machine need not have."""
    if options.processes:
        raise WanjaxError("--chip covers all processes of a slice: leave out --processes")
    check_compiler()
    jax.config.update("jax_platforms", "cpu")
    init_distributed(report, None, platform_name="tpu")
    if current_shared_cache() is None:
        raise WanjaxError(f"--chip {target.name} fills a cache for other machines: give it as --compile-cache")
    os.environ.update(ENVIRONMENT)  # before libtpu is loaded
    compiled = []
    with (
        substitute_devices(topology_devices(target.topology, one_host=True)),
        _traced_programs(report, request, options) as traced_programs,
        report.stage("compile"),
        ThreadPoolExecutor(MAX_CONCURRENT) as pool,
    ):
        for done, is_new in enumerate(pool.map(_is_compiled, traced_programs), 1):
            report.set_progress("program", done, len(traced_programs))
            compiled.append(is_new)
    report.table()
    counts = f"{pluralize(sum(compiled), 'program')}, already in the cache: {compiled.count(False)}"
    report.note(f"compiled for {target.name}: {counts}; the cache is {compile_cache_folder()}")


def _is_compiled(traced_program: TracedProgram) -> bool:
    """Compile a program for devices that this machine does not have, and store it in the shared cache. Return False if
    the cache already has the program."""
    options = traced_program.program.compiler_options(traced_program.compile_context)
    with suppress(EntryExists):
        retry_without_rejected_options(
            options, lambda remaining: traced_program.compile(remaining, compile_cache), warn_rejected_option
        )
        return True
    return False


@contextmanager
def _traced_programs(report: Report, request: VideoRequest, options: PipelineOptions) -> Iterator[list[TracedProgram]]:
    """Yield the traced programs that `generate` would run."""
    with temp_dir() as folder:
        request = request.with_defaults(VideoRequest({"prompt": ""}))
        video = VideoCommand(report, request, options, CommandOptions(folder=folder))
        with report.stage("record"):
            traced_programs = video.traced_programs()
        yield traced_programs
