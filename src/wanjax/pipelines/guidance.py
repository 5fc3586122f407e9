# SPDX-License-Identifier: Apache-2.0
"""The grouping of a guided step's two prompts: one after the other, or as one batch."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from wanjax.sharding import Partitioner


def grouping(guided: bool, batched: bool, partitioner: Partitioner | None) -> tuple[int, int]:
    """Returns the number of forwards in a step, and the number of prompts in each.

    The prompts are one batch if `batched`, or if the mesh's axis `dp` splits them.
    """
    prompts = 2 if guided else 1
    together = batched or (partitioner is not None and partitioner.size("dp") > 1)
    return (1, prompts) if together else (prompts, 1)


def group(prompts: Sequence[Any], grouping: tuple[int, int]) -> tuple[Any, ...]:
    """Joins trees of arrays [1 ...], one for each prompt, into one tree for each forward."""
    forwards, batch = grouping
    if batch == 1:
        return tuple(prompts[:forwards])
    return (jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *prompts[:batch]),)
