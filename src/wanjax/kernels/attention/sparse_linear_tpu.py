# SPDX-License-Identifier: Apache-2.0
"""Sparse-linear attention on TPUs, by the kernels of `sparse_linear_kernel`. The gradient is that of
`sparse_linear_chunked`.

XLA computes the small products between the kernels: the products of block means, and the projection of the linear
state.
"""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wanjax.kernels.alignment import ceil_div
from wanjax.kernels.attention.blocks import matmul_precision
from wanjax.kernels.attention.implementation import INTERPRETER_ADVICE
from wanjax.kernels.attention.sparse_linear import SUM_EPSILON, Projection, SparseLinearAttentionConfig
from wanjax.kernels.attention.sparse_linear_chunked import with_gradient
from wanjax.kernels.attention.sparse_linear_kernel import TILE_KV, KernelSizes, attend, list_blocks, prepare
from wanjax.kernels.target import vmem_bytes

HEAD_DIM = 128
BLOCK_Q = 128
DTYPES = ("float32", "bfloat16")
OTHER_VMEM_BYTES = 16 << 20  # VMEM for the compiler and for small arrays, besides a head's keys and values
MAX_UNROLLED_TILES = 192  # unrolled tiles of all lists of a grid step; with more, compiling takes minutes
LISTS_PER_STEP = (8, 4)  # lists in a grid step: 8 is faster, if all tiles can be unrolled


@dataclass(frozen=True)
class Config:
    """Options of the kernels.

    `KernelSizes` explains `lists` and `unroll`. If `interpret` is True, the kernels run without a TPU, slowly, for
    tests.
    """

    lists: int | None = None
    unroll: int | None = None
    interpret: bool = False


def unsupported(q: Array, sparse: SparseLinearAttentionConfig, kv_length: int, config: Config | None) -> str | None:
    """Return the reason why this call is not supported, or None."""
    vmem_capacity = vmem_bytes()
    if vmem_capacity is None and not (config and config.interpret):
        return INTERPRETER_ADVICE.format("the kernel of sparse-linear attention", "sparse_linear_tpu")
    if q.shape[3] != HEAD_DIM or q.dtype.name not in DTYPES:
        return f"the kernel of sparse-linear attention does not support heads of {q.shape[3]} in {q.dtype.name}"
    if sparse.block_q != BLOCK_Q or TILE_KV % sparse.block_kv or sparse.block_kv % 16:
        return f"the kernel of sparse-linear attention does not support blocks of {sparse.block_q} by {sparse.block_kv}"
    if vmem_capacity is not None and (needed := _vmem_needed(q, kv_length, 1)) > vmem_capacity:
        return f"a head's keys need {needed >> 20} MiB of VMEM, and the chip has {vmem_capacity >> 20}"
    return None


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    projection: Projection,
    *,
    sparse: SparseLinearAttentionConfig,
    kv_length: int,
    config: Config | None = None,
) -> Float[Array, "B L N D"]:
    """Compute the same as the reference."""
    forward = partial(_forward, sparse=sparse, kv_length=kv_length, config=config or Config())
    return with_gradient(forward, q, k, v, projection, sparse=sparse, kv_length=kv_length)


def _forward(
    q, k, v, projection: Projection, *, sparse: SparseLinearAttentionConfig, kv_length: int, config: Config
) -> tuple[Array, Array]:
    shape, sizes = q.shape, _sizes(q, sparse, kv_length, config)
    buffers = 2 if _vmem_needed(q, kv_length, 2) <= (vmem_bytes() or 0) else 1
    options = {"buffers": buffers, "vmem_bytes": _vmem_needed(q, kv_length, buffers), "interpret": config.interpret}
    q, k, v = (x.reshape(*shape[:2], -1) for x in (q, k, v))
    q_sums, k_sums, state = prepare(q, k, v, sizes, interpret=config.interpret)
    scores = _scores(q_sums, k_sums, q.dtype, sizes)
    lists = list_blocks(scores.reshape(-1, scores.shape[2]), sizes, interpret=config.interpret)
    first_keys = lists.reshape(len(scores), -1, sizes.lists, lists.shape[1])
    bias = projection.bias.astype(jnp.float32)[None]
    out = attend(first_keys, q, k, v, _project_state(state, projection, q.dtype), bias, sizes, **options)
    selected = lists.reshape(*scores.shape[:2], -1)[:, : ceil_div(kv_length, sparse.block_q), : sizes.top_k]
    return out.reshape(shape), selected // sparse.block_kv


def _vmem_needed(q: Array, kv_length: int, buffers: int) -> int:
    """Return the bytes of VMEM that the kernel needs with this many buffers of a head's keys and values."""
    return 2 * buffers * kv_length * q.shape[3] * q.dtype.itemsize + OTHER_VMEM_BYTES


def _sizes(q: Array, sparse: SparseLinearAttentionConfig, kv_length: int, config: Config) -> KernelSizes:
    top_k = sparse.top_k(kv_length)
    sizes = KernelSizes(q.shape[1], kv_length, q.shape[2], sparse.block_q, sparse.block_kv, top_k, lists=1, unroll=1)
    tiles_per_list = sizes.tiles + 1
    lists = config.lists or next(
        (count for count in LISTS_PER_STEP if count * tiles_per_list <= MAX_UNROLLED_TILES), LISTS_PER_STEP[-1]
    )
    return sizes._replace(
        lists=lists, unroll=config.unroll or max(1, sizes.tiles // ceil_div(lists * tiles_per_list, MAX_UNROLLED_TILES))
    )


def _scores(
    q_sums: Float32[Array, "_B _L D"], k_sums: Float32[Array, "_B _S D"], dtype: DTypeLike, sizes: KernelSizes
) -> Float32[Array, "_B _L _S"]:
    """Compute the scores of blocks of keys from the sums over each block. There is a row for each list of the grid."""
    q_blocks, kv_blocks = (
        ceil_div(sizes.num_queries, sizes.rows) * sizes.lists,
        ceil_div(sizes.num_tokens, sizes.block_kv),
    )
    q_sums = jnp.pad(q_sums, ((0, 0), (0, max(0, q_blocks - q_sums.shape[1])), (0, 0)))[:, :q_blocks]
    k_sums = k_sums[:, :kv_blocks]
    key_mean = k_sums.sum(axis=1, keepdims=True) / sizes.num_tokens
    means = (
        q_sums / _block_sizes(q_blocks, sizes.block_q, sizes),
        k_sums / _block_sizes(kv_blocks, sizes.block_kv, sizes) - key_mean,
    )
    precision = matmul_precision(dtype)
    means = (x.astype(dtype) for x in means)
    return jnp.einsum("BLD,BSD->BLS", *means, precision=precision, preferred_element_type=jnp.float32)


def _block_sizes(blocks: int, size: int, sizes: KernelSizes) -> Float32[np.ndarray, "1 _L 1"]:
    """Return the number of tokens in each block. For an empty block, return 1, to avoid a division by zero."""
    counts = np.clip(sizes.num_tokens - size * np.arange(blocks), 1, size)
    return counts.astype(np.float32)[None, :, None]


def _project_state(
    state: Float32[Array, "_B D _D"], projection: Projection, dtype: DTypeLike
) -> Float[Array, "_B _E _D"]:
    """Return the state of linear attention with projected values. In bfloat16, the state is split into a sum of two
    arrays, which are concatenated along the first axis of the matrix."""
    values, weights = jnp.split(state, 2, axis=2)
    values = jnp.matmul(values, projection.kernel.astype(jnp.float32)[None], precision="highest")
    values_and_weights = jnp.concatenate([values, weights + SUM_EPSILON], axis=2)
    high = values_and_weights.astype(dtype)
    if dtype == jnp.float32:
        return high
    return jnp.concatenate([high, (values_and_weights - high.astype(jnp.float32)).astype(dtype)], axis=1)
