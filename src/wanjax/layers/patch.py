# SPDX-License-Identifier: Apache-2.0
"""Convert latents to sequences of patches and back, and squares of pixels to channels and back."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from wanjax.errors import WanjaxError, repr_shape
from wanjax.sharding import shard_tokens

Size = tuple[int, int, int]  # frames, height, width


def patch_grid(x: Float[Array, "B T H W C"], patch: Size) -> Size:
    """Return the number of patches along frames, height and width. Raises WanjaxError unless x has five axes."""
    if getattr(x, "ndim", None) != 5:
        raise WanjaxError(f"latents must be [B T H W C], got {repr_shape(x)}: give five axes, with the channels last")
    _, frames, height, width, _ = x.shape
    return frames // patch[0], height // patch[1], width // patch[2]


def patchify(
    x: Float[Array, "B T H W C"], patch: Size, channels: int | None = None, *, length: int | None = None
) -> Float[Array, "B L E"]:
    """Split latents into patches, one per token.

    Tokens are in the order T, H, W. The values of a token are in the order T, H, W, C. On several devices, zero tokens
    are appended, so that every device has the same number of tokens. Raises WanjaxError if x does not have `channels`
    channels, or if its sizes are not multiples of the patch. If `channels` is None, any number of channels is accepted.
    `length` is that of `sharding.shard_tokens`.
    """
    if channels not in (None, x.shape[-1]) or any(size % part for size, part in zip(x.shape[1:4], patch, strict=True)):
        patch_text, expected_channels = "×".join(map(str, patch)), channels or x.shape[-1]
        raise WanjaxError(
            f"{list(x.shape)} is not [B T H W {expected_channels}] in patches of {patch_text}: give "
            f"{expected_channels} channels last, and frames, height, width in multiples of {', '.join(map(str, patch))}"
        )
    batch, frames, height, width, channels = x.shape
    pt, ph, pw = patch
    x = x.reshape(batch, frames // pt, pt, height // ph, ph, width // pw, pw, channels)
    x = jnp.transpose(x, (0, 1, 3, 5, 2, 4, 6, 7))  # [B T H W pt ph pw C]
    return shard_tokens(x.reshape(batch, -1, pt * ph * pw * channels), ("batch", "length", None), length=length)


def unpatchify(x: Float[Array, "B L E"], grid: Size, patch: Size) -> Float[Array, "B T H W C"]:
    """Invert `patchify` for a `grid` of patches."""
    batch = x.shape[0]
    (t, h, w), (pt, ph, pw) = grid, patch
    x = x[:, : t * h * w].reshape(batch, t, h, w, pt, ph, pw, -1)
    x = jnp.transpose(x, (0, 1, 4, 2, 5, 3, 6, 7))
    return x.reshape(batch, t * pt, h * ph, w * pw, -1)


def space_to_depth(x: Float[Array, "B T H W C"], patch: int) -> Float[Array, "B T _H _W _C"]:
    """Move each `patch` × `patch` square of pixels to the channels, in the order colour, column, row."""
    batch, frames, height, width, colours = x.shape
    x = x.reshape(batch, frames, height // patch, patch, width // patch, patch, colours)
    return jnp.transpose(x, (0, 1, 2, 4, 6, 5, 3)).reshape(*x.shape[:3], x.shape[4], -1)


def depth_to_space(x: Float[Array, "B T H W C"], patch: int) -> Float[Array, "B T _H _W _C"]:
    """Invert `space_to_depth`."""
    batch, frames, height, width, channels = x.shape
    x = jnp.transpose(x.reshape(batch, frames, height, width, -1, patch, patch), (0, 1, 2, 6, 3, 5, 4))
    return x.reshape(batch, frames, height * patch, width * patch, channels // patch**2)
