# SPDX-License-Identifier: Apache-2.0
"""Programs of the bench that no video runs alone: attention, a projection, and the messages between devices."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from wanjax.bench.measure import distance, made_up, mesh_of
from wanjax.bench.timing import Timing, timed
from wanjax.errors import UnsupportedError
from wanjax.kernels.alignment import round_up
from wanjax.kernels.attention import (
    IMPLEMENTATIONS,
    AttentionConfig,
    Projection,
    SparseLinear,
    attention,
    choose,
    sparse_linear_attention,
)
from wanjax.layers.linear import dot_general
from wanjax.pricing.lowering import Lowering, replicated
from wanjax.sharding import MESH_AXES

CHECKED_TOKENS = 700  # of the exact comparison: several tiles of every kernel, and a rest
CLOSE = {"float32": 1e-5, "bfloat16": 1e-2}  # relative L2 distance from the reference
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "permute")


def attend(
    mesh: Mesh | AbstractMesh,
    implementation: str | AttentionConfig,
    *,
    queries: int,
    keys: int,
    heads: int,
    head_dim: int,
    dtype: str,
) -> Lowering:
    """Build attention of q [1 L N D] with k and v [1 S N D] on each device."""
    shapes = ((1, length, heads, head_dim) for length in (queries, keys, keys))
    return replicated(partial(attention, implementation=implementation), mesh, _operands(dtype, *shapes))


def attend_sparsely(
    mesh: Mesh | AbstractMesh,
    _: Any = None,
    *,
    sparse: SparseLinear,
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: str,
) -> Lowering:
    """Build sparse-linear attention of q, k and v [1 L N D] to each other on each device."""

    def run(q: Array, k: Array, v: Array, *projection: Array) -> Array:
        return sparse_linear_attention(q, k, v, Projection(*projection), sparse)

    shapes = (*[(1, tokens, heads, head_dim)] * 3, (head_dim, head_dim), (head_dim,))
    return replicated(run, mesh, _operands(dtype, *shapes))


def multiply(mesh: Mesh | AbstractMesh, _: Any = None, *, tokens: int, width: int, inside: int, dtype: str) -> Lowering:
    """Build the product of a projection, [L I] by [I O], on each device."""
    run = partial(dot_general, dimensions=(((1,), (0,)), ((), ())))
    return replicated(run, mesh, _operands(dtype, (tokens, width), (width, inside)))


def _operands(dtype: str, *shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]


def multiply_by_numpy(tokens: int, width: int, inside: int, budget: float) -> tuple[str, Timing]:
    """Time the same product in float32 by the library that NumPy brings; return that library's name too."""
    operands = tuple(made_up(_operands("float32", (tokens, width), (width, inside))))
    library: Any = np.show_config(mode="dicts")
    return library["Build Dependencies"]["blas"]["name"], timed(np.matmul, lambda: operands, 0.0, budget)[0]


def check_attention(
    heads: int, head_dim: int, dtype: str, tokens: int = CHECKED_TOKENS, configs: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Return the distance from the reference's answer of every implementation that runs on this kind of device.

    The reference computes in float32, at the highest precision, on the same operands. `configs` are the tiles of
    implementations by name, where not their own are to be used.
    """
    device = jax.local_devices()[:1]
    sizes = {"queries": tokens, "keys": tokens, "heads": heads, "head_dim": head_dim, "dtype": dtype}
    program = attend(mesh_of({}, device), "reference", **sizes)
    q, k, v = (30 * x for x in made_up(program.arguments))  # of size 1, so that the scores differ
    distances: dict[str, float] = {}
    with jax.default_matmul_precision("highest"):
        exact = [x.astype(jnp.float32) for x in (q, k, v)]
        expected = jax.jit(partial(attention, implementation="reference"))(*exact)
    for name in IMPLEMENTATIONS:
        try:
            choose(q, k, v, implementation=name, config=(configs or {}).get(name))
        except UnsupportedError:
            continue
        run = partial(attention, implementation=name, config=(configs or {}).get(name))
        distances[name] = distance(jax.jit(run)(q, k, v), expected)
    return distances


def exchange(mesh: Mesh | AbstractMesh, _: Any = None, *, kind: str, tokens: int, width: int, dtype: str) -> Lowering:
    """Build a message between all devices, as large as the tokens of a video on any number of them.

    `kind` is the sum of [L E] numbers, the whole on each device, another axis split, the sum split, or the next
    device's part.
    """
    length, width = (round_up(size, mesh.size) for size in (tokens, width))
    axes, split, whole = PartitionSpec(MESH_AXES), PartitionSpec(None, MESH_AXES), PartitionSpec()
    ring = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]
    x = jax.ShapeDtypeStruct((length, width), jnp.dtype(dtype), sharding=NamedSharding(mesh, axes))
    run, out = {
        "all_reduce": (lambda x: jax.lax.psum(x, MESH_AXES), whole),
        "all_gather": (lambda x: jax.lax.all_gather(x, MESH_AXES, axis=0, tiled=True), whole),
        "all_to_all": (lambda x: jax.lax.all_to_all(x, MESH_AXES, 1, 0, tiled=True), split),
        "reduce_scatter": (lambda x: jax.lax.psum_scatter(x, MESH_AXES, scatter_dimension=1, tiled=True), split),
        "permute": (lambda x: jax.lax.ppermute(x, MESH_AXES, ring), axes),
    }[kind]
    return Lowering(jax.shard_map(run, mesh=mesh, in_specs=axes, out_specs=out, check_vma=False), (x,))
