# SPDX-License-Identifier: Apache-2.0
"""Run programs on the devices of this machine, with synthetic arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from wanjax.bench.timing import Timing, time_program
from wanjax.pricing.lowering import AbstractCall, retry_without_rejected_options
from wanjax.sharding import MESH_AXES, make_mesh

NORM_EPSILON = 1e-12


@dataclass(frozen=True)
class MeasuredProgram:
    """The times and the result of a program, all its compiler options, and the options that the compiler rejected."""

    timing: Timing
    result: Any
    rejected_options: tuple[str, ...]
    options: dict[str, Any]


def mesh_of_first_devices(axes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """Make a mesh with these axis sizes from the first devices."""
    sizes = [axes.get(axis, 1) for axis in MESH_AXES]
    return make_mesh(*sizes, devices=list(devices[: prod(sizes)]))


def measure(program: AbstractCall, budget: float) -> MeasuredProgram:
    """Compile a program for the devices of its mesh, run it with synthetic arguments, and time it.

    `budget` is the seconds in which the program is run repeatedly.
    """
    rejected: list[str] = []
    options = dict(program.compiler_options or {})
    lowered = jax.jit(program.function, donate_argnums=program.donate, keep_unused=True).lower(*program.arguments)
    start = perf_counter()
    run: Any = retry_without_rejected_options(
        options, lambda accepted: lowered.compile(compiler_options=accepted), rejected.append
    )
    compilation = perf_counter() - start
    arguments = synthetic_arrays(program.arguments)

    def make_arguments() -> tuple[Any, ...]:
        """Copy the arguments whose buffers the program reuses."""
        return tuple(jax.tree.map(jnp.copy, x) if i in program.donate else x for i, x in enumerate(arguments))

    timing, result = time_program(run, make_arguments, compilation, budget)
    return MeasuredProgram(timing, result, tuple(rejected), options)


def synthetic_arrays(shapes: Any) -> Any:
    """Make arrays of the given shapes, with deterministic numbers that are too small to overflow.

    A shape without a sharding becomes an array on the host.
    """
    shape_dtypes, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [_synthetic_array(leaf, index) for index, leaf in enumerate(shape_dtypes)])


def _synthetic_array(shape_dtype: jax.ShapeDtypeStruct, index: int) -> Any:
    """Make an array from NumPy arrays, shard by shard, so that JAX compiles nothing.

    `index` is the number of the array.
    """
    if shape_dtype.sharding is None:
        return _host_array(shape_dtype, index)
    if jnp.issubdtype(shape_dtype.dtype, jax.dtypes.prng_key):
        return jax.device_put(
            jax.random.split(jax.random.key(0), prod(shape_dtype.shape)).reshape(shape_dtype.shape),
            shape_dtype.sharding,
        )
    waves = _sine_waves(shape_dtype.shape, 1.0 + index % 11)

    def make_shard(slices: Any) -> np.ndarray:
        x = np.full((1,) * len(shape_dtype.shape), 0.04, np.float32)
        for wave, (axis, positions) in zip(waves, enumerate(slices), strict=True):
            x = x * wave[positions].reshape([-1 if i == axis else 1 for i in range(len(slices))])
        if shape_dtype.dtype == np.bool_ or np.issubdtype(shape_dtype.dtype, np.integer):
            return np.full(x.shape, 1 + index % 7).astype(shape_dtype.dtype)
        return x.astype(shape_dtype.dtype)

    return jax.make_array_from_callback(shape_dtype.shape, shape_dtype.sharding, make_shard)


def _host_array(shape_dtype: jax.ShapeDtypeStruct, index: int) -> np.ndarray:
    """Make an array of small integers, or of decreasing floats between 0 and 1, like the noise levels of a schedule."""
    if not jnp.issubdtype(shape_dtype.dtype, jnp.floating):
        return np.full(shape_dtype.shape, 1 + index % 7).astype(shape_dtype.dtype)
    levels = 0.9 / (1 + index % 13 + np.arange(prod(shape_dtype.shape), dtype=np.float32))
    return levels.reshape(shape_dtype.shape).astype(shape_dtype.dtype)


def _sine_waves(shape: tuple[int, ...], offset: float) -> list[np.ndarray]:
    """Make a sine wave for each axis. The product of all waves varies like weights do."""
    waves = []
    for axis, size in enumerate(shape):
        positions = np.arange(size, dtype=np.float32)
        sign = np.where(np.arange(size) % (axis + 2) == 0, np.float32(-1), np.float32(1))
        waves.append((1 + 0.5 * np.sin(np.float32(offset + 0.31 * axis) + positions)) * sign)
    return waves


def relative_l2_error(a: Any, b: Any) -> float:
    """Compute the relative L2 error of a result against another.

    The error is infinite if a number is finite in only one of the two results.
    """
    squared_error, squared_norm = 0.0, 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if not jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != jnp.uint8:
            continue
        values, expected = (np.asarray(jax.device_get(array)).astype(np.float64) for array in (x, y))
        finite = np.isfinite(expected)
        if not np.array_equal(np.isfinite(values), finite):
            return float("inf")
        squared_error += float(np.sum((values[finite] - expected[finite]) ** 2))
        squared_norm += float(np.sum(expected[finite] ** 2))
    return (squared_error / max(squared_norm, NORM_EPSILON)) ** 0.5
