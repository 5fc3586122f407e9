# SPDX-License-Identifier: Apache-2.0
"""Batches of clips of one shape each, whose order follows from the seed and the step alone."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from wanjax.training.clips import Bucket
from wanjax.training.encoded import Piece


class Batches:
    """The batches of a training: epoch after epoch of all clips, shuffled, and joined within buckets.

    The last batch of a bucket is filled up from its first. `empty` is the file of the empty caption, which takes the
    place of a clip's own at the rate `dropped`.
    """

    def __init__(self, pieces: Sequence[Piece], size: int, seed: int, *, empty: Path, dropped: float = 0.0):
        self.size, self.seed, self.empty, self.dropped = size, seed, empty, dropped
        self._buckets: dict[Bucket, list[Piece]] = {}
        for piece in pieces:
            self._buckets.setdefault(piece.bucket, []).extend([piece] * piece.repeats)
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

    def at(self, step: int) -> list[tuple[Path, Path]]:
        """Returns the files of latents and captions of a step."""
        epoch, index = divmod(step, self.per_epoch)
        chosen = self._epoch(epoch)[index]
        drops = np.random.default_rng([self.seed, 2, step]).random(len(chosen)) < self.dropped
        return [(x.latents, self.empty if drop else x.text) for x, drop in zip(chosen, drops, strict=True)]
