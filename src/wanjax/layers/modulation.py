# SPDX-License-Identifier: Apache-2.0
"""Adaptive layer norm (Peebles and Xie, DiT, 2023): shift, scale and gate are computed from the timestep, in float32.

Usually all tokens share one modulation. If there are two modulations, the mask `second_mask` [L] marks the tokens that
use the second modulation, such as clean tokens at timestep 0, or text tokens. The results for both modulations are
computed, and one of them is selected for each token. So no array has a shift, scale and gate for every token.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

SecondMask = Bool[Array, " L"] | None


class Modulation(NamedTuple):
    """The modulation of a sub-layer, in float32. T is 1, or 2 for two modulations."""

    shift: Float32[Array, "B T E"]
    scale: Float32[Array, "B T E"]
    gate: Float32[Array, "B T E"]


def split_modulation(mod: Float32[Array, "B T 6 E"]) -> tuple[Modulation, Modulation]:
    """Split the modulation of a block into the modulation of its self-attention and the modulation of its MLP."""
    rows = [mod[:, :, row] for row in range(6)]
    return Modulation(*rows[:3]), Modulation(*rows[3:])


@jax.named_scope("modulation")
def modulate(
    x: Float32[Array, "B L E"],
    shift: Float32[Array, "B T E"],
    scale: Float32[Array, "B T E"],
    second_mask: SecondMask = None,
) -> Float32[Array, "B L E"]:
    """Return `x (1 + scale) + shift` in float32, the dtype of norms."""
    return _select_by_token(lambda shift, scale: x * (1.0 + scale) + shift, second_mask, shift, scale)


@jax.named_scope("modulation")
def gated_add(
    x: Float[Array, "B L E"], y: Float[Array, "B L E"], gate: Float32[Array, "B _T E"], second_mask: SecondMask = None
) -> Float[Array, "B L E"]:
    """Return the residual sum `x + gate · y`. The sum is computed in float32 and rounded once to x's dtype."""
    x32, y32 = x.astype(jnp.float32), y.astype(jnp.float32)
    return _select_by_token(lambda gate: x32 + gate * y32, second_mask, gate).astype(x.dtype)


def _select_by_token(
    apply: Callable[..., Array], second_mask: SecondMask, *values: Float32[Array, "B T E"]
) -> Float32[Array, "B _L E"]:
    """Apply a function of shift, scale or gate. If there are two modulations, select the result for each token."""
    if second_mask is None:
        return apply(*values)
    first_result, second_result = (apply(*(value[:, t : t + 1] for value in values)) for t in (0, 1))
    return jnp.where(second_mask[None, :, None], second_result, first_result)
