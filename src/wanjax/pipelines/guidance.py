# SPDX-License-Identifier: Apache-2.0
"""Guidance: how a step's prompts are grouped, and scales that differ from step to step."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from wanjax.sharding import Partitioner


class Groups(NamedTuple):
    """The number of forwards in a step, and for how many prompts of a video each is."""

    forwards: int
    batch: int


def grouping(guided: bool, batched: bool, partitioner: Partitioner) -> Groups:
    """Returns how a step's prompts are grouped.

    A video's two prompts are in one batch if `batched`, or if the mesh's axis `dp` splits them.
    """
    prompts = 2 if guided else 1
    return Groups(1, prompts) if batched or partitioner.size("dp") > 1 else Groups(prompts, 1)


def group(prompts: Sequence[Any], groups: Groups) -> tuple[Any, ...]:
    """Joins trees of arrays [B ...], those of the prompts and of the negative ones, into one tree for each forward."""
    if groups.batch == 1:
        return tuple(prompts[: groups.forwards])
    return (jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *prompts[: groups.batch]),)


def dynamic_scales(scale: float, timesteps: Float[np.ndarray, " steps"], steps: int) -> list[float]:
    """Returns the guidance scale of each step along a cosine, from 1 to `1 + scale`.

    Follows diffusers' `use_dynamic_cfg` (pipelines/cogvideo/pipeline_cogvideox.py), which compares timesteps, up to a
    thousand, with the number of steps: before the last `2 · steps` timesteps the scale swings between its bounds.
    """
    ways = ((steps - float(t)) / steps for t in timesteps)
    return [1 + scale * (1 - math.cos(math.pi * way**5)) / 2 for way in ways]
