# SPDX-License-Identifier: Apache-2.0
"""The attention of real models at real sizes, named once for tests, benchmarks and docs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class Workload(NamedTuple):
    """One attention layer's operands: q [1 L N D], k and v [1 S N D]."""

    name: str
    queries: int
    keys: int
    heads: int
    head_dim: int

    def operands(self, dtype: DTypeLike = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of q, k and v."""
        return tuple(
            jax.ShapeDtypeStruct((1, length, self.heads, self.head_dim), dtype)
            for length in (self.queries, self.keys, self.keys)
        )

    @property
    def scores(self) -> int:
        return self.heads * self.queries * self.keys

    @property
    def flops(self) -> int:
        """Of the two products; a multiplication and an addition are two."""
        return 4 * self.scores * self.head_dim


WAN_HEADS = {"wan_1_3b": 12, "wan_14b": 40}
WAN_TEXT_TOKENS = 512
SIZES = {"256x256x17": (256, 256, 17), "480x832x17": (480, 832, 17), "480p": (480, 832, 81), "720p": (720, 1280, 81)}


def _wan_tokens(height: int, width: int, frames: int) -> int:
    """Patches of 16 × 16 pixels; the first frame alone, then one latent frame for every four."""
    return ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)


def _wan() -> list[Workload]:
    workloads = []
    for model, heads in WAN_HEADS.items():
        for size, shape in SIZES.items():
            tokens = _wan_tokens(*shape)
            workloads.append(Workload(f"{model}_{size}_self", tokens, tokens, heads, 128))
            workloads.append(Workload(f"{model}_{size}_cross", tokens, WAN_TEXT_TOKENS, heads, 128))
    return workloads


WORKLOADS = {workload.name: workload for workload in _wan()}
