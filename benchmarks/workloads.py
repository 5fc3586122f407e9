# SPDX-License-Identifier: Apache-2.0
"""Attention workloads of real models at real sizes, with names for tests, benchmarks and docs."""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class Workload(NamedTuple):
    """The sizes of one attention layer: q [1 L N D], k and v [1 S N D]."""

    name: str
    num_queries: int
    num_keys: int
    heads: int
    head_dim: int

    def operands(self, dtype: DTypeLike = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of q, k and v."""
        return tuple(
            jax.ShapeDtypeStruct((1, length, self.heads, self.head_dim), dtype)
            for length in (self.num_queries, self.num_keys, self.num_keys)
        )

    @property
    def scores(self) -> int:
        return self.heads * self.num_queries * self.num_keys

    @property
    def flops(self) -> int:
        """Operations of the two products; a multiplication and an addition are two operations."""
        return 4 * self.scores * self.head_dim

    def shard(self, chips: int) -> "Workload":
        """Return one chip's share: some heads of self-attention, or some of the queries if there are few keys."""
        name = f"{self.name}_on_{chips}"
        if self.num_keys < self.num_queries:
            return self._replace(name=name, num_queries=-(-self.num_queries // chips))
        return self._replace(name=name, heads=-(-self.heads // chips))


WAN_HEADS = {"wan_1_3b": 12, "wan_14b": 40}
WAN_TEXT_TOKENS = 512
SMALL_SIZES = {"256x256x17": (256, 256, 17), "480x832x17": (480, 832, 17)}
SIZES = {"480p": (480, 832, 81), "720p": (720, 1280, 81)}
SHARDS = (4, 8)


def _patches(height: int, width: int, frames: int, patch: tuple[int, int, int]) -> int:
    """Return the number of patches of a video. There is one latent frame for the first frame and one for every four
    frames after it. The sizes of video and patch are in pixels."""
    patch_frames, patch_height, patch_width = patch
    return -(-((frames - 1) // 4 + 1) // patch_frames) * (height // patch_height) * (width // patch_width)


def _wan() -> Iterator[Workload]:
    for model, heads in WAN_HEADS.items():
        for size, shape in (SMALL_SIZES | SIZES).items():
            tokens = _patches(*shape, (1, 16, 16))
            for kind, keys in (("self", tokens), ("cross", WAN_TEXT_TOKENS)):
                yield from _with_shards(Workload(f"{model}_{size}_{kind}", tokens, keys, heads, 128), size in SIZES)


def _cogvideox() -> Iterator[Workload]:
    """Self-attention of video and 226 tokens of text in one sequence."""
    tokens = _patches(768, 1360, 81, (2, 16, 16)) + 226
    yield from _with_shards(Workload("cogvideox_768x1360_self", tokens, tokens, 48, 64))


def _hunyuanvideo() -> Iterator[Workload]:
    """Self-attention of video, 1,000 + 256 tokens of two texts and 729 of an image, some masked, in one sequence."""
    for size, shape in (("480p", (480, 848, 121)), ("720p", (720, 1280, 121))):
        tokens = _patches(*shape, (1, 16, 16)) + 1000 + 256 + 729
        yield from _with_shards(Workload(f"hunyuanvideo_{size}_self", tokens, tokens, 16, 128))


def _with_shards(workload: Workload, shards: bool = True) -> Iterator[Workload]:
    yield workload
    yield from (workload.shard(chips) for chips in SHARDS if shards)


WORKLOADS = {workload.name: workload for workload in chain(_wan(), _cogvideox(), _hunyuanvideo())}
