# SPDX-License-Identifier: Apache-2.0
"""The memory and the seconds of each stage of a video, and their limits, on devices that need not be present."""

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
    Tell,
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

TAKEN_BY_JAX = 0.75  # of a card's memory
ESTIMATED = "a stated model, from the kernels that the card's compiler wrote"
PricedProgram = tuple[VideoProgram, Price]


@dataclass(frozen=True)
class Stage:
    """A stage on one device, at its peak: bytes of weights and other arguments, and bytes beside them.

    `kept` are the bytes of networks that stay there for another stage. `seconds` is the time of all runs of its
    programs; None where the stage does not fit.
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
    """A program of a video: the times that it runs, the seconds of each, and its bytes on one device.

    On cards `kernels` tells how often one run starts each kind of kernel.
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
    """The prices of a video, not measurements.

    `fits` is True if every stage fits, and None where a stated model cannot tell: its peak counts nothing as fused, and
    is an upper bound. `advice` says what to do unless it is True.

    `compiler` is the set of compiler options, None where nothing was compiled. `attention` is the implementation of
    self-attention that was priced: the one that a run takes where the trials of its kernel pass. Of the steps,
    `reusing_steps` reuse what the step cache kept, and `dense_steps`, the first under radial attention, take all of
    attention; fields named `step_...` are those of the others. Where a step decides on the device whether it reuses,
    `reusing_step_seconds` are those of one that does not, `reusing_step_seconds_least` of one that does, and
    `total_seconds_least` count as many of the latter as there may be. `step_seconds_worst` is the high end of a step
    with every head of attention on its safe path, None where kernels are not scheduled. `total_seconds_low` and
    `total_seconds_high` are the ends of the prices' range, each program at its own. `peak_bytes_per_chip` is that of
    the whole run.
    `frames_a_second` is the pace of a video whose frames come while it is made, once a block sees a full window, with
    the decoder; it is to be compared with `fps`, at which the video is played.
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
    tell: Tell = lambda now, done, total: None,
) -> Estimate:
    """Price a video of the outline's settings on a slice such as v6e-8.

    `mesh` None chooses the best mesh, with `sp` if given. `pictures` None are those that the model needs, of the
    video's size. `tell` is that of `priced_on`; the other keywords are those of `wanjax.load` and of
    `Pipeline.denoise`. Raises WanjaxError where the chip is unknown, the mesh has another number of devices, or libtpu
    is missing.
    """
    family, settings = outline.family, outline.settings
    model = with_attention(outline.model, attention, settings.model)
    hardware, attention = find_priceable_hardware(chip), model.spec.attention(attention)
    check_set(compiler)
    doubts: list[str] = []
    if isinstance(hardware, Machine):
        if chip in CARDS:
            doubts.append(
                f"nothing was compiled for {chip}: with the extra wanjax[plan-cuda] programs are, memory is exact, and "
                "times are estimated from the kernels"
            )
        if attention.window is not None:
            doubts.append(
                f"the window of {quantity(attention.window, 'token')} is not priced: each token is taken to see all"
            )
        attention, compiler = (
            attention if attention.is_sparse else AttentionConfig("reference"),
            SAFE,
        )  # nothing is compiled
    options = {"attention": attention, "rules": RULES[rules], "offload": offload}
    cost = partial(step_cost, family, model, settings, param_dtype=outline.param_dtype, **options)
    hardware, axes = mesh_axes(hardware, mesh, cost, sp)
    work = model.cost(model.spec.passes_of(settings)[0])
    check_apart(settings.cache, axes["dp"] > 1 or batch_guidance)
    settings = replace(settings, cache=model.spec.cache_rule(settings))
    if not (settings.cache.counted or settings.cache.decided_on_device):  # the weights decide
        doubts.append(
            f"which steps reuse what another kept ({settings.cache}) is not known ahead: all but one are whole"
        )
    partitioner = Partitioner(mesh_on(hardware, axes), RULES[rules])
    how = {"attention": attention, "compiler": compiler, "offload": offload, "decoder": decoder}
    pipe = abstract_pipeline(replace(outline, model=model, settings=settings), partitioner, **how)

    def programs_for(settings: Settings) -> list[VideoProgram]:
        shown = needed_pictures(pipe, settings) if pictures is None else pictures
        options = {"tiling": tiling, "batch_guidance": batch_guidance, "room": hardware.memory}
        return programs_of(trace_programs(pipe, settings, shown, **options))

    programs = programs_for(settings)
    priced = priced_on(hardware, [(program.name, program.lowering) for program in programs], tell)
    prices = list(zip(programs, priced, strict=True))
    (step,) = (price for program, price in prices if program.name == STEP)
    names = dict.fromkeys(program.stage for program in programs)
    stages = {name: _stage([pair for pair in prices if pair[0].stage == name], hardware.memory) for name in names}
    if isinstance(hardware, Slice) and isinstance(hardware.chip, Card):
        peak = max(stage.peak_bytes_per_chip for stage in stages.values())
        if TAKEN_BY_JAX * hardware.memory < peak <= hardware.memory:
            doubts.append(
                f"the peak is more than the {TAKEN_BY_JAX:.0%} of a card that JAX takes by default: run with "
                "XLA_CLIENT_MEM_FRACTION=.95 in the environment"
            )
    block = model.spec.chunk_length
    longer = programs_for(settings.updated({"frames": settings.frames + block})) if block else []
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
        attention=_attention_name(attention, work, settings.dtype, partitioner),
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
        **_step(settings, hardware, step, work if attention.is_dense else None),
        **_totals(model, settings, stages, prices),
        frames_a_second=_pace(block, longer, prices),
        compile_seconds=sum(stage.compile_seconds for stage in stages.values()),
        download_bytes_at_most=4 * sum(network.parameters for network in networks),
        disk_bytes=sum(network.parameters * (4 if network.float32 else 2) for network in networks),  # by `convert`
        doubts=[*dict.fromkeys(doubt for price in priced for doubt in price.doubts), *doubts],
    )


def _attention_name(attention: AttentionConfig, work: Cost, dtype: str, partitioner: Partitioner) -> str:
    """Return the implementation of self-attention that a run takes on these devices."""
    if attention.is_sparse:
        return str(attention)
    shape = (1, work.tokens, work.heads, work.width // work.heads)
    operand = jax.ShapeDtypeStruct(shape, dtype, sharding=partitioner.replicated)
    with on_mesh(partitioner):  # the kernels ask it for the chip
        return choose(operand, operand, operand, implementation=attention).name


def _priced_by(hardware: Hardware) -> str:
    if isinstance(hardware, Machine):
        return "a stated model"
    return ESTIMATED if isinstance(hardware.chip, Card) else "the chip's compiler"


def _memory(
    settings: Settings, chip: str, hardware: Hardware, stages: Mapping[str, Stage], step: Price
) -> dict[str, Any]:
    """Return the fields on the stages and their memory, and what limits the video."""
    each = [
        fits_on(hardware, stage.weights_bytes_per_chip + stage.kept_bytes_per_chip, stage.peak_bytes_per_chip)
        for stage in stages.values()
    ]
    fits = False if False in each else None if None in each else True
    tightest = min(stages, key=lambda name: stages[name].spare_bytes_per_chip)
    return {
        "memory_per_chip": hardware.memory,
        "fits": fits,
        "peak_bytes_per_chip": max(stage.peak_bytes_per_chip for stage in stages.values()),
        "stages": stages,
        "limit": (None if fits is False else limit_of(step)) or f"the memory of a chip, in {tightest}",
        "advice": None if fits else _advice(settings, chip, stages, hardware.devices, fits),
    }


def _pace(block: int, longer: Sequence[VideoProgram], prices: Sequence[PricedProgram]) -> float | None:
    """Return the frames per second of a video that is streamed, from the price of one more chunk.

    `longer` are the programs of a video of a block more, none for other videos. None for these, and where a program
    does not fit or is not priced, as in a video of one block.
    """
    each = {(program.stage, program.name): (program.times, price.seconds) for program, price in prices}
    seconds = 0.0
    for program in longer:
        before, price = each.get((program.stage, program.name), (0, None))
        if price is None:
            return None
        seconds += (program.times - before) * price
    return block / seconds if longer else None


def _step(settings: Settings, hardware: Hardware, step: Price, work: Cost | None) -> dict[str, Any]:
    """Return the fields on a step; without its work, which a window or a mask makes less, no share of a peak."""
    flops = work and (2 if settings.guided else 1) * sum(work.flops.values())
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
    """Return the fields on the whole run, on steps that reuse cached values, and on dense ones.

    The low end of the range is that of as many cheap steps as there may be.
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
    """Return a stage from its programs, which run one after another, so that the largest sets its memory."""
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
    """Return the sum of the seconds; None if one is None."""
    values = list(seconds)
    return None if None in values else sum(filter(None, values))


def _advice(settings: Settings, chip: str, stages: Mapping[str, Stage], devices: int, fits: bool | None) -> str:
    """Return what to do where a video does not fit, or perhaps does not."""
    name, worst = max(stages.items(), key=lambda item: item[1].peak_bytes_per_chip)
    video = f"{settings.model} at {settings.width}x{settings.height} and {quantity(settings.frames, 'frame')}"
    needed, memory = worst.peak_bytes_per_chip, worst.peak_bytes_per_chip + worst.spare_bytes_per_chip
    if fits is None:
        least = worst.weights_bytes_per_chip + worst.kept_bytes_per_chip
        return may_fit(f"{video} may fit {chip}", f"to {name} it", least, needed, memory)
    return (
        f"{video} does not fit {chip}: to {name} it needs {in_bytes(needed, 1024)} a chip, which has "
        f"{in_bytes(memory, 1024)}; {would_fit(chip, needed * devices)}"
    )
