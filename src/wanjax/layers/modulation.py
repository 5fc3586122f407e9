# SPDX-License-Identifier: Apache-2.0
"""Adaptive layer norm: shift, scale and gate from the timestep (Peebles and Xie, DiT, 2023), in float32.

All tokens are at one timestep, or at two: then a mask `clean` [L] marks those at the second. Both answers are computed
and one is kept for each token, so that no array of shifts, scales and gates of all tokens comes to be.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Clean = Bool[Array, "L"] | None


class Modulation(NamedTuple):
    """What the timesteps, one or two, do to one sub-layer: each [B _T E], float32."""

    shift: Float[Array, "B _T E"]
    scale: Float[Array, "B _T E"]
    gate: Float[Array, "B _T E"]


def split_modulation(mod: Float[Array, "B _T 6 E"]) -> tuple[Modulation, Modulation]:
    """The modulations of a block's self-attention and of its MLP."""
    parts = [mod[:, :, row] for row in range(6)]
    return Modulation(*parts[:3]), Modulation(*parts[3:])


@jax.named_scope("modulation")
def modulate(
    x: Float[Array, "B L E"], shift: Float[Array, "B _T E"], scale: Float[Array, "B _T E"], clean: Clean = None
) -> Array:
    """`x (1 + scale) + shift`, in x's precision: norms hand over float32."""
    return _by_token(lambda shift, scale: x * (1.0 + scale) + shift, clean, shift, scale)


@jax.named_scope("modulation")
def gated_add(x: Float[Array, "B L E"], y: Float[Array, "B L E"], gate: Float[Array, "B _T E"], clean: Clean = None):
    """The residual `x + gate · y`, summed in float32 and rounded once."""
    x32, y32 = x.astype(jnp.float32), y.astype(jnp.float32)
    return _by_token(lambda gate: x32 + gate * y32, clean, gate).astype(x.dtype)


def _by_token(apply: Callable[..., Array], clean: Clean, *values: Float[Array, "B _T E"]) -> Float[Array, "B L E"]:
    """What `apply` makes of the values at each token's timestep."""
    if clean is None:
        return apply(*values)
    noisy, still = (apply(*(value[:, t : t + 1] for value in values)) for t in (0, 1))
    return jnp.where(clean[None, :, None], still, noisy)
