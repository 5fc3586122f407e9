# SPDX-License-Identifier: Apache-2.0
"""Programs for single operations: attention, matrix products, and collectives between devices."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from wanjax.bench.measure import mesh_of_first_devices, relative_l2_error, synthetic_arrays
from wanjax.bench.timing import Timing, time_program
from wanjax.errors import UnsupportedError
from wanjax.kernels.alignment import round_up
from wanjax.kernels.attention import (
    IMPLEMENTATIONS,
    AttentionConfig,
    Projection,
    SparseLinearAttentionConfig,
    attention,
    choose_implementation,
    sparse_linear_attention,
)
from wanjax.layers.linear import dot_general
from wanjax.pricing.lowering import AbstractCall, replicated
from wanjax.sharding import MESH_AXES

NUM_CHECKED_TOKENS = 700  # fills several tiles of every kernel, and a part of the last tile
MAX_ATTENTION_ERRORS = {"float32": 1e-5, "bfloat16": 1e-2}  # the maximum relative L2 error against the reference
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "permute")


def attention_program(
    mesh: Mesh | AbstractMesh,
    implementation: str | AttentionConfig,
    *,
    queries: int,
    keys: int,
    heads: int,
    head_dim: int,
    dtype: str,
) -> AbstractCall:
    """Build attention of q [1 L N D] to k and v [1 S N D], replicated on each device."""
    shapes = ((1, length, heads, head_dim) for length in (queries, keys, keys))
    return replicated(partial(attention, implementation=implementation), mesh, _operand_shapes(dtype, *shapes))


def sparse_attention_program(
    mesh: Mesh | AbstractMesh,
    _: Any = None,
    *,
    sparse: SparseLinearAttentionConfig,
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: str,
) -> AbstractCall:
    """Build sparse-linear self-attention with q, k and v [1 L N D], replicated on each device."""

    def run(q: Array, k: Array, v: Array, *projection: Array) -> Array:
        return sparse_linear_attention(q, k, v, Projection(*projection), sparse)

    shapes = (*[(1, tokens, heads, head_dim)] * 3, (head_dim, head_dim), (head_dim,))
    return replicated(run, mesh, _operand_shapes(dtype, *shapes))


def matmul_program(
    mesh: Mesh | AbstractMesh, _: Any = None, *, tokens: int, width: int, output_width: int, dtype: str
) -> AbstractCall:
    """Build the product of tokens [L I] and a weight [I O], replicated on each device."""
    run = partial(dot_general, dimensions=(((1,), (0,)), ((), ())))
    return replicated(run, mesh, _operand_shapes(dtype, (tokens, width), (width, output_width)))


def _operand_shapes(dtype: str, *shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]


def time_numpy_matmul(tokens: int, width: int, output_width: int, budget: float) -> tuple[str, Timing]:
    """Time the product of `matmul_program` in float32 with NumPy; also return the name of NumPy's BLAS library."""
    operands = tuple(synthetic_arrays(_operand_shapes("float32", (tokens, width), (width, output_width))))
    library: Any = np.show_config(mode="dicts")
    return library["Build Dependencies"]["blas"]["name"], time_program(np.matmul, lambda: operands, 0.0, budget)[0]


def check_attention(
    heads: int, head_dim: int, dtype: str, tokens: int = NUM_CHECKED_TOKENS, configs: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Compute the relative L2 error of each implementation that runs on this device, against the reference.

    The reference computes in float32 at the highest precision, with the same operands. `configs` maps names of
    implementations to tile configs that replace the default configs.
    """
    device = jax.local_devices()[:1]
    sizes = {"queries": tokens, "keys": tokens, "heads": heads, "head_dim": head_dim, "dtype": dtype}
    program = attention_program(mesh_of_first_devices({}, device), "reference", **sizes)
    q, k, v = (30 * x for x in synthetic_arrays(program.arguments))  # numbers around 1, so that attention's scores vary
    errors: dict[str, float] = {}
    with jax.default_matmul_precision("highest"):
        operands = [x.astype(jnp.float32) for x in (q, k, v)]
        expected = jax.jit(partial(attention, implementation="reference"))(*operands)
    for name in IMPLEMENTATIONS:
        try:
            choose_implementation(q, k, v, implementation=name, config=(configs or {}).get(name))
        except UnsupportedError:
            continue
        run = partial(attention, implementation=name, config=(configs or {}).get(name))
        errors[name] = relative_l2_error(jax.jit(run)(q, k, v), expected)
    return errors


def collective_program(
    mesh: Mesh | AbstractMesh, _: Any = None, *, kind: str, tokens: int, width: int, dtype: str
) -> AbstractCall:
    """Build a collective operation over all devices. The operation's array [L E] has a video's tokens, sharded along L.

    `kind` is one of `COLLECTIVES`. Both sizes are rounded up so that they divide evenly.
    """
    length, width = (round_up(size, mesh.size) for size in (tokens, width))
    by_length, by_width, unsharded = PartitionSpec(MESH_AXES), PartitionSpec(None, MESH_AXES), PartitionSpec()
    ring = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]
    x = jax.ShapeDtypeStruct((length, width), jnp.dtype(dtype), sharding=NamedSharding(mesh, by_length))
    run, out = {
        "all_reduce": (lambda x: jax.lax.psum(x, MESH_AXES), unsharded),
        "all_gather": (lambda x: jax.lax.all_gather(x, MESH_AXES, axis=0, tiled=True), unsharded),
        "all_to_all": (lambda x: jax.lax.all_to_all(x, MESH_AXES, 1, 0, tiled=True), by_width),
        "reduce_scatter": (lambda x: jax.lax.psum_scatter(x, MESH_AXES, scatter_dimension=1, tiled=True), by_width),
        "permute": (lambda x: jax.lax.ppermute(x, MESH_AXES, ring), by_length),
    }[kind]
    return AbstractCall(jax.shard_map(run, mesh=mesh, in_specs=by_length, out_specs=out, check_vma=False), (x,))
