# SPDX-License-Identifier: Apache-2.0
"""The memory and the seconds of each stage of a video, and their limits, on devices that need not be present."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from wanjax.kernels.attention import is_radial, passes_keys
from wanjax.kernels.compiler_options import SAFE, check_set
from wanjax.pipelines.cache_rules import check_apart
from wanjax.pipelines.family import Architecture, Family, Forward
from wanjax.pipelines.settings import Settings
from wanjax.plan.chips import Slice
from wanjax.plan.meshes import choose_mesh
from wanjax.plan.places import Place, axes_on, find_place, limit_of, mesh_on, priced_on, would_fit
from wanjax.plan.priced import Priced
from wanjax.plan.roofline import Machine
from wanjax.plan.stages import Scheduled, stages


@dataclass(frozen=True)
class Stage:
    """A stage on one device: bytes of weights and other arguments, bytes beside them, and the peak.

    `seconds` is the time of all runs of its programs; None where the stage does not fit.
    """

    weights_bytes_per_chip: int
    activation_bytes_per_chip: int
    peak_bytes_per_chip: int
    spare_bytes_per_chip: int
    seconds: float | None
    compile_seconds: float


@dataclass(frozen=True)
class Outlook:
    """The prices of a video, not measurements. `fits` is True if every stage fits; else `advice` says what would.

    `compiler` is the set of compiler options, None where nothing was compiled. Of the steps, `reusing_steps` reuse what
    the step cache kept, and `dense_steps`, the first under radial attention, take all of attention; fields named
    `step_...` are those of the others. `frames_a_second` is the pace of a video whose frames come while it is made,
    once a block sees a full window, with the decoder; it is to be compared with `fps`, at which the video is played.
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
    dtype: str
    priced_by: str
    memory_per_chip: int
    fits: bool
    stages: Mapping[str, Stage]
    step_seconds: float | None
    step_seconds_low: float | None
    step_seconds_high: float | None
    step_breakdown: Mapping[str, float]
    step_outside_self_attention_seconds: float | None
    cache: str
    reusing_steps: int
    reusing_step_seconds: float | None
    dense_steps: int
    dense_step_seconds: float | None
    mfu: float | None
    peak_dtype: str
    total_seconds: float | None
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
    family: Family,
    architecture: Architecture,
    settings: Settings,
    chip: str,
    mesh: tuple[int, int, int] | None = None,
    *,
    sp: int | None = None,
    rules: str = "fsdp",
    compiler: str = SAFE,
    attention: str | None = None,
    batch_guidance: bool = False,
    tell: Callable[[str, int, int], Any] | None = None,
) -> Outlook:
    """Prices a video of these settings on a slice such as v6e-8; `mesh` None chooses the best mesh, with `sp` if given.

    `tell` is that of `priced_on`; the other keywords are those of `wanjax.load` and of `Pipeline.denoise`. Raises
    WanjaxError where the chip is unknown, the mesh has another number of devices, or libtpu is missing.
    """
    place = find_place(chip)
    check_set(compiler)
    if isinstance(place, Machine):
        attention, compiler = attention if is_radial(attention) else "reference", SAFE  # nothing is compiled
    parameters = _parameters(family, architecture)
    work = architecture.forward(settings)
    if mesh is None and isinstance(place, Slice):
        how = {"guided": settings.split, "sp": sp, "ring": passes_keys(attention)}
        mesh = choose_mesh(place, work, parameters=sum(parameters[name] for name in architecture.denoisers), **how)
    axes = axes_on(place, mesh or (1, 1, 1))
    settings = _settled(architecture, settings, axes["dp"] > 1 or batch_guidance)
    options: dict[str, Any] = {"attention": attention, "rules": rules, "batch_guidance": batch_guidance}
    prices = _prices(place, stages(architecture, settings, mesh_on(place, axes), compiler=compiler, **options), tell)
    told = {name: _stage(programs, place.memory) for name, programs in prices.items()}
    (step,) = (priced for run, priced in prices["denoise"] if run.name == "step")
    return Outlook(
        **_asked(settings, chip, place, axes, rules, compiler),
        **_verdict(settings, chip, place, told),
        **_step(settings, place, step, None if is_radial(attention) else work),
        **_reusing(settings, prices["denoise"]),
        frames_a_second=_pace(architecture, settings, prices),
        download_bytes_at_most=4 * sum(parameters.values()),
        disk_bytes=_stored_bytes(family, architecture, parameters),
        limit=_limit(told, step),
        doubts=_doubts(prices),
    )


def _doubts(prices: Mapping[str, Sequence[tuple[Scheduled, Priced]]]) -> list[str]:
    """Returns the doubts about the price of any program, each once."""
    return list(dict.fromkeys(doubt for stage in prices.values() for _, priced in stage for doubt in priced.doubts))


def _settled(architecture: Architecture, settings: Settings, together: bool) -> Settings:
    """Returns the settings with a complete step cache; `together` tells whether a forward has both prompts."""
    check_apart(settings.cache, together)
    return replace(settings, cache=str(architecture.cache_rule(settings)))


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
        "stages": told,
        "total_seconds": None if None in seconds else sum(filter(None, seconds)),
        "compile_seconds": sum(stage.compile_seconds for stage in told.values()),
        "advice": None if fits else _advice(settings, chip, told, place.devices),
    }


def _pace(
    architecture: Architecture, settings: Settings, prices: Mapping[str, Sequence[tuple[Scheduled, Priced]]]
) -> float | None:
    """Returns the frames a second of a video that is delivered while it is made: those of one more block.

    None for other videos, and where a program does not fit or is not priced, as in a video of one block.
    """
    if not architecture.block_length:
        return None
    longer = settings.updated({"frames": settings.frames + architecture.block_length})
    times = {program.name: program.times for stage in architecture.programs(longer).values() for program in stage}
    each = {run.name: (run.times, priced.seconds) for stage in prices.values() for run, priced in stage}
    seconds = 0.0
    for name, count in times.items():
        before, price = each.get(name, (0, None))
        if price is None:
            return None
        seconds += (count - before) * price
    return architecture.block_length / seconds


def _step(settings: Settings, place: Place, step: Priced, work: Forward | None) -> dict[str, Any]:
    """Returns the fields on a step; without its work, of which sparse attention leaves some out, no share of a peak."""
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


def _reusing(settings: Settings, denoise: Sequence[tuple[Scheduled, Priced]]) -> dict[str, Any]:
    """Returns the fields on steps that reuse what the step cache kept, and on dense ones."""
    found: dict[str, Any] = {"cache": settings.cache}
    for kind in ("reusing_step", "dense_step"):
        times, seconds = next(((run.times, x.seconds) for run, x in denoise if run.name == kind), (0, None))
        found |= {f"{kind}s": times, f"{kind}_seconds": seconds}
    return found


def _prices(
    place: Place, runs: Mapping[str, Sequence[Scheduled]], tell: Callable[[str, int, int], Any] | None
) -> dict[str, list[tuple[Scheduled, Priced]]]:
    """Returns the price of each program of each stage."""
    every = [(run.name, run.lowering) for stage in runs.values() for run in stage]
    found = iter(priced_on(place, every, tell))
    return {name: [(run, next(found)) for run in stage] for name, stage in runs.items()}


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
    """Returns a stage from its programs, which run in turn; its memory is that of the largest program."""
    largest = max((priced for _, priced in programs), key=lambda priced: priced.peak)
    seconds = [None if priced.seconds is None else run.times * priced.seconds for run, priced in programs]
    return Stage(
        weights_bytes_per_chip=largest.arguments,
        activation_bytes_per_chip=largest.peak - largest.arguments,
        peak_bytes_per_chip=largest.peak,
        spare_bytes_per_chip=memory - largest.peak,
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
        f"{name} it needs {worst.peak_bytes_per_chip / 2**30:.1f} GiB a chip where {memory / 2**30:.1f} are to be had; "
        f"{would}"
    )
