# SPDX-License-Identifier: Apache-2.0
"""Gather the weights of the next transformer block while attention computes.

In ring attention, the shards of the weights pass around the ring of `sp`. Their direction is opposite to that of the
keys, so that both directions of the links are used. During the last turn, a kernel can join the shards by DMA while it
computes. In attention that exchanges tokens for heads over `tp`, each device sends its shards to all other devices
after the exchange. The shards are joined after attention. Attention takes longer than sending, so the chips do not
wait.
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
class ShardedMatrix:
    """A weight as a list of shards, in the order in which they arrive on this device.

    Attributes:
        shards: The shards [I _O] or [_I O].
        axis: The axis that is sharded.
        first: The position of the first shard in the matrix. The following shards have the following positions, and the
            position after the last one is 0.
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
        """Return whether a shard consists of whole tiles, so that a DMA can write it into the matrix."""
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
    """Sharded weights that the next self-attention gathers while it computes.

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


_pending_weights: ContextVar[RingWeights | None] = ContextVar("ring_weights", default=None)


@contextmanager
def gather_during_attention(weights: RingWeights) -> Iterator[None]:
    """Within the `with` block, let the first self-attention that runs on several devices gather these weights."""
    token = _pending_weights.set(weights)
    try:
        yield
    finally:
        _pending_weights.reset(token)


def take_pending_weights() -> RingWeights | None:
    """Return the weights that the caller has to gather, or None. Later callers get None."""
    pending = _pending_weights.get()
    _pending_weights.set(None)
    return pending


def ring_mesh_axis(partitioner: Partitioner) -> str | None:
    """Return the mesh axis over which attention can gather weights. Return None unless exactly one axis shards tokens
    and the rules gather weights."""
    axes = [axis for axis in ("sp", "tp") if partitioner.axis_size(axis) > 1]
    return axes[0] if len(axes) == 1 and partitioner.rules.gather_weights else None


def send(weights: Sequence[Array], mesh_axis: str, num_devices: int, distance: int = 1) -> tuple[Array, ...]:
    """Send shards to the device that is `distance` positions before this device on the mesh axis."""
    permutation = [(i, (i - distance) % num_devices) for i in range(num_devices)]
    return tuple(jax.lax.ppermute(weight, mesh_axis, permutation) for weight in weights)


def group_by_matrix(
    arrivals: Sequence[Sequence[Array]], axes: Sequence[int], mesh_axis: str
) -> tuple[ShardedMatrix, ...]:
    """Group the shards by weight. The first entry of `arrivals` has this device's shards of all weights. The other
    entries have the shards of the following devices, in the order of the devices."""
    by_weight = zip(zip(*arrivals, strict=True), axes, strict=True)
    return tuple(ShardedMatrix(shards, axis, jax.lax.axis_index(mesh_axis)) for shards, axis in by_weight)


def shard_map_with_weights(
    partitioner: Partitioner, attend: Callable[..., tuple[Result, Sequence[Array]]], specs: tuple, out_specs: Any
) -> Callable[..., Result]:
    """Shard a function over the devices. If there are pending weights, let the function gather them.

    Args:
        partitioner: The devices.
        attend: Called on each device with the pending `RingWeights` or None, the device's shards of these weights, and
            its shards of the operands. Returns the result and the gathered weights, which are empty without pending
            weights.
        specs: The shardings of the operands.
        out_specs: The sharding of the result.
    """
    pending = take_pending_weights() if ring_mesh_axis(partitioner) else None
    weights, weight_specs = ((), ()) if pending is None else (pending.weights, pending.specs)

    def run(weights: Sequence[Array], *operands: Any) -> tuple[Result, tuple[Array, ...]]:
        result, gathered = attend(pending, weights, *operands)
        return result, tuple(gathered)

    def call(*operands: Any) -> Result:
        all_out_specs = out_specs, (PartitionSpec(),) * len(weights)
        result, gathered = partitioner.shard_map(run, (weight_specs, *specs), all_out_specs)(weights, *operands)
        if pending is not None:
            pending.set_gathered(gathered)
        return result

    return call


def gather_while_computing(
    pending: RingWeights | None,
    weights: Sequence[Array],
    partitioner: Partitioner,
    attend: Callable[..., Result],
    *operands: Any,
) -> tuple[Result, Sequence[Array]]:
    """Compute `attend(*operands)` on a device, while each device sends its shards of the weights to all other devices.

    Returns:
        The result and the gathered weights. Without pending weights, the gathered weights are empty.
    """
    if pending is None:
        return attend(*operands), ()
    size = partitioner.axis_size(pending.mesh_axis)
    operands, weights = _barrier((operands, tuple(weights)))
    arrivals = [weights, *(send(weights, pending.mesh_axis, size, distance) for distance in range(1, size))]
    out, arrivals = _barrier((attend(*operands), arrivals))
    return out, [matrix.concatenate() for matrix in group_by_matrix(arrivals, pending.axes, pending.mesh_axis)]


def _barrier(tree: Result) -> Result:
    """Apply an optimization barrier to a tree. For the barrier, arrays [B L N D] are reshaped to [B L E], because a TPU
    would copy arrays with an axis of heads before and after the barrier."""
    joined = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x, tree)
    return jax.tree.map(lambda x, original: x.reshape(original.shape), jax.lax.optimization_barrier(joined), tree)


def join_while_computing(
    kernel: Callable[..., None], matrices: Sequence[ShardedMatrix], num_scalars: int, num_inputs: int, num_results: int
) -> Callable[..., None]:
    """Return a kernel that joins shards by DMA while it computes. The chip must have one core for each device.

    The new kernel takes these additional references: after the scalars, the position of the first shard; after the
    inputs, all shards; after the results, the joined matrices; and at the end, a semaphore for each shard.

    Args:
        kernel: The original kernel. Its references are scalars, inputs, results and scratch memory, in this order.
        matrices: The matrices whose shards are joined.
        num_scalars: The number of scalars of the original kernel.
        num_inputs: The number of inputs of the original kernel.
        num_results: The number of results of the original kernel.
    """
    num_shards = sum(len(matrix.shards) for matrix in matrices)
    lengths = [num_scalars, 1, num_inputs, num_shards, num_results, len(matrices)]

    def run(*refs: Any) -> None:
        ends = [0, *accumulate(lengths)]
        parts = [refs[start:end] for start, end in pairwise(ends)]
        scalars, (first_ref,), inputs, shard_refs, results, joined_refs = parts
        *scratch, semaphores = refs[ends[-1] :]

        def copies() -> Iterator[Any]:
            shard_numbers = count()
            for matrix, joined_ref in zip(matrices, joined_refs, strict=True):
                num_positions, size = len(matrix.shards), matrix.shards[0].shape[matrix.axis]
                for index in range(num_positions):
                    position = first_ref[0] + index
                    position = jnp.where(position >= num_positions, position - num_positions, position)
                    target_slice = pl.ds(pl.multiple_of(position * size, size), size)
                    target = joined_ref.at[:, target_slice] if matrix.axis else joined_ref.at[target_slice]
                    i = next(shard_numbers)
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
