# SPDX-License-Identifier: Apache-2.0
"""Attention guided away from a negative prompt (Chen et al., Normalized Attention Guidance, 2025, arXiv:2505.21179).

The guidance is applied to the result of attention, before the output projection. The reference is attention_flux_nag.py
of ChenDarYen/Normalized-Attention-Guidance, with the paper's norm, L1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

Tokens = Float[Array, "B L E"]
EPSILON = 1e-12


@jax.named_scope("guided_attention")
def apply_nag(y: Tokens, negative: Tokens, parameters: Float32[Array, "3"]) -> Tokens:
    """Apply normalized attention guidance in float32: extrapolate, clip the norm, and blend.

    Args:
        y: The attention to the prompt.
        negative: The attention to the negative prompt.
        parameters: `scale` is the scale of the extrapolation from `negative` to y. `tau` is the largest ratio of the
            result's norm to the norm of y. `alpha` is the weight of the result when it is blended with y.
    """
    scale, tau, alpha = parameters
    positive32, negative32 = y.astype(jnp.float32), negative.astype(jnp.float32)
    guided = scale * positive32 - (scale - 1) * negative32
    norm, guided_norm = (jnp.sum(jnp.abs(z), axis=-1, keepdims=True) for z in (positive32, guided))
    guided = guided * jnp.minimum(1.0, tau * norm / jnp.maximum(guided_norm, EPSILON))
    return (alpha * guided + (1 - alpha) * positive32).astype(y.dtype)
