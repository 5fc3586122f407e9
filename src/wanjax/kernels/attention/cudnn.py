# SPDX-License-Identifier: Apache-2.0
"""Attention by NVIDIA's cuDNN, through `jax.nn.dot_product_attention`, on GPUs from Ampere on.

A mask of cuDNN's is a whole score matrix. Attention does not depend on the order of keys, so the keys that take part
are moved to the front instead, and cuDNN receives their number.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from wanjax.kernels.attention.masks import Window, live_first
from wanjax.kernels.target import target

LARGEST_HEAD = 128


def unsupported(q, k, v, *, key_mask, window, scale, bias, config, return_lse) -> str | None:
    """The reason why this call is not supported, or None."""
    device = target(q)
    if device.platform != "gpu" or "NVIDIA" not in device.kind:
        return f"cudnn runs on NVIDIA's cards, and this is for {device.kind}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cudnn takes bfloat16 and float16, not {q.dtype}"
    if q.shape[3] % 8 or q.shape[3] > LARGEST_HEAD:
        return f"cudnn takes heads of a multiple of 8 up to {LARGEST_HEAD}, not {q.shape[3]}"
    if window is not None:
        return f"cudnn has no window to both sides such as {window}"
    if bias is not None:
        return "cudnn would round a bias to the operands' dtype"
    if return_lse:
        return "cudnn gives its log-sum-exp in the operands' dtype, which merges parts too coarsely"
    if config is not None:
        return f"cudnn has nothing to configure: {type(config).__name__} belongs to another implementation"
    return None


def attention(
    q: Float[Array, "B L N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    key_mask: Bool[Array, "B S"] | None,
    window: Window | None,
    scale: float,
    bias: Float32[Array, "..."] | None,
    config: None,
    return_lse: bool = False,
) -> Float[Array, "B L N D"]:
    """Compute what the reference does."""
    count = None
    if key_mask is not None:
        count, (k, v) = live_first(key_mask, k, v)
    with jax.numpy_dtype_promotion("standard"):  # JAX itself mixes dtypes here
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            key_value_seq_lengths=None if count is None else jnp.maximum(count, 1),
            implementation="cudnn",
        )
    return out if count is None else jnp.where(count[:, None, None, None] > 0, out, jnp.zeros_like(out))
