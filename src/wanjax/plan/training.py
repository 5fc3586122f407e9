# SPDX-License-Identifier: Apache-2.0
"""The memory and the seconds of a step of training, on devices that need not be present."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax.numpy as jnp

from wanjax.kernels.attention import passes_keys
from wanjax.kernels.compiler_options import SAFE
from wanjax.pipelines.blueprint import Blueprint
from wanjax.pipelines.family import Architecture, Family
from wanjax.pipelines.settings import Settings
from wanjax.plan.chips import Slice
from wanjax.plan.meshes import choose_mesh
from wanjax.plan.places import Place, axes_on, find_place, limit_of, mesh_on, priced_on, would_fit
from wanjax.plan.priced import Priced
from wanjax.sharding import RULES, Partitioner
from wanjax.training import planned
from wanjax.training.adapters import LoraConfig
from wanjax.training.optimizers import OptimizerConfig


@dataclass(frozen=True)
class TrainingOutlook:
    """The prices of a step of training, not measurements. `fits` is True if it fits; else `advice` says what would.

    `forward_seconds` are those of the loss alone, and `backward_ratio` how many times as long the rest of a step takes.
    """

    model: str
    chip: str
    mesh: Mapping[str, int]
    rules: str
    size: str
    frames: int
    clips: int
    trained: str
    optimizer: str
    memory_per_chip: int
    weights_bytes_per_chip: int
    peak_bytes_per_chip: int
    spare_bytes_per_chip: int
    fits: bool
    step_seconds: float | None
    step_breakdown: Mapping[str, float]
    forward_seconds: float | None
    forward_breakdown: Mapping[str, float]
    backward_ratio: float | None
    limit: str
    collectives: Sequence[Mapping[str, Any]]
    doubts: Sequence[str]
    advice: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def training_outlook(
    family: Family,
    architecture: Architecture,
    settings: Settings,
    chip: str,
    mesh: tuple[int, int, int] | None = None,
    *,
    lora: LoraConfig | None,
    optimized: OptimizerConfig,
    clips: int = 1,
    sp: int | None = None,
    rules: str = "fsdp",
    compiler: str = SAFE,
    attention: str | None = None,
    tell: Callable[[str, int, int], Any] | None = None,
) -> TrainingOutlook:
    """Prices a step of training on clips of these settings; the other keywords are those of `outlook`."""
    place, settings = find_place(chip), replace(settings, guidance_scale=1.0)
    architecture.check_whole(settings.model, "training")
    known = family.network_of(architecture.networks["transformer"])
    if isinstance(place, Slice) and mesh is None:
        work = architecture.forward(settings)
        how = {"sp": sp, "ring": passes_keys(attention)}
        mesh = choose_mesh(place, work, guided=False, parameters=known.parameters, **how)
    axes = axes_on(place, mesh or (1, 1, 1))
    blueprint = Blueprint(Partitioner(mesh_on(place, axes), RULES[rules]), jnp.dtype(settings.dtype), compiler)
    kind: dict[str, Any] = {"pipeline": family.pipeline, "module": known.kind.modules[type(known.config)]}
    arguments = {"architecture": architecture, "settings": settings, "clips": clips, "lora": lora}
    arguments |= {"optimized": optimized, "attention": attention, "rules": known.kind.rules} | kind
    programs = [(x.__name__, x(blueprint, **arguments)) for x in (planned.step, planned.forward)]
    step, forward = priced_on(place, programs, tell)
    asked = {"model": settings.model, "chip": chip, "mesh": axes, "rules": rules, "clips": clips}
    return TrainingOutlook(
        **asked,
        size=f"{settings.width}x{settings.height}",
        frames=settings.frames,
        trained="all weights" if lora is None else f"a LoRA of rank {lora.rank}",
        optimizer=optimized.name,
        **_memory(settings, chip, place, step),
        **_seconds(step, forward),
    )


def _seconds(step: Priced, forward: Priced) -> dict[str, Any]:
    """Returns the fields on time."""
    ratio = (step.seconds - forward.seconds) / forward.seconds if step.seconds and forward.seconds else None
    return {
        "step_seconds": step.seconds,
        "step_breakdown": step.parts,
        "forward_seconds": forward.seconds,
        "forward_breakdown": forward.parts,
        "backward_ratio": ratio,
        "collectives": step.collectives,
        "doubts": list(dict.fromkeys((*step.doubts, *forward.doubts))),
    }


def _memory(settings: Settings, chip: str, place: Place, step: Priced) -> dict[str, Any]:
    """Returns the fields on memory, and what limits a step."""
    spare = place.memory - step.peak
    advice = None
    if spare < 0:
        advice = (
            f"a step of {settings.model} needs {step.peak / 2**30:.1f} GiB a chip where {place.memory / 2**30:.1f} are "
            f"to be had: {would_fit(chip, step.peak * place.devices)}"
        )
    return {
        "memory_per_chip": place.memory,
        "weights_bytes_per_chip": step.arguments,
        "peak_bytes_per_chip": step.peak,
        "spare_bytes_per_chip": spare,
        "fits": spare >= 0,
        "limit": (limit_of(step) if spare >= 0 else None) or "the memory of a chip",
        "advice": advice,
    }
