# SPDX-License-Identifier: Apache-2.0
"""Gather the weights of the next block while attention computes.

In ring attention, the shards of the weights pass around the ring of `sp` in the direction opposite to the keys, so they
use the other direction of the links. During the last turn, a kernel can join the shards by DMA while it computes. In
attention that exchanges tokens for heads over `tp`, each device sends its shards to all others after the exchange, and
the shards are joined after attention. Attention takes longer than sending, so the chips do not wait.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate, count, pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int32

from wanjax.kernels.alignment import LANES
from wanjax.sharding import Partitioner, replicate

Result = TypeVar("Result")  # an array, or a tree of arrays

TILE_BYTES = 32  # bytes of a column of a tile: 8 rows of float32, 16 of bfloat16, 32 of int8


@partial(jax.tree_util.register_dataclass, data_fields=["shards", "first"], meta_fields=["axis"])
@dataclass(frozen=True)
class ShardsToJoin:
    """The shards of a matrix, in the order in which they arrive.

    Attributes:
        shards: The shards [I _O] or [_I O].
        axis: The axis that is sharded.
        first: The position of the first shard; the others follow it, and wrap around.
    """

    shards: tuple[Array, ...]
    axis: int
    first: Int32[Array, ""]

    @property
    def joined(self) -> jax.ShapeDtypeStruct:
        """The shape of the joined matrix."""
        shard = self.shards[0]
        shape = [size * len(self.shards) if axis == self.axis else size for axis, size in enumerate(shard.shape)]
        return jax.ShapeDtypeStruct(shape, shard.dtype)

    def is_aligned(self) -> bool:
        """Return whether each shard has whole tiles, so that a DMA can write it to its place."""
        shard = self.shards[0]
        unit = LANES if self.axis == 1 else TILE_BYTES // shard.dtype.itemsize
        return shard.shape[self.axis] % unit == 0

    def concatenate(self) -> Array:
        """Join the shards without a kernel."""
        joined, size = jax.lax.empty(self.joined.shape, self.joined.dtype), self.shards[0].shape[self.axis]
        for index, shard in enumerate(self.shards):
            start = (self.first + index) % len(self.shards) * size
            joined = jax.lax.dynamic_update_slice_in_dim(joined, shard, start, self.axis)
        return joined


class RingWeights:
    """Weights that wait for attention.

    Attributes:
        weights: Matrices [I O].
        axes: The axis along which each matrix is sharded.
        mesh_axis: The mesh axis over which they are sharded.
    """

    def __init__(self, weights: Sequence[Array], axes: Sequence[int], mesh_axis: str = "sp"):
        self.weights, self.axes, self.mesh_axis = tuple(weights), tuple(axes), mesh_axis
        self._gathered: tuple[Array, ...] | None = None

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """The shardings of the weights."""
        return tuple(PartitionSpec(*(self.mesh_axis if i == axis else None for i in range(2))) for axis in self.axes)

    def set_gathered(self, weights: Sequence[Array]) -> None:
        """Set the weights that attention has gathered."""
        self._gathered = tuple(weights)

    def gathered(self) -> tuple[Array, ...]:
        """Return the gathered weights. If no attention has gathered them, they are gathered now."""
        return replicate(self.weights if self._gathered is None else self._gathered)


_waiting: ContextVar[RingWeights | None] = ContextVar("ring_weights", default=None)


@contextmanager
def gather_during_attention(weights: RingWeights) -> Iterator[None]:
    """Within the block, let the first self-attention that devices share gather these weights."""
    token = _waiting.set(weights)
    try:
        yield
    finally:
        _waiting.reset(token)


def take_waiting() -> RingWeights | None:
    """Return the weights that wait, for the caller to gather. Later callers get None."""
    waiting = _waiting.get()
    _waiting.set(None)
    return waiting


def ring_mesh_axis(partitioner: Partitioner) -> str | None:
    """Return the mesh axis over which weights are gathered, if there is only one, else None."""
    axes = [axis for axis in ("sp", "tp") if partitioner.axis_size(axis) > 1]
    return axes[0] if len(axes) == 1 and partitioner.rules.gather_weights else None


def send(weights: Sequence[Array], mesh_axis: str, num_devices: int, distance: int = 1) -> tuple[Array, ...]:
    """Send shards to the device that is `distance` places before this one."""
    permutation = [(i, (i - distance) % num_devices) for i in range(num_devices)]
    return tuple(jax.lax.ppermute(weight, mesh_axis, permutation) for weight in weights)


def shards_to_join(
    arrivals: Sequence[Sequence[Array]], axes: Sequence[int], mesh_axis: str
) -> tuple[ShardsToJoin, ...]:
    """Return the shards of each weight. `arrivals` has the shards of all weights: the device's own, then those of the
    following devices in their order."""
    by_weight = zip(zip(*arrivals, strict=True), axes, strict=True)
    return tuple(ShardsToJoin(shards, axis, jax.lax.axis_index(mesh_axis)) for shards, axis in by_weight)


def shard_map_with_weights(
    partitioner: Partitioner, attend: Callable[..., tuple[Result, Sequence[Array]]], specs: tuple, out_specs: Any
) -> Callable[..., Result]:
    """Shard a function over the devices, and let it gather the weights that wait.

    Args:
        partitioner: The devices.
        attend: Called on each device with `RingWeights` or None, the device's shards of the weights, and its shards of
            the operands. Returns the result and the gathered weights, none if no weights wait.
        specs: The shardings of the operands.
        out_specs: The sharding of the result.
    """
    waiting = take_waiting() if ring_mesh_axis(partitioner) else None
    weights, weight_specs = ((), ()) if waiting is None else (waiting.weights, waiting.specs)

    def run(weights: Sequence[Array], *operands: Any) -> tuple[Result, tuple[Array, ...]]:
        result, gathered = attend(waiting, weights, *operands)
        return result, tuple(gathered)

    def call(*operands: Any) -> Result:
        all_out_specs = out_specs, (PartitionSpec(),) * len(weights)
        result, gathered = partitioner.shard_map(run, (weight_specs, *specs), all_out_specs)(weights, *operands)
        if waiting is not None:
            waiting.set_gathered(gathered)
        return result

    return call


def gather_beside(
    waiting: RingWeights | None,
    weights: Sequence[Array],
    partitioner: Partitioner,
    attend: Callable[..., Result],
    *operands: Any,
) -> tuple[Result, Sequence[Array]]:
    """Compute `attend(*operands)` on a device while each device sends its shards of the weights to all others.

    Returns:
        The result, and the gathered weights, none if no weights wait.
    """
    if waiting is None:
        return attend(*operands), ()
    size = partitioner.axis_size(waiting.mesh_axis)
    operands, weights = _barrier((operands, tuple(weights)))
    arrivals = [weights, *(send(weights, waiting.mesh_axis, size, distance) for distance in range(1, size))]
    out, arrivals = _barrier((attend(*operands), arrivals))
    return out, [join.concatenate() for join in shards_to_join(arrivals, waiting.axes, waiting.mesh_axis)]


def _barrier(tree: Result) -> Result:
    """Apply an optimization barrier to a tree. Heads [B L N D] are joined in the channels meanwhile: with an axis of
    heads, a TPU would copy them before and after the barrier."""
    joined = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x, tree)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), jax.lax.optimization_barrier(joined), tree)


def join_during(
    kernel: Callable[..., None], joins: Sequence[ShardsToJoin], num_scalars: int, num_inputs: int, num_results: int
) -> Callable[..., None]:
    """Return a kernel that joins shards by DMA while it computes. The chip must have one core for each device.

    The new kernel takes more references: after its scalars the position of the first shard; after its inputs all
    shards; after its results the joined matrices; and at the end a semaphore for each shard.

    Args:
        kernel: The kernel, whose references are its scalars, its inputs, its results and its scratch memory.
        joins: The shards.
        num_scalars: The number of the kernel's scalars.
        num_inputs: The number of its inputs.
        num_results: The number of its results.
    """
    num_shards = sum(len(join.shards) for join in joins)
    lengths = [num_scalars, 1, num_inputs, num_shards, num_results, len(joins)]

    def run(*refs: Any) -> None:
        ends = [0, *accumulate(lengths)]
        parts = [refs[start:end] for start, end in pairwise(ends)]
        scalars, (first_ref,), inputs, shard_refs, results, joined_refs = parts
        *scratch, semaphores = refs[ends[-1] :]

        def copies() -> Iterator[Any]:
            numbers = count()
            for join, joined_ref in zip(joins, joined_refs, strict=True):
                num_places, size = len(join.shards), join.shards[0].shape[join.axis]
                for index in range(num_places):
                    position = first_ref[0] + index
                    position = jnp.where(position >= num_places, position - num_places, position)
                    place = pl.ds(pl.multiple_of(position * size, size), size)
                    target = joined_ref.at[:, place] if join.axis else joined_ref.at[place]
                    i = next(numbers)
                    yield pltpu.make_async_copy(shard_refs[i], target, semaphores.at[i])

        grid = range(4)

        @pl.when(reduce(jnp.logical_and, [pl.program_id(axis) == 0 for axis in grid]))
        def _() -> None:
            for copy in copies():
                copy.start()

        kernel(*scalars, *inputs, *results, *scratch)

        @pl.when(reduce(jnp.logical_and, [pl.program_id(axis) == pl.num_programs(axis) - 1 for axis in grid]))
        def _() -> None:
            for copy in copies():
                copy.wait()

    return run
