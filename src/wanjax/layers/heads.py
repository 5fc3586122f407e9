# SPDX-License-Identifier: Apache-2.0
"""Split the channels of tokens into an axis of attention heads, and join heads into channels."""

from jaxtyping import Array, Float


def split_heads(x: Float[Array, "B L E"], heads: int) -> Float[Array, "B L N D"]:
    return x.reshape(*x.shape[:2], heads, -1)


def join_heads(x: Float[Array, "B L N D"]) -> Float[Array, "B L E"]:
    return x.reshape(*x.shape[:2], -1)
