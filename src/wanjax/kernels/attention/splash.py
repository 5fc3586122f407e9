# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradient on TPUs by JAX's own splash kernel. By default, it is used if `flash_tpu` failed its
trials."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from wanjax.kernels.alignment import LANES, round_up
from wanjax.kernels.attention.implementation import INTERPRETER_ADVICE
from wanjax.kernels.attention.masks import length_mask
from wanjax.kernels.target import target
from wanjax.sharding import pad_to

HEAD_DIMS = (64, 128)
BLOCK_Q, BLOCK_KV, BLOCK_KV_COMPUTE = 1024, 2048, 512  # blocks of this size fit in the VMEM of every TPU from v5e on


@dataclass(frozen=True)
class Config:
    """Options of the kernel. If `interpret` is True, the kernel runs without a TPU, slowly, for tests."""

    interpret: bool = False


def unsupported(q, k, v, *, key_mask, window, scale, bias, config, return_lse) -> str | None:
    """Return the reason why this call is not supported, or None."""
    if config is not None and not isinstance(config, Config):
        return f"splash has no tiles: {type(config).__name__} belongs to another implementation"
    if target(q).platform != "tpu" and not (config and config.interpret):
        return INTERPRETER_ADVICE.format("splash", "splash")
    if q.shape[3] not in HEAD_DIMS or q.dtype.name != "bfloat16":
        return f"splash does not support heads of {q.shape[3]} in {q.dtype.name}: it supports 64 and 128 in bfloat16"
    if window is not None or bias is not None:
        return "splash takes no window, radial mask or bias here: it supports a key mask"
    return "splash returns no differentiable log-sum-exp" if return_lse else None


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    key_mask: Bool[Array, "B S"] | None,
    window: None,
    scale: float,
    bias: None,
    config: Config | None,
    return_lse: bool = False,
    kv_length: int | Int32[Array, " B"] | None = None,
) -> Float[Array, "B L N D"]:
    """Compute the same as the reference. Splash's own kernels compute the gradient."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel

    (batch, num_queries, heads, _), num_keys = q.shape, k.shape[1]
    heads_per_kv = heads // k.shape[2]
    block_q, block_kv_compute = (
        min(BLOCK_Q, round_up(num_queries, LANES)),
        min(BLOCK_KV_COMPUTE, round_up(num_keys, LANES)),
    )
    block_kv = min(BLOCK_KV, round_up(num_keys, block_kv_compute))
    padded_lengths = round_up(num_queries, block_q), round_up(num_keys, block_kv)
    kernel = _kernel(
        heads, padded_lengths, (block_q, block_kv, block_kv_compute), interpret=config is not None and config.interpret
    )
    valid = jnp.ones((batch, num_keys), bool) if key_mask is None else key_mask
    if kv_length is not None:
        valid &= length_mask(jnp.broadcast_to(jnp.asarray(kv_length), (batch,)), num_keys)

    def attend(q: Array, k: Array, v: Array, valid: Array) -> Array:
        q = (q.astype(jnp.float32) * scale).astype(q.dtype)
        k, v = (jnp.repeat(x, heads_per_kv, axis=1) for x in (k, v))
        kv_segments = jnp.where(pad_to(valid, 0, block_kv), 0, 1)  # a query sees only keys of its own segment
        segments = splash_kernel.SegmentIds(q=jnp.zeros(padded_lengths[0], jnp.int32), kv=kv_segments)
        padded = (pad_to(jnp.moveaxis(x, 1, 0), 1, size) for x, size in ((q, block_q), (k, block_kv), (v, block_kv)))
        out = jnp.moveaxis(kernel(*padded, segment_ids=segments)[:, :num_queries], 0, 1)
        return jnp.where(valid.any(), out, jnp.zeros_like(out))

    return jnp.stack([attend(*example) for example in zip(q, k, v, valid, strict=True)])


def _kernel(heads: int, padded_lengths: tuple[int, int], tiles: tuple[int, int, int], *, interpret: bool) -> Any:
    """Return the kernel for the heads of one example, [N L D]. L must be a multiple of the block size."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    block_q, block_kv, block_kv_compute = tiles
    block_sizes = splash_attention_kernel.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv_compute,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv_compute,
        use_fused_bwd_kernel=True,
    )
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.FullMask(padded_lengths)] * heads)
    options = {"head_shards": 1, "q_seq_shards": 1, "interpret": interpret}
    with jax.ensure_compile_time_eval():
        return splash_attention_kernel.make_splash_mha(mask, block_sizes=block_sizes, **options)
