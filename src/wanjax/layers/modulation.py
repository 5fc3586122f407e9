# SPDX-License-Identifier: Apache-2.0
"""Adaptive layer norm: shift, scale and gate from the timestep (Peebles and Xie, DiT, 2023), in float32."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Modulation(NamedTuple):
    """What the timestep does to one sub-layer: each [B 1 E], float32."""

    shift: Float[Array, "B 1 E"]
    scale: Float[Array, "B 1 E"]
    gate: Float[Array, "B 1 E"]


def split_modulation(mod: Float[Array, "B 6 E"]) -> tuple[Modulation, Modulation]:
    """The modulations of a block's self-attention and of its MLP."""
    parts = jnp.split(mod, 6, axis=1)
    return Modulation(*parts[:3]), Modulation(*parts[3:])


def modulate(x: Float[Array, "B L E"], shift: Float[Array, "B 1 E"], scale: Float[Array, "B 1 E"]) -> Array:
    """`x (1 + scale) + shift`, in x's precision: norms hand over float32."""
    return x * (1.0 + scale) + shift


def gated_add(x: Float[Array, "B L E"], y: Float[Array, "B L E"], gate: Float[Array, "B 1 E"]) -> Array:
    """The residual `x + gate · y`, summed in float32 and rounded once."""
    return (x.astype(jnp.float32) + gate * y.astype(jnp.float32)).astype(x.dtype)
