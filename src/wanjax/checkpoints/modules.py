# SPDX-License-Identifier: Apache-2.0
"""Modules filled from a checkpoint by a table of rules, and written as one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from wanjax.checkpoints.arrays import Arrays
from wanjax.checkpoints.files import Reader, Spec, adding, write_safetensors
from wanjax.checkpoints.to_devices import on_devices
from wanjax.converters.transforms import Transform
from wanjax.converters.weight_rules import Assignment, Rule, assign, expanded, rules_for

Module = TypeVar("Module", bound=nnx.Module)


def load(
    abstract: Module,
    rules: Iterable[Rule],
    reader: Reader,
    *,
    ignore: Iterable[str] = (),
    progress: Callable[[int, int], object] | None = None,
) -> Module:
    """Return the module with the checkpoint's weights, each in the abstract module's dtype and sharding.

    abstract: from `nnx.eval_shape`, or `nnx.merge(*nnx.get_abstract_model(..., mesh))`, which has shardings; progress:
    called after each tensor with the checkpoint's bytes read so far and in all.
    One tensor, or one stack of at most `to_devices.SMALL_STACK` bytes, is in host memory at a time, beside the weights
    themselves where the devices are CPUs; each process reads only its devices' shards. Raises WanjaxError as `assign`
    does.
    """
    targets = parameters(abstract)
    specs = reader.specs
    assignments = assign(rules, specs, targets, ignore=ignore)
    count = adding(progress, sum(specs[key].nbytes for each in assignments for key in each.sources))

    @contextmanager
    def reading(key: str, transform: Transform) -> Iterator[np.ndarray]:
        """Yield the rearranged tensor, and report its bytes once it has been used."""
        yield transform.forward(reader.read(key))
        count(specs[key].nbytes)

    def weights(each: Assignment) -> jax.Array:
        tensors = [reading(key, each.transform) for key in each.sources]  # each is read when it is entered
        return on_devices(tensors, targets[each.target], stacked=each.stacked)

    return _filled(abstract, {each.target: weights(each) for each in assignments})


def restore(abstract: Module, arrays: Arrays, *, progress: Callable[[int, int], object] | None = None) -> Module:
    """Return the module with weights that `wanjax convert` stored; otherwise as `load`."""
    targets = parameters(abstract)
    assign([Rule(name, name) for name in targets], arrays.specs, targets)
    return _filled(abstract, arrays.restore(targets, adding(progress, arrays.nbytes)))


def _filled(abstract: Module, weights: Mapping[str, jax.Array]) -> Module:
    graphdef, state = nnx.split(abstract)
    filled = [(path, variable.replace(weights[_dotted(path)])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def parameters(module: nnx.Module) -> dict[str, Any]:
    """Return the module's arrays by dotted path, as shapes and dtypes if it is abstract: targets for `assign`."""
    return {_dotted(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(module))}


def _dotted(path: Iterable) -> str:
    return ".".join(map(str, path))


class Exported:
    """A module's weights as a `Reader` of the table's source tensors, with their names, shapes and order of axes.

    weights: arrays, or objects with a shape and a dtype that return an array for an index, such as `StoredArray`.
    It inverts `load` bit for bit.
    """

    def __init__(self, weights: Mapping[str, Any], rules: Iterable[Rule]):
        self._weights, self._places, self.specs = weights, {}, dict[str, Spec]()
        rules = list(rules)
        for target, values in weights.items():
            ((rule, indices),) = rules_for(target, rules)
            assignment, _ = expanded(rule, indices, target, values.shape, ())
            shape = tuple(values.shape)[assignment.stacked :]
            spec = Spec(assignment.transform.source_shape(shape) or shape, np.dtype(values.dtype))
            self.specs |= dict.fromkeys(assignment.sources, spec)
            for i, key in enumerate(assignment.sources):
                self._places[key] = (target, i if assignment.stacked else ..., assignment.transform)

    def read(self, key: str) -> np.ndarray:
        target, index, transform = self._places[key]
        return transform.inverse(self._weights[target][index])


def export(model: nnx.Module, rules: Iterable[Rule], path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write the module's weights as one safetensors file of the table's source tensors.

    It inverts `load`, bit for bit when the dtypes are the same. Raises WanjaxError if the file cannot be written.
    """
    weights = {target: np.asarray(value) for target, value in parameters(model).items()}
    exported = Exported(weights, rules)
    write_safetensors(path, exported, exported.specs, metadata)
