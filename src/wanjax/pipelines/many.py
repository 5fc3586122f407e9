# SPDX-License-Identifier: Apache-2.0
"""Many videos from one load: a video for each prompt and seed. Each prompt is encoded once."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wanjax.errors import WanjaxError
from wanjax.sharding import Partitioner


class Order(NamedTuple):
    """A video that is asked for: its prompt and its seed."""

    prompt: str
    seed: int


def orders(prompts: Sequence[str], seeds: Sequence[int]) -> list[Order]:
    """Returns an order for each prompt and seed, prompt by prompt."""
    return [Order(prompt, seed) for prompt in prompts for seed in seeds]


def check_single(orders: Sequence[Order], name: str) -> None:
    """Raises WanjaxError where something that is made for one video is given for another number of videos."""
    if len(orders) != 1:
        raise WanjaxError(f"one {name} is given for {len(orders)} videos: it makes one video")


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
