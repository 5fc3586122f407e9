# SPDX-License-Identifier: Apache-2.0
"""Puts a checkpoint's tensors on devices: one at a time, cast and rearranged on all cores, and without a compilation.

Large stacks for accelerators are the exception. Two programs fill them block by block, to spare the host's memory.
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
from wanjax.checkpoints.files import CACHE_LINE, aligned
from wanjax.converters.transforms import Shape

PIECE = 1 << 20  # bytes that one core copies at a time
SMALL_STACK = 64 << 20  # bytes; the largest tensor of a model that strains a host's memory has more
CHUNK = 512  # bytes that one core writes in a row when it copies rows to columns


def on_devices(tensors: Sequence[AbstractContextManager[np.ndarray]], target: Any, *, stacked: bool) -> jax.Array:
    """Return one parameter on the devices of its target's sharding, in its target's dtype.

    Its tensors, which may be views of files, are the blocks of a stack, or a single one. Each is read once, when its
    context is entered. Only a large stack for accelerators needs programs.
    """
    if stacked:
        return (_assembled if _fits_host(target) else _block_by_block)(tensors, target)
    with tensors[0] as x:
        return _put(x, target)


def _fits_host(target: Any) -> bool:
    """Return whether a stack can be put together in host memory, from which it goes to its devices without a program.

    A CPU takes over the host's own buffers. An accelerator copies them, and a large stack beside them is too much.
    """
    sharding = getattr(target, "sharding", None)
    devices = sharding.device_set if sharding else jax.devices()[:1]
    return all(device.platform == "cpu" for device in devices) or target.size * target.dtype.itemsize <= SMALL_STACK


def _assembled(blocks: Sequence[AbstractContextManager[np.ndarray]], target: Any) -> jax.Array:
    """Return a stack whose shards on this process's devices are put together in host memory."""
    shards = {str(part): (part, aligned(shape, target.dtype)) for part, shape in shard_slices(target)}
    for i, block in enumerate(blocks):
        with block as x:
            for (along, *within), values in shards.values():
                if i in (here := range(len(blocks))[along]):
                    rearrange(x[tuple(within)], values[here.index(i), ...])
    return make_array(lambda part, _: shards[str(part)][1], target).block_until_ready()  # else many would wait there


def _block_by_block(blocks: Sequence[AbstractContextManager[np.ndarray]], target: Any) -> jax.Array:
    """Return a stack that is updated in place on its devices, so that host memory holds one block at a time."""
    sharding = getattr(target, "sharding", None)
    stack = _zeros(tuple(target.shape), target.dtype, sharding)()
    shape = jax.ShapeDtypeStruct(target.shape[1:], target.dtype, sharding=_block_sharding(sharding))
    for i, block in enumerate(blocks):
        with block as x:
            stack = _set_block(stack, _put(x, shape), i).block_until_ready()  # else many would wait there
    return stack


@cache
def _zeros(shape: Shape, dtype: np.dtype, sharding: Sharding | None) -> Callable[[], jax.Array]:
    """Return a program that many stacks share, which makes an empty one."""
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)


@partial(jax.jit, donate_argnums=0)
def _set_block(stack: jax.Array, block: jax.Array, i: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, block, i, 0)


def _block_sharding(sharding: Sharding | None) -> Sharding | None:
    """Return the sharding of one block, given its stack's."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def _put(x: np.ndarray, target: Any) -> jax.Array:
    """Put a tensor, which may be a view of a file, on the devices; each process reads its own shards."""
    return make_array(partial(_part, x), target)


def _part(x: np.ndarray, part: Sequence[slice], dtype: np.dtype) -> np.ndarray:
    """Return a part of a tensor in this dtype, in memory of its own."""
    shard = x[tuple(part)]
    values = aligned(shard.shape, dtype)
    rearrange(shard, values)
    return values


def rearrange(x: np.ndarray, out: np.ndarray) -> None:
    """Copy `x`, a view with its axes in any order, to `out` and cast it; large ones on all cores."""
    if x.nbytes < PIECE:
        np.copyto(out, x, casting="unsafe")  # `assign` has checked that both are floating or equal
        return
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    x, out = x.transpose(order), out.transpose(order)  # the source in its order in memory
    if order == sorted(order):
        step, copy = max(1, PIECE * len(x) // x.nbytes), _copy
    else:
        step, copy = CHUNK // out.itemsize, _copy_through_cache
    pieces = [slice(start, start + step) for start in range(0, len(x), step)]
    list(_workers().map(lambda piece: copy(x[piece], out[piece]), pieces))


def _copy(x: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, x, casting="unsafe")


def _copy_through_cache(x: np.ndarray, out: np.ndarray) -> None:
    """Copy rows to columns, two to four times as fast as NumPy, which casts while it strides through memory.

    The rows are first cast into a buffer, in order. The buffer's rows are a cache line longer than needed, since the
    elements of a column, at a distance of a power of two, would compete for the same few cache lines.
    """
    row = x[0].size
    padded = np.empty((len(x), row + CACHE_LINE // out.itemsize), out.dtype)[:, :row].reshape(x.shape)
    np.copyto(padded, x, casting="unsafe")
    bits = np.dtype(f"u{out.itemsize}")  # NumPy moves these faster than bfloat16
    np.copyto(out.view(bits), padded.view(bits))


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="wanjax-load")
