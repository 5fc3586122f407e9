# SPDX-License-Identifier: Apache-2.0
"""A step of training as programs: the optimizer's first state, the step, and the loss alone.

    static, weights, fixed = prepare_step(network, loss, optimizer)
    state = {"weights": weights, **call(begin_training, static, weights)}
    for number, batch in enumerate(batches):
        state, metrics = call(train, static, state, fixed, batch, number)

A `Trainer` executes them, and a plan of training traces them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from wanjax.execution import program
from wanjax.kernels.compiler_options import matmul_options, scan_options
from wanjax.pipelines.seeds import key_of, seed_to_key_data
from wanjax.sharding import constrain_to
from wanjax.training.adapters import DropoutKey, redraw_dropout_keys
from wanjax.training.objective import Loss

Filter = Callable[[Any, Any], bool]
FINITE = "finite"  # the metric that tells whether all of the state after a step is


def all_parameters(path: Any, weight: Any) -> bool:
    """Choose all parameters of a network."""
    return isinstance(weight, nnx.Param)


class Fixed(NamedTuple):
    """The arrays that no step changes.

    Args:
        keys: Those of dropout, which each step draws anew.
        frozen: The parameters that are not trained, and all else of the network.
        seed_words: Those of the seed.
    """

    keys: nnx.State
    frozen: nnx.State
    seed_words: UInt32[Array | np.ndarray, "2"]


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """What a step of training is compiled for, without arrays. A hashable value: it is equal to itself alone.

    `specs` are the shardings of the state, by its entries. `ema_decay` and `grad_accum_steps` are those of `Trainer`.
    """

    graphdef: nnx.GraphDef
    loss: Loss
    optimizer: optax.GradientTransformation
    specs: Mapping[str, Any]
    ema_decay: float | None = None
    grad_accum_steps: int = 1

    def network(self, weights: Any, fixed: Fixed, key: jax.Array | None = None) -> Any:
        """Return the network with these weights, and keys of dropout that are drawn from `key`, if it is given."""
        keys = fixed.keys
        if key is not None and jax.tree.leaves(keys):
            keys = redraw_dropout_keys(keys, jax.random.fold_in(key, 1))
        return nnx.merge(self.graphdef, weights, keys, fixed.frozen)


def prepare_step(
    network: nnx.Module,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    seed: int = 0,
    trained: Filter = all_parameters,
    ema_decay: float | None = None,
    grad_accum_steps: int = 1,
) -> tuple[TrainingStep, Any, Fixed]:
    """Return the steps of a network's training, the weights that they change, and the arrays that they do not.

    The arguments are those of `Trainer`.
    """
    graphdef, weights, keys, frozen = nnx.split(network, trained, DropoutKey, ...)
    sharding = jax.tree.map(_spec, weights)
    specs = {"weights": sharding, "optimizer": _optimizer_specs(optimizer, weights)}
    if ema_decay is not None:
        specs["ema"] = sharding
    static = TrainingStep(graphdef, loss, optimizer, specs, ema_decay, grad_accum_steps)
    return static, weights, Fixed(keys, frozen, seed_to_key_data([seed])[0])


@program(scan_options)
def begin_training(static: TrainingStep, weights: Any) -> dict[str, Any]:
    """Return the state beside the weights: the optimizer's, and the mean of the weights if there is one."""
    first: dict[str, Any] = {"optimizer": static.optimizer.init(weights)}
    if static.ema_decay is not None:
        first["ema"] = weights
    return jax.tree.map(constrain_to, first, {name: static.specs[name] for name in first})


@program(matmul_options, donated=("state",))
def train(
    static: TrainingStep, state: dict[str, Any], fixed: Fixed, batch: Any, number: Int[Array, ""]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Take a step; return the state, and metrics."""
    key = jax.random.fold_in(key_of(fixed.seed_words), number)

    def compute(weights: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return static.loss(static.network(weights, fixed, key), batch, key)

    gradient = jax.value_and_grad(compute, has_aux=True)
    weights = state["weights"]
    if static.grad_accum_steps == 1:
        (value, loss_metrics), gradients = gradient(weights, batch, key)
    else:
        (value, loss_metrics), gradients = _mean(gradient, weights, batch, key, static.grad_accum_steps)
    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        updates, optimizer_state = static.optimizer.update(gradients, state["optimizer"], weights)
        weights = optax.apply_updates(weights, updates)
    after = {"weights": weights, "optimizer": optimizer_state}
    if static.ema_decay is not None:
        after["ema"] = optax.incremental_update(weights, state["ema"], 1.0 - static.ema_decay)
    metrics = {"loss": value, "gradient": optax.tree.norm(gradients), FINITE: _is_finite(after), **loss_metrics}
    return jax.tree.map(constrain_to, after, static.specs), metrics


@program(matmul_options)
def loss_alone(
    static: TrainingStep, weights: Any, fixed: Fixed, batch: Any, number: Int[Array, ""]
) -> Float[Array, ""]:
    """Compute the loss of a step, for comparison."""
    key = jax.random.fold_in(key_of(fixed.seed_words), number)
    return static.loss(static.network(weights, fixed, key), batch, key)[0]


def _is_finite(state: Any) -> Bool[Array, ""]:
    """Return whether all numbers of a state are finite."""
    numbers = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in numbers])


def _mean(gradient: Callable[..., Any], weights: Any, batch: Any, key: jax.Array, parts: int) -> Any:
    """Return the means of the losses, metrics and gradients of the parts of a batch, computed one after the other."""
    split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
    first, keys = jax.tree.map(lambda x: x[0], split), jax.random.split(key, parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, weights, first, key))

    def add(total: Any, part: Any) -> tuple[Any, None]:
        part_results = gradient(weights, *part)
        return jax.tree.map(lambda a, b: a + b / jnp.asarray(parts, b.dtype), total, part_results), None

    return jax.lax.scan(add, zeros, (split, keys))[0]


def _spec(weight: Any) -> PartitionSpec:
    """Return how a weight is sharded."""
    return weight.sharding.spec if isinstance(weight.sharding, NamedSharding) else PartitionSpec()


def _optimizer_specs(optimizer: optax.GradientTransformation, weights: Any) -> Any:
    """Return how an optimizer's state is sharded: what belongs to a weight as the weight is."""

    def spec_of(x: Any, weight: Any) -> Any:
        if isinstance(x, optax.MaskedNode):  # a weight that another part of the optimizer has
            return x
        return _spec(weight) if x.shape == weight.shape and x.size > 1 else PartitionSpec()

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    state = jax.eval_shape(optimizer.init, shapes)
    options = {"transform_non_params": lambda x: PartitionSpec(), "is_leaf": lambda x: isinstance(x, optax.MaskedNode)}
    return optax.tree.map_params(optimizer, spec_of, state, weights, **options)
