# SPDX-License-Identifier: Apache-2.0
"""Fill modules with a checkpoint's weights by rules, and write the weights of modules to a checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from wanjax.checkpoints.arrays import OrbaxCheckpoint
from wanjax.checkpoints.files import Spec, TensorReader, progress_counter, write_safetensors
from wanjax.checkpoints.quantize import as_floats, quantized_kernels, to_device_quantized
from wanjax.checkpoints.to_devices import to_device
from wanjax.converters.transforms import Transform
from wanjax.converters.weight_rules import WeightRule, assign, expand_rule, rules_for

Module = TypeVar("Module", bound=nnx.Module)


def load(
    abstract: Module,
    rules: Iterable[WeightRule],
    reader: TensorReader,
    *,
    ignore: Iterable[str] = (),
    progress: Callable[[int, int], object] | None = None,
    was_quantized: bool = False,
) -> Module:
    """Load a module's weights from a checkpoint.

    Host memory holds one tensor at a time, or one stack if it has at most `to_devices.SMALL_STACK` bytes or stays in
    host memory. On CPUs host memory also holds the loaded weights. Each process reads only the shards of its own
    devices.

    Args:
        abstract: The abstract module with dtypes and shardings, from `nnx.eval_shape` or
            `nnx.merge(*nnx.get_abstract_model(..., mesh))`.
        rules: The rules that say which tensors fill which parameters of the module.
        reader: The checkpoint's tensors.
        ignore: Patterns with `*` for the names of unused tensors.
        progress: Called after each tensor with the number of bytes read so far and the total number.
        was_quantized: Whether kernels were quantized to 8 bits before LoRAs changed them.

    Raises:
        WanjaxError: The checkpoint does not fit the module; `assign` lists the cases.
    """
    kernels = quantized_kernels(abstract)
    targets = as_floats(parameters(abstract), kernels)
    specs, changes = reader.specs, getattr(reader, "changes", lambda key: False)
    assignments = assign(rules, specs, targets, ignore=ignore)
    count = progress_counter(
        progress, sum(specs[key].nbytes for assignment in assignments for key in assignment.sources)
    )

    @contextmanager
    def open_tensor(key: str, transform: Transform) -> Iterator[np.ndarray]:
        """Yield the rearranged tensor, and report its bytes when the caller has used the tensor."""
        yield transform.forward(reader.read(key))
        count(specs[key].nbytes)

    weights: dict[str, jax.Array] = {}
    for assignment in assignments:
        # A tensor is read when its context is entered
        tensors = [open_tensor(key, assignment.transform) for key in assignment.sources]
        if (kernel := kernels.get(assignment.target)) is None:
            weights[assignment.target] = to_device(tensors, targets[assignment.target], stacked=assignment.stacked)
        else:
            requantizes = [was_quantized and changes(key) for key in assignment.sources]
            weights |= to_device_quantized(tensors, kernel, stacked=assignment.stacked, was_quantized=requantizes)
    return _with_weights(abstract, weights)


def restore(
    abstract: Module, arrays: OrbaxCheckpoint, *, progress: Callable[[int, int], object] | None = None
) -> Module:
    """Fill a module with the arrays that `wanjax convert` stored; the counterpart of `load` for a wanjax checkpoint."""
    targets = parameters(abstract)
    assign([WeightRule(name, name) for name in targets], arrays.specs, targets)
    return _with_weights(abstract, arrays.restore(targets, progress_counter(progress, arrays.nbytes)))


def _with_weights(abstract: Module, weights: Mapping[str, jax.Array]) -> Module:
    graphdef, state = nnx.split(abstract)
    filled = [(path, variable.replace(weights[_dotted(path)])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def parameters(module: nnx.Module) -> dict[str, Any]:
    """Return the module's arrays by dotted path. For an abstract module, return shapes and dtypes in place of
    arrays."""
    return {_dotted(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(module))}


def _dotted(path: Iterable) -> str:
    return ".".join(map(str, path))


class ExportedTensors:
    """A reader of a module's weights, as the tensors from which rules would fill the module: the inverse of `load`.

    Args:
        weights: Arrays by parameter name, or other objects with a shape, a dtype and indexing, such as `StoredArray`.
        rules: The rules.
    """

    def __init__(self, weights: Mapping[str, Any], rules: Iterable[WeightRule]):
        self._weights, self._locations, self.specs = weights, {}, dict[str, Spec]()
        rules = list(rules)
        for target, values in weights.items():
            ((rule, indices),) = rules_for(target, rules)
            assignment, _ = expand_rule(rule, indices, target, values.shape, ())
            shape = tuple(values.shape)[assignment.stacked :]
            spec = Spec(assignment.transform.source_shape(shape) or shape, np.dtype(values.dtype))
            self.specs |= dict.fromkeys(assignment.sources, spec)
            for i, key in enumerate(assignment.sources):
                self._locations[key] = (target, i if assignment.stacked else ..., assignment.transform)

    def read(self, key: str) -> np.ndarray:
        target, index, transform = self._locations[key]
        return transform.inverse(self._weights[target][index])


def export(
    model: nnx.Module, rules: Iterable[WeightRule], path: Path, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a module's weights to a safetensors file, with the names and shapes of the tensors from which rules fill
    it.

    `load` reads the same weights from this file, bit for bit if the dtypes are the same. Raises WanjaxError if the file
    cannot be written.
    """
    weights = {target: np.asarray(value) for target, value in parameters(model).items()}
    exported = ExportedTensors(weights, rules)
    write_safetensors(path, exported, exported.specs, metadata)
