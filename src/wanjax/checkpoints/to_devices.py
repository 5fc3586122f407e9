# SPDX-License-Identifier: Apache-2.0
"""Move a checkpoint's tensors to devices one at a time. All cores cast and rearrange them, without compilation.

Large stacks on accelerators are the exception: two compiled programs fill such a stack block by block, which saves host
memory.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from wanjax.checkpoints.arrays import make_array, shard_slices
from wanjax.checkpoints.files import CACHE_LINE, aligned_empty
from wanjax.converters.transforms import Shape
from wanjax.sharding import is_in_host_memory

COPY_BYTES = 1 << 20  # bytes that one core copies at a time
SMALL_STACK = 64 << 20  # bytes; a larger stack for an accelerator is not assembled in host memory
TRANSPOSE_BYTES = 512  # bytes that one core writes consecutively when it transposes


def to_device(tensors: Sequence[AbstractContextManager[np.ndarray]], target: Any, *, stacked: bool) -> jax.Array:
    """Create a parameter with its target's sharding and dtype.

    Args:
        tensors: The tensors of the blocks of a stack, or a single tensor. A tensor may be a view of a file. Each tensor
            is read once, when its context is entered.
        target: The parameter's shape, dtype and sharding.
        stacked: Whether the tensors are blocks of a stack.
    """
    if stacked:
        return (_assemble_on_host if _fits_in_host_memory(target) else _fill_by_block)(tensors, target)
    with tensors[0] as x:
        return _to_device(x, target)


def _fits_in_host_memory(target: Any) -> bool:
    """Return whether a stack can be assembled in host memory.

    On a CPU, JAX uses the buffer without a copy, so the stack may be large. For an accelerator, JAX copies the buffer,
    so the stack must be small or must stay in host memory.
    """
    sharding = getattr(target, "sharding", None)
    if sharding is not None and is_in_host_memory(target):
        return True
    devices = sharding.device_set if sharding else jax.devices()[:1]
    return all(device.platform == "cpu" for device in devices) or target.size * target.dtype.itemsize <= SMALL_STACK


def _assemble_on_host(blocks: Sequence[AbstractContextManager[np.ndarray]], target: Any) -> jax.Array:
    """Create a stack by assembling the shards of this process's devices in host memory."""
    shards = {str(shard): (shard, aligned_empty(shape, target.dtype)) for shard, shape in shard_slices(target)}
    for index, block in enumerate(blocks):
        with block as x:
            for (block_range, *inner_slices), values in shards.values():
                if index in (shard_blocks := range(len(blocks))[block_range]):
                    rearrange(x[tuple(inner_slices)], values[shard_blocks.index(index), ...])
    return make_array(
        lambda shard, _: shards[str(shard)][1], target
    ).block_until_ready()  # otherwise many buffers would exist at the same time


def _fill_by_block(blocks: Sequence[AbstractContextManager[np.ndarray]], target: Any) -> jax.Array:
    """Create a stack on its devices and write one block after another into it, so that host memory holds one block."""
    sharding = getattr(target, "sharding", None)
    stack = _zeros(tuple(target.shape), target.dtype, sharding)()
    block_target = jax.ShapeDtypeStruct(target.shape[1:], target.dtype, sharding=_block_sharding(sharding))
    for index, block in enumerate(blocks):
        with block as x:
            stack = _set_block(
                stack, _to_device(x, block_target), index
            ).block_until_ready()  # otherwise many buffers would exist at the same time
    return stack


@cache
def _zeros(shape: Shape, dtype: np.dtype, sharding: Sharding | None) -> Callable[[], jax.Array]:
    """Return the compiled program that creates zeros; stacks of the same shape share it."""
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)


@partial(jax.jit, donate_argnums=0)
def _set_block(stack: jax.Array, block: jax.Array, i: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, block, i, 0)


def _block_sharding(sharding: Sharding | None) -> Sharding | None:
    """Derive the sharding of one block from the sharding of its stack."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def _to_device(x: np.ndarray, target: Any) -> jax.Array:
    """Move a tensor to its devices. If the tensor is a view of a file, each process reads only its own shards."""
    return make_array(partial(_copy_slice, x), target)


def _copy_slice(x: np.ndarray, slices: Sequence[slice], dtype: np.dtype) -> np.ndarray:
    """Return a copy of a slice of a tensor, cast to a dtype."""
    shard = x[tuple(slices)]
    values = aligned_empty(shard.shape, dtype)
    rearrange(shard, values)
    return values


def rearrange(x: np.ndarray, out: np.ndarray) -> None:
    """Copy `x` to `out` and cast it. The axes of `x` may lie in memory in any order. All cores copy a large array."""
    if x.nbytes < COPY_BYTES:
        np.copyto(out, x, casting="unsafe")  # `assign` has checked the dtypes
        return
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    x, out = x.transpose(order), out.transpose(order)  # reads the source in its order in memory
    if order == sorted(order):
        step, copy = max(1, COPY_BYTES * len(x) // x.nbytes), _copy
    else:
        step, copy = TRANSPOSE_BYTES // out.itemsize, _copy_through_cache
    pieces = [slice(start, start + step) for start in range(0, len(x), step)]
    list(workers().map(lambda piece: copy(x[piece], out[piece]), pieces))


def _copy(x: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, x, casting="unsafe")


def _copy_through_cache(x: np.ndarray, out: np.ndarray) -> None:
    """Transpose and cast an array. NumPy takes two to four times as long, because it casts with strided access.

    The rows are first cast, in their order in memory, to a buffer. The buffer's rows are padded by a cache line.
    Without padding, elements of a column whose distance is a power of two would compete for the same few cache lines.
    """
    row = x[0].size
    padded = np.empty((len(x), row + CACHE_LINE // out.itemsize), out.dtype)[:, :row].reshape(x.shape)
    np.copyto(padded, x, casting="unsafe")
    bits = np.dtype(f"u{out.itemsize}")  # NumPy copies unsigned integers faster than bfloat16
    np.copyto(out.view(bits), padded.view(bits))


@cache
def workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="wanjax-load")
