# SPDX-License-Identifier: Apache-2.0
"""Attention on TPUs with q kᵀ in int8, selected by `flash_tpu:qk=int8`. It is faster than flash_tpu, but not exact.

First, the mean of all keys is subtracted from each key, which does not change the weights (Zhang et al., SageAttention,
2024). Then queries and keys are quantized to int8. The largest number of a query determines the query's scale, and the
largest number of all keys of a head the scale of these keys. Weights are bfloat16, and values are not quantized.
docs/attention.md has the error and the price.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float32, Int8

from wanjax.kernels.admitted import is_admitted
from wanjax.kernels.attention.blocks import from_rows, mean_logits, to_rows
from wanjax.kernels.attention.flash_int8_kernel import INT8_MAX, MIN_SCALE, call
from wanjax.kernels.attention.flash_kernel import KernelSizes
from wanjax.kernels.attention.flash_tiles import INT8_REGISTER_ROWS, RUNNING_MAX_STEP_KV, UNBOUNDED_SIDE, Config
from wanjax.kernels.target import has_fast_int8, vmem_bytes

TRIAL_KERNEL = "flash_tpu_int8"  # the name of the kernel in `admitted.is_admitted`
ADVICE = "use --attention flash_tpu"
ERROR_TEXT = "relative errors of 0.015 and 0.032 where logits have a standard deviation of 1 and 3"
RUNNING_MAX_STEPS = range(RUNNING_MAX_STEP_KV, 0, -INT8_REGISTER_ROWS)  # keys of a step of the running-max path
HEAD_DIM = 128  # half of the matrix unit's depth; the digits of the offset fill the other half


def unsupported(q: Any, *, key_mask: Any, window: Any, interpret: bool) -> str | None:
    """Return the reason why q kᵀ in int8 is not supported for these operands on this chip, or None. A shape may replace
    the array q."""
    if q.shape[3] != HEAD_DIM or q.dtype != jnp.bfloat16:
        return f"qk=int8 takes heads of {HEAD_DIM} in bfloat16, not of {q.shape[3]} in {q.dtype.name}: {ADVICE}"
    if key_mask is not None or window is not None:
        return f"qk=int8 takes no mask and no window: {ADVICE}"
    if interpret or vmem_bytes() is None:
        return None
    if not has_fast_int8():
        return f"qk=int8 is no faster on this TPU: {ADVICE}"
    return None if is_admitted(TRIAL_KERNEL) else f"{TRIAL_KERNEL} was tried on this chip and failed: {ADVICE}"


def attention(
    q: BFloat16[Array, "B L N D"],
    k: BFloat16[Array, "B S K D"],
    v: BFloat16[Array, "B S K D"],
    *,
    scale: float,
    tiles: Config,
    kv_length: int,
) -> tuple[BFloat16[Array, "B L N D"], Float32[Array, "B L N"]]:
    """Return the attention to the first `kv_length` keys, and its log-sum-exps."""
    (batch, num_queries, heads, head_dim), kv_heads = q.shape, k.shape[2]
    sizes = KernelSizes(
        num_queries=num_queries,
        num_keys=kv_length,
        heads=heads,
        block_q=tiles.block_q,
        block_kv=tiles.block_kv,
        block_kv_compute=tiles.block_kv_compute,
        step_kv=next(size for size in RUNNING_MAX_STEPS if tiles.block_kv_compute % size == 0),
        q_per_list=tiles.block_q,
        ragged=False,
        window=(UNBOUNDED_SIDE, UNBOUNDED_SIDE),
        q_scale=scale * math.log2(math.e),
    )
    int8_k, k_scale, key_mean = quantize_keys(to_rows(k), kv_heads, kv_length)
    operands = k_scale.reshape(-1), to_rows(q), int8_k, to_rows(v)
    out, lse = call(*operands, sizes=sizes, kv_heads=kv_heads, head_dim=head_dim, config=tiles)
    lse = jnp.moveaxis(lse.reshape(batch, heads, num_queries), 1, 2)
    return from_rows(out, heads, head_dim), lse + mean_logits(q, key_mean.reshape(batch, kv_heads, head_dim), scale)


def quantize_keys(
    k: BFloat16[Array, "B S E"], heads: int, kv_length: int
) -> tuple[Int8[Array, "B S E"], Float32[Array, "B K"], Float32[Array, "B E"]]:
    """Subtract the mean of the first `kv_length` keys from all keys, and quantize the keys to int8. Also return the
    scale of each head and the mean of each channel."""
    k32 = k.astype(jnp.float32)  # heads stay side by side, because a TPU would pad an axis of heads
    key_sum, key_max, key_min = _sum_and_range(k32[:, :kv_length])
    mean = key_sum / kv_length
    absmax = jnp.maximum(key_max - mean, mean - key_min).reshape(len(k), heads, -1).max(axis=2)
    scale = jnp.maximum(absmax / INT8_MAX, MIN_SCALE)
    inverse_scale = jnp.repeat(1.0 / scale, k.shape[2] // heads, axis=1)
    int8_keys = jnp.round((k32 - mean[:, None]) * inverse_scale[:, None]).astype(jnp.int32).astype(jnp.int8)
    return int8_keys, scale, mean


def _sum_and_range(x: Float32[Array, "B S E"]) -> tuple[Float32[Array, "B E"], ...]:
    """Return the sum, the maximum and the minimum of each channel, computed in one pass."""

    def combine(a: tuple, b: tuple) -> tuple:
        return a[0] + b[0], jnp.maximum(a[1], b[1]), jnp.minimum(a[2], b[2])

    initial = tuple(np.float32(value) for value in (0, -np.inf, np.inf))
    return tuple(jax.lax.reduce((x, x, x), initial, combine, (1,)))
