# SPDX-License-Identifier: Apache-2.0
"""Batches of clips of one shape each, whose order follows from the seed and the step alone."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wanjax.training.clips import Bucket
from wanjax.training.encoded import Piece


class Shown(NamedTuple):
    """A clip of a batch: the files of its latents and of its caption, and how far the model is to stay as it is."""

    latents: Path
    text: Path
    preserved: float


class Batches:
    """The batches of a training: epoch after epoch of all clips, shuffled, and joined within buckets.

    The last batch of a bucket is filled up from its first. `empty` is the file of the empty caption, which takes the
    place of a clip's own at the rate `dropped`. Where some clips are preserved, so is, by the part `uncaptioned`, what
    has no caption.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        size: int,
        seed: int,
        *,
        empty: Path,
        dropped: float = 0.0,
        uncaptioned: float = 1.0,
    ):
        self.size, self.seed, self.empty, self.dropped = size, seed, empty, dropped
        self._buckets: dict[Bucket, list[Piece]] = {}
        for piece in pieces:
            self._buckets.setdefault(piece.bucket, []).extend([piece] * piece.repeats)
        self.preserves = any(piece.preserve for piece in pieces)
        self.uncaptioned = uncaptioned if self.preserves else 0.0
        self.per_epoch = sum(-(-len(bucket) // size) for bucket in self._buckets.values())
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> list[list[Piece]]:
        rng = np.random.default_rng([self.seed, 1, epoch])
        batches = []
        for bucket in self._buckets.values():
            order = [bucket[i] for i in rng.permutation(len(bucket))]
            for start in range(0, len(order), self.size):
                batches.append([order[(start + i) % len(order)] for i in range(self.size)])
        return [batches[i] for i in rng.permutation(len(batches))]

    def at(self, step: int) -> list[Shown]:
        """Returns the clips of a step."""
        epoch, index = divmod(step, self.per_epoch)
        chosen = self._epoch(epoch)[index]
        drops = np.random.default_rng([self.seed, 2, step]).random(len(chosen)) < self.dropped
        return [
            Shown(x.latents, self.empty if drop else x.text, 1.0 if x.preserve else self.uncaptioned * bool(drop))
            for x, drop in zip(chosen, drops, strict=True)
        ]
