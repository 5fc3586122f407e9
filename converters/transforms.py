# SPDX-License-Identifier: Apache-2.0
"""Rearrange a tensor's values from a checkpoint's order to wanjax's order, and exactly back."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """An exact rearrangement of a tensor's values: `forward` from the checkpoint's order to wanjax's, and `inverse`."""

    name: str
    forward: Callable
    inverse: Callable

    def __rshift__(self, next_transform: "Transform") -> "Transform":
        """Return a transform that applies this one and then `after`."""
        return Transform(
            f"{self.name} >> {next_transform.name}",
            lambda x: next_transform.forward(self.forward(x)),
            lambda x: self.inverse(next_transform.inverse(x)),
        )

    def shape(self, source: Shape) -> Shape | None:
        """Return the shape after the transform; None if the transform does not apply to the source shape."""
        return _shape_through(self.forward, source)

    def source_shape(self, target: Shape) -> Shape | None:
        """Return the source shape that the transform turns into `target`; None if no shape does."""
        return _shape_through(self.inverse, target)


@lru_cache(maxsize=4096)
def _shape_through(rearrange: Callable, shape: Shape) -> Shape | None:
    try:
        return rearrange(np.broadcast_to(np.int8(0), shape)).shape  # all strides are 0, so this takes no memory
    except (ValueError, IndexError):
        return None


def _swap_inner_axes(x, groups: int, axis_sizes: tuple[int, int]):
    """Split the rows into axes [groups, a, b] with (a, b) = `axis_sizes`, one of which is -1, and swap a and b."""
    split_rows = x.reshape(groups, *axis_sizes, *x.shape[1:])
    return split_rows.swapaxes(1, 2).reshape(x.shape)


def rope_halves(heads: int) -> Transform:
    """Move each head's channel pairs (0, 1), (2, 3), … to (0, D/2), (1, D/2 + 1), …

    Applies to a weight, bias or norm [N*D, ...] of q or k.
    """
    return Transform(
        f"rope_halves({heads})",
        lambda x: _swap_inner_axes(x, heads, (-1, 2)),
        lambda x: _swap_inner_axes(x, heads, (2, -1)),
    )


def squeeze(*axes: int) -> Transform:
    """Drop axes of size 1."""
    return Transform(
        f"squeeze{axes}",
        lambda x: x.squeeze(axes),
        lambda x: np.expand_dims(x, axes),
    )


def patches(patch: tuple[int, ...]) -> Transform:
    """Reshape the weight [E, C, *patch] of a patch-embedding convolution to a matrix [prod(patch) * C, E].

    The rows have the order of wanjax's flattened patches: offsets in the patch first, channel last.
    """
    rank = len(patch)

    def forward(x):
        if x.shape[2:] != patch:
            raise ValueError(f"{x.shape[2:]} is not the patch {patch}")
        return x.transpose(*range(2, 2 + rank), 1, 0).reshape(-1, x.shape[0])

    def inverse(x):
        width = x.shape[1]
        return x.reshape(*patch, -1, width).transpose(rank + 1, rank, *range(rank))

    return Transform(f"patches{patch}", forward, inverse)


def channels_last(patch_volume: int) -> Transform:
    """Reorder the rows [C * P, ...] of flattened patches of P positions to [P * C, ...]."""
    return Transform(
        f"channels_last({patch_volume})",
        lambda x: _swap_inner_axes(x, 1, (-1, patch_volume)),
        lambda x: _swap_inner_axes(x, 1, (patch_volume, -1)),
    )


IDENTITY = Transform("identity", lambda x: x, lambda x: x)
TRANSPOSE = Transform("transpose", lambda x: x.transpose(1, 0), lambda x: x.transpose(1, 0))
CONV = Transform(
    "conv",
    lambda x: x.transpose(*range(2, x.ndim), 1, 0),
    lambda x: x.transpose(x.ndim - 1, x.ndim - 2, *range(x.ndim - 2)),
)
"""A convolution's weight [O, I, *kernel] -> [*kernel, I, O]."""
