# SPDX-License-Identifier: Apache-2.0
"""Many videos from one load: a video for each prompt and seed. Each prompt is encoded once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wanjax.pipelines.settings import Settings
from wanjax.sharding import Partitioner


class Order(NamedTuple):
    """A video that is to be made: its settings, and the record that its metadata will hold."""

    settings: Settings
    record: Mapping[str, Any]


def together(partitioner: Partitioner | None, guided: bool) -> int:
    """Returns the number of videos to denoise at once: as many as the mesh's axis `dp` splits.

    Elsewhere one after another takes less memory and, but for small models, no longer.
    """
    dp = 1 if partitioner is None else partitioner.size("dp")
    return max(1, dp // 2) if guided else dp


def batches(orders: Sequence[Order], size: int) -> Iterator[tuple[Sequence[Order], int]]:
    """Yields orders in batches of one size, each with the number of its own orders; the rest repeat the last one."""
    for start in range(0, len(orders), size):
        own = orders[start : start + size]
        yield [*own, *[own[-1]] * (size - len(own))], len(own)


def joined(encoded: Sequence[Any]) -> Any:
    """Joins outputs of `encode_prompts` along their first axis."""
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *encoded)
