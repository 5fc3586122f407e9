# SPDX-License-Identifier: Apache-2.0
"""What a video will take on devices that need not be there: memory of each stage, seconds, and what limits them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from wanjax.abstract import abstract
from wanjax.errors import WanjaxError
from wanjax.models.wan.config import ImageTransformerConfig
from wanjax.pipelines.base import Settings
from wanjax.pipelines.text import TEXT_LENGTH
from wanjax.pipelines.wan import WanConfigs
from wanjax.plan import traced
from wanjax.plan.chips import SLICES, Slice
from wanjax.plan.digest import PARTS, Digest, digests
from wanjax.plan.flops import forward_flops
from wanjax.plan.meshes import choose_mesh
from wanjax.plan.roofline import Machine, machines
from wanjax.plan.stages import Architecture, Run, stages
from wanjax.sharding import MESH_AXES

Place = Slice | Machine
LIMITS = {
    "attention": "the matrix units, in attention",
    "matmuls": "the matrix units, in projections",
    "elementwise": "the memory's bandwidth, in elementwise work",
    "copies": "the memory's bandwidth, in copies",
    "communication": "the links between chips",
}
ROOM = 0.9  # of a device's memory: what a guess of what would fit is allowed


def find_place(name: str) -> Place:
    """The slice of TPUs, or the device, of this name; raises WanjaxError that lists those there are."""
    known: dict[str, Place] = {**SLICES, **machines()}
    if name not in known:
        raise WanjaxError(f"no chip is named {name!r}: there are {', '.join(known)}")
    return known[name]


@dataclass(frozen=True)
class Stage:
    """Of one device: bytes of weights and what else a program is given, bytes beside them, and bytes at most.

    `seconds` are those of all runs of its programs; None where it does not fit.
    """

    weights_bytes_per_chip: int
    activation_bytes_per_chip: int
    peak_bytes_per_chip: int
    spare_bytes_per_chip: int
    seconds: float | None
    compile_seconds: float


@dataclass(frozen=True)
class Outlook:
    """Prices, not measurements; `fits` says whether each stage does, and `advice` what would where one does not."""

    model: str
    chip: str
    devices: int
    mesh: Mapping[str, int]
    rules: str
    size: str
    frames: int
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
    mfu: float | None
    total_seconds: float | None
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
    networks: Architecture,
    settings: Settings,
    chip: str,
    mesh: tuple[int, int, int] | None = None,
    *,
    rules: str = "fsdp",
    attention: str | None = None,
    batch_guidance: bool = False,
) -> Outlook:
    """A video of these settings on a chip such as v6e-8; `mesh` None finds the best.

    The keywords are those of `wanjax.load` and of `WanPipeline.denoise`. Raises WanjaxError where the chip is not
    known, the mesh is not one of its devices, or libtpu is missing.
    """
    place = find_place(chip)
    attention = attention if isinstance(place, Slice) else "reference"
    sizes = parameters(networks, experts=settings.boundary is not None)
    tokens = WanConfigs(networks.transformer, networks.vae).tokens(settings)
    guided = settings.guidance_scale > 1
    if mesh is None and isinstance(place, Slice):
        size = {"tokens": tokens, "text": TEXT_LENGTH, "parameters": sizes["transformer"]}
        mesh = choose_mesh(place, networks.transformer, guided=guided, **size)
    axes = _axes(place, mesh or (1, 1, 1))
    options: dict[str, Any] = {"attention": attention, "rules": rules, "batch_guidance": batch_guidance}
    runs = stages(networks, settings, chip, axes, **options)
    made = _digests(place, runs)
    told = {name: _stage(stage, made, place.memory) for name, stage in runs.items()}
    (step,) = (made[run.job.builder] for run in runs["denoise"] if run.name == "step")
    fits = all(stage.spare_bytes_per_chip >= 0 for stage in told.values())
    seconds = [stage.seconds for stage in told.values()]
    return Outlook(
        model=settings.model,
        chip=chip,
        devices=place.devices,
        mesh=axes,
        rules=rules,
        size=f"{settings.width}x{settings.height}",
        frames=settings.frames,
        steps=settings.steps,
        guidance_scale=settings.guidance_scale,
        dtype=settings.dtype,
        priced_by="the chip's compiler" if isinstance(place, Slice) else "a stated model",
        memory_per_chip=place.memory,
        fits=fits,
        stages=told,
        step_seconds=step.seconds,
        step_seconds_low=step.low if step.seconds else None,
        step_seconds_high=step.high if step.seconds else None,
        step_breakdown={part: step.breakdown.get(part, 0.0) for part in PARTS},
        step_outside_self_attention_seconds=step.seconds and step.seconds - step.self_attention,
        mfu=step.seconds and _step_flops(networks, tokens, guided) / (step.seconds * place.devices * place.flops),
        total_seconds=None if None in seconds else sum(filter(None, seconds)),
        compile_seconds=sum(stage.compile_seconds for stage in told.values()),
        download_bytes_at_most=4 * sum(sizes.values()),
        disk_bytes=sum(_stored(name) * count for name, count in sizes.items()),
        limit=_limit(fits, told, step),
        collectives=step.collectives,
        doubts=[doubt for found in made.values() for doubt in found.doubts],
        advice=None if fits else _advice(settings, chip, told, place.devices),
    )


def _axes(place: Place, mesh: tuple[int, int, int]) -> dict[str, int]:
    if isinstance(place, Machine) and prod(mesh) != 1:
        raise WanjaxError(f"the mesh has {prod(mesh)} devices: {place.name} stands for one")
    return dict(zip(MESH_AXES, mesh, strict=True))


def _digests(place: Place, runs: Mapping[str, Sequence[Run]]) -> dict[str, Digest]:
    """What there is to tell of each program, by what builds it."""
    jobs = [run.job for stage in runs.values() for run in stage]
    found = digests(jobs) if isinstance(place, Slice) else [traced.digest(place, job) for job in jobs]
    return dict(zip((job.builder for job in jobs), found, strict=True))


def parameters(networks: Architecture, *, experts: bool) -> dict[str, int]:
    """How many each network has; of two experts, both are the transformer's."""
    found = {}
    for name in ("text_encoder", "transformer", "vae", "image_encoder"):
        if (config := getattr(networks, name)) is None:
            continue
        network = abstract(config, dtype=jnp.float32, param_dtype=jnp.float32)
        found[name] = sum(x.size for x in jax.tree.leaves(nnx.state(network)))
    found["transformer"] *= 2 if experts else 1
    return found


def _stored(network: str) -> int:
    """Bytes of a parameter as `convert` stores it."""
    return 4 if network in ("vae", "image_encoder") else 2


def _step_flops(networks: Architecture, tokens: int, guided: bool) -> int:
    config, image = networks.transformer, 0
    if isinstance(config, ImageTransformerConfig) and networks.image_encoder is not None:
        image = config.image_positions or networks.image_encoder.tokens
    return (2 if guided else 1) * sum(forward_flops(config, tokens=tokens, text=TEXT_LENGTH, image=image).values())


def _stage(runs: Sequence[Run], made: Mapping[str, Digest], memory: int) -> Stage:
    """The programs of a stage, one after another; the one that needs the most memory is told."""
    all_made = [(run.times, made[run.job.builder]) for run in runs]
    largest = max((found for _, found in all_made), key=lambda found: found.peak)
    seconds = [None if found.seconds is None else times * found.seconds for times, found in all_made]
    return Stage(
        weights_bytes_per_chip=largest.arguments,
        activation_bytes_per_chip=largest.peak - largest.arguments,
        peak_bytes_per_chip=largest.peak,
        spare_bytes_per_chip=memory - largest.peak,
        seconds=None if None in seconds else sum(filter(None, seconds)),
        compile_seconds=sum(found.compile_seconds for _, found in all_made),
    )


def _limit(fits: bool, told: Mapping[str, Stage], step: Digest) -> str:
    if not fits or not step.breakdown:
        return "the memory of a chip, in " + min(told, key=lambda name: told[name].spare_bytes_per_chip)
    return LIMITS[max(step.breakdown, key=lambda part: step.breakdown[part])]


def _advice(settings: Settings, chip: str, told: Mapping[str, Stage], devices: int) -> str:
    """What would hold it, guessed from what is needed in all."""
    name, worst = max(told.items(), key=lambda item: item[1].peak_bytes_per_chip)
    needed = worst.peak_bytes_per_chip * devices
    memory = worst.peak_bytes_per_chip + worst.spare_bytes_per_chip
    places = [place for place in SLICES.values() if place.devices * place.chip.hbm * ROOM > needed]
    same = [place for place in places if place.chip.name == chip.partition("-")[0]] or places
    least = min(same, key=lambda place: place.devices, default=None)
    would = "a smaller size or fewer frames may" if least is None else f"{least.name} should"
    return (
        f"{settings.model} at {settings.width}x{settings.height} and {settings.frames} frames does not fit {chip}: to "
        f"{name} it needs {worst.peak_bytes_per_chip / 2**30:.1f} GiB a chip where {memory / 2**30:.1f} are to be had; "
        f"{would}"
    )
