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
from wanjax.execution import CompileContext, Program, Trace, TracedProgram
from wanjax.figures import format_bytes
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.kernels.compiler_options import SAFE_SET
from wanjax.layers.placement import as_shapes, with_shardings
from wanjax.layers.precision import Precision
from wanjax.loading import abstract_pipeline
from wanjax.pipelines.meshes import step_cost
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.request import PreparedRequest
from wanjax.pipelines.run import Run
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.tracing import needed_pictures
from wanjax.pipelines.video_shape import VIDEO_SHAPE_TENSOR
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
from wanjax.pricing.pricer import Price
from wanjax.registry import ModelDescription
from wanjax.sharding import SHARDING_RULES, Partitioner
from wanjax.training.adapters import LoraConfig, adapt, check_trainable_precision, is_factor
from wanjax.training.latent_cache import NEGATIVE
from wanjax.training.objective import Batch, NoiseLevels, make_loss
from wanjax.training.optimizers import OptimizerConfig, make_optimizer
from wanjax.training.step import all_parameters, begin_training, compute_loss, prepare_step, train

STEPS = 1000  # the length of the learning-rate schedule; it does not change the price


@dataclass(frozen=True)
class TrainingEstimate:
    """The estimated memory and time of a training step. `fits` and `advice` are as in `Estimate`.

    `forward_seconds` is the time to compute only the loss. `backward_ratio` is the time of all other parts of a step,
    divided by `forward_seconds`.
    """

    model: str
    chip: str
    mesh: Mapping[str, int]
    rules: str
    size: str
    frames: int
    batch_size: int
    trained: str
    precision: str
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
    description: ModelDescription,
    chip: str,
    mesh: tuple[int, int, int] | None = None,
    *,
    lora: LoraConfig | None,
    optimizer_config: OptimizerConfig,
    batch_size: int = 1,
    sp: int | None = None,
    rules: str = "fsdp",
    compiler: str = SAFE_SET,
    attention: AttentionConfig = AUTO,
    on_progress: OnProgress = lambda running_names, done, total: None,
) -> TrainingEstimate:
    """Estimate a training step on clips with the description's settings. The other arguments are as in `estimate`."""
    precision = Precision.of(description.settings.precision)
    check_trainable_precision(precision, lora, is_stored=description.has_quantized_weights)
    hardware, settings = find_priceable_hardware(chip), replace(description.settings, guidance_scale=1.0)
    model = description.model
    model.spec.check_trainable(settings)
    options = {"attention": attention, "rules": SHARDING_RULES[rules]}
    dtype = "float32" if lora is None else description.param_dtype
    compute_step_cost = partial(step_cost, description.family, model, settings, param_dtype=dtype, **options)
    hardware, axes = mesh_axes(hardware, mesh, compute_step_cost, sp)
    partitioner = Partitioner(mesh_on(hardware, axes), SHARDING_RULES[rules])
    param_dtype = "float32" if lora is None else settings.dtype
    load_options = {"attention": attention, "compiler": compiler, "param_dtype": param_dtype}
    pipe = abstract_pipeline(replace(description, settings=settings), partitioner, **load_options)
    traced = _trace_step(pipe, settings, batch_size, lora, optimizer_config)
    programs = [(name, traced[program].abstract_call) for name, program in (("step", train), ("forward", compute_loss))]
    step, forward = price_on(hardware, programs, on_progress)
    return TrainingEstimate(
        model=settings.model,
        chip=chip,
        mesh=axes,
        rules=rules,
        batch_size=batch_size,
        size=f"{settings.width}x{settings.height}",
        frames=settings.frames,
        trained="all weights" if lora is None else f"a LoRA of rank {lora.rank}",
        precision=settings.precision,
        optimizer=optimizer_config.name,
        **_memory_fields(settings, chip, hardware, step),
        **_time_fields(step, forward),
    )


def _trace_step(
    pipe: Pipeline, settings: Settings, batch_size: int, lora: LoraConfig | None, optimizer_config: OptimizerConfig
) -> dict[Program, TracedProgram]:
    """Trace two programs on clips with captions: a training step, and its loss without the gradients."""
    config, partitioner = pipe.model.spec.networks["transformer"], pipe.partitioner
    graphdef, weights = nnx.split(pipe.components.abstract().get("transformer"))

    def build_network(rngs: nnx.Rngs) -> nnx.Module:
        network = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), weights))
        rules = network_of(config, pipe.components.kinds).rules
        return network if lora is None else adapt(network, rules, lora, 0)[0]

    network = with_shardings(as_shapes(build_network), partitioner)
    trained = all_parameters if lora is None else is_factor
    static, trainable_weights, constants = prepare_step(
        network, make_loss(pipe, NoiseLevels()), make_optimizer(optimizer_config, STEPS), trained=trained
    )
    batch, number = _batch(pipe, settings, batch_size), np.int32(0)
    trace, compile_context = Trace(), CompileContext(partitioner, pipe.compiler)
    state = {"weights": trainable_weights, **trace.call(begin_training, compile_context, static, trainable_weights)}
    trace.call(train, compile_context, static, state, constants, batch, number)
    trace.call(compute_loss, compile_context, static, trainable_weights, constants, batch, number)
    return {program.traced_program.program: program.traced_program for program in trace.programs}


def _batch(pipe: Pipeline, settings: Settings, batch_size: int) -> Batch:
    """Return the shapes of a batch of clips with these settings.

    The shapes stand for arrays on the host, like a batch that is read from files.
    """
    traced = pipe.with_strategy(Trace(), pipe.components.abstract())
    (conditioning,) = Run(traced, [PreparedRequest(settings)], needed_pictures(pipe, settings)).encode().values()
    fields = {
        name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype)
        for name, x in conditioning._asdict().items()
        if x is not None and name != VIDEO_SHAPE_TENSOR  # a run adds this field, and a training does not
    }
    negatives = {name: fields[name.removeprefix(NEGATIVE)] for name in fields if name.startswith(NEGATIVE)}
    _, *latents = pipe.model.spec.latent_shape(settings)
    return Batch(jax.ShapeDtypeStruct((batch_size, *latents), jnp.float32), type(conditioning)(**fields | negatives))


def _time_fields(step: Price, forward: Price) -> dict[str, Any]:
    """Return the fields of `TrainingEstimate` about time."""
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


def _memory_fields(settings: Settings, chip: str, hardware: Hardware, step: Price) -> dict[str, Any]:
    """Return the fields of `TrainingEstimate` about memory, and about what limits the speed of a step."""
    spare_bytes, fits = hardware.memory - step.peak_bytes, fits_on(hardware, step.argument_bytes, step.peak_bytes)
    advice = None
    if fits is None:
        claim = f"a step of {settings.model} may fit {chip}"
        advice = may_fit_advice(claim, "it", step.argument_bytes, step.peak_bytes, hardware.memory)
    elif not fits:
        advice = (
            f"a step of {settings.model} needs {format_bytes(step.peak_bytes, 1024)} a chip, but a chip has "
            f"{format_bytes(hardware.memory, 1024)}: {smallest_slice_advice(chip, step.peak_bytes * hardware.devices)}"
        )
    return {
        "memory_per_chip": hardware.memory,
        "weights_bytes_per_chip": step.argument_bytes,
        "peak_bytes_per_chip": step.peak_bytes,
        "spare_bytes_per_chip": spare_bytes,
        "fits": fits,
        "limit": (None if fits is False else limit_of(step)) or "the memory of a chip",
        "advice": advice,
    }
