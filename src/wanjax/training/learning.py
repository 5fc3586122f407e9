# SPDX-License-Identifier: Apache-2.0
"""A step of training as programs: the optimiser's first state, the step, and the loss alone.

A training executes them, and its plan records them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, UInt32

from wanjax.kernels.compiler_options import products, scanned
from wanjax.pipelines.seeds import key_of, seed_to_key_data
from wanjax.programs import Site, Strategy, program
from wanjax.sharding import state as stated
from wanjax.training.adapters import DropoutKey, dropped
from wanjax.training.objective import Loss

Filter = Callable[[Any, Any], bool]
FINITE = "finite"  # the metric that tells whether all of the state after a step is


def everything(path: Any, weight: Any) -> bool:
    """Chooses all parameters of a network."""
    return isinstance(weight, nnx.Param)


@dataclass(frozen=True, eq=False)
class Method:
    """What a step of training is compiled for. A hashable value: it is equal to itself alone.

    `specs` are the shardings of the state. `average` and `accumulated` are those of `Trainer`.
    """

    graphdef: Any
    loss: Loss
    optimizer: optax.GradientTransformation
    specs: Any
    average: float | None = None
    accumulated: int = 1


@program(scanned)
def begin_training(method: Method, weights: Any) -> dict[str, Any]:
    """Returns the state beside the weights: the optimiser's, and the mean of the weights if there is one."""
    made: dict[str, Any] = {"optimizer": method.optimizer.init(weights)}
    if method.average is not None:
        made["average"] = weights
    return jax.tree.map(stated, made, {name: method.specs[name] for name in made})


@program(products, donated=("state",))
def train(
    method: Method,
    state: dict[str, Any],
    keys: Any,
    frozen: Any,
    batch: Any,
    words: UInt32[Array, "2"],
    number: Int[Array, ""],
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Takes a step; returns the state, and metrics. `keys` are those of dropout, `words` those of the seed."""
    key = jax.random.fold_in(key_of(words), number)

    def compute(weights: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, dict]:
        return method.loss(_network(method, weights, keys, frozen, key), batch, key)

    gradient = jax.value_and_grad(compute, has_aux=True)
    weights = state["weights"]
    if method.accumulated == 1:
        (value, told), gradients = gradient(weights, batch, key)
    else:
        (value, told), gradients = _mean(gradient, weights, batch, key, method.accumulated)
    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        updates, of_optimizer = method.optimizer.update(gradients, state["optimizer"], weights)
        weights = optax.apply_updates(weights, updates)
    after = {"weights": weights, "optimizer": of_optimizer}
    if method.average is not None:
        after["average"] = optax.incremental_update(weights, state["average"], 1.0 - method.average)
    metrics = {"loss": value, "gradient": optax.tree.norm(gradients), FINITE: _finite(after), **told}
    return jax.tree.map(stated, after, method.specs), metrics


@program(products)
def loss_alone(
    method: Method, weights: Any, keys: Any, frozen: Any, batch: Any, words: UInt32[Array, "2"], number: Int[Array, ""]
) -> Array:
    """Computes the loss of a step, for comparison."""
    key = jax.random.fold_in(key_of(words), number)
    return method.loss(_network(method, weights, keys, frozen, key), batch, key)[0]


def _network(method: Method, weights: Any, keys: Any, frozen: Any, key: jax.Array) -> Any:
    drawn = dropped(keys, jax.random.fold_in(key, 1)) if jax.tree.leaves(keys) else keys
    return nnx.merge(method.graphdef, weights, drawn, frozen)


def _finite(state: Any) -> Bool[Array, ""]:
    """Tells whether all numbers of a state are finite."""
    numbers = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in numbers])


def _mean(gradient: Callable[..., Any], weights: Any, batch: Any, key: jax.Array, parts: int) -> Any:
    """Returns the means of the losses, metrics and gradients of the parts of a batch, computed one after the other."""
    split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
    first, keys = jax.tree.map(lambda x: x[0], split), jax.random.split(key, parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, weights, first, key))

    def add(total: Any, part: Any) -> tuple[Any, None]:
        found = gradient(weights, *part)
        return jax.tree.map(lambda a, b: a + b / jnp.asarray(parts, b.dtype), total, found), None

    return jax.lax.scan(add, zeros, (split, keys))[0]


class Learning:
    """The steps of a training of a network, which `strategy` takes.

    The other arguments are those of `Trainer`.
    """

    def __init__(
        self,
        network: nnx.Module,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        strategy: Strategy,
        site: Site,
        *,
        seed: int = 0,
        trained: Filter = everything,
        average: float | None = None,
        accumulated: int = 1,
    ):
        self.graphdef, self.weights, self.keys, self.frozen = nnx.split(network, trained, DropoutKey, ...)
        weights = jax.tree.map(_spec, self.weights)
        specs = {"weights": weights, "optimizer": _like(optimizer, self.weights)}
        if average is not None:
            specs["average"] = weights
        self.method = Method(self.graphdef, loss, optimizer, specs, average, accumulated)
        self.words = seed_to_key_data([seed])[0]
        self._call = lambda program, *arguments: strategy.call(program, site, self.method, *arguments)

    def begin(self) -> dict[str, Any]:
        """Returns the first state."""
        return {"weights": self.weights, **self._call(begin_training, self.weights)}

    def take(self, state: dict[str, Any], batch: Any, number: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Takes a step, whose number is an int32 of the host; returns the state, whose buffers go on, and metrics."""
        return self._call(train, state, self.keys, self.frozen, batch, self.words, number)

    def loss(self, batch: Any, number: Any) -> Any:
        """Returns the loss of a step alone."""
        return self._call(loss_alone, self.weights, self.keys, self.frozen, batch, self.words, number)

    def network(self, weights: Any) -> Any:
        """Returns the network with these weights."""
        return nnx.merge(self.graphdef, weights, self.keys, self.frozen)


def _spec(weight: Any) -> PartitionSpec:
    """Returns how a weight is sharded."""
    return weight.sharding.spec if isinstance(weight.sharding, NamedSharding) else PartitionSpec()


def _like(optimizer: optax.GradientTransformation, weights: Any) -> Any:
    """Returns how an optimiser's state is sharded: what belongs to a weight as the weight is."""

    def like(x: Any, weight: Any) -> Any:
        if isinstance(x, optax.MaskedNode):  # a weight that another part of the optimiser has
            return x
        return _spec(weight) if x.shape == weight.shape and x.size > 1 else PartitionSpec()

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    state = jax.eval_shape(optimizer.init, shapes)
    how = {"transform_non_params": lambda x: PartitionSpec(), "is_leaf": lambda x: isinstance(x, optax.MaskedNode)}
    return optax.tree.map_params(optimizer, like, state, weights, **how)
