# SPDX-License-Identifier: Apache-2.0
"""Stacks of equal transformer blocks. A stack is one module, and a scan runs over the leading axis of its weights.

The weights of a stack may be in the host's memory. While one block computes, the next blocks are copied to the device.
The device then has only a few blocks at a time (`Partitioner.num_device_blocks`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from wanjax.kernels.attention.ring_weights import RingWeights, gather_during_attention, ring_mesh_axis
from wanjax.kernels.autodiff import is_forward_only, remat
from wanjax.layers.linear import GatherableProjection
from wanjax.layers.offload import DEFAULT_BLOCKS
from wanjax.layers.placement import axes_of
from wanjax.sharding import constrain, current_partitioner

Module = TypeVar("Module", bound=nnx.Module)
Blocks = TypeVar("Blocks")  # a stacked module, or a tree of stacked modules and arrays
Carry = TypeVar("Carry")  # an array, or a tuple of arrays
Result = TypeVar("Result")
Weights = TypeVar("Weights")  # a tree of arrays

TOKENS = ("batch", "length", "embed")

checkpointed = partial(remat, prevent_cse=False)  # in a scan, XLA's CSE cannot remove the rematerialization


def stack(make_block: Callable[[nnx.Rngs], Module], layers: int, rngs: nnx.Rngs) -> Module:
    """Create `layers` blocks as one module. Each weight of the module has a leading axis named `layers`."""

    @nnx.split_rngs(splits=layers)
    @nnx.vmap(axis_size=layers)
    def make(rngs: nnx.Rngs) -> Module:
        return make_block(rngs)

    blocks = make(rngs)
    for _, weight in nnx.to_flat_state(nnx.state(blocks)):
        if (axes := axes_of(weight)) is not None:
            weight.set_metadata(axes=("layers", *axes))
    return blocks


def block_at(blocks: Blocks, index: int | slice) -> Blocks:
    """Return the block at an index of stacked blocks, or the stack of the blocks in a slice."""
    graphdef, weights = nnx.split(blocks)
    weights = jax.tree.map(lambda w: w[index], weights)
    return nnx.merge(graphdef, weights if isinstance(index, slice) else to_device(weights))


def is_on_host(x: Any) -> bool:
    """Return whether an array, which may be traced, is in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Weights) -> Weights:
    """Copy the arrays of a tree that are in the host's memory to the device."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree)


def group_blocks(blocks: Blocks, groups: int) -> Blocks:
    """Split stacked blocks into `groups` consecutive groups of equal size. Return the groups as a stack of stacks."""
    graphdef, weights = nnx.split(blocks)
    return nnx.merge(graphdef, jax.tree.map(lambda w: w.reshape(groups, -1, *w.shape[1:]), weights))


def scan_blocks(
    blocks: Any,
    apply: Callable[..., Carry],
    x: Carry,
    *per_block: Any,
    part: range | None = None,
    projections: Callable[[Any], Sequence[nnx.Module]] | None = None,
) -> Carry:
    """Run `x = apply(block, x, *entries)` for each of the stacked blocks, and return x.

    The backward pass computes each block again from its input, except attention and MLPs, whose results are saved. This
    rematerialization takes less memory than saving all activations, and on CPUs it takes less time. Blocks in the
    host's memory have no backward pass.

    Args:
        blocks: Stacked blocks, or a tuple of stacks of equal length.
        apply: Called for each block with the block, x, and the block's entries of `per_block`.
        x: The tokens [B L E], or a tuple of arrays.
        per_block: Trees of arrays with a leading axis, which has an entry for each block.
        part: The range of blocks to run; None runs all blocks. The weights of the range are not copied.
        projections: Returns the projections of a block whose weights can be gathered ahead. While several devices
            compute the self-attention of a block, they gather the weights of the next block's projections. This is not
            done if there is a backward pass.
    """
    graphdef, weights = nnx.split(blocks)
    stacked = weights, per_block
    all_blocks = range(len(jax.tree.leaves(weights)[0]))
    part = all_blocks if part is None else part

    def run(x: Carry, scanned: tuple[Any, tuple]) -> tuple[Carry, None]:
        block_weights, entries = scanned
        return constrain_tokens(apply(nnx.merge(graphdef, block_weights), x, *entries)), None

    def run_at(x: Carry, index: jax.Array) -> tuple[Carry, None]:
        return run(x, entries_at(stacked, index))

    on_host = any(map(is_on_host, jax.tree.leaves(weights)))
    sharded_axes = {} if on_host or projections is None else _sharded_axes(blocks, projections(blocks))
    if sharded_axes and len(part) > 1:
        return _scan_with_ring_weights(run, constrain_tokens(x), weights, per_block, part, sharded_axes)
    if part == all_blocks and not on_host:
        return jax.lax.scan(checkpointed(run), constrain_tokens(x), stacked)[0]
    if len(part) == 1:
        return constrain_tokens(
            apply(block_at(blocks, part.start), constrain_tokens(x), *block_at(per_block, part.start))
        )
    if on_host:
        return _scan_from_host(run, constrain_tokens(x), weights, per_block, part)
    return jax.lax.scan(checkpointed(run_at), constrain_tokens(x), jnp.arange(part.start, part.stop))[0]


def entries_at(stacked: Weights, index: int | jax.Array) -> Weights:
    """Return the entries at an index of stacked arrays. The index may be traced."""
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, index, keepdims=False), stacked)


def _scan_from_host(
    run: Callable[[Carry, tuple[Any, tuple]], tuple[Carry, Any]], x: Carry, weights: Any, per_block: tuple, part: range
) -> Carry:
    """Scan over blocks in the host's memory. While one block computes, copy the next blocks to the device.

    An iteration of the scan runs as many blocks as fit on the device (`num_device_blocks`). Each copy then overwrites
    the block that was computed last. If an iteration ran a single block, a copy could not start before the iteration
    ends.

    Args:
        run: Runs a block. It is called with x, and with a pair of the block's weights and entries.
        x: The tokens.
        weights: The stacked weights, some of them in the host's memory.
        per_block: As in `scan_blocks`.
        part: The range of blocks to run.
    """
    num_blocks = min(current_partitioner().num_device_blocks or DEFAULT_BLOCKS, len(part))

    def fetch(index: Any) -> Any:
        return to_device(entries_at(weights, index))

    def run_blocks(count: int, x: Carry, prefetched: Sequence[Any], start: Any) -> tuple[Carry, Sequence[Any]]:
        for index in (start + i for i in range(count)):
            block_weights, *prefetched = (*prefetched, fetch(jnp.minimum(index + num_blocks - 1, part.stop - 1)))
            x, _ = run(x, (block_weights, entries_at(per_block, index)))
        return x, prefetched

    def step(carry: tuple[Carry, tuple], start: jax.Array) -> tuple[tuple[Carry, tuple], None]:
        x, prefetched = run_blocks(num_blocks, *carry, start)
        return (x, tuple(prefetched)), None

    prefetched = tuple(fetch(part.start + i) for i in range(num_blocks - 1))
    num_remaining = len(part) % num_blocks
    starts = jnp.arange(part.start, part.stop - num_remaining, num_blocks)
    x, prefetched = jax.lax.scan(step, (x, prefetched), starts)[0]
    return run_blocks(num_remaining, x, prefetched, part.stop - num_remaining)[0]


def _sharded_axes(blocks: nnx.Module, projections: Sequence[nnx.Module]) -> dict[tuple, int]:
    """Return the weights that attention can gather. A key is the path of a weight in the state of the blocks, and the
    value is the axis along which the weight is sharded.

    Args:
        blocks: Stacked blocks.
        projections: The projections whose weights can be gathered.
    """
    partitioner = current_partitioner()
    mesh_axis = ring_mesh_axis(partitioner)
    if mesh_axis is None or not is_forward_only():
        return {}
    sharded_axes = {}
    for path, module in nnx.iter_modules(blocks):
        if isinstance(module, GatherableProjection) and any(module is projection for projection in projections):
            weight = getattr(module, module.weight_name)
            x, axes = weight[...], axes_of(weight)
            spec = partitioner.weight_sharding(axes or (None,) * x.ndim, x.shape).spec[1:]
            axes_on_mesh = [axis for axis, names in enumerate(spec) if names and mesh_axis in names]
            if axes_on_mesh and module.sent_weight().dtype == x.dtype:
                sharded_axes[(*path, module.weight_name)] = axes_on_mesh[0]
    return sharded_axes


def _scan_with_ring_weights(
    run: Callable[[Carry, tuple[Any, tuple]], tuple[Carry, Any]],
    x: Carry,
    weights: Any,
    per_block: tuple,
    part: range,
    sharded_axes: dict[tuple, int],
) -> Carry:
    """Scan over blocks. While one block computes attention, the devices gather matrices of the next block.

    An iteration of the scan runs two blocks. The gathered matrices of the two blocks then have separate memory, and are
    not copied.

    Args:
        run: Runs a block. It is called with x, and with a pair of the block's weights and entries.
        x: The tokens.
        weights: The stacked weights.
        per_block: As in `scan_blocks`.
        part: The range of blocks to run.
        sharded_axes: The result of `_sharded_axes`.
    """
    variables = dict(nnx.to_flat_state(weights))
    sharded_weights = [variables[path][...] for path in sharded_axes]
    other_variables = {path: variable for path, variable in variables.items() if path not in sharded_axes}

    def ring_weights(index: Any) -> RingWeights:
        mesh_axis = ring_mesh_axis(current_partitioner())
        assert mesh_axis is not None
        return RingWeights(entries_at(sharded_weights, index), tuple(sharded_axes.values()), mesh_axis)

    def run_block(x: Carry, gathered: Sequence[jax.Array], index: Any) -> tuple[Carry, Sequence[jax.Array]]:
        block = {path: variable.replace(entries_at(variable[...], index)) for path, variable in other_variables.items()}
        block |= {path: variables[path].replace(matrix) for path, matrix in zip(sharded_axes, gathered, strict=True)}
        next_weights = ring_weights(jnp.minimum(index + 1, part.stop - 1))
        with gather_during_attention(next_weights):
            x, _ = run(x, (nnx.from_flat_state(list(block.items())), entries_at(per_block, index)))
        return x, next_weights.gathered()

    def step(carry: tuple[Carry, Sequence[jax.Array]], start: jax.Array) -> tuple[tuple, None]:
        for index in (start, start + 1):
            carry = run_block(*carry, index)
        return carry, None

    carry = x, ring_weights(part.start).gathered()
    carry, _ = jax.lax.scan(step, carry, jnp.arange(part.start, part.stop - 1, 2))
    x, gathered = carry
    return x if len(part) % 2 == 0 else run_block(x, gathered, part.stop - 1)[0]


def scan_with_results(
    blocks: Any, apply: Callable[..., tuple[Carry, Result]], x: Carry, *per_block: Any
) -> tuple[Carry, Result]:
    """Run `x, result = apply(block, x, *entries)` for each of the stacked blocks. Return x and the stacked results.

    The arguments are those of `scan_blocks`. Blocks are not rematerialized in a backward pass.
    """
    graphdef, weights = nnx.split(blocks)

    def step(x: Carry, scanned: tuple[Any, tuple]) -> tuple[Carry, Result]:
        block_weights, entries = scanned
        x, result = apply(nnx.merge(graphdef, to_device(block_weights)), x, *entries)
        return constrain_tokens(x), result

    return jax.lax.scan(step, constrain_tokens(x), (weights, per_block))


def constrain_tokens(x: Carry) -> Carry:
    """Constrain tokens [B L E], or a tree of tokens, to the sharding that tokens have between blocks."""
    return jax.tree.map(lambda tokens: constrain(tokens, TOKENS), x)


class BlockCache:
    """Callbacks around the blocks of a forward pass, for step caches. This base class caches nothing.

    `previous` has the values that the previous step cached. `cached` has the values that this step caches. A model runs
    its blocks with this code:

        for part in cache.parts(layers):
            x = scan_blocks(blocks, apply, cache.before(part, x), part=part)
        x = cache.after(x)
    """

    def __init__(self, previous: tuple | None = None):
        self.previous = previous
        self.cached: tuple = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def parts(self, layers: int, *cuts: int) -> Sequence[range]:
        """Return the ranges of blocks to run, split at `cuts`."""
        return [range(*ends) for ends in pairwise(sorted({0, *cuts, layers}))]

    def before(self, part: range, x: Carry) -> Carry:
        """Return the input of a part, given the output `x` of the previous part."""
        return x

    def after(self, x: Carry) -> Carry:
        """Return the output of all blocks, given the output `x` of the last part."""
        return x


NO_BLOCK_CACHE = BlockCache()


class SkippedBlocks(BlockCache):
    """Skips some blocks and runs all others. The output of a skipped block is its input."""

    def __init__(self, skipped_blocks: Sequence[int]):
        super().__init__()
        self.skipped_blocks = frozenset(skipped_blocks)

    def parts(self, layers: int, *cuts: int) -> Sequence[range]:
        cut_points = {end for block in self.skipped_blocks for end in (block, block + 1)}
        return [part for part in super().parts(layers, *cuts, *cut_points) if part.start not in self.skipped_blocks]


def map_blocks(blocks: Module, apply: Callable[[Module], Result]) -> Result:
    """Call `apply(block)` for each of the stacked blocks, and stack the results along a leading axis."""
    graphdef, weights = nnx.split(blocks)
    return jax.lax.map(lambda block_weights: apply(nnx.merge(graphdef, to_device(block_weights))), weights)
