# SPDX-License-Identifier: Apache-2.0
"""Which keys a query may see, and the sum over keys that stays finite when it may see none."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

Window = tuple[int | None, int | None]


def in_window(queries: Int[Array, " L"], keys: Int[Array, " S"], window: Window) -> Bool[Array, "L S"]:
    """Keys from `left` before a query's own position to `right` after it; None on a side is no bound there."""
    left, right = window
    ahead = keys[None, :] - queries[:, None]
    seen = jnp.ones(ahead.shape, bool)
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    return seen


def live_first(
    key_mask: Bool[Array, "B S"], *arrays: Float[Array, "B S K D"]
) -> tuple[Int32[Array, " B"], list[Float[Array, "B S K D"]]]:
    """How many keys take part, and arrays of keys with those before the others: softmax does not know their order."""
    order = jnp.argsort(~key_mask, axis=1, stable=True)[:, :, None, None]
    return key_mask.sum(axis=1, dtype=jnp.int32), [jnp.take_along_axis(x, order, axis=1) for x in arrays]


def finite_max(maximum: Float[Array, "..."]) -> Float[Array, "..."]:
    """A row's maximum, 0 for the -inf of a row with no live key, so that logits less their maximum are never NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def divide_live(total: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """total / weight, 0 where a row with no live key has no weight."""
    return total / jnp.where(weight == 0, 1.0, weight)


def log_sum_exp(top: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """top + log(weight), weight being the sum of exp(logits - top); -inf for a row with no live key."""
    return top + jnp.log(jnp.where(weight == 0, 1.0, weight))
