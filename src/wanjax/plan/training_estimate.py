# SPDX-License-Identifier: Apache-2.0
"""Estimate the memory and the seconds of a training step, on devices that may be absent."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wanjax.checkpoints.network_kinds import network_of
from wanjax.execution import Instance, Program, Site, Trace
from wanjax.figures import in_bytes
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.kernels.compiler_options import SAFE
from wanjax.layers.placement import as_shapes, with_shardings
from wanjax.loading import abstract_pipeline
from wanjax.pipelines.meshes import step_cost
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.request import PreparedRequest
from wanjax.pipelines.run import Run
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.tracing import needed_pictures
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
from wanjax.pricing.pricer import Price
from wanjax.registry import Outline
from wanjax.sharding import RULES, Partitioner
from wanjax.training.adapters import LoraConfig, adapt, is_factor
from wanjax.training.latent_cache import NEGATIVE
from wanjax.training.objective import Batch, NoiseLevels, loss_of
from wanjax.training.optimizers import OptimizerConfig, make_optimizer
from wanjax.training.step import all_parameters, begin_training, loss_alone, prepare_step, train

STEPS = 1000  # length of the learning-rate schedule, which does not change the price


@dataclass(frozen=True)
class TrainingEstimate:
    """The estimated memory and time of a training step. `fits` and `advice` are as in `Estimate`.

    `forward_seconds` is the time of the loss alone. `backward_ratio` is the time of the rest of a step, divided by it.
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
    fits: bool | None
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


def estimate_training(
    outline: Outline,
    chip: str,
    mesh: tuple[int, int, int] | None = None,
    *,
    lora: LoraConfig | None,
    optimizer_config: OptimizerConfig,
    clips: int = 1,
    sp: int | None = None,
    rules: str = "fsdp",
    compiler: str = SAFE,
    attention: AttentionConfig = AUTO,
    on_progress: OnProgress = lambda now, done, total: None,
) -> TrainingEstimate:
    """Estimate a training step on clips with the outline's settings. Other arguments are as in `estimate`."""
    hardware, settings = find_priceable_hardware(chip), replace(outline.settings, guidance_scale=1.0)
    model = outline.model
    model.spec.check_trainable(settings.model)
    options = {"attention": attention, "rules": RULES[rules]}
    dtype = "float32" if lora is None else outline.param_dtype
    cost = partial(step_cost, outline.family, model, settings, param_dtype=dtype, **options)
    hardware, axes = mesh_axes(hardware, mesh, cost, sp)
    partitioner = Partitioner(mesh_on(hardware, axes), RULES[rules])
    param_dtype = "float32" if lora is None else settings.dtype
    load_options = {"attention": attention, "compiler": compiler, "param_dtype": param_dtype}
    pipe = abstract_pipeline(replace(outline, settings=settings), partitioner, **load_options)
    traced = _traced(pipe, settings, clips, lora, optimizer_config)
    programs = [(name, traced[program].lowering) for name, program in (("step", train), ("forward", loss_alone))]
    step, forward = priced_on(hardware, programs, on_progress)
    return TrainingEstimate(
        model=settings.model,
        chip=chip,
        mesh=axes,
        rules=rules,
        clips=clips,
        size=f"{settings.width}x{settings.height}",
        frames=settings.frames,
        trained="all weights" if lora is None else f"a LoRA of rank {lora.rank}",
        optimizer=optimizer_config.name,
        **_memory(settings, chip, hardware, step),
        **_seconds(step, forward),
    )


def _traced(
    pipe: Pipeline, settings: Settings, clips: int, lora: LoraConfig | None, optimizer_config: OptimizerConfig
) -> dict[Program, Instance]:
    """Trace a training step on clips with captions, and the loss alone."""
    config, partitioner = pipe.model.spec.networks["transformer"], pipe.partitioner
    graphdef, weights = nnx.split(pipe.components.abstract().get("transformer"))

    def adapted(rngs: nnx.Rngs) -> nnx.Module:
        network = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), weights))
        rules = network_of(config, pipe.components.kinds).rules
        return network if lora is None else adapt(network, rules, lora, 0)[0]

    network = with_shardings(as_shapes(adapted), partitioner)
    trained = all_parameters if lora is None else is_factor
    static, changed, fixed = prepare_step(
        network, loss_of(pipe, NoiseLevels()), make_optimizer(optimizer_config, STEPS), trained=trained
    )
    batch, number = _batch(pipe, settings, clips), np.int32(0)
    trace, site = Trace(), Site(partitioner, pipe.compiler)
    state = {"weights": changed, **trace.call(begin_training, site, static, changed)}
    trace.call(train, site, static, state, fixed, batch, number)
    trace.call(loss_alone, site, static, changed, fixed, batch, number)
    return {program.instance.program: program.instance for program in trace.programs}


def _batch(pipe: Pipeline, settings: Settings, clips: int) -> Batch:
    """Return the shapes of a batch of clips with these settings, on the host, as if it were read from files."""
    traced = pipe.under(Trace(), pipe.components.abstract())
    (conditioning,) = Run(traced, [PreparedRequest(settings)], needed_pictures(pipe, settings)).encode().values()
    fields = {
        name: jax.ShapeDtypeStruct((clips, *x.shape[1:]), x.dtype)
        for name, x in conditioning._asdict().items()
        if x is not None
    }
    negatives = {name: fields[name.removeprefix(NEGATIVE)] for name in fields if name.startswith(NEGATIVE)}
    _, *latents = pipe.model.spec.latent_shape(settings)
    return Batch(jax.ShapeDtypeStruct((clips, *latents), jnp.float32), type(conditioning)(**fields | negatives))


def _seconds(step: Price, forward: Price) -> dict[str, Any]:
    """Return the fields of `TrainingEstimate` on time."""
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


def _memory(settings: Settings, chip: str, hardware: Hardware, step: Price) -> dict[str, Any]:
    """Return the fields of `TrainingEstimate` on memory, and on what limits a step."""
    spare, fits = hardware.memory - step.peak, fits_on(hardware, step.arguments, step.peak)
    advice = None
    if fits is None:
        claim = f"a step of {settings.model} may fit {chip}"
        advice = may_fit(claim, "it", step.arguments, step.peak, hardware.memory)
    elif not fits:
        advice = (
            f"a step of {settings.model} needs {in_bytes(step.peak, 1024)} a chip, but a chip has "
            f"{in_bytes(hardware.memory, 1024)}: {would_fit(chip, step.peak * hardware.devices)}"
        )
    return {
        "memory_per_chip": hardware.memory,
        "weights_bytes_per_chip": step.arguments,
        "peak_bytes_per_chip": step.peak,
        "spare_bytes_per_chip": spare,
        "fits": fits,
        "limit": (None if fits is False else limit_of(step)) or "the memory of a chip",
        "advice": advice,
    }
