# SPDX-License-Identifier: Apache-2.0
"""Attention by its formula, with the full score matrix in float32. This reference specifies what all other
implementations compute."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.attention.masks import Window, divide_or_zero, finite_max, in_window, log_sum_exp
from wanjax.kernels.attention.radial import Radial

KV_BLOCK = 512  # keys in one partial sum


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    key_mask: Bool[Array, "B S"] | None,
    window: Window | Radial | None,
    scale: float,
    bias: Float[Array, "..."] | None,
    config: None,
    return_lse: bool = False,
) -> Float[Array, "B L N D"] | tuple[Float[Array, "B L N D"], Float32[Array, "B L N"]]:
    """Return softmax(scale · q kᵀ + bias) v over the valid keys. A query without valid keys gives zeros.

    The computation is in float32, and the result is rounded once to the operands' dtype. With `return_lse`, also return
    log Σ exp of each query's logits, which is -inf for a query without valid keys.
    """
    heads_per_kv = q.shape[2] // k.shape[2]
    dtype = q.dtype
    q, k, v = (
        x.astype(jnp.float32) for x in (q, jnp.repeat(k, heads_per_kv, axis=2), jnp.repeat(v, heads_per_kv, axis=2))
    )
    logits = scale * jnp.einsum("BLND,BSND->BNLS", q, k, precision="highest")
    if bias is not None:
        logits += bias
    if key_mask is not None:
        logits = jnp.where(key_mask[:, None, None, :], logits, -jnp.inf)
    if window is not None:
        length, num_keys = q.shape[1], k.shape[1]
        is_radial = isinstance(window, Radial)
        visible = (
            window.token_mask(length, num_keys)
            if is_radial
            else in_window(jnp.arange(length), jnp.arange(num_keys), window)
        )
        logits = jnp.where(visible[None, None], logits, -jnp.inf)
    row_max = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - finite_max(row_max))
    weight_sum = weights.sum(axis=-1, keepdims=True)
    out = _weighted_sum(divide_or_zero(weights, weight_sum), v).astype(dtype)
    return (out, jnp.moveaxis(log_sum_exp(row_max, weight_sum)[..., 0], 1, 2)) if return_lse else out


def _weighted_sum(weights: Float32[Array, "B N L S"], v: Float32[Array, "B S N D"]) -> Float32[Array, "B L N D"]:
    """Sum the weighted values in blocks of keys. A single float32 sum over thousands of keys would lose a digit."""
    blocks = v.shape[1] // KV_BLOCK
    in_blocks = blocks * KV_BLOCK
    out = _weighted_sum_of_block(weights[..., in_blocks:], v[:, in_blocks:])
    if blocks:
        weight_blocks = jnp.moveaxis(weights[..., :in_blocks].reshape(*weights.shape[:3], blocks, KV_BLOCK), 3, 0)
        value_blocks = jnp.moveaxis(v[:, :in_blocks].reshape(len(v), blocks, KV_BLOCK, *v.shape[2:]), 1, 0)
        out += jax.vmap(_weighted_sum_of_block)(weight_blocks, value_blocks).sum(axis=0)
    return out


def _weighted_sum_of_block(
    weights: Float32[Array, "B N L S"], v: Float32[Array, "B S N D"]
) -> Float32[Array, "B L N D"]:
    return jnp.einsum("BNLS,BSND->BLND", weights, v, precision="highest")


def unsupported(q, k, v, *, key_mask, window, scale, bias, config, return_lse) -> str | None:
    """Return the reason why this call is not supported, or None."""
    if config is not None:
        return f"reference has no configuration: {type(config).__name__} belongs to another implementation"
    return None
