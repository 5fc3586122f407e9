# SPDX-License-Identifier: Apache-2.0
"""Many videos from one load: a video for each prompt and seed. Each prompt is encoded once."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from wanjax.pipelines.denoiser import join
from wanjax.pipelines.frames import Call
from wanjax.pipelines.request import PreparedRequest
from wanjax.sharding import Partitioner


def together(partitioner: Partitioner, guided: bool) -> int:
    """Return the number of videos to denoise at once: as many as the mesh's axis `dp` splits.

    Elsewhere one after another takes less memory and, but for small models, no longer.
    """
    dp = partitioner.size("dp")
    return max(1, dp // 2) if guided else dp


def batches(requests: Sequence[PreparedRequest], size: int) -> Iterator[tuple[Sequence[PreparedRequest], int]]:
    """Yield requests in batches of one size, each with the number of its own ones; the rest repeat the last one."""
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        yield [*batch, *[batch[-1]] * (size - len(batch))], len(batch)


def joined(encoded: Sequence[Any], call: Call) -> Any:
    """Join outputs of `encode_prompts` along their first axis: what is on the host there, the rest by a program."""
    if len(encoded) == 1:
        return encoded[0]
    columns = list(zip(*(jax.tree.leaves(one) for one in encoded), strict=True))
    on_host = [all(isinstance(x, np.ndarray) for x in column) for column in columns]
    parts = tuple(zip(*(column for column, host in zip(columns, on_host, strict=True) if not host), strict=True))
    concatenated = iter(call(join, 0, parts)) if parts else iter(())
    leaves = [
        np.concatenate(column) if host else next(concatenated) for column, host in zip(columns, on_host, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(encoded[0]), leaves)
