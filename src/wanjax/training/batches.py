# SPDX-License-Identifier: Apache-2.0
"""Batches of clips of equal shape. The order of the batches depends only on the seed and the step."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wanjax.training.clips import Bucket
from wanjax.training.latent_cache import EncodedClip


class BatchClip(NamedTuple):
    """A clip of a batch: the files of its latents and its caption's features, and its prior-preservation weight."""

    latents: Path
    text: Path
    preservation: float


class Batches:
    """The batches of a training run. A batch has clips of one bucket. Each epoch has a new random order.

    If the clips of an epoch do not fill the last batch of a bucket, the rest of the batch comes from the bucket's next
    epoch. In a round of `size` epochs, each clip is therefore in exactly `size` batches, even if its bucket has fewer
    clips than a batch.

    Args:
        clips: The clips.
        size: The number of clips in a batch.
        seed: Seed of the order and of caption dropout.
        empty_caption: The file of the empty caption's features.
        caption_dropout: The probability with which the empty caption replaces a clip's caption.
        uncaptioned_preservation: The weight of prior preservation for a clip whose caption is dropped. It is used only
            if the data set has preserved clips.
    """

    def __init__(
        self,
        clips: Sequence[EncodedClip],
        size: int,
        seed: int,
        *,
        empty_caption: Path,
        caption_dropout: float = 0.0,
        uncaptioned_preservation: float = 1.0,
    ):
        self.size, self.seed, self.empty_caption, self.caption_dropout = size, seed, empty_caption, caption_dropout
        clips_by_bucket: dict[Bucket, list[EncodedClip]] = {}
        for clip in clips:
            clips_by_bucket.setdefault(clip.bucket, []).extend([clip] * clip.repeats)
        self._buckets = list(clips_by_bucket.values())
        self.has_preserved_clips = any(clip.preserve for clip in clips)
        self.uncaptioned_preservation = uncaptioned_preservation if self.has_preserved_clips else 0.0
        self._round_batches = sum(map(len, self._buckets))  # the number of batches in a round of `size` epochs
        self._round_order = lru_cache(maxsize=2)(self._order_round)
        self._permutation = lru_cache(maxsize=2 * len(self._buckets))(self._permute_bucket)

    def _order_round(self, round_number: int) -> list[tuple[int, int]]:
        """Return the order of the batches in a round of `size` epochs. A batch is a pair: the index of the bucket, and
        the index of the batch among all batches of the bucket."""
        rng, epochs = (
            np.random.default_rng([self.seed, 1, round_number]),
            [list[tuple[int, int]]() for _ in range(self.size)],
        )
        for index, bucket in enumerate(self._buckets):
            count = len(bucket)
            for batch in range(count):  # a batch belongs to the epoch of its first clip
                epochs[batch * self.size // count].append((index, round_number * count + batch))
        return [epoch[i] for epoch in epochs for i in rng.permutation(len(epoch))]

    def _permute_bucket(self, bucket: int, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, 3, bucket, epoch]).permutation(len(self._buckets[bucket]))

    def _clip(self, bucket: int, position: int) -> EncodedClip:
        """Return the clip at a position in the sequence of all epochs of a bucket."""
        epoch, index = divmod(position, len(self._buckets[bucket]))
        return self._buckets[bucket][self._permutation(bucket, epoch)[index]]

    def clips_of_step(self, step: int) -> list[BatchClip]:
        """Return the clips of a step."""
        round_number, index = divmod(step, self._round_batches)
        bucket, batch = self._round_order(round_number)[index]
        clips = [self._clip(bucket, batch * self.size + i) for i in range(self.size)]
        dropped_captions = np.random.default_rng([self.seed, 2, step]).random(len(clips)) < self.caption_dropout
        return [
            BatchClip(
                clip.latents,
                self.empty_caption if is_dropped else clip.text,
                1.0 if clip.preserve else self.uncaptioned_preservation * bool(is_dropped),
            )
            for clip, is_dropped in zip(clips, dropped_captions, strict=True)
        ]
