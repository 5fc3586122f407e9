# SPDX-License-Identifier: Apache-2.0
"""Dense projections and lookup tables with logical axes on their weights, and stacks of equal blocks."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
from flax import nnx
from jax.typing import DTypeLike

Module = TypeVar("Module", bound=nnx.Module)

Axes = tuple[str | None, ...]
nnx.use_eager_sharding(False)  # weights carry the names of their axes and can be built without a mesh
default_kernel_init = nnx.initializers.lecun_normal()


def linear(
    features_in: int,
    features_out: int,
    axes: Axes,
    *,
    bias: bool = True,
    kernel_init: nnx.Initializer = default_kernel_init,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A dense projection whose kernel [in, out] has the logical axes `axes`; the bias has the last of them."""
    return nnx.Linear(
        features_in,
        features_out,
        use_bias=bias,
        kernel_init=nnx.with_partitioning(kernel_init, axes),
        bias_init=nnx.with_partitioning(nnx.initializers.zeros_init(), axes[-1:]),
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
    )


def stack(make_block: Callable[[nnx.Rngs], Module], layers: int, rngs: nnx.Rngs) -> Module:
    """`layers` blocks as one module whose weights have a leading axis named `layers`."""

    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs: nnx.Rngs) -> Module:
        return make_block(rngs)

    return make(rngs)


def scan_blocks(blocks: Module, apply: Callable[[Module, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Runs `x = apply(block, x)` over the stacked blocks, compiled once for all of them.

    Backwards, each block is computed again from its input: less memory, and on the CPU less time than to keep it all.
    """
    graphdef, weights = nnx.split(blocks)

    @partial(jax.checkpoint, prevent_cse=False)  # which a scan needs no guard against
    def step(x: jax.Array, block_weights: nnx.State) -> tuple[jax.Array, None]:
        return apply(nnx.merge(graphdef, block_weights), x), None

    return jax.lax.scan(step, x, weights)[0]


def scan_compiler_options() -> dict[str, str]:
    """What to give `jax.jit` as `compiler_options` where the program runs `scan_blocks`.

    On the CPU, XLA would cast the half-precision weights of all blocks to float32 ahead of the loop and so take three
    times their memory; this has it cast one block at a time.
    """
    cpu = jax.default_backend() == "cpu"
    return {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"} if cpu else {}
