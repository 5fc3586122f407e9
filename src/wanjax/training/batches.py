# SPDX-License-Identifier: Apache-2.0
"""Batches of clips of one shape each, whose order follows from the seed and the step alone."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wanjax.training.clips import Bucket
from wanjax.training.latent_cache import EncodedClip


class BatchClip(NamedTuple):
    """A clip of a batch: the files of its latents and of its caption, and how far the model is to stay as it is."""

    latents: Path
    text: Path
    preserved: float


class Batches:
    """The batches of a training, each of clips of one bucket, in an order that is shuffled anew in each epoch.

    An epoch has as many batches of a bucket as its clips fill, and a batch may take its last clips from the next
    epoch's: so each clip is shown `size` times in `size` epochs, however few clips have its shape. `empty` is the file
    of the empty caption, which takes the place of a clip's own at the rate `dropped`. Where some clips are preserved,
    so is, by the part `uncaptioned`, what has no caption.
    """

    def __init__(
        self,
        clips_in_set: Sequence[EncodedClip],
        size: int,
        seed: int,
        *,
        empty: Path,
        dropped: float = 0.0,
        uncaptioned: float = 1.0,
    ):
        self.size, self.seed, self.empty, self.dropped = size, seed, empty, dropped
        buckets: dict[Bucket, list[EncodedClip]] = {}
        for piece in clips_in_set:
            buckets.setdefault(piece.bucket, []).extend([piece] * piece.repeats)
        self._buckets = list(buckets.values())
        self.preserves = any(piece.preserve for piece in clips_in_set)
        self.uncaptioned = uncaptioned if self.preserves else 0.0
        self._per_round = sum(map(len, self._buckets))  # the batches of `size` epochs
        self._round = lru_cache(maxsize=2)(self._ordered)
        self._shuffled = lru_cache(maxsize=2 * len(self._buckets))(self._permutation)

    def _ordered(self, number: int) -> list[tuple[int, int]]:
        """Return the batches of a round of `size` epochs in order: the bucket, and the batch among all of its own."""
        rng, epochs = np.random.default_rng([self.seed, 1, number]), [list[tuple[int, int]]() for _ in range(self.size)]
        for index, bucket in enumerate(self._buckets):
            count = len(bucket)
            for batch in range(count):  # in the epoch of its first clip
                epochs[batch * self.size // count].append((index, number * count + batch))
        return [epoch[i] for epoch in epochs for i in rng.permutation(len(epoch))]

    def _permutation(self, bucket: int, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, 3, bucket, epoch]).permutation(len(self._buckets[bucket]))

    def _clip(self, bucket: int, position: int) -> EncodedClip:
        """Return a clip of a bucket, by its position in the bucket's epochs one after another."""
        epoch, index = divmod(position, len(self._buckets[bucket]))
        return self._buckets[bucket][self._shuffled(bucket, epoch)[index]]

    def at(self, step: int) -> list[BatchClip]:
        """Return the clips of a step."""
        number, index = divmod(step, self._per_round)
        bucket, batch = self._round(number)[index]
        clips = [self._clip(bucket, batch * self.size + i) for i in range(self.size)]
        dropped_captions = np.random.default_rng([self.seed, 2, step]).random(len(clips)) < self.dropped
        return [
            BatchClip(x.latents, self.empty if drop else x.text, 1.0 if x.preserve else self.uncaptioned * bool(drop))
            for x, drop in zip(clips, dropped_captions, strict=True)
        ]
