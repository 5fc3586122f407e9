# SPDX-License-Identifier: Apache-2.0
"""Videos to sequences of patches and back."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from wanjax.sharding import spread


def patchify(x: Float[Array, "B T H W C"], patch: tuple[int, int, int]) -> Float[Array, "B L E"]:
    """Tokens in the order T, H, W; in a token its cells in the same order, the channel fastest.

    Over several devices there are tokens of zeros behind them, so that each device has as many.
    """
    batch, frames, height, width, channels = x.shape
    pt, ph, pw = patch
    x = x.reshape(batch, frames // pt, pt, height // ph, ph, width // pw, pw, channels)
    x = jnp.transpose(x, (0, 1, 3, 5, 2, 4, 6, 7))  # [B T H W pt ph pw C]
    return spread(x.reshape(batch, -1, pt * ph * pw * channels), ("batch", "length", None))


def unpatchify(
    x: Float[Array, "B L E"], grid: tuple[int, int, int], patch: tuple[int, int, int]
) -> Float[Array, "B T H W C"]:
    """The inverse of `patchify` for a `grid` of (frames, height, width) patches."""
    batch = x.shape[0]
    (t, h, w), (pt, ph, pw) = grid, patch
    x = x[:, : t * h * w].reshape(batch, t, h, w, pt, ph, pw, -1)
    x = jnp.transpose(x, (0, 1, 4, 2, 5, 3, 6, 7))
    return x.reshape(batch, t * pt, h * ph, w * pw, -1)
