# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose videos are made block by block, each from what is kept of the blocks before.

    for each block of latent frames:
        denoise the block from noise, by the steps of the sampler
        renew what is kept, by a pass over the finished block
        decode the block, and deliver its frames

The programs are the same for every block, and what is kept has a fixed size, so a video may be of any length.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Unpack

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from wanjax.layers.tiling import Tiling
from wanjax.pipelines.checks import check_tiling
from wanjax.pipelines.draws import GivenDraws, checked_draws
from wanjax.pipelines.frames import GivenLatents
from wanjax.pipelines.hooks import Encoded
from wanjax.pipelines.keywords import Given, GivenSettings, spelled_out
from wanjax.pipelines.looking import Calling
from wanjax.pipelines.many import Order
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.run import Run
from wanjax.pipelines.sampler import Denoiser, Inputs
from wanjax.pipelines.seeds import told_seeds
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Segment, Step
from wanjax.programs import Value

Latents = Float[Value, "B T H W C"]
Clip = UInt8[np.ndarray, "T H W 3"]
Stop = Callable[[Step], bool | None]


class StreamingPipeline(Pipeline):
    """A pipeline that delivers frames as each block of a video is made."""

    @abstractmethod
    def begin_past(self, network: nnx.Module, encoded: Encoded, x: Latents) -> Any:
        """Returns what the first block, of latents like x, is given in place of blocks before it."""

    @abstractmethod
    def block_inputs(self, network: nnx.Module, past: Any, x: Latents, block: int) -> tuple[Denoiser, Inputs]:
        """Returns the denoiser of a block, counted from 0, and the inputs that its steps share."""

    def prepared(
        self,
        network: nnx.Module,
        segment: Segment,
        encoded: Encoded,
        x: Latents,
        batched: bool,
        block: int,
        past: Any,
    ) -> tuple[Denoiser, Inputs, Any]:
        past = self.begin_past(network, encoded, x) if past is None else past
        return *self.block_inputs(network, past, x, block), past

    @spelled_out(Given)
    def stream(
        self,
        prompt: str,
        *,
        noise: GivenDraws | None = None,
        callback: Stop | None = None,
        tiling: Tiling | None = None,
        **given: Unpack[Given],
    ) -> Iterator[Clip]:
        """Returns an iterator over a video's clips, uint8 [T H W 3], one for each block, made when it is asked for.

        The keywords are those of a call for one video, whose frames are the same.
        """
        check_tiling(tiling)
        _, chosen = self.prepare(prompt=prompt, **given)
        told_seeds([given.get("seed")], [chosen.seed])
        encoded = self.encode(prompt, **given)
        settings = self._settings_for(encoded, chosen.to_json())
        return self.decode_blocks(self._blocks(encoded, settings, [chosen.seed], noise, callback), tiling=tiling)

    @spelled_out(GivenSettings)
    def blocks(
        self,
        encoded: Encoded,
        *,
        noise: GivenDraws | None = None,
        callback: Stop | None = None,
        seeds: Sequence[int] | None = None,
        **settings: Unpack[GivenSettings],
    ) -> Iterator[Float[Array, "B C T H W"]]:
        """Returns an iterator over the latents of each block, made when it is asked for.

        The keywords are those of `denoise`, which joins the blocks. `callback` receives the latents of a block.
        """
        chosen = self._settings_for(encoded, dict(settings))
        seeds = told_seeds([settings.get("seed")], [chosen.seed]) if seeds is None else told_seeds(seeds)
        return self._blocks(encoded, chosen, seeds, noise, callback)

    def _blocks(
        self,
        encoded: Encoded,
        settings: Settings,
        seeds: Sequence[int],
        noise: GivenDraws | None,
        callback: Stop | None,
    ) -> Iterator[Float[Array, "B C T H W"]]:
        """Returns an iterator over the latents of each block; the given noise is checked at once."""
        checked_draws(noise, self.draws(settings, videos=len(seeds)))
        hooks = [Calling(callback)] if callback else []
        return Run(self, [Order(settings, {})], noise=noise, hooks=hooks).latents(encoded, settings, seeds)

    def decode_blocks(self, blocks: Iterable[GivenLatents], *, tiling: Tiling | None = None) -> Iterator[Clip]:
        """Yields the frames uint8 [T H W 3] of each block of latents [1 C T H W] as it comes."""
        for frames in Run(self, [], tiling=tiling).frames(iter(blocks)):
            yield np.asarray(frames)
