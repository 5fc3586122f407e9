# SPDX-License-Identifier: Apache-2.0
"""A training's step for plans, lowered for arguments that are shapes."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from wanjax.compilation import Lowering
from wanjax.kernels.compiler_options import products
from wanjax.layers.placement import as_shapes, placed
from wanjax.pipelines.blueprint import Blueprint
from wanjax.pipelines.components import Components
from wanjax.pipelines.family import Architecture
from wanjax.pipelines.settings import Settings
from wanjax.sharding import use
from wanjax.training.adapters import DropoutKey, LoraConfig, adapt, is_factor
from wanjax.training.loop import everything, step_of
from wanjax.training.objective import Batch, Loss, NoiseLevels, loss_of
from wanjax.training.optimizers import OptimizerConfig, optimizer


def step(blueprint: Blueprint, **training: Any) -> Lowering:
    """Lowers a step: the loss, its gradient, and the optimiser."""
    (loss, made, split, batch), key = _parts(blueprint, **training), _key(blueprint)
    graphdef, weights, keys, frozen = split
    init = jax.eval_shape(made.init, weights)
    state = {"weights": weights, "optimizer": _sharded(blueprint, made, init, weights)}
    run = _under(blueprint, step_of(graphdef, loss, made))
    return Lowering(run, (state, keys, frozen, batch, key), (0,), products(None))


def forward(blueprint: Blueprint, **training: Any) -> Lowering:
    """Lowers the loss alone, for comparison."""
    (loss, _, split, batch), key = _parts(blueprint, **training), _key(blueprint)
    graphdef, weights, keys, frozen = split

    def run(weights: Any, keys: Any, frozen: Any, batch: Batch, key: jax.Array) -> jax.Array:
        return loss(nnx.merge(graphdef, weights, keys, frozen), batch, key)[0]

    return Lowering(_under(blueprint, run), (weights, keys, frozen, batch, key), (), products(None))


def _parts(
    blueprint: Blueprint,
    *,
    pipeline: Callable[..., Any],
    module: Callable[..., nnx.Module],
    rules: Callable[[Any], Any],
    architecture: Architecture,
    settings: Settings,
    clips: int,
    lora: LoraConfig | None,
    optimized: OptimizerConfig,
    attention: str | None,
) -> tuple[Loss, optax.GradientTransformation, Any, Batch]:
    """Returns the loss, the optimiser, the network's parts as shapes, and a batch as shapes.

    `pipeline` and `module` make the family's pipeline and its denoiser, and `rules` its conversion table.
    """
    config = architecture.networks["transformer"]
    kept = jnp.float32 if lora is None else blueprint.dtype
    kw = {"attention": attention, "dtype": blueprint.dtype, "param_dtype": kept}

    def make(rngs: nnx.Rngs) -> nnx.Module:
        network = module(config, **kw, rngs=rngs)
        return network if lora is None else adapt(network, rules(config), lora, 0)[0]

    network = placed(as_shapes(make), blueprint.partitioner)
    split = nnx.split(network, everything if lora is None else is_factor, DropoutKey, ...)
    pipe = pipeline(Components({}), architecture, settings, blueprint.partitioner, blueprint.compiler)
    return loss_of(pipe, NoiseLevels()), optimizer(optimized, 1000), split, _batch(blueprint, pipe, settings, clips)


def _batch(blueprint: Blueprint, pipe: Any, settings: Settings, clips: int) -> Batch:
    """Returns a batch of clips as shapes."""
    _, *latents = pipe.architecture.latent_shape(settings)
    fields = {}
    for name, (shape, dtype) in pipe.architecture.encoded_shapes(settings).items():
        fields[name] = blueprint.array((clips, *shape[1:]), blueprint.dtype if dtype is None else dtype)
        if f"negative_{name}" in pipe.encoded_type._fields:
            fields[f"negative_{name}"] = fields[name]
    return Batch(blueprint.array((clips, *latents), jnp.float32), pipe.encoded_type(**fields))


def _key(blueprint: Blueprint) -> Any:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=blueprint.array((), jnp.uint32).sharding)


def _under(blueprint: Blueprint, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with use(blueprint.partitioner):
            return function(*arguments)

    return run


def _sharded(blueprint: Blueprint, made: optax.GradientTransformation, state: Any, weights: Any) -> Any:
    """Returns the optimiser's state as shapes; what belongs to a weight has its sharding."""
    whole = partial(blueprint.array)

    def like(x: jax.ShapeDtypeStruct, weight: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = weight.sharding
        if x.shape == weight.shape and isinstance(sharding, NamedSharding) and prod(x.shape) > 1:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return whole(x.shape, x.dtype)

    return optax.tree.map_params(made, like, state, weights, transform_non_params=lambda x: whole(x.shape, x.dtype))
