# SPDX-License-Identifier: Apache-2.0
"""Estimate the memory and the seconds of each stage of a video, on devices that may be absent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import jax

from wanjax.execution import on_mesh
from wanjax.figures import in_bytes, quantity
from wanjax.kernels.attention import AUTO, AttentionConfig, choose
from wanjax.kernels.compiler_options import SAFE, check_set
from wanjax.layers.tiling import Tiling
from wanjax.loading import abstract_pipeline
from wanjax.media.pictures import Pictures
from wanjax.pipelines.caching.rules import check_apart
from wanjax.pipelines.meshes import step_cost
from wanjax.pipelines.model import Cost, VideoModel, with_attention
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.tiny_decoder import DecoderFile
from wanjax.pipelines.tracing import needed_pictures, trace_programs
from wanjax.plan.hardware import (
    Hardware,
    OnProgress,
    find_priceable_hardware,
    fits_on,
    limit_of,
    may_fit,
    mesh_axes,
    mesh_on,
    priced_on,
    would_fit,
)
from wanjax.plan.video_programs import DENSE, REUSING, STEP, VideoProgram, programs_of
from wanjax.pricing.chips import CARDS, Card, Slice
from wanjax.pricing.pricer import Price
from wanjax.pricing.roofline import Machine
from wanjax.registry import Outline
from wanjax.sharding import RULES, Partitioner

JAX_MEMORY_FRACTION = 0.75  # fraction of a card's memory that JAX allocates by default
ESTIMATED_BY_MODEL = "a stated model, from the kernels that the card's compiler wrote"
PricedProgram = tuple[VideoProgram, Price]


@dataclass(frozen=True)
class Stage:
    """The peak memory of a stage on one device, and its time.

    `weights_bytes_per_chip` counts weights and other arguments, and `activation_bytes_per_chip` all other bytes of the
    program. `kept_bytes_per_chip` counts networks that stay on the device for another stage. `seconds` is the time of
    all runs of the stage's programs; None if the stage does not fit.
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

    For cards, `kernels` has how often one run starts each kind of kernel.
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
    """The estimated memory and time of a video. These are prices, not measurements.

    `fits` is True if every stage fits. It is None if the roofline model cannot decide, since its peak is an upper bound
    that assumes no fusion. Unless `fits` is True, `advice` says what to do.

    `compiler` is the set of compiler options; None if nothing was compiled. `attention` is the implementation of
    self-attention that was priced, which is the one that a run uses if the trials of its kernel pass.

    `reusing_steps` is the number of steps that reuse values of the step cache. `dense_steps` is the number of steps
    that use full attention, which are the first steps of radial attention. Fields named `step_...` are about all other
    steps. If a step decides on the device whether it reuses, `reusing_step_seconds` is the time of a step that does not
    reuse, `reusing_step_seconds_least` of a step that does, and `total_seconds_least` assumes the maximum number of
    reusing steps. `step_seconds_worst` is the high end of a step in which every attention head takes its safe path;
    None if kernels have no schedules. `total_seconds_low` and `total_seconds_high` are the ends of the range, with
    every program at its own end.

    `peak_bytes_per_chip` is the peak of the whole run. `frames_a_second` is the rate at which a streamed video gets its
    frames, including the decoder, once attention sees a full window. Compare it with `fps`, the rate of playback.
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
    frames_a_second: float | None
    compile_seconds: float
    download_bytes_at_most: int
    disk_bytes: int
    limit: str
    collectives: Sequence[Mapping[str, Any]]
    doubts: Sequence[str]
    advice: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate(
    outline: Outline,
    chip: str,
    mesh: tuple[int, int, int] | None = None,
    *,
    sp: int | None = None,
    rules: str = "fsdp",
    compiler: str = SAFE,
    attention: AttentionConfig = AUTO,
    batch_guidance: bool = False,
    tiling: Tiling | None = None,
    pictures: Pictures | None = None,
    offload: bool | None = True,
    decoder: DecoderFile | None = None,
    on_progress: OnProgress = lambda now, done, total: None,
) -> Estimate:
    """Estimate a video with the outline's settings on a slice such as v6e-8.

    Without `mesh`, the best mesh is chosen, with `sp` as the size of that axis if it is set. Without `pictures`, the
    pictures that the model needs are assumed, in the size of the video. `on_progress` is as in `priced_on`; the other
    arguments are as in `wanjax.load` and `Pipeline.denoise`. Raises WanjaxError if the chip is unknown, the mesh does
    not match its number of devices, or a compiler is missing.
    """
    family, settings = outline.family, outline.settings
    model = with_attention(outline.model, attention, settings.model)
    hardware, attention = find_priceable_hardware(chip), model.spec.attention(attention)
    check_set(compiler)
    doubts: list[str] = []
    if isinstance(hardware, Machine):
        if chip in CARDS:
            doubts.append(
                f"nothing was compiled for {chip}: install wanjax[plan-cuda] for exact memory, and for times that are "
                "estimated from the compiled kernels"
            )
        if attention.window is not None:
            doubts.append(
                f"the window of {quantity(attention.window, 'token')} is ignored: the price is that of full attention"
            )
        attention, compiler = (
            attention if attention.is_sparse else AttentionConfig("reference"),
            SAFE,
        )  # without a compiler, only the reference has a price
    options = {"attention": attention, "rules": RULES[rules], "offload": offload}
    cost = partial(step_cost, family, model, settings, param_dtype=outline.param_dtype, **options)
    hardware, axes = mesh_axes(hardware, mesh, cost, sp)
    attention_cost = model.cost(model.spec.passes_of(settings)[0])
    check_apart(settings.cache, axes["dp"] > 1 or batch_guidance)
    settings = replace(settings, cache=model.spec.cache_rule(settings))
    if not (settings.cache.counted or settings.cache.decided_on_device):  # only the weights decide which steps reuse
        doubts.append(
            f"which steps reuse cached values ({settings.cache}) is not known in advance: only one is priced so"
        )
    partitioner = Partitioner(mesh_on(hardware, axes), RULES[rules])
    load_options = {"attention": attention, "compiler": compiler, "offload": offload, "decoder": decoder}
    pipe = abstract_pipeline(replace(outline, model=model, settings=settings), partitioner, **load_options)

    def programs_for(settings: Settings) -> list[VideoProgram]:
        shown_pictures = needed_pictures(pipe, settings) if pictures is None else pictures
        options = {"tiling": tiling, "batch_guidance": batch_guidance, "room": hardware.memory}
        return programs_of(trace_programs(pipe, settings, shown_pictures, **options))

    programs = programs_for(settings)
    priced = priced_on(hardware, [(program.name, program.lowering) for program in programs], on_progress)
    prices = list(zip(programs, priced, strict=True))
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
    chunk_frames = model.spec.chunk_length
    programs_with_next_chunk = (
        programs_for(settings.updated({"frames": settings.frames + chunk_frames})) if chunk_frames else []
    )
    networks = [family.network_of(config) for config in model.spec.networks.values()]
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
        attention=_attention_name(attention, attention_cost, settings.dtype, partitioner),
        priced_by=_priced_by(hardware),
        **_memory(settings, chip, hardware, stages, step),
        programs=[
            Row(
                program.stage,
                program.name,
                program.times,
                price.seconds,
                price.arguments,
                price.peak,
                program.beside,
                price.kernels,
            )
            for program, price in prices
        ],
        **_step(settings, hardware, step, attention_cost if attention.is_dense else None),
        **_totals(model, settings, stages, prices),
        frames_a_second=_frames_per_second(chunk_frames, programs_with_next_chunk, prices),
        compile_seconds=sum(stage.compile_seconds for stage in stages.values()),
        download_bytes_at_most=4 * sum(network.parameters for network in networks),
        disk_bytes=sum(
            network.parameters * (4 if network.float32 else 2) for network in networks
        ),  # as `wanjax convert` stores them
        doubts=[*dict.fromkeys(doubt for price in priced for doubt in price.doubts), *doubts],
    )


def _attention_name(attention: AttentionConfig, attention_cost: Cost, dtype: str, partitioner: Partitioner) -> str:
    """Return the implementation of self-attention that a run uses on these devices."""
    if attention.is_sparse:
        return str(attention)
    shape = (1, attention_cost.tokens, attention_cost.heads, attention_cost.width // attention_cost.heads)
    operand = jax.ShapeDtypeStruct(shape, dtype, sharding=partitioner.replicated)
    with on_mesh(partitioner):  # the kernels ask it for the chip
        return choose(operand, operand, operand, implementation=attention).name


def _priced_by(hardware: Hardware) -> str:
    if isinstance(hardware, Machine):
        return "a stated model"
    return ESTIMATED_BY_MODEL if isinstance(hardware.chip, Card) else "the chip's compiler"


def _memory(
    settings: Settings, chip: str, hardware: Hardware, stages: Mapping[str, Stage], step: Price
) -> dict[str, Any]:
    """Return the fields of `Estimate` on the stages and their memory, and on what limits the video."""
    stage_fits = [
        fits_on(hardware, stage.weights_bytes_per_chip + stage.kept_bytes_per_chip, stage.peak_bytes_per_chip)
        for stage in stages.values()
    ]
    fits = False if False in stage_fits else None if None in stage_fits else True
    tightest = min(stages, key=lambda name: stages[name].spare_bytes_per_chip)
    return {
        "memory_per_chip": hardware.memory,
        "fits": fits,
        "peak_bytes_per_chip": max(stage.peak_bytes_per_chip for stage in stages.values()),
        "stages": stages,
        "limit": (None if fits is False else limit_of(step)) or f"the memory of a chip, in {tightest}",
        "advice": None if fits else _advice(settings, chip, stages, hardware.devices, fits),
    }


def _frames_per_second(
    chunk_frames: int, programs_with_next_chunk: Sequence[VideoProgram], prices: Sequence[PricedProgram]
) -> float | None:
    """Return the frames per second of a video that is streamed, from the price of one more chunk.

    `programs_with_next_chunk` has the programs of a video that is one chunk longer; it is empty if the video is not
    streamed. Returns None for such a video, and if a program does not fit or has no price, as for a single chunk.
    """
    times_and_seconds = {(program.stage, program.name): (program.times, price.seconds) for program, price in prices}
    seconds = 0.0
    for program in programs_with_next_chunk:
        previous_times, price = times_and_seconds.get((program.stage, program.name), (0, None))
        if price is None:
            return None
        seconds += (program.times - previous_times) * price
    return chunk_frames / seconds if programs_with_next_chunk else None


def _step(settings: Settings, hardware: Hardware, step: Price, attention_cost: Cost | None) -> dict[str, Any]:
    """Return the fields on a step; without its work, which a window or a mask makes less, no share of a peak."""
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


def _totals(
    model: VideoModel, settings: Settings, stages: Mapping[str, Stage], prices: Sequence[PricedProgram]
) -> dict[str, Any]:
    """Return the fields of `Estimate` on the whole run, on steps that reuse cached values, and on dense steps.

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
        values["reusing_steps"] = most = sum(model.spec.reused(settings))
        least = next((x.least for run, x in prices if run.name == REUSING), None)
        if least is not None and total is not None:
            saved = most * (values["reusing_step_seconds"] - least)
            values |= {"reusing_step_seconds_least": least, "total_seconds_least": total - saved}
    if total is not None:
        low, high = (sum(run.times * getattr(x, end) for run, x in prices) for end in ("low", "high"))
        values["total_seconds_low"] = low * (values["total_seconds_least"] or total) / total
        values["total_seconds_high"] = high
    return values


def _stage(programs: Sequence[PricedProgram], memory: int) -> Stage:
    """Return a stage from its programs. They run one after another, so the largest one sets the stage's memory."""
    program, largest = max(programs, key=lambda pair: pair[1].peak + pair[0].beside)
    return Stage(
        weights_bytes_per_chip=largest.arguments,
        activation_bytes_per_chip=largest.peak - largest.arguments,
        kept_bytes_per_chip=program.beside,
        peak_bytes_per_chip=largest.peak + program.beside,
        spare_bytes_per_chip=memory - largest.peak - program.beside,
        seconds=_sum(x.seconds and run.times * x.seconds for run, x in programs),
        compile_seconds=sum(priced.compile_seconds for _, priced in programs),
    )


def _sum(seconds: Iterable[float | None]) -> float | None:
    """Return the sum of the seconds, or None if one of them is None."""
    values = list(seconds)
    return None if None in values else sum(filter(None, values))


def _advice(settings: Settings, chip: str, stages: Mapping[str, Stage], devices: int, fits: bool | None) -> str:
    """Return what to do if a video does not fit, or may not fit."""
    name, largest = max(stages.items(), key=lambda item: item[1].peak_bytes_per_chip)
    video = f"{settings.model} at {settings.width}x{settings.height} and {quantity(settings.frames, 'frame')}"
    needed, memory = largest.peak_bytes_per_chip, largest.peak_bytes_per_chip + largest.spare_bytes_per_chip
    if fits is None:
        min_bytes = largest.weights_bytes_per_chip + largest.kept_bytes_per_chip
        return may_fit(f"{video} may fit {chip}", f"to {name} it", min_bytes, needed, memory)
    return (
        f"{video} does not fit {chip}: to {name} it needs {in_bytes(needed, 1024)} a chip, which has "
        f"{in_bytes(memory, 1024)}; {would_fit(chip, needed * devices)}"
    )
