# SPDX-License-Identifier: Apache-2.0
"""A plan's programs on devices that are here, run on made-up arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from wanjax.bench.timing import Timing, timed
from wanjax.pricing.lowering import Lowering, retry_without_rejected_options
from wanjax.sharding import MESH_AXES, make_mesh

SMALLEST = 1e-12


@dataclass(frozen=True)
class Measured:
    """A program that ran: its times, its result, the options that the compiler rejected, and all its options."""

    timing: Timing
    result: Any
    refused: tuple[str, ...]
    options: dict[str, Any]


def mesh_of(axes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """Return a mesh with these axes, over as many of the devices as they need."""
    sizes = [axes.get(axis, 1) for axis in MESH_AXES]
    return make_mesh(*sizes, devices=list(devices[: prod(sizes)]))


def measure(program: Lowering, budget: float) -> Measured:
    """Compile a program for the devices of its mesh, run it on made-up arguments, and time it.

    `budget` is in seconds.
    """
    refused: list[str] = []
    options = dict(program.compiler_options or {})
    lowered = jax.jit(program.function, donate_argnums=program.donate, keep_unused=True).lower(*program.arguments)
    start = perf_counter()
    run: Any = retry_without_rejected_options(
        options, lambda accepted: lowered.compile(compiler_options=accepted), refused.append
    )
    compiling = perf_counter() - start
    arguments = made_up(program.arguments)

    def fresh() -> tuple[Any, ...]:
        """Return the arguments, with copies of those whose buffers the program reuses."""
        copied = [jax.tree.map(jnp.copy, x) if i in program.donate else x for i, x in enumerate(arguments)]
        return tuple(copied)

    timing, result = timed(run, fresh, compiling, budget)
    return Measured(timing, result, tuple(refused), options)


def made_up(shapes: Any) -> Any:
    """Return arrays for shapes: small numbers, so that nothing overflows, the same every time.

    A shape without a sharding becomes an array of the host.
    """
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [_array(leaf, index) for index, leaf in enumerate(leaves)])


def _array(leaf: jax.ShapeDtypeStruct, index: int) -> Any:
    """Return an array that is made on the host, each device's part apart; nothing is compiled."""
    if leaf.sharding is None:
        return _of_host(leaf, index)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.device_put(jax.random.split(jax.random.key(0), prod(leaf.shape)).reshape(leaf.shape), leaf.sharding)
    waves = _waves(leaf.shape, 1.0 + index % 11)

    def part(index: Any) -> np.ndarray:
        x = np.full((1,) * len(leaf.shape), 0.04, np.float32)
        for wave, (axis, size) in zip(waves, enumerate(index), strict=True):
            x = x * wave[size].reshape([-1 if i == axis else 1 for i in range(len(index))])
        if leaf.dtype == np.bool_ or np.issubdtype(leaf.dtype, np.integer):
            return np.full(x.shape, 1 + index % 7).astype(leaf.dtype)
        return x.astype(leaf.dtype)

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def _of_host(leaf: jax.ShapeDtypeStruct, index: int) -> np.ndarray:
    """Return small whole numbers or, as a schedule has them, falling noise levels between 0 and 1."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return np.full(leaf.shape, 1 + index % 7).astype(leaf.dtype)
    levels = 0.9 / (1 + index % 13 + np.arange(prod(leaf.shape), dtype=np.float32))
    return levels.reshape(leaf.shape).astype(leaf.dtype)


def _waves(shape: tuple[int, ...], pitch: float) -> list[np.ndarray]:
    """Return a wave along each axis, whose product has numbers of about 0.02, as weights have."""
    waves = []
    for axis, size in enumerate(shape):
        positions = np.arange(size, dtype=np.float32)
        sign = np.where(np.arange(size) % (axis + 2) == 0, np.float32(-1), np.float32(1))
        waves.append((1 + 0.5 * np.sin(np.float32(pitch + 0.31 * axis) + positions)) * sign)
    return waves


def distance(a: Any, b: Any) -> float:
    """Return the relative L2 distance of two results; numbers that are finite in one alone make it infinite."""
    total, size = 0.0, 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if not jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != jnp.uint8:
            continue
        left, right = (np.asarray(jax.device_get(one)).astype(np.float64) for one in (x, y))
        finite = np.isfinite(right)
        if not np.array_equal(np.isfinite(left), finite):
            return float("inf")
        total += float(np.sum((left[finite] - right[finite]) ** 2))
        size += float(np.sum(right[finite] ** 2))
    return (total / max(size, SMALLEST)) ** 0.5
