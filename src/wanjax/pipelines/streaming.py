# SPDX-License-Identifier: Apache-2.0
"""Pipelines whose videos are made block by block, each from what is kept of the blocks before.

    for each block of latent frames:
        denoise the block from noise, by the steps of the sampler
        renew what is kept, by a pass over the finished block
        decode the block, and deliver its frames

The programs are the same for every block, and what is kept has a fixed size, so a video may be of any length.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from wanjax.compilation import compile_cache, keeps_programs, kept_apart
from wanjax.layers.tiling import Tiling
from wanjax.pipelines.checks import check_tiling
from wanjax.pipelines.draws import INITIAL, OF_STEPS, GivenDraws
from wanjax.pipelines.frames import GivenLatents, decoded
from wanjax.pipelines.hooks import Encoded
from wanjax.pipelines.keywords import Given, GivenSettings, spelled_out
from wanjax.pipelines.looks import with_colours
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.progress import counted
from wanjax.pipelines.sampler import Denoiser, Inputs, Latents, State, sample
from wanjax.pipelines.seeds import steady_draws, told_seeds
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Cancelled, Step, Switch

Clip = UInt8[np.ndarray, "T H W 3"]
Stop = Callable[[Step], bool | None]


class Order(NamedTuple):
    """Everything from which the blocks of a video are made, or of several videos, a seed for each."""

    encoded: Encoded
    settings: Settings
    seeds: Sequence[int]
    noise: GivenDraws | None
    callback: Stop | None


class StreamingPipeline(Pipeline):
    """A pipeline that delivers frames as each block of a video is made."""

    @property
    @abstractmethod
    def block_frames(self) -> int:
        """The number of latent frames of a block, of which those of a video are a multiple."""

    @abstractmethod
    def begin_past(self, network: nnx.Module, encoded: Encoded, x: Latents) -> Any:
        """Returns what the first block, of latents like x, is given in place of blocks before it."""

    @abstractmethod
    def block_inputs(self, network: nnx.Module, past: Any, x: Latents, block: int) -> tuple[Denoiser, Inputs]:
        """Returns the denoiser of a block, counted from 0, and the inputs that its steps share."""

    @abstractmethod
    def renewed(self, network: nnx.Module, past: Any, inputs: Inputs, x: Latents) -> Any:
        """Returns what the next block is given, once a block is finished; the buffers of `past` may be reused."""

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
        order = Order(encoded, self._settings_for(encoded, chosen.to_json()), [chosen.seed], noise, callback)
        return self.decode_blocks(self._blocks(order), tiling=tiling)

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
        return self._blocks(Order(encoded, chosen, seeds, noise, callback))

    def _blocks(self, order: Order) -> Iterator[Float[Array, "B C T H W"]]:
        """Yields the latents of each block; the given noise is checked at once."""
        drawn = self._drawn(order.encoded, order.settings, order.seeds, order.noise)
        return kept_apart(self._made_blocks(order, *drawn), compile_cache, steady_draws)

    def _made_blocks(
        self, order: Order, encoded: Encoded, draws: Mapping[str, Array]
    ) -> Iterator[Float[Array, "B C T H W"]]:
        schedule, whole = self.begin(encoded, order.settings, draws[INITIAL])
        whole = np.asarray(whole)  # noise of a long video is not for the device
        segments = self.segments(schedule, order.settings)
        steps, of_steps = len(schedule.timesteps), draws.get(OF_STEPS)
        looking = with_colours(order.callback, self.colours)
        network, _ = self.components.take_over(segments[0].network, self.architecture.denoisers)
        blocks = whole.shape[1] // self.block_frames
        past = None
        for block in range(blocks):
            frames = slice(block * self.block_frames, (block + 1) * self.block_frames)
            x = jnp.asarray(whole[:, frames])
            past = self.begin_past(network, encoded, x) if past is None else past
            made = self.block_inputs(network, past, x, block)
            noise = None if of_steps is None else of_steps[:, :, :, frames]
            state = self.on_devices(State(x, self._solver_state(schedule, x, order.seeds, noise, block)))
            told = _from(looking, block * steps, blocks * steps)
            x = sample(state, schedule, segments, lambda *_, made=made: made, compiled=self.compiled, callback=told)
            if block + 1 < blocks:
                past = self.renewed(network, past, made[1], x)
            yield jnp.moveaxis(x, -1, 1)

    @spelled_out(GivenSettings)
    @keeps_programs
    @steady_draws()
    def denoise(
        self,
        encoded: Encoded,
        *,
        noise: GivenDraws | None = None,
        callback: Stop | None = None,
        switched: Callable[[Switch], Any] | None = None,
        batch_guidance: bool = False,
        seeds: Sequence[int] | None = None,
        keep: str | Path | None = None,
        continued: Callable[[int, int], Any] | None = None,
        **settings: Unpack[GivenSettings],
    ) -> Float[Array, "B C _T H W"]:
        """Returns latents [1 C T H W], float32 and normalised, as `Pipeline.denoise`, block by block.

        There is one network and no guidance, and a run that was stopped begins anew: `switched`, `batch_guidance`,
        `keep` and `continued` have no effect.
        """
        blocks, made = self.blocks(encoded, noise=noise, callback=callback, seeds=seeds, **settings), []
        total = self.architecture.latent_shape(self._settings_for(encoded, dict(settings)))[2] // self.block_frames
        with counted("denoise", "block", 0, total, self.progress) as count:
            for block in blocks:
                made.append(block)
                count(len(made), total)
        return self.components.leave(jnp.concatenate(made, axis=2))

    def decode_blocks(self, blocks: Iterable[GivenLatents], *, tiling: Tiling | None = None) -> Iterator[Clip]:
        """Yields the frames uint8 [T H W 3] of each block of latents [1 C T H W] as it comes."""
        at_once = self.architecture.decoded_at_once(self.block_frames)  # a block is a chunk
        for frames in kept_apart(decoded(self.vae, blocks, at_once, jnp.uint8, tiling, self.compiled), compile_cache):
            yield np.asarray(frames)
        self.components.leave(())


def _from(callback: Stop | None, start: int, total: int) -> Callable[[Step], None] | None:
    """Returns a callback that receives the steps of a block as those of the video from `start` on."""
    if callback is None:
        return None

    def told(step: Step) -> None:
        if callback(step._replace(index=start + step.index, total=total)) is False:
            raise Cancelled(start + step.index)

    return told
