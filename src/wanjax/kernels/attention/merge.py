# SPDX-License-Identifier: Apache-2.0
"""Merge the attention of the same queries to two sets of keys by their log-sum-exps.

On a TPU, a kernel updates a part of the queries in one pass over memory. XLA makes more passes: it slices, converts
both results to float32 and copies the merged part back.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Shaped

from wanjax.kernels.admitted import is_admitted
from wanjax.kernels.alignment import LANES
from wanjax.kernels.attention.masks import divide_or_zero, finite_max, log_sum_exp
from wanjax.kernels.autodiff import with_gradient
from wanjax.kernels.target import target

AttentionResult = tuple[Float[Array, "B L N D"], Float32[Array, "B L N"]]

ROWS_UNIT, MAX_BLOCK_ROWS = 8, 512  # rows of a tile, and of a block: 1.3 MB for 10 heads in bfloat16


def merge_by_log_sum_exp(a: AttentionResult, b: AttentionResult) -> AttentionResult:
    """Merge the attention to two sets of keys by their log-sum-exps, in float32."""
    (x, x_lse), (y, y_lse) = a, b
    share, lse = _share_of_second(x_lse, y_lse)
    return _mix(join_heads(x), join_heads(y), share).reshape(x.shape), lse


def merge_rows(
    x: Float[Array, "B L N D"],
    x_lse: Float32[Array, "B L N"],
    y: Float[Array, "B S N D"],
    y_lse: Float32[Array, "B S N"],
    start: int,
) -> Float[Array, "B L N D"]:
    """Merge x, from row `start` on, with y. The computation is in float32, and the result is rounded once to x's dtype.

    Args:
        x: The result of attention to the first set of keys.
        x_lse: Its log-sum-exps.
        y: The result of attention of the rows from `start` on to the second set of keys.
        y_lse: Its log-sum-exps.
        start: The first row to merge.
    """
    share, _ = _share_of_second(x_lse[:, start : start + y.shape[1]], y_lse)
    operands = join_heads(x), join_heads(y), share
    if target(x).platform == "tpu" and is_admitted("merged_rows") and is_supported(x, y.shape[1], start):
        run = partial(call, start=start, interpret=False)
        return with_gradient(run, partial(reference, start=start), *operands).reshape(x.shape)
    return reference(*operands, start=start).reshape(x.shape)


def is_supported(x: Float[Array, "B L N D"], num_rows: int, start: int) -> bool:
    """Return whether the kernel supports these rows: blocks of whole tiles, and heads of 128 channels."""
    return x.shape[3] == LANES and _rows_per_block(num_rows, start) is not None


def join_heads(x: Shaped[Array, "B L N D"]) -> Shaped[Array, "B L E"]:
    """Concatenate the heads of each token."""
    return x.reshape(*x.shape[:2], -1)


def reference(
    x: Float[Array, "B L E"], y: Float[Array, "B S E"], share: Float32[Array, "B S N"], *, start: int
) -> Float[Array, "B L E"]:
    """Compute the merged rows in plain JAX. This is the specification of the kernel, and gives its gradient.

    Row `start + i` of the result is x + share · (y - x), where x is row `start + i`, and y and share are row i.
    """
    merged = _mix(x[:, start : start + y.shape[1]], y, share)
    return jax.lax.dynamic_update_slice_in_dim(x, merged.astype(x.dtype), start, axis=1)


def call(
    x: Float[Array, "B L E"], y: Float[Array, "B S E"], share: Float32[Array, "B S N"], *, start: int, interpret: bool
) -> Float[Array, "B L E"]:
    """Call the kernel, which computes `reference`. The result overwrites x. `interpret` is for tests."""
    batch, num_rows, width = y.shape
    block_rows = _rows_per_block(num_rows, start)
    assert block_rows is not None
    x_spec = pl.BlockSpec((None, block_rows, width), lambda b, i: (b, start // block_rows + i, 0))
    y_spec, share_spec = (
        pl.BlockSpec((None, block_rows, size), lambda b, i: (b, i, 0)) for size in (width, share.shape[2])
    )
    return pl.pallas_call(
        _kernel,
        grid=(batch, num_rows // block_rows),
        in_specs=[x_spec, y_spec, share_spec],
        out_specs=x_spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        input_output_aliases={0: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="merged_rows",
    )(x, y, share)


def _kernel(x_ref, y_ref, share_ref, out_ref) -> None:
    for head in range(share_ref.shape[1]):
        lanes = pl.ds(head * LANES, LANES)
        x = x_ref[:, lanes].astype(jnp.float32)
        share = share_ref[:, pl.ds(head, 1)]
        out_ref[:, lanes] = (x + share * (y_ref[:, lanes].astype(jnp.float32) - x)).astype(out_ref.dtype)


def _rows_per_block(num_rows: int, start: int) -> int | None:
    """Return the largest block that divides both numbers of rows; None if there is none."""
    sizes = range(MAX_BLOCK_ROWS, 0, -ROWS_UNIT)
    return next((size for size in sizes if num_rows % size == 0 and start % size == 0), None)


def _share_of_second(
    lse_a: Float32[Array, "B L N"], lse_b: Float32[Array, "B L N"]
) -> tuple[Float32[Array, "B L N"], Float32[Array, "B L N"]]:
    """Return the share of the second set of keys in the sum of weights, and the log-sum-exp over both sets."""
    lse_max = jnp.maximum(lse_a, lse_b)
    weight_a, weight_b = (jnp.exp(lse - finite_max(lse_max)) for lse in (lse_a, lse_b))
    weight_sum = weight_a + weight_b
    return divide_or_zero(weight_b, weight_sum), log_sum_exp(lse_max, weight_sum)


def _mix(x: Float[Array, "B L E"], y: Float[Array, "B L E"], share: Float32[Array, "B L N"]) -> Float32[Array, "B L E"]:
    x, y = (out.astype(jnp.float32) for out in (x, y))
    return x + _repeat_in_channels(share, x.shape[2] // share.shape[2]) * (y - x)


def _repeat_in_channels(x: Float32[Array, "B L N"], size: int) -> Float32[Array, "B L E"]:
    """Repeat each head's number for the `size` channels of the head. The heads are concatenated in the result.

    The function computes a matrix product, because a TPU would copy a repeated array with an axis of heads. The product
    is exact, because each number is split into a sum of three bfloat16 numbers.
    """
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    ones = jnp.repeat(jnp.eye(x.shape[2], dtype=jnp.bfloat16), size, axis=1)
    return jnp.dot(jnp.concatenate(parts, axis=2), jnp.tile(ones, (3, 1)), preferred_element_type=jnp.float32)
