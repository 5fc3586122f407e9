# SPDX-License-Identifier: Apache-2.0
"""Dense projections and lookup tables with logical axes on their weights, and stacks of equal blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.typing import DTypeLike

from wanjax.kernels.attention.target import Target, target
from wanjax.sharding import Layout, constrain, whole

Module = TypeVar("Module", bound=nnx.Module)
Blocks = TypeVar("Blocks")  # a stacked module, or a tree of them and of arrays
Carry = TypeVar("Carry")  # an array, or a tuple of them
Result = TypeVar("Result")

Axes = tuple[str | None, ...]
TOKENS = ("batch", "length", "embed")
nnx.use_eager_sharding(False)  # weights carry the names of their axes and can be built without a mesh
default_kernel_init = nnx.initializers.lecun_normal()


class Linear(nnx.Linear):
    """A dense projection; over several devices that of tokens [B L E] gathers its weights and lays out its result."""

    def __init__(self, *sizes: int, axis: str | None, **kw):
        super().__init__(*sizes, **kw, promote_dtype=_promote)
        self.axis = axis

    def __call__(self, inputs: jax.Array, out_sharding: None = None) -> jax.Array:
        y = super().__call__(inputs, out_sharding)
        return constrain(y, ("batch", "length", self.axis)) if _are_tokens(y) else y


def _promote(operands: tuple, /, *, dtype: DTypeLike | None = None, inexact: bool = True) -> Any:
    """The operands of a projection in its dtype, which is also the one in which weights are gathered."""
    inputs, kernel, bias = promote_dtype(operands, dtype=dtype, inexact=inexact)
    return inputs, whole(kernel) if _are_tokens(inputs) else kernel, bias


def _are_tokens(x: jax.Array) -> bool:
    return x.ndim == 3 and x.shape[1] > 1


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
) -> Linear:
    """A dense projection whose kernel [in, out] has the logical axes `axes`; the bias has the last of them."""
    return Linear(
        features_in,
        features_out,
        axis=axes[-1],
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


def part(blocks: Blocks, index: int | slice) -> Blocks:
    """The block, or the stack, at an index of stacked blocks."""
    graphdef, weights = nnx.split(blocks)
    return nnx.merge(graphdef, jax.tree.map(lambda w: w[index], weights))


def grouped(blocks: Blocks, groups: int) -> Blocks:
    """Stacked blocks as a stack of `groups` stacks of equal size, in the same order."""
    graphdef, weights = nnx.split(blocks)
    return nnx.merge(graphdef, jax.tree.map(lambda w: w.reshape(groups, -1, *w.shape[1:]), weights))


def scan_blocks(blocks: Any, apply: Callable[..., Carry], x: Carry, *beside: Any) -> Carry:
    """Runs `x = apply(block, x, *parts)` over the stacked blocks, compiled once for all of them; x is [B L E].

    Stacks of equal length may run side by side, as a tuple; so may arrays as x. The parts are those of the trees of
    arrays `beside`, which have a leading axis as the stacks have.

    Backwards, each block is computed again from its input: less memory, and on the CPU less time than to keep it all.
    """
    graphdef, weights = nnx.split(blocks)

    @partial(jax.checkpoint, prevent_cse=False)  # which a scan needs no guard against
    def step(x: Carry, layer: tuple[nnx.State, tuple]) -> tuple[Carry, None]:
        block_weights, parts = layer
        return spread(apply(nnx.merge(graphdef, block_weights), x, *parts)), None

    def spread(x: Carry) -> Carry:
        return jax.tree.map(lambda tokens: constrain(tokens, TOKENS), x)

    return jax.lax.scan(step, spread(x), (weights, beside))[0]


def map_blocks(blocks: Module, apply: Callable[[Module], Result]) -> Result:
    """What `apply(block)` gives for each of the stacked blocks, compiled once, behind a leading axis."""
    graphdef, weights = nnx.split(blocks)
    return jax.lax.map(lambda block_weights: apply(nnx.merge(graphdef, block_weights)), weights)


def placed(abstract: Module, layout: Layout | None) -> Module:
    """The abstract module, of `nnx.eval_shape`, with the sharding of each weight, by the names of its axes."""
    if layout is None:
        return abstract
    graphdef, state = nnx.split(abstract)

    def place(variable: nnx.Variable) -> nnx.Variable:
        x = variable.get_value()
        axes = variable.get_metadata().get("out_sharding") or (None,) * len(x.shape)
        return variable.replace(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.weight(axes, x.shape)))

    return nnx.merge(graphdef, nnx.from_flat_state([(path, place(leaf)) for path, leaf in nnx.to_flat_state(state)]))


def scan_compiler_options(on: Target | None = None) -> dict[str, str]:
    """What to give `jax.jit` as `compiler_options` where the program runs `scan_blocks`; None: on that of `target`.

    On the CPU, XLA would cast the half-precision weights of all blocks to float32 ahead of the loop and so take three
    times their memory; this has it cast one block at a time. On TPUs, heads change chips and weights are gathered while
    something is computed, which is not so unless it is asked for.
    """
    options = {
        "cpu": {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"},
        "tpu": {"xla_tpu_enable_async_all_to_all": "true", "xla_enable_async_all_gather": "true"},
    }
    return options.get((on or target()).platform, {})


OFFLOADED = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_dense_all_to_all": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
}
HALF_OF_VMEM = {"xla_tpu_scoped_vmem_limit_kib": str(64 << 10)}


def product_compiler_options(on: Target | None = None) -> dict[str, str]:
    """Those, and more for a program that is products above all.

    SparseCores, which all TPUs but v5e have, send and gather beside them; on v6e one operation may take half of the
    VMEM, for larger tiles.
    """
    on = on or target()
    options = scan_compiler_options(on)
    if on.platform == "tpu" and on.kind not in ("TPU v5 lite", "TPU v5e"):
        options |= OFFLOADED
    return options | (HALF_OF_VMEM if on.kind in ("TPU v6 lite", "TPU v6e") else {})
