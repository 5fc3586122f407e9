# SPDX-License-Identifier: Apache-2.0
"""Attention as the formula says it, with the whole score matrix in float32: the specification of every other kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.attention.masks import Window, divide_live, finite_max, in_window, log_sum_exp


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    key_mask: Bool[Array, "B S"] | None,
    window: Window | None,
    scale: float,
    bias: Float[Array, "..."] | None,
    config: None,
    return_lse: bool = False,
) -> Float[Array, "B L N D"] | tuple[Float[Array, "B L N D"], Float32[Array, "B L N"]]:
    """softmax(scale · q kᵀ + bias) v over the keys that take part, in float32; zeros for a query that has none.

    With `return_lse` also log Σ exp of each query's logits, -inf for a query that has no key.
    """
    group = q.shape[2] // k.shape[2]
    dtype = q.dtype
    q, k, v = (x.astype(jnp.float32) for x in (q, jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)))
    logits = scale * jnp.einsum("BLND,BSND->BNLS", q, k, precision="highest")
    if bias is not None:
        logits += bias
    if key_mask is not None:
        logits = jnp.where(key_mask[:, None, None, :], logits, -jnp.inf)
    if window is not None:
        seen = in_window(jnp.arange(q.shape[1]), jnp.arange(k.shape[1]), window)
        logits = jnp.where(seen[None, None], logits, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - finite_max(top))
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum("BNLS,BSND->BLND", divide_live(weights, total), v, precision="highest").astype(dtype)
    return (out, jnp.moveaxis(log_sum_exp(top, total)[..., 0], 1, 2)) if return_lse else out


def unsupported(q, k, v, *, key_mask, window, scale, bias, config, return_lse) -> str | None:
    """Why this cannot be done here, or None."""
    if config is not None:
        return f"reference has nothing to configure: {type(config).__name__} belongs to another implementation"
    return None
