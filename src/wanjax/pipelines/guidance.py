# SPDX-License-Identifier: Apache-2.0
"""Classifier-free guidance (Ho and Salimans, 2022)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.named_scope("guidance")
def guide(conditional: Float[Array, "..."], unconditional: Float[Array, "..."], scale: Float[Array, ""]) -> Array:
    """`unconditional + scale · (conditional − unconditional)`, in float32: the difference is small beside its terms."""
    conditional, unconditional = conditional.astype(jnp.float32), unconditional.astype(jnp.float32)
    return unconditional + scale * (conditional - unconditional)
