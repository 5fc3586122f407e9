# SPDX-License-Identifier: Apache-2.0
"""The grouping of a step's prompts: the negative ones after the others, or in one batch with them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wanjax.sharding import Partitioner


def grouping(guided: bool, batched: bool, partitioner: Partitioner | None) -> tuple[int, int]:
    """Returns the number of forwards in a step, and for how many prompts of a video each is.

    A video's two prompts are in one batch if `batched`, or if the mesh's axis `dp` splits them.
    """
    prompts = 2 if guided else 1
    together = batched or (partitioner is not None and partitioner.size("dp") > 1)
    return (1, prompts) if together else (prompts, 1)


def group(prompts: Sequence[Any], grouping: tuple[int, int]) -> tuple[Any, ...]:
    """Joins trees of arrays [B ...], those of the prompts and of the negative ones, into one tree for each forward."""
    forwards, batch = grouping
    if batch == 1:
        return tuple(prompts[:forwards])
    return (jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *prompts[:batch]),)
