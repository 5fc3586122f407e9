# SPDX-License-Identifier: Apache-2.0
"""Wan 2.2's two experts: one transformer takes the steps of much noise, another those of little.

The weights of both stay on the devices where they fit beside each other; otherwise the one that is not at work is
freed. Settings, as in diffusers, have the guidance of much noise first; the official configs have it second.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from wanjax.pipelines.base import Parts, Settings
from wanjax.schedulers.base import TRAIN_STEPS

EXPERTS = ("transformer", "transformer_2")
SPARE = 0.25  # of a device's memory, for what steps compute


class Stretch(NamedTuple):
    """The steps from `start` up to `stop`, which one transformer takes under one guidance."""

    transformer: str
    guidance_scale: float
    start: int
    stop: int


class Switch(NamedTuple):
    """Before step `index` of `total`, from 0, another transformer took over, which took `seconds` to load."""

    transformer: str
    index: int
    total: int
    seconds: float


def stretches(timesteps: Sequence[float] | np.ndarray, settings: Settings) -> list[Stretch]:
    """Who takes which steps: the second expert those whose timesteps are below the boundary, of 1 to 1000."""
    steps, first, second = len(timesteps), settings.guidance_scale, settings.guidance_scale_2
    if settings.boundary is None:
        return [Stretch(EXPERTS[0], first, 0, steps)]
    high = int(np.sum(np.asarray(timesteps) >= settings.boundary * TRAIN_STEPS))
    both = (
        Stretch(EXPERTS[0], first, 0, high),
        Stretch(EXPERTS[1], first if second is None else second, high, steps),
    )
    return [stretch for stretch in both if stretch.start < stretch.stop]


def take_over(parts: Parts, name: str) -> tuple[Any, float]:
    """The transformer of that name and the seconds that it took to load; the other goes unless both fit."""
    start = perf_counter()
    for other in EXPERTS:
        if other != name and parts.has(other) and not parts.has(name) and not _fits_again(parts.get(other)):
            parts.free(other)
    transformer = parts.get(name)
    jax.block_until_ready(nnx.state(transformer))
    return transformer, perf_counter() - start


def _fits_again(network: nnx.Module) -> bool:
    """Whether as much as a network's weights would fit on each of its devices once more."""
    taken: dict[Any, int] = {}
    for weight in jax.tree.leaves(nnx.state(network)):
        for shard in weight.addressable_shards:
            taken[shard.device] = taken.get(shard.device, 0) + shard.data.nbytes
    return all(needed <= _free_memory(device) for device, needed in taken.items())


def _free_memory(device: Any) -> float:
    """The bytes that weights may still take of a device's memory."""
    if stats := device.memory_stats():
        return max(0, (1 - SPARE) * stats["bytes_limit"] - stats["bytes_in_use"])
    with suppress(AttributeError, ValueError, OSError):  # not every system tells
        page = os.sysconf("SC_PAGE_SIZE")
        return max(0, page * (os.sysconf("SC_AVPHYS_PAGES") - SPARE * os.sysconf("SC_PHYS_PAGES")))
    return 0
