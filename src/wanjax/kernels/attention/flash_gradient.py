# SPDX-License-Identifier: Apache-2.0
"""The gradient of attention on TPUs: a Pallas kernel with five matrix products for each pair of blocks.

The scores have the shape keys × queries, as in `flash_kernel`. The kernel computes the weights from the scores and the
log-sum-exps of the forward pass, so it needs no maximum and no sum. For each block of keys, the kernel streams all
blocks of queries of a head, and sums dk and dv in scratch memory. dq is summed over all blocks of keys. The dq of all
queries of a call must therefore fit in VMEM, and longer sequences need several calls.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from wanjax.kernels.alignment import LANES, ceil_div, round_up
from wanjax.kernels.attention.blocks import even_blocks, from_rows, iota, matmul, to_rows
from wanjax.kernels.attention.flash_tiles import COMPILER_VMEM_BYTES
from wanjax.kernels.attention.masks import finite_max
from wanjax.sharding import pad_to

MAX_BLOCK_Q, MAX_BLOCK_KV = 2048, 2048  # of a grid step
MAX_COMPUTE_KV = 2048  # unrolled keys
STRIP = 256  # queries and keys of one step: a tile of the matrix unit
# Number of steps whose weights are computed before the products of the first step; the matrix units then do not wait
PIPELINE_DEPTH = 2


@dataclass(frozen=True)
class Config:
    """Tile sizes of the kernel.

    Attributes:
        block_q: Queries of a grid step.
        block_kv: Keys of a grid step.
        block_kv_compute: Keys of a compute block, which divides `block_kv`. The steps of a compute block are unrolled.
        resident_q: Queries of one call, a multiple of `block_q`. The dq of these queries stays in VMEM.
        interpret: Run the kernel without a TPU, slowly, for tests.
    """

    block_q: int
    block_kv: int
    block_kv_compute: int
    resident_q: int
    interpret: bool = False

    def vmem_bytes(self, head_dim: int, itemsize: int) -> int:
        """Return the bytes of VMEM that the kernel needs: the buffers of its input and output blocks, and its
        scratch."""
        padded_head_dim = max(head_dim, LANES)  # a row of 64 occupies 128 lanes
        streamed = 2 * padded_head_dim * (3 * itemsize * self.block_q + (2 * itemsize + 2 * 4) * self.block_kv)
        scratch = 2 * itemsize * self.block_q + (itemsize + 2 * 4) * self.block_kv + 4 * self.resident_q
        return streamed + head_dim * scratch + 2 * 2 * 4 * 8 * self.block_q


class GradientSizes(NamedTuple):
    """Static arguments of the kernel."""

    num_queries: int
    heads: int  # of one example
    block_q: int
    block_kv: int
    block_kv_compute: int  # unrolled keys
    scale: float


class GradientRefs(NamedTuple):
    """References to scratch memory: transposed operands, and the sums of the gradients [D L] and [D S] in float32."""

    q: jax.Ref
    g: jax.Ref
    k: jax.Ref
    dq: jax.Ref  # the dq of all blocks of queries, side by side
    dk: jax.Ref
    dv: jax.Ref


def kernel(
    kv_lengths_ref,
    q_ref,
    g_ref,
    lse_ref,
    delta_ref,
    k_ref,
    v_ref,
    dq_ref,
    dk_ref,
    dv_ref,
    *scratch,
    sizes: GradientSizes,
) -> None:
    """Compute the gradients. The grid has heads, blocks of keys, and blocks of queries."""
    state = GradientRefs(*scratch)
    j, i = pl.program_id(1), pl.program_id(2)
    num_valid = kv_lengths_ref[pl.program_id(0) // sizes.heads] - j * sizes.block_kv  # keys of this block
    q_slice = pl.ds(pl.multiple_of(i * sizes.block_q, LANES), sizes.block_q)

    @pl.when(i == 0)
    def _():
        rows = iota((sizes.block_kv, 1), 0)
        state.k[...] = jnp.where(rows < num_valid, k_ref[...], jnp.zeros_like(k_ref)).T
        state.dk[...] = jnp.zeros(state.dk.shape)
        state.dv[...] = jnp.zeros(state.dv.shape)

    @pl.when(j == 0)
    def _():
        state.dq[:, q_slice] = jnp.zeros((state.dq.shape[0], sizes.block_q))

    remaining_q = sizes.num_queries - i * sizes.block_q  # memory after the last query is undefined
    row_valid = iota((sizes.block_q, 1), 0) < remaining_q
    state.q[...] = jnp.where(row_valid, q_ref[...], jnp.zeros_like(q_ref)).T
    state.g[...] = jnp.where(row_valid, g_ref[...], jnp.zeros_like(g_ref)).T
    column_valid = iota((1, sizes.block_q), 1) < remaining_q
    lse, delta = (jnp.where(column_valid, x[...], 0.0) for x in (lse_ref, delta_ref))

    def add_keys(index: Array, masked: bool) -> None:
        _accumulate_keys(
            k_ref,
            v_ref,
            state,
            lse,
            delta,
            index * sizes.block_kv_compute,
            i * sizes.block_q,
            num_valid if masked else None,
            sizes,
        )

    num_full_blocks = jnp.clip(num_valid, 0, sizes.block_kv) // sizes.block_kv_compute
    jax.lax.fori_loop(0, num_full_blocks, lambda index, _: add_keys(index, False), None)
    pl.when(
        (num_valid > num_full_blocks * sizes.block_kv_compute)
        & (num_full_blocks < sizes.block_kv // sizes.block_kv_compute)
    )(lambda: add_keys(num_full_blocks, True))

    @pl.when(i == pl.num_programs(2) - 1)
    def _():
        dk_ref[...] = (sizes.scale * state.dk[...]).T.astype(dk_ref.dtype)
        dv_ref[...] = state.dv[...].T.astype(dv_ref.dtype)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        dq_ref[...] = (sizes.scale * state.dq[:, q_slice]).T.astype(dq_ref.dtype)


def _accumulate_keys(
    k_ref, v_ref, state: GradientRefs, lse, delta, start, q_start, num_valid: Array | None, sizes: GradientSizes
) -> None:
    """Add the first `num_valid` keys of a compute block to the gradients, or all keys if `num_valid` is None."""
    exponent_scale = sizes.scale * math.log2(math.e)
    pending: list[tuple[slice, Any, Array, Array]] = []
    for kv_offset in range(0, sizes.block_kv_compute, STRIP):
        num_keys = min(STRIP, sizes.block_kv_compute - kv_offset)
        key_slice = pl.ds(pl.multiple_of(start + kv_offset, LANES), num_keys)
        k, v = k_ref[key_slice, :], v_ref[key_slice, :]
        for q_offset in range(0, sizes.block_q, STRIP):
            query_slice = slice(q_offset, min(q_offset + STRIP, sizes.block_q))
            weights = jnp.exp2(exponent_scale * matmul(k, state.q[:, query_slice]) - lse[:, query_slice])
            dlogits = weights * (matmul(v, state.g[:, query_slice]) - delta[:, query_slice])
            if num_valid is not None:
                key_valid = iota((num_keys, 1), 0) < num_valid - start - kv_offset
                weights, dlogits = (jnp.where(key_valid, x, 0.0) for x in (weights, dlogits))
            pending.append((query_slice, key_slice, weights.astype(k.dtype), dlogits.astype(k.dtype)))
            if len(pending) > PIPELINE_DEPTH:
                _accumulate(state, q_start, *pending.pop(0))
    for operands in pending:
        _accumulate(state, q_start, *operands)


def _accumulate(
    state: GradientRefs, q_start: Array, query_slice: slice, key_slice: Any, weights: Array, dlogits: Array
) -> None:
    """Add the contribution of the weights [S L] to dv, and of the gradients of the logits [S L] to dk and dq."""
    state.dv[:, key_slice] += matmul(state.g[:, query_slice], weights, transposed=True)
    state.dk[:, key_slice] += matmul(state.q[:, query_slice], dlogits, transposed=True)
    dq_slice = pl.ds(pl.multiple_of(q_start + query_slice.start, LANES), query_slice.stop - query_slice.start)
    state.dq[:, dq_slice] += matmul(state.k[:, key_slice], dlogits)


def choose_config(
    num_queries: int, num_keys: int, head_dim: int, itemsize: int, vmem_bytes: int, *, interpret: bool = False
) -> Config | None:
    """Return tiles for these sizes, or None if the chip's VMEM is too small for one block of queries."""
    block_q, block_kv = (
        round_up(even_blocks(n, maximum)[1], LANES)
        for n, maximum in ((num_queries, MAX_BLOCK_Q), (num_keys, MAX_BLOCK_KV))
    )
    block_kv_compute = next(size for size in range(min(MAX_COMPUTE_KV, block_kv), 0, -LANES) if block_kv % size == 0)
    smallest_config = Config(block_q, block_kv, block_kv_compute, block_q, interpret)
    free_bytes = vmem_bytes - COMPILER_VMEM_BYTES - smallest_config.vmem_bytes(head_dim, itemsize)
    if free_bytes < 0:
        return None
    extra_blocks = min(free_bytes // (4 * head_dim * block_q), ceil_div(num_queries, block_q) - 1)
    return replace(smallest_config, resident_q=block_q * (1 + extra_blocks))


def gradient(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S N D"],
    v: Float[Array, "B S N D"],
    g: Float[Array, "B L N D"],
    lse: Float32[Array, "B L N"],
    delta: Float32[Array, "B L N"],
    valid_keys: Int32[Array, " B"],
    *,
    scale: float,
    max_keys: int,
    config: Config,
) -> tuple[Float[Array, "B L N D"], Float[Array, "B S N D"], Float[Array, "B S N D"]]:
    """Return the gradients of q, k and v. `gradient.from_result` explains `g`, `lse` and `delta`.

    The first `valid_keys` keys of each example are valid. Their number is at most `max_keys`.
    """
    call_kernel = partial(_call, scale=scale, max_keys=max_keys, config=config)
    if config.resident_q >= q.shape[1]:
        return call_kernel(q, k, v, g, lse, delta, valid_keys, sum_dtype=k.dtype)
    gradients = []
    for start in range(0, q.shape[1], config.resident_q):
        q_part, g_part, lse_part, delta_part = (x[:, start : start + config.resident_q] for x in (q, g, lse, delta))
        gradients.append(call_kernel(q_part, k, v, g_part, lse_part, delta_part, valid_keys, sum_dtype=jnp.float32))
    dq, dk, dv = zip(*gradients, strict=True)
    return jnp.concatenate(dq, axis=1), reduce(jnp.add, dk).astype(k.dtype), reduce(jnp.add, dv).astype(v.dtype)


# With `jit`, the function is traced only once
@partial(jax.jit, static_argnames=("scale", "max_keys", "config", "sum_dtype"), inline=True)
def _call(q, k, v, g, lse, delta, valid_keys, *, scale: float, max_keys: int, config: Config, sum_dtype: Any) -> tuple:
    """Call the kernel on a grid of heads, blocks of keys and blocks of queries. `sum_dtype` is the dtype of dk and
    dv."""
    batch, num_queries, heads, head_dim = q.shape
    grid = (batch * heads, ceil_div(max_keys, config.block_kv), ceil_div(num_queries, config.block_q))
    lse, delta = (
        jnp.moveaxis(x, 1, 2).reshape(-1, 1, num_queries) for x in (math.log2(math.e) * finite_max(lse), delta)
    )
    operands = [to_rows(x) for x in (q, g, k, v)]
    rows, _, width = operands[0].shape
    in_specs, out_specs = _block_specs(grid, width // head_dim, head_dim, config)
    gradients = pl.pallas_call(
        partial(
            kernel,
            sizes=GradientSizes(num_queries, heads, config.block_q, config.block_kv, config.block_kv_compute, scale),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=_scratch_shapes(grid[2], head_dim, q.dtype, config),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, n, width), dtype)
            for n, dtype in ((num_queries, q.dtype), (max_keys, sum_dtype), (max_keys, sum_dtype))
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem_bytes(head_dim, q.dtype.itemsize) + COMPILER_VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * q.size * max_keys,
            transcendentals=q.size // head_dim * max_keys,
            bytes_accessed=q.dtype.itemsize * (3 * q.size + 4 * k.size),
        ),
        interpret=config.interpret,
        name="flash_gradient",
    )(valid_keys, *operands[:2], lse, delta, *operands[2:])
    dq, dk, dv = (from_rows(x, heads, head_dim) for x in gradients)
    return dq, pad_to(dk, 1, k.shape[1]), pad_to(dv, 1, k.shape[1])


def _block_specs(grid: tuple[int, int, int], heads_per_row: int, head_dim: int, config: Config) -> tuple[list, list]:
    """Return the block specs of operands and results. A row has `heads_per_row` heads side by side."""

    def block(rows: int, block_index: Callable[[Any, Any], Any]) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, rows, head_dim), lambda h, j, i, *_: (h // heads_per_row, block_index(j, i), h % heads_per_row)
        )

    q_spec, kv_spec = block(config.block_q, lambda j, i: i), block(config.block_kv, lambda j, i: j)
    row_vector_spec = pl.BlockSpec((None, 1, config.block_q), lambda h, j, i, *_: (h, 0, i))
    # dq is complete, and written, only in the last pass over the blocks of queries
    dq_spec = block(config.block_q, lambda j, i: jnp.where(j == grid[1] - 1, i, 0))
    return [q_spec, q_spec, row_vector_spec, row_vector_spec, kv_spec, kv_spec], [dq_spec, kv_spec, kv_spec]


def _scratch_shapes(blocks: int, head_dim: int, dtype: jnp.dtype, config: Config) -> list[Any]:
    """Return the scratch memory of the kernel's `GradientRefs`, in the order of its fields."""
    operands = (config.block_q, config.block_q, config.block_kv)
    sums = (blocks * config.block_q, config.block_kv, config.block_kv)
    transposed = [pltpu.VMEM((head_dim, n), dtype) for n in operands]
    return transposed + [pltpu.VMEM((head_dim, n), jnp.float32) for n in sums]
