# SPDX-License-Identifier: Apache-2.0
"""The programs of a training step: the optimizer's initial state, the step, and the loss.

    static, weights, constants = prepare_step(network, loss, optimizer)
    state = {"weights": weights, **call(begin_training, static, weights)}
    for step, batch in enumerate(batches):
        state, metrics = call(train, static, state, constants, batch, step)

A `Trainer` executes these programs, and `wanjax plan` traces them to estimate a training run.
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
FINITE = "finite"  # the name of the metric that is true if the state after a step is finite


def all_parameters(path: Any, weight: Any) -> bool:
    """Select all parameters of a network."""
    return isinstance(weight, nnx.Param)


class ConstantArrays(NamedTuple):
    """Arrays that a step reads but does not change.

    Args:
        keys: Placeholders for the dropout keys. Each step draws new keys.
        frozen: The parameters that are not trained, and other variables of the network.
        seed_words: The seed as key data.
    """

    keys: nnx.State
    frozen: nnx.State
    seed_words: UInt32[Array | np.ndarray, "2"]


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """The static argument of the programs. Two of these arguments are equal only if they are the same object.

    Args:
        graphdef: The network's graph definition.
        loss: The loss, as in `Trainer`.
        optimizer: The optimizer.
        specs: The shardings of the state's entries.
        ema_decay: As in `Trainer`.
        grad_accum_steps: As in `Trainer`.
    """

    graphdef: nnx.GraphDef
    loss: Loss
    optimizer: optax.GradientTransformation
    specs: Mapping[str, Any]
    ema_decay: float | None = None
    grad_accum_steps: int = 1

    def network(self, weights: Any, constants: ConstantArrays, key: jax.Array | None = None) -> Any:
        """Build the network with these weights. If `key` is not None, draw new dropout keys from it."""
        keys = constants.keys
        if key is not None and jax.tree.leaves(keys):
            keys = redraw_dropout_keys(keys, jax.random.fold_in(key, 1))
        return nnx.merge(self.graphdef, weights, keys, constants.frozen)


def prepare_step(
    network: nnx.Module,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    seed: int = 0,
    trained: Filter = all_parameters,
    ema_decay: float | None = None,
    grad_accum_steps: int = 1,
) -> tuple[TrainingStep, Any, ConstantArrays]:
    """Split a network into the static argument of the programs, the weights to train, and constant arrays.

    The arguments are those of `Trainer`.
    """
    graphdef, weights, keys, frozen = nnx.split(network, trained, DropoutKey, ...)
    sharding = jax.tree.map(_spec, weights)
    specs = {"weights": sharding, "optimizer": _optimizer_specs(optimizer, weights)}
    if ema_decay is not None:
        specs["ema"] = sharding
    static = TrainingStep(graphdef, loss, optimizer, specs, ema_decay, grad_accum_steps)
    return static, weights, ConstantArrays(keys, frozen, seed_to_key_data([seed])[0])


@program(scan_options)
def begin_training(static: TrainingStep, weights: Any) -> dict[str, Any]:
    """Initialise the state except the weights: the optimizer's state and, with `ema_decay`, the moving average."""
    state: dict[str, Any] = {"optimizer": static.optimizer.init(weights)}
    if static.ema_decay is not None:
        state["ema"] = weights
    return jax.tree.map(constrain_to, state, {name: static.specs[name] for name in state})


@program(matmul_options, donated=("state",))
def train(
    static: TrainingStep, state: dict[str, Any], constants: ConstantArrays, batch: Any, step: Int[Array, ""]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Take a training step. Return the new state and the metrics."""
    key = jax.random.fold_in(key_of(constants.seed_words), step)

    def loss_fn(weights: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return static.loss(static.network(weights, constants, key), batch, key)

    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
    weights = state["weights"]
    if static.grad_accum_steps == 1:
        (value, loss_metrics), gradients = value_and_grad(weights, batch, key)
    else:
        (value, loss_metrics), gradients = _accumulate(value_and_grad, weights, batch, key, static.grad_accum_steps)
    with jax.numpy_dtype_promotion("standard"):  # optax requires this
        updates, optimizer_state = static.optimizer.update(gradients, state["optimizer"], weights)
        weights = optax.apply_updates(weights, updates)
    new_state = {"weights": weights, "optimizer": optimizer_state}
    if static.ema_decay is not None:
        new_state["ema"] = optax.incremental_update(weights, state["ema"], 1.0 - static.ema_decay)
    metrics = {"loss": value, "gradient": optax.tree.norm(gradients), FINITE: _is_finite(new_state), **loss_metrics}
    return jax.tree.map(constrain_to, new_state, static.specs), metrics


@program(matmul_options)
def compute_loss(
    static: TrainingStep, weights: Any, constants: ConstantArrays, batch: Any, step: Int[Array, ""]
) -> Float[Array, ""]:
    """Compute the loss of a step without its gradients."""
    key = jax.random.fold_in(key_of(constants.seed_words), step)
    return static.loss(static.network(weights, constants, key), batch, key)[0]


def _is_finite(state: Any) -> Bool[Array, ""]:
    """Return whether all numbers of a state are finite."""
    numbers = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in numbers])


def _accumulate(value_and_grad: Callable[..., Any], weights: Any, batch: Any, key: jax.Array, parts: int) -> Any:
    """Compute the microbatches one after another, and average their losses, metrics and gradients."""
    split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
    first, keys = jax.tree.map(lambda x: x[0], split), jax.random.split(key, parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(value_and_grad, weights, first, key))

    def add(total: Any, part: Any) -> tuple[Any, None]:
        part_results = value_and_grad(weights, *part)
        return jax.tree.map(lambda a, b: a + b / jnp.asarray(parts, b.dtype), total, part_results), None

    return jax.lax.scan(add, zeros, (split, keys))[0]


def _spec(weight: Any) -> PartitionSpec:
    """Return the partition spec of a weight."""
    return weight.sharding.spec if isinstance(weight.sharding, NamedSharding) else PartitionSpec()


def _optimizer_specs(optimizer: optax.GradientTransformation, weights: Any) -> Any:
    """Return the partition specs of an optimizer's state. An array with the shape of its weight is sharded like the
    weight."""

    def spec_of(x: Any, weight: Any) -> Any:
        if isinstance(x, optax.MaskedNode):  # this weight belongs to another part of the optimizer
            return x
        return _spec(weight) if x.shape == weight.shape and x.size > 1 else PartitionSpec()

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    state = jax.eval_shape(optimizer.init, shapes)
    options = {"transform_non_params": lambda x: PartitionSpec(), "is_leaf": lambda x: isinstance(x, optax.MaskedNode)}
    return optax.tree.map_params(optimizer, spec_of, state, weights, **options)
