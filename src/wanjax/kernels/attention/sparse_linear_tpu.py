# SPDX-License-Identifier: Apache-2.0
"""Sparse-linear attention on TPUs, by the kernels of `sparse_linear_kernel`; its gradient is that of `chunked`.

Between the kernels are small products of means and of what linear attention keeps, which XLA makes.
"""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from wanjax.kernels.alignment import ceil_div
from wanjax.kernels.attention.blocks import matmul_precision
from wanjax.kernels.attention.flash_tpu import vmem_bytes
from wanjax.kernels.attention.sparse_linear import EPSILON, Projection, SparseLinear
from wanjax.kernels.attention.sparse_linear_chunked import with_gradient
from wanjax.kernels.attention.sparse_linear_kernel import TILE, Sizes, attend, list_blocks, prepare

HEAD_DIM = 128
BLOCK_Q = 128
DTYPES = ("float32", "bfloat16")
OTHERS = 16 << 20  # bytes of VMEM beside a head's keys and values: the compiler's own, and all that is small
UNROLLED = 192  # tiles of all lists of a grid step together; with more, compiling takes minutes
LISTS = (8, 4)  # of a grid step, the more the better while all are unrolled


@dataclass(frozen=True)
class Config:
    """`interpret` runs the kernels without a TPU, slowly, for tests; `lists` and `body` are those of `Sizes`."""

    lists: int | None = None
    body: int | None = None
    interpret: bool = False


def unsupported(q: Array, sparse: SparseLinear, keys: int, config: Config | None) -> str | None:
    """The reason why this call is not supported, or None."""
    vmem = vmem_bytes()
    if vmem is None and not (config and config.interpret):
        return "the kernel of sparse-linear attention runs on TPUs, and elsewhere only by Config(interpret=True)"
    if q.shape[3] != HEAD_DIM or q.dtype.name not in DTYPES:
        return f"the kernel of sparse-linear attention has no heads of {q.shape[3]} in {q.dtype.name}"
    if sparse.block_q != BLOCK_Q or TILE % sparse.block_kv or sparse.block_kv % 16:
        return f"the kernel of sparse-linear attention has no blocks of {sparse.block_q} by {sparse.block_kv}"
    if vmem is not None and _need(q, keys, 1) > vmem:
        return f"a head's keys need {_need(q, keys, 1) >> 20} MiB of VMEM, and the chip has {vmem >> 20}"
    return None


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B L N D"],
    v: Float[Array, "B L N D"],
    projection: Projection,
    *,
    sparse: SparseLinear,
    keys: int,
    config: Config | None = None,
) -> Float[Array, "B L N D"]:
    """Compute what the reference does."""
    forward = partial(_forward, sparse=sparse, keys=keys, config=config or Config())
    return with_gradient(forward, q, k, v, projection, sparse=sparse, keys=keys)


def _forward(
    q, k, v, projection: Projection, *, sparse: SparseLinear, keys: int, config: Config
) -> tuple[Array, Array]:
    shape, sizes = q.shape, _sizes(q, sparse, keys, config)
    buffers = 2 if _need(q, keys, 2) <= (vmem_bytes() or 0) else 1
    options = {"buffers": buffers, "vmem_bytes": _need(q, keys, buffers), "interpret": config.interpret}
    q, k, v = (x.reshape(*shape[:2], -1) for x in (q, k, v))
    of_q, of_k, state = prepare(q, k, v, sizes, interpret=config.interpret)
    scores = _scores(of_q, of_k, q.dtype, sizes)
    lists = list_blocks(scores.reshape(-1, scores.shape[2]), sizes, interpret=config.interpret)
    first = lists.reshape(len(scores), -1, sizes.lists, lists.shape[1])
    bias = projection.bias.astype(jnp.float32)[None]
    out = attend(first, q, k, v, _projected(state, projection, q.dtype), bias, sizes, **options)
    chosen = lists.reshape(*scores.shape[:2], -1)[:, : ceil_div(keys, sparse.block_q), : sizes.top_k]
    return out.reshape(shape), chosen // sparse.block_kv


def _need(q: Array, keys: int, buffers: int) -> int:
    """Bytes of VMEM for this many buffers of a head's keys and values."""
    return 2 * buffers * keys * q.shape[3] * q.dtype.itemsize + OTHERS


def _sizes(q: Array, sparse: SparseLinear, keys: int, config: Config) -> Sizes:
    top_k = sparse.top_k(keys)
    sizes = Sizes(q.shape[1], keys, q.shape[2], sparse.block_q, sparse.block_kv, top_k, lists=1, body=1)
    few = sizes.tiles + 1
    lists = config.lists or next((count for count in LISTS if count * few <= UNROLLED), LISTS[-1])
    return sizes._replace(lists=lists, body=config.body or max(1, sizes.tiles // ceil_div(lists * few, UNROLLED)))


def _scores(
    of_q: Float32[Array, "_B _L D"], of_k: Float32[Array, "_B _S D"], dtype: DTypeLike, sizes: Sizes
) -> Float32[Array, "_B _L _S"]:
    """The scores of blocks, by the sums over each, with a row for each list of the grid."""
    rows, columns = ceil_div(sizes.queries, sizes.rows) * sizes.lists, ceil_div(sizes.tokens, sizes.block_kv)
    of_q = jnp.pad(of_q, ((0, 0), (0, max(0, rows - of_q.shape[1])), (0, 0)))[:, :rows]
    of_k = of_k[:, :columns]
    mean = of_k.sum(axis=1, keepdims=True) / sizes.tokens
    means = of_q / _counts(rows, sizes.block_q, sizes), of_k / _counts(columns, sizes.block_kv, sizes) - mean
    precision = matmul_precision(dtype)
    means = (x.astype(dtype) for x in means)
    return jnp.einsum("BLD,BSD->BLS", *means, precision=precision, preferred_element_type=jnp.float32)


def _counts(blocks: int, size: int, sizes: Sizes) -> Float32[np.ndarray, "1 _L 1"]:
    """The number of tokens in each block; 1 where there are none, so that sums of zero stay."""
    counts = np.clip(sizes.tokens - size * np.arange(blocks), 1, size)
    return counts.astype(np.float32)[None, :, None]


def _projected(state: Float32[Array, "_B D _D"], projection: Projection, dtype: DTypeLike) -> Float[Array, "_B _E _D"]:
    """What linear attention keeps, its values projected; in bfloat16 as a sum of two, one above the other."""
    values, weights = jnp.split(state, 2, axis=2)
    values = jnp.matmul(values, projection.kernel.astype(jnp.float32)[None], precision="highest")
    both = jnp.concatenate([values, weights + EPSILON], axis=2)
    high = both.astype(dtype)
    if dtype == jnp.float32:
        return high
    return jnp.concatenate([high, (both - high.astype(jnp.float32)).astype(dtype)], axis=1)
