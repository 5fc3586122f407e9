# SPDX-License-Identifier: Apache-2.0
"""Masks of keys, and softmax sums that stay finite for a query without a visible key."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

Window = tuple[int | None, int | None]


def in_window(queries: Int[Array, " L"], keys: Int[Array, " S"], window: Window) -> Bool[Array, "L S"]:
    """Return a mask of the keys in the window (left, right) around each query's position. None means no bound."""
    left, right = window
    distance = keys[None, :] - queries[:, None]
    visible = jnp.ones(distance.shape, bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def valid_keys_first(
    key_mask: Bool[Array, "B S"], *arrays: Float[Array, "B S K D"]
) -> tuple[Int32[Array, " B"], list[Float[Array, "B S K D"]]]:
    """Return the number of valid keys, and the arrays with the valid keys first. Softmax does not depend on the order
    of the keys."""
    order = jnp.argsort(~key_mask, axis=1, stable=True)[:, :, None, None]
    return key_mask.sum(axis=1, dtype=jnp.int32), [jnp.take_along_axis(x, order, axis=1) for x in arrays]


def length_mask(lengths: Int[Array, " B"], num_keys: int) -> Bool[Array, "B S"]:
    """Return a mask of the first `lengths` keys of each example."""
    return jnp.arange(num_keys)[None, :] < lengths[:, None]


def finite_max(row_max: Float[Array, "..."]) -> Float[Array, "..."]:
    """Replace a maximum of -inf, which a row without a valid key has, by 0. Logits minus the maximum are then never
    NaN."""
    return jnp.where(row_max == -jnp.inf, 0.0, row_max)


def divide_or_zero(value_sum: Float[Array, "..."], weight_sum: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return value_sum / weight_sum. A row without a valid key has a weight sum of 0, and gives 0."""
    return value_sum / jnp.where(weight_sum == 0, 1.0, weight_sum)


def log_sum_exp(row_max: Float[Array, "..."], weight_sum: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return row_max + log(weight_sum), where weight_sum is Σ exp(logits - row_max). A row without a valid key gives
    -inf."""
    return row_max + jnp.log(jnp.where(weight_sum == 0, 1.0, weight_sum))
