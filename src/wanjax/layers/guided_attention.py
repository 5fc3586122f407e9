# SPDX-License-Identifier: Apache-2.0
"""Attention led away from a negative prompt (Chen et al., Normalized Attention Guidance, 2025, arXiv:2505.21179).

It is done with what attention returns, before the projection that follows. The reference is attention_flux_nag.py of
ChenDarYen/Normalized-Attention-Guidance, with the paper's norm, the sum of magnitudes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

Tokens = Float[Array, "B L E"]
TINY = 1e-12


@jax.named_scope("guided_attention")
def apply_nag(y: Tokens, negative: Tokens, parameters: Float32[Array, "3"]) -> Tokens:
    """Returns attention to a prompt, led away from that to a negative prompt by a scale, at most `tau`, for `alpha`.

    A token goes on from the negative one through its own by `scale`, is then cut to `tau` times its own length, and is
    mixed with its own by the share `alpha`. All is in float32.
    """
    scale, tau, alpha = parameters
    positive, opposite = y.astype(jnp.float32), negative.astype(jnp.float32)
    guided = scale * positive - (scale - 1) * opposite
    length, guided_length = (jnp.sum(jnp.abs(z), axis=-1, keepdims=True) for z in (positive, guided))
    guided = guided * jnp.minimum(1.0, tau * length / jnp.maximum(guided_length, TINY))
    return (alpha * guided + (1 - alpha) * positive).astype(y.dtype)
