# SPDX-License-Identifier: Apache-2.0
"""The memory and the seconds of each stage of a video, and their limits, on devices that need not be present."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from wanjax.compilers.chips import Slice
from wanjax.compilers.places import Place, Tell, axes_on, find_place, limit_of, mesh_on, priced_on, would_fit
from wanjax.compilers.priced import Priced
from wanjax.compilers.roofline import Machine
from wanjax.figures import in_bytes
from wanjax.kernels.attention import AUTO, Attention
from wanjax.kernels.compiler_options import SAFE, check_set
from wanjax.layers.tiling import Tiling
from wanjax.loading import outlined
from wanjax.media.pictures import Pictures
from wanjax.pipelines.caching.rules import check_apart
from wanjax.pipelines.decoders import DecoderFile
from wanjax.pipelines.family import Architecture, Family, Forward
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.recording import needed_pictures, record
from wanjax.pipelines.settings import Settings
from wanjax.plan.meshes import choose_mesh
from wanjax.plan.recorded import DENSE, REUSING, STEP, Scheduled, of_stages, programs_of
from wanjax.registry import Outline
from wanjax.sharding import RULES, Partitioner


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
    """A program of a video: the times that it runs, the seconds of each, and its bytes on one device."""

    stage: str
    name: str
    times: int
    seconds: float | None
    arguments_bytes_per_chip: int
    peak_bytes_per_chip: int
    kept_bytes_per_chip: int


@dataclass(frozen=True)
class Outlook:
    """The prices of a video, not measurements. `fits` is True if every stage fits; else `advice` says what would.

    `compiler` is the set of compiler options, None where nothing was compiled. Of the steps, `reusing_steps` reuse what
    the step cache kept, and `dense_steps`, the first under radial attention, take all of attention; fields named
    `step_...` are those of the others. Where a step decides on the device whether it reuses, `reusing_step_seconds` are
    those of one that does not, `reusing_step_seconds_least` of one that does, and `total_seconds_least` count as many
    of the latter as there may be. `total_seconds_low` and `total_seconds_high` are the ends of the prices' range, each
    program at its own. `peak_bytes_per_chip` is that of the whole run. `frames_a_second` is the pace of a
    video whose frames come while it is made, once a block sees a full window, with the decoder; it is to be compared
    with `fps`, at which the video is played.
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
    fits: bool
    peak_bytes_per_chip: int
    stages: Mapping[str, Stage]
    programs: Sequence[Row]
    step_seconds: float | None
    step_seconds_low: float | None
    step_seconds_high: float | None
    step_breakdown: Mapping[str, float]
    step_outside_self_attention_seconds: float | None
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


def outlook(
    outline: Outline,
    chip: str,
    mesh: tuple[int, int, int] | None = None,
    *,
    sp: int | None = None,
    rules: str = "fsdp",
    compiler: str = SAFE,
    attention: Attention = AUTO,
    batch_guidance: bool = False,
    tiling: Tiling | None = None,
    pictures: Pictures | None = None,
    offload: bool | None = True,
    decoder: DecoderFile | None = None,
    tell: Tell = lambda now, done, total: None,
) -> Outlook:
    """Prices a video of the outline's settings on a slice such as v6e-8.

    `mesh` None chooses the best mesh, with `sp` if given. `pictures` None are those that the model needs, of the
    video's size. `tell` is that of `priced_on`; the other keywords are those of `wanjax.load` and of
    `Pipeline.denoise`. Raises WanjaxError where the chip is unknown, the mesh has another number of devices, or libtpu
    is missing.
    """
    family, settings = outline.family, outline.settings
    architecture = outline.architecture.attending(attention, settings.model)
    place, attention = find_place(chip), architecture.attention(attention)
    check_set(compiler)
    unpriced: list[str] = []
    if isinstance(place, Machine):
        if attention.window is not None:
            unpriced.append(f"the window of {attention.window} tokens is not priced: each token is taken to see all")
        attention, compiler = attention if attention.leaves_out else Attention("reference"), SAFE  # nothing is compiled
    parameters = _parameters(family, architecture)
    if mesh is None and isinstance(place, Slice):
        mesh = choose_mesh(place, **asked_of_a_mesh(family, architecture, settings, attention, rules), sp=sp)
    work = architecture.forward(settings)
    axes = axes_on(place, mesh or (1, 1, 1))
    settings = _settled(architecture, settings, axes["dp"] > 1 or batch_guidance)
    partitioner = Partitioner(mesh_on(place, axes), RULES[rules])
    how = {"attention": attention, "compiler": compiler, "offload": offload, "decoder": decoder}
    pipe = outlined(replace(outline, architecture=architecture, settings=settings), partitioner, **how)
    recorded = Recording(pipe, pictures, tiling, batch_guidance, place.memory)
    programs = recorded.programs(settings)
    priced = priced_on(place, [(program.name, program.lowering) for program in programs], tell)
    prices = list(zip(programs, priced, strict=True))
    stages = {name: [(x, y) for x, y in prices if x.stage == name] for name in of_stages(programs)}
    told = {name: _stage(parts, place.memory) for name, parts in stages.items()}
    (step,) = (y for x, y in prices if x.name == STEP)
    verdict = _verdict(settings, chip, place, told)
    reusing = _reusing(architecture, settings, prices, told)
    return Outlook(
        **_asked(settings, chip, place, axes, rules, compiler),
        **verdict,
        **_step(settings, place, step, work if attention.sees_all else None),
        **reusing,
        **_range(prices, verdict["total_seconds"], reusing["total_seconds_least"]),
        programs=[_row(*each) for each in prices],
        frames_a_second=_pace(recorded, settings, prices),
        download_bytes_at_most=4 * sum(parameters.values()),
        disk_bytes=_stored_bytes(family, architecture, parameters),
        limit=_limit(told, step),
        doubts=[
            *dict.fromkeys(doubt for _, x in prices for doubt in x.doubts),
            *_unknown(architecture, settings),
            *unpriced,
        ],
    )


def asked_of_a_mesh(
    family: Family, architecture: Architecture, settings: Settings, attention: Attention, rules: str
) -> dict[str, Any]:
    """Returns what the model of `plan/meshes.py` is told of a step, by its keywords."""
    counts, work = _parameters(family, architecture), architecture.forward(settings)
    return {
        "work": work,
        "guided": settings.split,
        "parameters": sum(counts[name] for name in architecture.denoisers),
        "ring": attention.passes_keys and work.ring,
        "spread": bool(RULES[rules].weights),
    }


@dataclass(frozen=True)
class Recording:
    """What is recorded of a video, whatever its settings are: the pipeline, pictures, tiles, and a device's memory."""

    pipe: Pipeline
    pictures: Pictures | None
    tiling: Tiling | None
    batch_guidance: bool
    memory: int

    def programs(self, settings: Settings) -> list[Scheduled]:
        """Returns the programs of a video of these settings."""
        pictures = needed_pictures(self.pipe, settings) if self.pictures is None else self.pictures
        told = {"tiling": self.tiling, "batch_guidance": self.batch_guidance, "room": self.memory}
        return programs_of(record(self.pipe, settings, pictures, **told))


def _settled(architecture: Architecture, settings: Settings, together: bool) -> Settings:
    """Returns the settings with a complete step cache; `together` tells whether a forward has both prompts."""
    check_apart(settings.cache, together)
    return replace(settings, cache=architecture.cache_rule(settings))


def _asked(
    settings: Settings, chip: str, place: Place, axes: Mapping[str, int], rules: str, compiler: str
) -> dict[str, Any]:
    """Returns the fields that describe the video, the devices and the way of pricing."""
    return {
        "model": settings.model,
        "chip": chip,
        "devices": place.devices,
        "mesh": axes,
        "rules": rules,
        "compiler": compiler if isinstance(place, Slice) else None,
        "size": f"{settings.width}x{settings.height}",
        "frames": settings.frames,
        "fps": settings.fps,
        "steps": settings.steps,
        "guidance_scale": settings.guidance_scale,
        "guidance_rule": str(settings.guidance_rule),
        "dtype": settings.dtype,
        "priced_by": "the chip's compiler" if isinstance(place, Slice) else "a stated model",
    }


def _verdict(settings: Settings, chip: str, place: Place, told: Mapping[str, Stage]) -> dict[str, Any]:
    """Returns the fields on memory, the stages and the totals."""
    seconds = [stage.seconds for stage in told.values()]
    fits = _fits(told)
    return {
        "memory_per_chip": place.memory,
        "fits": fits,
        "peak_bytes_per_chip": max(stage.peak_bytes_per_chip for stage in told.values()),
        "stages": told,
        "total_seconds": None if None in seconds else sum(filter(None, seconds)),
        "compile_seconds": sum(stage.compile_seconds for stage in told.values()),
        "advice": None if fits else _advice(settings, chip, told, place.devices),
    }


def _pace(recorded: Recording, settings: Settings, prices: Sequence[tuple[Scheduled, Priced]]) -> float | None:
    """Returns the frames a second of a video that is delivered while it is made: those of one more block.

    None for other videos, and where a program does not fit or is not priced, as in a video of one block.
    """
    length = recorded.pipe.architecture.block_length
    if not length:
        return None
    longer = recorded.programs(settings.updated({"frames": settings.frames + length}))
    each = {(program.stage, program.name): (program.times, priced.seconds) for program, priced in prices}
    seconds = 0.0
    for program in longer:
        before, price = each.get((program.stage, program.name), (0, None))
        if price is None:
            return None
        seconds += (program.times - before) * price
    return length / seconds


def _step(settings: Settings, place: Place, step: Priced, work: Forward | None) -> dict[str, Any]:
    """Returns the fields on a step; without its work, which a window or a mask makes less, no share of a peak."""
    flops = work and (2 if settings.guided else 1) * sum(work.flops.values())
    return {
        "step_seconds": step.seconds,
        "step_seconds_low": step.low if step.seconds else None,
        "step_seconds_high": step.high if step.seconds else None,
        "step_breakdown": step.parts,
        "step_outside_self_attention_seconds": step.seconds and step.seconds - step.self_attention,
        "mfu": step.seconds and flops and flops / (step.seconds * place.devices * place.flops),
        "peak_dtype": place.peak_dtype,
        "collectives": step.collectives,
    }


def _reusing(
    architecture: Architecture,
    settings: Settings,
    prices: Sequence[tuple[Scheduled, Priced]],
    told: Mapping[str, Stage],
) -> dict[str, Any]:
    """Returns the fields on steps that reuse what the step cache kept, and on dense ones."""
    found: dict[str, Any] = {
        "cache": str(settings.cache),
        "reusing_step_seconds_least": None,
        "total_seconds_least": None,
    }
    for kind in (REUSING, DENSE):
        times, seconds = next(((run.times, x.seconds) for run, x in prices if run.name == kind), (0, None))
        found |= {f"{kind}s": times, f"{kind}_seconds": seconds}
    if architecture.cache_rule(settings).decided_on_device:
        found["reusing_steps"] = most = sum(architecture.reused(settings))
        least = next((x.least for run, x in prices if run.name == REUSING), None)
        seconds = [stage.seconds for stage in told.values()]
        if least is not None and None not in seconds:
            total = sum(filter(None, seconds)) - most * (found["reusing_step_seconds"] - least)
            found |= {"reusing_step_seconds_least": least, "total_seconds_least": total}
    return found


def _range(prices: Sequence[tuple[Scheduled, Priced]], total: float | None, least: float | None) -> dict[str, Any]:
    """Returns the ends of the range of the whole run; the low one of as many cheap steps as there may be."""
    if total is None:
        return {"total_seconds_low": None, "total_seconds_high": None}
    low = sum(run.times * x.low for run, x in prices) * (least or total) / total
    return {"total_seconds_low": low, "total_seconds_high": sum(run.times * x.high for run, x in prices)}


def _unknown(architecture: Architecture, settings: Settings) -> Iterator[str]:
    """Yields a sentence where the weights decide between the programs of whole steps and of those that reuse."""
    rule = architecture.cache_rule(settings)
    if not (rule.counted or rule.decided_on_device):
        yield f"which steps reuse what another kept ({settings.cache}) is not known ahead: all but one are whole"


def _row(program: Scheduled, priced: Priced) -> Row:
    sizes = priced.arguments, priced.peak, program.beside
    return Row(program.stage, program.name, program.times, priced.seconds, *sizes)


def _parameters(family: Family, architecture: Architecture) -> dict[str, int]:
    """Returns the number of parameters of each network; computes it once for networks of the same shape."""
    counts: dict[Any, int] = {}
    for config in architecture.networks.values():
        if config not in counts:
            counts[config] = family.network_of(config).parameters
    return {name: counts[config] for name, config in architecture.networks.items()}


def _stored_bytes(family: Family, architecture: Architecture, parameters: Mapping[str, int]) -> int:
    """Returns the bytes of all weights as `convert` stores them."""
    networks = {name: family.network_of(config) for name, config in architecture.networks.items()}
    return sum(count * (4 if networks[name].float32 else 2) for name, count in parameters.items())


def _stage(programs: Sequence[tuple[Scheduled, Priced]], memory: int) -> Stage:
    """Returns a stage from its programs, which run in turn; its memory is that at the peak of the largest."""
    program, largest = max(programs, key=lambda pair: pair[1].peak + pair[0].beside)
    seconds = [None if priced.seconds is None else run.times * priced.seconds for run, priced in programs]
    return Stage(
        weights_bytes_per_chip=largest.arguments,
        activation_bytes_per_chip=largest.peak - largest.arguments,
        kept_bytes_per_chip=program.beside,
        peak_bytes_per_chip=largest.peak + program.beside,
        spare_bytes_per_chip=memory - largest.peak - program.beside,
        seconds=None if None in seconds else sum(filter(None, seconds)),
        compile_seconds=sum(priced.compile_seconds for _, priced in programs),
    )


def _fits(told: Mapping[str, Stage]) -> bool:
    return all(stage.spare_bytes_per_chip >= 0 for stage in told.values())


def _limit(told: Mapping[str, Stage], step: Priced) -> str:
    within = "the memory of a chip, in " + min(told, key=lambda name: told[name].spare_bytes_per_chip)
    return (limit_of(step) if _fits(told) else None) or within


def _advice(settings: Settings, chip: str, told: Mapping[str, Stage], devices: int) -> str:
    """Returns advice on a slice that would fit, estimated from the memory of all devices together."""
    name, worst = max(told.items(), key=lambda item: item[1].peak_bytes_per_chip)
    memory = worst.peak_bytes_per_chip + worst.spare_bytes_per_chip
    would = would_fit(chip, worst.peak_bytes_per_chip * devices)
    return (
        f"{settings.model} at {settings.width}x{settings.height} and {settings.frames} frames does not fit {chip}: to "
        f"{name} it needs {in_bytes(worst.peak_bytes_per_chip, 1024)} a chip where {in_bytes(memory, 1024)} are to be "
        f"had; {would}"
    )
