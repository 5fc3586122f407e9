# SPDX-License-Identifier: Apache-2.0
"""The call of flash_tpu's kernel: its grid, the blocks that it streams, and its memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from wanjax.kernels.attention.flash_kernel import kernel, kernel_of_blocks
from wanjax.kernels.attention.flash_state import LANES, SPILL_BYTES, Sizes, Sums
from wanjax.kernels.attention.flash_tiles import Config, ceil_div, round_up


@partial(jax.jit, static_argnames=("sizes", "kv_heads", "head_dim", "config"), inline=True)  # is traced once
def call(
    scalars: tuple, operands: tuple, before: Sums | None, *, sizes: Sizes, kv_heads: int, head_dim: int, config: Config
) -> Any:
    """The kernel over a grid of heads, blocks of queries and blocks of keys.

    `operands` are q, k and v: [B L N·D] and [B S K·D], or [B·N L D] and [B·K S D]. `scalars` are the number of keys
    that take part in each example, or those of listed blocks. Sums are written where those before them were.
    """
    listed, (q, k, v) = len(scalars) > 1, operands
    block_q, queries, beside = sizes.block_q, sizes.queries, q.shape[2] // head_dim  # heads side by side in a row
    heads = q.shape[0] * beside  # of all examples
    split = q.dtype == jnp.bfloat16  # q times the factor, as a sum of two: one alone would lose three digits
    if split and 2 * head_dim <= LANES:  # fills rows that would be padded; the kernel doubles wider rows
        k = jnp.concatenate([k, k], axis=2)

    q_spec = pl.BlockSpec((None, block_q, head_dim), lambda h, i, j, *_: (h // beside, i, h % beside))
    rows_spec = partial(_rows_spec, block_q)
    kept = Sums((head_dim * (1 + split), q.dtype), (1, jnp.float32), (8, jnp.float32), (head_dim, jnp.float32))
    new = [] if not sizes.unfinished else kept[1:] if before else kept  # queries are made ready once
    row_shape = partial(_rows_of_heads, heads, round_up(queries, block_q) if new else queries)
    made = pl.pallas_call(
        partial(kernel_of_blocks if listed else kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(heads, ceil_div(queries, block_q), ceil_div(sizes.keys, sizes.block_kv)),
            in_specs=[
                rows_spec(kept.q[0]) if before else q_spec,
                *_specs_of_keys(k.shape[2], sizes, sizes.heads // kv_heads, beside, head_dim, config.buffers),
                *(rows_spec(rows) for rows, _ in kept[1:] if before),
            ],
            out_specs=[rows_spec(rows) for rows, _ in new] or [q_spec, rows_spec(1)],
            scratch_shapes=_scratch(sizes, kept.q[0], head_dim, q.dtype),
        ),
        out_shape=[row_shape(*entry) for entry in new]
        or [jax.ShapeDtypeStruct(q.shape, q.dtype), row_shape(1, jnp.float32)],
        input_output_aliases={len(scalars) + 3 + n: n for n in range(len(new))} if before else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem_bytes(head_dim, q.dtype.itemsize) + SPILL_BYTES,
        ),
        cost_estimate=_estimate(q, k, v, sizes.keys, head_dim),
        interpret=config.interpret,
        name="flash_blocks" if listed else "flash_attention",
    )(*scalars, before.q if before else q, k, v, *(before[1:] if before else ()))
    return made if not new else Sums(before.q, *made) if before else Sums(*made)


def _rows_spec(block_q: int, rows: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, rows, block_q), lambda h, i, j, *_: (h, 0, i))


def _specs_of_keys(
    width: int, sizes: Sizes, group: int, beside: int, head_dim: int, buffers: int
) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """Blocks of keys, of rows of this width, and of values; `group` heads share them."""

    def place(h, i, j, live, *_):
        j = _seen_block(h, i, j, live, sizes) if sizes.ragged else j
        row, column = (h // group, 0) if beside == 1 else (h // sizes.heads, h % sizes.heads // group)
        return row, j, column

    spec = partial(pl.BlockSpec, index_map=place, pipeline_mode=pl.Buffered(1) if buffers == 1 else None)
    k_width = width if beside == 1 else head_dim
    return spec((None, sizes.block_kv, k_width)), spec((None, sizes.block_kv, head_dim))


def _rows_of_heads(heads: int, columns: int, rows: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((heads, rows, columns), dtype)


def _seen_block(h, i, j, live, sizes: Sizes):
    """The block of keys to fetch in grid step (h, i, j): j, or the nearest block that a query sees."""
    left, right = sizes.window
    first = (i * sizes.block_q - left) // sizes.block_kv
    last = jnp.minimum(live[h // sizes.heads], i * sizes.block_q + sizes.block_q + right) - 1
    return jnp.clip(j, jnp.maximum(first, 0), jnp.maximum(last // sizes.block_kv, 0))


def _estimate(q, k, v, keys: int, head_dim: int) -> pl.CostEstimate:
    """The kernel's work, by which the compiler schedules other work beside it."""
    return pl.CostEstimate(
        flops=4 * q.size * keys,
        transcendentals=q.size // head_dim * keys,
        bytes_accessed=q.dtype.itemsize * (2 * q.size + k.size + v.size),
    )


def _scratch(sizes: Sizes, q_rows: int, head_dim: int, dtype: jnp.dtype) -> list[Any]:
    """The memory of the kernel's `State`, in the order of its fields."""
    queries = sizes.block_q
    return [
        pltpu.VMEM((q_rows, queries), dtype),
        pltpu.VMEM((1, queries), jnp.float32),
        pltpu.VMEM((8, queries), jnp.float32),
        pltpu.VMEM((head_dim, queries), jnp.float32),
        pltpu.VMEM((8, queries), jnp.float32),
        pltpu.VMEM((head_dim, queries), jnp.float32),
        pltpu.VMEM((sizes.chunk, queries), jnp.float32),
        pltpu.VMEM((8, queries), jnp.float32),
        pltpu.SMEM((2,), jnp.int32),
    ]
