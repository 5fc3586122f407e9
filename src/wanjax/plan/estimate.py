# SPDX-License-Identifier: Apache-2.0
"""Estimate the memory and the seconds of each stage of a video, on devices that may be absent."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import jax

from wanjax.errors import install_extra
from wanjax.execution import on_mesh
from wanjax.figures import format_bytes, pluralize
from wanjax.kernels.attention import AUTO, AttentionConfig, choose_implementation
from wanjax.kernels.attention.flash_int8 import ERROR_TEXT as INT8_ERROR
from wanjax.kernels.compiler_options import SAFE_SET, check_option_set
from wanjax.layers.offload import DEFAULT_BLOCKS, STAGES, Offload
from wanjax.layers.placement import host_bytes
from wanjax.layers.precision import STORABLE_PRECISIONS, UNQUANTIZED, Precision
from wanjax.layers.tiling import Tiling
from wanjax.loading import WEIGHTS_OF_8_BITS, abstract_pipeline
from wanjax.media.pictures import Pictures
from wanjax.pipelines.caching.rules import check_separate_forwards
from wanjax.pipelines.decoder_files import DecoderFile
from wanjax.pipelines.meshes import step_cost
from wanjax.pipelines.model import ForwardCost, VideoModel, with_attention
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.tracing import needed_pictures, trace_programs
from wanjax.plan.hardware import (
    Hardware,
    OnProgress,
    find_priceable_hardware,
    fits_on,
    limit_of,
    may_fit_advice,
    mesh_axes,
    mesh_on,
    price_on,
    smallest_slice_advice,
)
from wanjax.plan.video_programs import DENSE, REUSING, STEP, VideoProgram, programs_of
from wanjax.pricing.chips import CARDS, Card, Slice
from wanjax.pricing.pricer import Price
from wanjax.pricing.roofline import Machine
from wanjax.registry import ModelDescription, stored_dtypes
from wanjax.sharding import SHARDING_RULES, Partitioner, is_in_host_memory

JAX_MEMORY_FRACTION = 0.75  # the fraction of a card's memory that JAX allocates by default
ESTIMATED_BY_MODEL = "a model of the time of each kernel in the card's compiled program"
MEMORY_SIZES = (16, 24, 32, 80)  # GiB of a device
OPTIONS_TO_FIT = (  # options, each with two flags: whether it quantizes weights, and whether it offloads blocks
    (f"--precision {WEIGHTS_OF_8_BITS}", True, False),
    ("--offload blocks", False, True),
    (f"--precision {WEIGHTS_OF_8_BITS} --offload blocks", True, True),
)
PricedProgram = tuple[VideoProgram, Price]


@dataclass(frozen=True)
class Stage:
    """The peak memory of a stage on one device, and its time.

    `weights_bytes_per_chip` counts weights and other arguments. `activation_bytes_per_chip` counts all other bytes of
    the program. `kept_bytes_per_chip` counts networks that stay on the device for another stage. `seconds` is the time
    of all runs of the stage's programs; it is None if the stage does not fit.
    """

    weights_bytes_per_chip: int
    activation_bytes_per_chip: int
    kept_bytes_per_chip: int
    peak_bytes_per_chip: int
    spare_bytes_per_chip: int
    seconds: float | None
    compile_seconds: float


@dataclass(frozen=True)
class Row:
    """A program of a video: how often it runs, the seconds of one run, and its bytes on one device.

    For cards, `kernels` counts how often one run starts each kind of kernel.
    """

    stage: str
    name: str
    times: int
    seconds: float | None
    arguments_bytes_per_chip: int
    peak_bytes_per_chip: int
    kept_bytes_per_chip: int
    kernels: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """The estimated memory and time of a video. The figures are prices, not measurements.

    `fits` is True if every stage fits. `fits` is None if the roofline model cannot decide. The peak of this model is an
    upper bound, because the model assumes no fusion. Unless `fits` is True, `advice` says what to do.

    `compiler` is the name of the set of compiler options; None if nothing was compiled. `attention` is the priced
    implementation of self-attention. A run uses the same implementation if the trials of its kernel pass.

    `offload` is the offload as `Offload.of` reads it. `host_bytes` is the size of the blocks in the host's memory. It
    counts the blocks of all networks or, if each network is freed after its stage, the blocks of the largest network.

    `full_precision` describes the projections that stay in full precision when the other weights have 8 bits.

    `reusing_steps` is the number of steps that reuse values of the step cache. `dense_steps` is the number of steps
    that use full attention, which are the first steps of radial attention. Fields named `step_...` describe all other
    steps. Some caches decide on the device whether a step reuses values. For such a cache, `reusing_step_seconds` is
    the time of a step that does not reuse values, `reusing_step_seconds_least` is the time of a step that reuses
    values, and `total_seconds_least` assumes the maximum number of reusing steps.
    `step_seconds_worst` is the high end of the time of a step in which every attention head takes its running-max path;
    None if kernels have no schedules. `total_seconds_low` adds up the low ends of all programs, and
    `total_seconds_high` adds up the high ends.

    `fits_in` maps sizes of a device's memory to the first option with which the video fits. The option is empty if the
    video fits without an option, and None if no option suffices. These options are estimates, with the activations of
    the compiled programs. If nothing was compiled, the estimates count only weights and inputs. `fits_in` is empty if
    the video fits and the caller did not request options.

    `peak_bytes_per_chip` is the peak of the whole run. `frames_per_second` is the rate at which a streamed video gets
    its frames, including decoding, once the attention window is full. Compare this rate with `fps`, the rate of
    playback.
    """

    model: str
    chip: str
    devices: int
    mesh: Mapping[str, int]
    rules: str
    compiler: str | None
    size: str
    frames: int
    fps: int
    steps: int
    guidance_scale: float
    guidance_rule: str
    dtype: str
    precision: str
    full_precision: Sequence[str]
    offload: str
    host_bytes: int
    priced_by: str
    memory_per_chip: int
    fits: bool | None
    peak_bytes_per_chip: int
    stages: Mapping[str, Stage]
    programs: Sequence[Row]
    step_seconds: float | None
    step_seconds_low: float | None
    step_seconds_high: float | None
    step_seconds_worst: float | None
    step_breakdown: Mapping[str, float]
    step_outside_self_attention_seconds: float | None
    attention: str
    cache: str
    reusing_steps: int
    reusing_step_seconds: float | None
    reusing_step_seconds_least: float | None
    dense_steps: int
    dense_step_seconds: float | None
    mfu: float | None
    peak_dtype: str
    total_seconds: float | None
    total_seconds_least: float | None
    total_seconds_low: float | None
    total_seconds_high: float | None
    frames_per_second: float | None
    compile_seconds: float
    download_bytes_at_most: int
    disk_bytes: int
    limit: str
    collectives: Sequence[Mapping[str, Any]]
    doubts: Sequence[str]
    advice: str | None
    fits_in: Mapping[str, str | None]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate_video(
    description: ModelDescription,
    chip: str,
    mesh: tuple[int, int, int] | None = None,
    *,
    sp: int | None = None,
    rules: str = "fsdp",
    compiler: str = SAFE_SET,
    attention: AttentionConfig = AUTO,
    batch_guidance: bool = False,
    tiling: Tiling | None = None,
    pictures: Pictures | None = None,
    offload: Offload = STAGES,
    decoder: DecoderFile | None = None,
    finds_options: bool = False,
    on_progress: OnProgress = lambda running_names, done, total: None,
) -> Estimate:
    """Estimate a video with the description's settings on a slice such as v6e-8.

    Without `mesh`, the best mesh is chosen. If `sp` is set, this mesh has an axis `sp` of this size. Without
    `pictures`, the estimate assumes the pictures that the model requires, in the size of the video. With
    `finds_options`, the estimate has options for other sizes of memory (`fits_in`) even if the video fits.
    `on_progress` is as in `price_on`. The other arguments are as in `wanjax.load` and `Pipeline.denoise`. Raises
    WanjaxError if the chip is unknown, the mesh does not match its number of devices, or a compiler is missing.
    """
    family, settings = description.family, description.settings
    model = with_attention(description.model, attention, settings.model)
    hardware, attention = find_priceable_hardware(chip), model.spec.resolve_attention(attention)
    check_option_set(compiler)
    doubts: list[str] = []
    if isinstance(hardware, Machine):
        if chip in CARDS:
            doubts.append(
                f"nothing was compiled for {chip}: {install_extra('plan-cuda')} for exact memory, and for "
                "times that are estimated from the compiled kernels"
            )
        if attention.window is not None:
            doubts.append(
                f"the window of {pluralize(attention.window, 'token')} is ignored: the price is that of full attention"
            )
        attention, compiler = (
            attention if attention.is_sparse else AttentionConfig("reference"),
            SAFE_SET,
        )  # needs no compiler
    options = {"attention": attention, "rules": SHARDING_RULES[rules], "offload": offload}
    compute_step_cost = partial(step_cost, family, model, settings, param_dtype=description.param_dtype, **options)
    hardware, axes = mesh_axes(hardware, mesh, compute_step_cost, sp, one_device=offload.blocks > 0)
    offload.check_devices(hardware.devices)
    attention_cost = model.cost(model.spec.passes_of(settings)[0])
    check_separate_forwards(settings.cache, batch_guidance=batch_guidance, mesh_sizes=axes)
    settings = replace(settings, cache=model.spec.cache_rule(settings))
    # only the weights decide which steps reuse
    if not (settings.cache.reuse_is_known_before_run or settings.cache.decided_on_device):
        doubts.append(
            f"which steps reuse cached values ({settings.cache}) is not known in advance: the price assumes one such "
            "step"
        )
    if attention.qk:
        doubts.append(f"attention is not exact with qk={attention.qk}: {INT8_ERROR}")
    partitioner = Partitioner(mesh_on(hardware, axes), SHARDING_RULES[rules], num_device_blocks=offload.blocks)
    load_options: dict[str, Any] = {
        "attention": attention,
        "compiler": compiler,
        "offload": offload,
        "decoder": decoder,
    }
    pipe = abstract_pipeline(replace(description, model=model, settings=settings), partitioner, **load_options)

    def programs_for(settings: Settings, pipe: Pipeline = pipe) -> list[VideoProgram]:
        run_pictures = needed_pictures(pipe, settings) if pictures is None else pictures
        options = {"tiling": tiling, "batch_guidance": batch_guidance, "memory": hardware.memory}
        return programs_of(trace_programs(pipe, settings, run_pictures, **options))

    programs = programs_for(settings)
    program_prices = price_on(hardware, [(program.name, program.abstract_call) for program in programs], on_progress)
    prices = list(zip(programs, program_prices, strict=True))
    (step,) = (price for program, price in prices if program.name == STEP)
    names = dict.fromkeys(program.stage for program in programs)
    stages = {name: _stage([pair for pair in prices if pair[0].stage == name], hardware.memory) for name in names}
    if isinstance(hardware, Slice) and isinstance(hardware.chip, Card):
        peak = max(stage.peak_bytes_per_chip for stage in stages.values())
        if JAX_MEMORY_FRACTION * hardware.memory < peak <= hardware.memory:
            doubts.append(
                f"the peak is above the {JAX_MEMORY_FRACTION:.0%} of a card that JAX allocates by default: set "
                "XLA_CLIENT_MEM_FRACTION=.95 in the environment"
            )
    memory = _memory_fields(settings, chip, hardware, stages, step)

    def programs_with(precision: str, blocks: int) -> list[VideoProgram]:
        changed = replace(settings, precision=precision)
        changed_options: dict[str, Any] = load_options | {"offload": replace(offload, blocks=blocks)}
        changed_pipe = abstract_pipeline(
            replace(description, model=model, settings=changed),
            replace(partitioner, num_device_blocks=blocks),
            **changed_options,
        )
        return programs_for(changed, changed_pipe)

    fits_in: Mapping[str, str | None] = {}
    if finds_options or memory["fits"] is False:
        peaks = {"": _estimated_peak(prices, programs, hardware)}
        can_offload = hardware.devices == 1 and not offload.blocks
        can_quantize = settings.precision == UNQUANTIZED.name and family.unquantized_projections(model) is not None
        for option, quantizes, offloads in OPTIONS_TO_FIT:
            if (can_quantize or not quantizes) and (can_offload or not offloads):
                precision = WEIGHTS_OF_8_BITS if quantizes else settings.precision
                blocks = DEFAULT_BLOCKS if offloads else offload.blocks
                peaks[option] = _estimated_peak(prices, programs_with(precision, blocks), hardware)
        fits_in = {
            f"{size} GiB": next((option for option, peak in peaks.items() if peak <= size * 2**30), None)
            for size in MEMORY_SIZES
        }
        if memory["fits"] is False:
            memory["advice"] += _options_advice(peaks, hardware.memory)
            if tiling is None and stages["decode"].spare_bytes_per_chip < 0:
                memory["advice"] += "; --tile needs less to decode: plan with it"
    chunk_frames = model.spec.chunk_length
    programs_with_next_chunk = (
        programs_for(settings.updated({"frames": settings.frames + chunk_frames})) if chunk_frames else []
    )
    components = pipe.components.abstract()
    networks = {name: family.network_of(config) for name, config in model.spec.networks.items()}
    dtypes = stored_dtypes(description)
    precision = Precision.of(settings.precision)
    return Estimate(
        model=settings.model,
        chip=chip,
        devices=hardware.devices,
        mesh=axes,
        rules=rules,
        compiler=compiler if isinstance(hardware, Slice) else None,
        size=f"{settings.width}x{settings.height}",
        frames=settings.frames,
        fps=settings.fps,
        steps=settings.steps,
        guidance_scale=settings.guidance_scale,
        guidance_rule=str(settings.guidance_rule),
        dtype=settings.dtype,
        precision=settings.precision,
        full_precision=(precision.quantizes and family.unquantized_projections(model)) or [],
        offload=str(offload),
        host_bytes=(max if offload.frees_stages else sum)(
            host_bytes(components.get(name)) for name in model.spec.networks
        ),
        attention=_attention_name(attention, attention_cost, settings.dtype, partitioner),
        priced_by=_priced_by(hardware),
        **memory,
        fits_in=fits_in,
        programs=[
            Row(
                program.stage,
                program.name,
                program.times,
                price.seconds,
                price.argument_bytes,
                price.peak_bytes,
                program.resident_bytes,
                price.kernels,
            )
            for program, price in prices
        ],
        **_step_fields(settings, hardware, step, attention_cost if attention.is_dense else None),
        **_total_fields(model, settings, stages, prices),
        frames_per_second=_frames_per_second(chunk_frames, programs_with_next_chunk, prices),
        compile_seconds=sum(stage.compile_seconds for stage in stages.values()),
        download_bytes_at_most=4 * sum(network.parameters for network in networks.values()),
        disk_bytes=sum(
            network.weight_bytes(
                dtypes.get(name, "bfloat16"), precision if precision.name in STORABLE_PRECISIONS else UNQUANTIZED
            )
            for name, network in networks.items()
        ),  # the bytes of the weights in the form in which `wanjax convert` stores them
        doubts=[*dict.fromkeys(doubt for price in program_prices for doubt in price.doubts), *doubts],
    )


def _attention_name(
    attention: AttentionConfig, attention_cost: ForwardCost, dtype: str, partitioner: Partitioner
) -> str:
    """Name the implementation of self-attention that a run uses on these devices."""
    if attention.is_sparse:
        return str(attention)
    shape = (1, attention_cost.num_tokens, attention_cost.num_heads, attention_cost.width // attention_cost.num_heads)
    operand = jax.ShapeDtypeStruct(shape, dtype, sharding=partitioner.replicated)
    with on_mesh(partitioner):  # kernels get the kind of chip from this mesh
        return choose_implementation(operand, operand, operand, implementation=attention).name + (
            f":qk={attention.qk}" if attention.qk else ""
        )


def _priced_by(hardware: Hardware) -> str:
    if isinstance(hardware, Machine):
        return "a stated model"
    return ESTIMATED_BY_MODEL if isinstance(hardware.chip, Card) else "the chip's compiler"


def _memory_fields(
    settings: Settings, chip: str, hardware: Hardware, stages: Mapping[str, Stage], step: Price
) -> dict[str, Any]:
    """Return the fields of `Estimate` about the stages, their memory, and what limits the speed of the video."""
    stage_fits = [
        fits_on(hardware, stage.weights_bytes_per_chip + stage.kept_bytes_per_chip, stage.peak_bytes_per_chip)
        for stage in stages.values()
    ]
    fits = False if False in stage_fits else None if None in stage_fits else True
    tightest_stage = min(stages, key=lambda name: stages[name].spare_bytes_per_chip)
    return {
        "memory_per_chip": hardware.memory,
        "fits": fits,
        "peak_bytes_per_chip": max(stage.peak_bytes_per_chip for stage in stages.values()),
        "stages": stages,
        "limit": (None if fits is False else limit_of(step)) or f"the memory of a chip, in {tightest_stage}",
        "advice": None if fits else _advice(settings, chip, stages, hardware.devices, fits),
    }


def _frames_per_second(
    chunk_frames: int, programs_with_next_chunk: Sequence[VideoProgram], prices: Sequence[PricedProgram]
) -> float | None:
    """Return the frames per second of a streamed video, from the price of one more chunk.

    `programs_with_next_chunk` has the programs of a video that is one chunk longer, and is empty if the video is not
    streamed. Return None if the video is not streamed, if a program does not fit, or if a program has no price.
    """
    times_and_seconds = {(program.stage, program.name): (program.times, price.seconds) for program, price in prices}
    seconds = 0.0
    for program in programs_with_next_chunk:
        previous_times, price = times_and_seconds.get((program.stage, program.name), (0, None))
        if price is None:
            return None
        seconds += (program.times - previous_times) * price
    return chunk_frames / seconds if programs_with_next_chunk else None


def _step_fields(
    settings: Settings, hardware: Hardware, step: Price, attention_cost: ForwardCost | None
) -> dict[str, Any]:
    """Return the fields of `Estimate` about a step. `mfu` is None if `attention_cost` is None.

    A window or a mask reduces the work of attention by an unknown amount, so there is no `mfu` with them.
    """
    flops = attention_cost and (2 if settings.guided else 1) * sum(attention_cost.flops.values())
    return {
        "step_seconds": step.seconds,
        "step_seconds_low": step.low if step.seconds else None,
        "step_seconds_high": step.high if step.seconds else None,
        "step_seconds_worst": step.worst if step.seconds else None,
        "step_breakdown": step.parts,
        "step_outside_self_attention_seconds": step.seconds and step.seconds - step.self_attention,
        "mfu": step.seconds and flops and flops / (step.seconds * hardware.devices * hardware.flops),
        "peak_dtype": hardware.peak_dtype,
        "collectives": step.collectives,
    }


def _total_fields(
    model: VideoModel, settings: Settings, stages: Mapping[str, Stage], prices: Sequence[PricedProgram]
) -> dict[str, Any]:
    """Return the fields of `Estimate` about the whole run, about steps that reuse cached values, and about dense steps.

    The low end of the range assumes the maximum number of reusing steps.
    """
    total = _sum(stage.seconds for stage in stages.values())
    values: dict[str, Any] = {
        "cache": str(settings.cache),
        "total_seconds": total,
        "reusing_step_seconds_least": None,
        "total_seconds_least": None,
        "total_seconds_low": None,
        "total_seconds_high": None,
    }
    for kind in (REUSING, DENSE):
        times, seconds = next(((run.times, x.seconds) for run, x in prices if run.name == kind), (0, None))
        values |= {f"{kind}s": times, f"{kind}_seconds": seconds}
    if settings.cache.decided_on_device:
        values["reusing_steps"] = max_reusing = sum(model.spec.reused_steps(settings))
        least_seconds = next((x.least for run, x in prices if run.name == REUSING), None)
        if least_seconds is not None and total is not None:
            saved = max_reusing * (values["reusing_step_seconds"] - least_seconds)
            values |= {"reusing_step_seconds_least": least_seconds, "total_seconds_least": total - saved}
    if total is not None:
        low, high = (sum(run.times * getattr(x, end) for run, x in prices) for end in ("low", "high"))
        values["total_seconds_low"] = low * (values["total_seconds_least"] or total) / total
        values["total_seconds_high"] = high
    return values


def _stage(programs: Sequence[PricedProgram], memory: int) -> Stage:
    """Build a stage from its programs.

    The programs run one after another, so the stage needs the memory of the largest program.
    """
    program, largest = max(programs, key=lambda pair: pair[1].peak_bytes + pair[0].resident_bytes)
    return Stage(
        weights_bytes_per_chip=largest.argument_bytes,
        activation_bytes_per_chip=largest.peak_bytes - largest.argument_bytes,
        kept_bytes_per_chip=program.resident_bytes,
        peak_bytes_per_chip=largest.peak_bytes + program.resident_bytes,
        spare_bytes_per_chip=memory - largest.peak_bytes - program.resident_bytes,
        seconds=_sum(x.seconds and run.times * x.seconds for run, x in programs),
        compile_seconds=sum(price.compile_seconds for _, price in programs),
    )


def _sum(seconds: Iterable[float | None]) -> float | None:
    """Return the sum of the seconds, or None if one number is None."""
    values = list(seconds)
    return None if None in values else sum(filter(None, values))


def _estimated_peak(prices: Sequence[PricedProgram], changed: Sequence[VideoProgram], hardware: Hardware) -> int:
    """Estimate the peak of a run on one device with weights of another size.

    The estimate uses the activations of the compiled programs. If nothing was compiled, activations count as 0 bytes.

    Args:
        prices: The programs and their prices.
        changed: The same programs with other weights.
        hardware: The devices.
    """
    priced = {(program.stage, program.name): (program, price) for program, price in prices}
    peaks = []
    for program in changed:
        original, price = priced[program.stage, program.name]
        activations = price.peak_bytes - _argument_bytes(original) if isinstance(hardware, Slice) else 0
        peaks.append(activations + _argument_bytes(program) + program.resident_bytes)
    return max(peaks)


def _argument_bytes(program: VideoProgram) -> int:
    """Return the bytes of a program's arguments on one device. For weights in the host's memory, count two blocks."""
    argument_bytes = 0
    for x in jax.tree.leaves(program.abstract_call.arguments):
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        device_bytes = math.prod(shape) * x.dtype.itemsize
        if sharding is not None and is_in_host_memory(x):
            device_bytes = device_bytes * min(DEFAULT_BLOCKS, x.shape[0]) // x.shape[0]
        argument_bytes += device_bytes
    return argument_bytes


def _options_advice(peaks: Mapping[str, int], memory: int) -> str:
    """Return the end of the advice: the options with which the video fits, and the memory that it then needs.

    Args:
        peaks: The peak with each option.
        memory: The memory of a device.
    """
    fitting = {option: peak for option, peak in peaks.items() if option and peak <= memory}
    single_options = {option: peak for option, peak in fitting.items() if option.count("--") == 1}
    return "".join(
        f"; {option} needs about {format_bytes(peak, 1024)}" for option, peak in (single_options or fitting).items()
    )


def _advice(settings: Settings, chip: str, stages: Mapping[str, Stage], devices: int, fits: bool | None) -> str:
    """Write the advice for a video that does not fit, or that may not fit."""
    name, largest = max(stages.items(), key=lambda item: item[1].peak_bytes_per_chip)
    video = f"{settings.model} at {settings.width}x{settings.height} and {pluralize(settings.frames, 'frame')}"
    needed_bytes, memory = largest.peak_bytes_per_chip, largest.peak_bytes_per_chip + largest.spare_bytes_per_chip
    if fits is None:
        min_bytes = largest.weights_bytes_per_chip + largest.kept_bytes_per_chip
        return may_fit_advice(f"{video} may fit {chip}", f"to {name} it", min_bytes, needed_bytes, memory)
    return (
        f"{video} does not fit {chip}: to {name} it needs {format_bytes(needed_bytes, 1024)} a chip, which has "
        f"{format_bytes(memory, 1024)}; {smallest_slice_advice(chip, needed_bytes * devices)}"
    )
