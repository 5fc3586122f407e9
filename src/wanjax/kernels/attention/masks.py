# SPDX-License-Identifier: Apache-2.0
"""Masks of keys, and softmax sums that stay finite for a query that sees no key."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

Window = tuple[int | None, int | None]


def in_window(queries: Int[Array, " L"], keys: Int[Array, " S"], window: Window) -> Bool[Array, "L S"]:
    """Mark keys from `left` before a query's own position to `right` after it; None is no bound."""
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
    """The number of keys that take part, and arrays with these keys first: softmax does not depend on the order."""
    order = jnp.argsort(~key_mask, axis=1, stable=True)[:, :, None, None]
    return key_mask.sum(axis=1, dtype=jnp.int32), [jnp.take_along_axis(x, order, axis=1) for x in arrays]


def first_keys(counts: Int[Array, " B"], keys: int) -> Bool[Array, "B S"]:
    """Mark the first keys, a number of them for each example."""
    return jnp.arange(keys)[None, :] < counts[:, None]


def finite_max(maximum: Float[Array, "..."]) -> Float[Array, "..."]:
    """A row's maximum, or 0 for the -inf of a row with no live key: logits minus it are never NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def divide_live(total: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return total / weight, or 0 for a row with no live key, whose weight is 0."""
    return total / jnp.where(weight == 0, 1.0, weight)


def log_sum_exp(top: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return top + log(weight) for weight = Σ exp(logits - top), or -inf for a row with no live key."""
    return top + jnp.log(jnp.where(weight == 0, 1.0, weight))
