# SPDX-License-Identifier: Apache-2.0
"""A run that is recorded: the calls of its programs in order, with nothing loaded and nothing computed."""

from functools import cache
from typing import Any

import jax
import numpy as np
from flax import nnx

from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Pictures
from wanjax.pipelines.components import bytes_of
from wanjax.pipelines.many import Order
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.run import Run
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.tokenizer import TokenBatch
from wanjax.programs import Record


def record(
    pipe: Pipeline,
    settings: Settings,
    pictures: Pictures | None = None,
    *,
    tiling: Tiling | None = None,
    batch_guidance: bool = False,
    room: int | None = None,
) -> Record:
    """Records the making of a video: encode, denoise and decode.

    The keywords are those of `Pipeline.videos`; `room` is that of `Components.abstract`. The most that is kept on a
    device beside the arguments of each program is noted as `beside`.
    """
    components = pipe.components.abstract(room)

    @cache
    def weighed(network: nnx.Module) -> tuple[int, int]:
        return id(jax.tree.leaves(network)[0]), bytes_of(network)

    def beside(arguments: Any) -> int:
        """Returns the bytes of the networks that are loaded but not among the arguments of a call."""
        given = {id(x) for x in jax.tree.leaves(arguments)}
        return sum(size for weight, size in map(weighed, components.networks()) if weight not in given)

    made = Record(beside)
    told = {"tiling": tiling, "batch_guidance": batch_guidance}
    for _, frames in Run(pipe.under(made, components), [Order(settings, {})], pictures, **told):
        for _ in frames:
            pass
    return made


def needed_pictures(pipe: Pipeline, settings: Settings) -> Pictures:
    """Returns blank pictures of the video's own size in place of those without which the model makes no video."""
    page = np.zeros((*settings.size, 3), np.uint8)
    pages: dict[str, Any] = {name: page for name in pipe.architecture.needs}
    return Pictures(**pages)


class NoTokenizer:
    """A tokenizer for plans, which have none: a prompt is its length, and so many tokens of it are real."""

    pad_id = 0

    def __init__(self, length: int, tokens: int):
        self.length, self.tokens, self.backend = length, tokens, self

    def tokenize(self, texts: Any, length: int | None = None) -> TokenBatch:
        """Returns tokens 0 for each text."""
        shape = len(texts), length or self.length
        mask = np.broadcast_to(np.arange(shape[1]) < self.tokens, shape)
        return TokenBatch(np.zeros(shape, np.int32), mask, (None,) * len(texts))

    def encode(self, text: str) -> Any:
        """Returns no tokens, as the tokenizer's backend."""
        return type("Encoding", (), {"ids": ()})


class NoProcessor:
    """An image processor for plans: pictures of the encoder's size."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, images: Any, **how: Any) -> np.ndarray:
        return np.zeros((len(images), self.size, self.size, 3), np.float32)
