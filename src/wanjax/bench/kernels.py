# SPDX-License-Identifier: Apache-2.0
"""Programs of the bench that no video runs alone: one attention layer, and the messages between devices."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from wanjax.bench.programs import build, distance, made_up, operand
from wanjax.compilation import Lowering
from wanjax.errors import UnsupportedError
from wanjax.kernels.attention import IMPLEMENTATIONS, attention, choose
from wanjax.plan.builders import path_of
from wanjax.plan.compile import Job
from wanjax.sharding import MESH_AXES

CHECKED_TOKENS = 700  # of the exact comparison: several tiles of every kernel, and a rest
CLOSE = {"float32": 1e-5, "bfloat16": 1e-2}  # relative L2 distance from the reference
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")


def attend(
    mesh: Mesh, *, queries: int, keys: int, heads: int, head_dim: int, dtype: str, implementation: str | None
) -> Lowering:
    """Builds attention of q [1 L N D] with k and v [1 S N D] on each device."""
    arguments = tuple(operand(mesh, (1, length, heads, head_dim), jnp.dtype(dtype)) for length in (queries, keys, keys))
    everywhere = jax.sharding.PartitionSpec()
    run = partial(attention, implementation=implementation)
    return Lowering(
        jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False), arguments
    )


def attention_job(place: str, implementation: str | None = None, **sizes: Any) -> Job:
    return Job(place, path_of(attend), {**sizes, "implementation": implementation}, {"dp": 1, "sp": 1, "tp": 1})


def check_attention(
    heads: int, head_dim: int, dtype: str, tokens: int = CHECKED_TOKENS, configs: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Returns the distance from the reference's answer of every implementation that runs on this kind of device.

    The reference computes in float32, at the highest precision, on the same operands. `configs` are the tiles of
    implementations by name, where not their own are to be used.
    """
    device = jax.local_devices()[:1]
    sizes = {"queries": tokens, "keys": tokens, "heads": heads, "head_dim": head_dim, "dtype": dtype}
    program = build(attention_job("", "reference", **sizes), device)
    q, k, v = (30 * x for x in made_up(program.arguments))  # of size 1, so that the scores differ
    found: dict[str, float] = {}
    with jax.default_matmul_precision("highest"):
        exact = [x.astype(jnp.float32) for x in (q, k, v)]
        expected = jax.jit(partial(attention, implementation="reference"))(*exact)
    for name in IMPLEMENTATIONS:
        try:
            choose(q, k, v, implementation=name, config=(configs or {}).get(name))
        except UnsupportedError:
            continue
        run = partial(attention, implementation=name, config=(configs or {}).get(name))
        found[name] = distance(jax.jit(run)(q, k, v), expected)
    return found


def exchange(mesh: Mesh, *, kind: str, length: int, width: int, dtype: str) -> Lowering:
    """Builds a message of [L E] numbers between all devices: its sum, the whole on each, or another axis split."""
    x = operand(mesh, (length, width), jnp.dtype(dtype), MESH_AXES)
    axes, split = jax.sharding.PartitionSpec(MESH_AXES), jax.sharding.PartitionSpec(None, MESH_AXES)
    whole = jax.sharding.PartitionSpec()
    run, out = {
        "all_reduce": (lambda x: jax.lax.psum(x, MESH_AXES), whole),
        "all_gather": (lambda x: jax.lax.all_gather(x, MESH_AXES, axis=0, tiled=True), whole),
        "all_to_all": (lambda x: jax.lax.all_to_all(x, MESH_AXES, 1, 0, tiled=True), split),
    }[kind]
    return Lowering(jax.shard_map(run, mesh=mesh, in_specs=axes, out_specs=out, check_vma=False), (x,))


def exchange_job(place: str, kind: str, devices: int, tokens: int, width: int, dtype: str) -> Job:
    """Returns the job of a message as large as the tokens of a video, the same on every number of devices."""
    whole = -(-tokens // devices) * devices
    sizes = {"kind": kind, "length": whole, "width": -(-width // devices) * devices, "dtype": dtype}
    return Job(place, path_of(exchange), sizes, {"dp": 1, "sp": 1, "tp": devices})
