# SPDX-License-Identifier: Apache-2.0
"""Stacks: equal blocks as one module, whose weights have a leading axis, compiled once for all of them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from wanjax.kernels.saved import saved_alone
from wanjax.layers.placement import axes_of
from wanjax.sharding import constrain

Module = TypeVar("Module", bound=nnx.Module)
Blocks = TypeVar("Blocks")  # a stacked module, or a tree of stacked modules and arrays
Carry = TypeVar("Carry")  # an array, or a tuple of arrays
Result = TypeVar("Result")

TOKENS = ("batch", "length", "embed")

again = partial(saved_alone, prevent_cse=False)  # a scan leaves nothing for CSE to undo


def stack(make_block: Callable[[nnx.Rngs], Module], layers: int, rngs: nnx.Rngs) -> Module:
    """Makes `layers` blocks, as one module whose weights have a leading axis named `layers`."""

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
    """The block at an index of stacked blocks, or the stack at a slice."""
    graphdef, weights = nnx.split(blocks)
    return nnx.merge(graphdef, jax.tree.map(lambda w: w[index], weights))


def grouped(blocks: Blocks, groups: int) -> Blocks:
    """Stacked blocks as a stack of `groups` stacks of equal size, in the same order."""
    graphdef, weights = nnx.split(blocks)
    return nnx.merge(graphdef, jax.tree.map(lambda w: w.reshape(groups, -1, *w.shape[1:]), weights))


def scan_blocks(blocks: Any, apply: Callable[..., Carry], x: Carry, *per_block: Any) -> Carry:
    """Runs `x = apply(block, x, *entries)` over stacked blocks; x is [B L E].

    `blocks` may be a tuple of stacks of equal length, and x a tuple of arrays. `per_block` are trees of arrays with a
    leading axis as long as the stack; `apply` receives the entries of one block.

    The backward pass computes each block again from its input, except the results of attention and of MLPs. That
    takes less memory than keeping all activations, and on CPUs less time.
    """
    graphdef, weights = nnx.split(blocks)

    @again
    def step(x: Carry, layer: tuple[Any, tuple]) -> tuple[Carry, None]:
        block_weights, entries = layer
        return as_tokens(apply(nnx.merge(graphdef, block_weights), x, *entries)), None

    return jax.lax.scan(step, as_tokens(x), (weights, per_block))[0]


def scan_keeping(
    blocks: Any, apply: Callable[..., tuple[Carry, Result]], x: Carry, *per_block: Any
) -> tuple[Carry, Result]:
    """Runs `x, made = apply(block, x, *entries)` over stacked blocks; returns x, and all that was made, stacked.

    The arguments are those of `scan_blocks`. There is no checkpoint for a backward pass.
    """
    graphdef, weights = nnx.split(blocks)

    def step(x: Carry, layer: tuple[Any, tuple]) -> tuple[Carry, Result]:
        block_weights, entries = layer
        x, made = apply(nnx.merge(graphdef, block_weights), x, *entries)
        return as_tokens(x), made

    return jax.lax.scan(step, as_tokens(x), (weights, per_block))


def scan_some(blocks: Any, some: range, apply: Callable[..., Carry], x: Carry, *per_block: Any) -> Carry:
    """Runs the blocks of a range, as `scan_blocks` does all, without a copy of their weights."""
    graphdef, weights = nnx.split(blocks)
    stacked = weights, per_block

    @again
    def step(x: Carry, index: jax.Array) -> tuple[Carry, None]:
        block_weights, entries = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, index, keepdims=False), stacked)
        return as_tokens(apply(nnx.merge(graphdef, block_weights), x, *entries)), None

    return jax.lax.scan(step, as_tokens(x), jnp.arange(some.start, some.stop))[0]


def as_tokens(x: Carry) -> Carry:
    """Shards tokens [B L E], or a tree of them, as they are between blocks."""
    return jax.tree.map(lambda tokens: constrain(tokens, TOKENS), x)


class Trunk(NamedTuple):
    """The blocks of a transformer as functions of its tokens: all of them, those before the last, and the last."""

    all: Callable[[Any], Any]
    before_last: Callable[[Any], Any]
    last: Callable[[Any], Any]


Through = Callable[[Trunk, Any], Any]
"""A way through a transformer's blocks, from the tokens before them to those after them."""


def through_all(trunk: Trunk, x: Carry) -> Carry:
    """Runs every block, which a step cache may not."""
    return trunk.all(x)


def trunk_of(blocks: Any, apply: Callable[..., Any], *per_block: Any, first: Callable[..., Any] | None = None) -> Trunk:
    """Returns the trunk of stacked blocks; the arguments are those of `scan_blocks`.

    `first` applies the first block, where that is not done as to the others.
    """
    layers = len(jax.tree.leaves(nnx.split(blocks)[1])[0])

    def one(apply: Callable[..., Any], index: int, x: Any) -> Any:
        return as_tokens(apply(block_at(blocks, index), as_tokens(x), *block_at(per_block, index)))

    def some(start: int, stop: int, x: Any) -> Any:
        return scan_some(blocks, range(start, stop), apply, x, *per_block)

    if first is None:
        every = partial(scan_blocks, blocks, apply)
        return Trunk(lambda x: every(x, *per_block), partial(some, 0, layers - 1), partial(one, apply, -1))
    return Trunk(
        lambda x: some(1, layers, one(first, 0, x)),
        lambda x: some(1, layers - 1, one(first, 0, x)),
        partial(one, apply, -1),
    )


def map_blocks(blocks: Module, apply: Callable[[Module], Result]) -> Result:
    """Returns `apply(block)` of each stacked block, stacked along a leading axis."""
    graphdef, weights = nnx.split(blocks)
    return jax.lax.map(lambda block_weights: apply(nnx.merge(graphdef, block_weights)), weights)
