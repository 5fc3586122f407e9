# SPDX-License-Identifier: Apache-2.0
"""The run: it drives encode, denoise and decode, for one video or many, whoever asked for them.

    for order, frames in Run(pipe, orders, pictures, hooks=[Progress(), Keeping(file)]):
        write(order, frames)

What is done with a program is the pipeline's strategy's matter: a run that is executed makes videos, and one that is
recorded makes the same calls and nothing else. Hooks see what happens beside it: progress, saving, previews, a wish to
stop. A video that is made block by block is a run of several blocks, each from what is kept of those before; its frames
come while it is made. So do those of a video of windows, each of which goes through the three stages.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from wanjax.errors import WanjaxError
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Pictures
from wanjax.pipelines import many
from wanjax.pipelines.caching.networks import Caching
from wanjax.pipelines.caching.rules import check_apart
from wanjax.pipelines.caching.tables import Tables
from wanjax.pipelines.components import DECODER
from wanjax.pipelines.draws import INITIAL, OF_STEPS, GivenDraws, checked_draws
from wanjax.pipelines.family import Encoded, Pipe
from wanjax.pipelines.frames import Frames, GivenLatents, chunk_count, decoded
from wanjax.pipelines.guidance import check_rule
from wanjax.pipelines.many import Order
from wanjax.pipelines.record import VERSION
from wanjax.pipelines.sampler import Beginning, Given, State, begin, finish, take_step
from wanjax.pipelines.seeds import words_of
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.steps import Cancelled, InFlight, Segment, Step, Switch, at_step, left_of
from wanjax.pipelines.video_shape import with_shape
from wanjax.pipelines.windows import Window, faded, pictures_of, windows_of
from wanjax.programs import refuse_traced
from wanjax.schedulers import one_step


class Begun(NamedTuple):
    """The state before the first step, and everything on which the latents depend: facts as JSON, and arrays."""

    state: State
    segments: Sequence[Segment]
    facts: Mapping[str, Any]
    arrays: Sequence[Array | np.ndarray]


class Hook:
    """A part that looks on while a run is executed. Every method does nothing: a hook has those that it needs."""

    def stage(self, name: str) -> AbstractContextManager[Any]:
        """Surrounds a stage."""
        return nullcontext()

    def count(self, unit: str, done: int, total: int) -> None:
        """Receives how many units of a stage, such as steps, the device has done."""

    def window(self, window: Window) -> None:
        """Receives a window of a video of several, before it is made."""

    def encoded(self, encoded: Encoded) -> None:
        """Receives the output of the first stage."""

    def begun(self, encoded: Encoded) -> None:
        """Receives what is denoised: the output of the first stage, of videos that are made together."""

    def resumed(self, begun: Begun) -> tuple[State, int] | None:
        """Returns the state from which to go on, and the number of steps that were taken before it, if there is one."""

    def switched(self, switch: Switch) -> None:
        """Receives a change of network."""

    def stepped(self, step: Step) -> bool | None:
        """Receives a step, which the device may not have finished; returns False to end the run."""

    def stopped(self, step: Step) -> None:
        """Receives the last step of a run that ends after it, before its time."""

    def denoised(self, latents: Array, block: "Block") -> None:
        """Receives the latents [B C T H W] of a block of videos that are made together."""


@dataclass(frozen=True)
class Block:
    """A part of a video that is denoised at once: its number from 0, of how many, and its latent frames."""

    number: int
    count: int
    frames: range

    @property
    def last(self) -> bool:
        return self.number + 1 == self.count


class Run:
    """The making of videos that differ in prompt and seed alone.

    `noise` is given in place of the seed's, for one video. `tiling` is that of pictures and of frames. Raises
    WanjaxError for `batch_guidance` beside a step cache that needs a step's prompts apart.
    """

    def __init__(
        self,
        pipe: Pipe,
        orders: Sequence[Order],
        pictures: Pictures | None = None,
        *,
        noise: GivenDraws | None = None,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        hooks: Sequence[Hook] = (),
    ):
        self.pipe, self.orders, self.pictures = pipe, orders, pictures or Pictures()
        self.noise, self.tiling, self.batch_guidance, self.hooks = noise, tiling, batch_guidance, tuple(hooks)
        for order in orders:
            check_apart(order.settings.cache, batch_guidance)

    def __iter__(self) -> Iterator[tuple[Order, Iterator[Frames]]]:
        """Yields each order with an iterator over the frames of its video, chunk by chunk, which has to be used up."""
        if not self.orders:
            return
        shared = self.orders[0].settings
        if shared.windows > 1:
            texts: dict[str, Encoded] = {}
            for order in self.orders:
                yield order, self._windows(order.settings, texts)
            return
        encoded = self.encode()
        size = many.together(self.pipe.partitioner, shared.guided) if len(self.orders) > 1 else 1
        for batch, own in many.batches(self.orders, size):
            inputs = many.joined([encoded[order.settings.prompt] for order in batch], self.pipe.call)
            pieces: Iterable[Any] = self.latents(inputs, shared, [order.settings.seed for order in batch])
            if own > 1 or not self.pipe.architecture.streams:
                with self.stage("denoise"):
                    pieces = list(pieces)
            for video, order in enumerate(batch[:own]):
                yield order, self.frames(pieces, video=video, last=video + 1 == own)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Surrounds a stage, for each hook."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.stage(name))
            yield

    def count(self, unit: str, done: int, total: int) -> None:
        """Tells each hook how far a stage is."""
        for hook in self.hooks:
            hook.count(unit, done, total)

    def encode(self) -> dict[str, Encoded]:
        """Encodes each prompt once, and the pictures, which all videos share; returns the outputs by prompt."""
        with self.stage("encode"), self.pipe.strategy.stage("encode"):
            texts = self._texts()
            seen = self._seen(self.pictures, self.orders[0].settings)
        encoded = {prompt: text._replace(**seen) for prompt, text in texts.items()}
        for one in encoded.values():
            for hook in self.hooks:
                hook.encoded(one)
        return encoded

    def _texts(self) -> dict[str, Encoded]:
        """Encodes each prompt once, without pictures; returns the outputs by prompt."""
        pipe, windows = self.pipe, [window for order in self.orders for window in windows_of(order.settings)]
        prompts = {alone.prompt: alone for _, _, alone in windows}
        texts = {prompt: pipe.architecture.encode_prompts(pipe, alone) for prompt, alone in prompts.items()}
        return pipe.components.finish_stage(texts)

    def _seen(self, pictures: Pictures, settings: Settings) -> Mapping[str, Any]:
        """Encodes pictures; returns fields of the output of the first stage."""
        pipe = self.pipe
        seen = pipe.architecture.encode_pictures(pipe, pictures, settings, tiling=self.tiling)
        seen = with_shape(seen, pipe.architecture.encoded_type, pictures, settings)
        return pipe.components.finish_stage(seen)

    def _windows(self, settings: Settings, texts: dict[str, Encoded]) -> Iterator[Any]:
        """Yields the frames of a video of windows, those of each once it is made; `texts` are encoded by the first."""
        pipe, before = self.pipe, None
        for window in windows_of(settings):
            for hook in self.hooks:
                hook.window(window)
            alone = window.settings
            pictures = pictures_of(window, self.pictures, before, pipe.architecture.continued_by)
            with self.stage("encode"), pipe.strategy.stage("encode"):
                texts.update({} if texts else self._texts())
                encoded = texts[alone.prompt]._replace(**self._seen(pictures, alone))
            with self.stage("denoise"):
                pieces = list(self.latents(encoded, alone, [alone.seed]))
            with self.stage("decode"):
                chunks = [pipe.strategy.read(x, np.zeros(x.shape, np.uint8)) for x in self.frames(pieces)]
            frames = np.concatenate(chunks)
            if before is not None:
                frames = np.concatenate([before, faded(before, frames[len(before) :])])
            yield frames[0 if before is None else len(before) :]
            before = frames[-alone.overlap :]

    def finishing(self, order: Order) -> AbstractContextManager[None]:
        """Surrounds the use of a video's frames, by their decoding; windows have their stages in turn."""
        return nullcontext() if order.settings.windows > 1 else self.stage("decode")

    def latents(self, encoded: Encoded, settings: Settings, seeds: Sequence[int]) -> Iterator[Any]:
        """Yields the latents of videos that are made together, one for each seed: each block as soon as it is made."""
        pipe, words, architecture = self.pipe, words_of(seeds), self.pipe.architecture
        shapes = architecture.draws(settings, architecture.references(encoded, settings), len(seeds))
        given = checked_draws(self.noise, shapes)
        schedule, arrays = architecture.schedule(settings, encoded), [x for x in encoded if x is not None]
        rule, pictures = settings.guidance_rule, latents_of(encoded)
        check_rule(rule, settings.guided, len(schedule.timesteps))
        segments = [segment._replace(rule=rule) for segment in architecture.segments(schedule, settings)]
        for hook in self.hooks:
            hook.begun(encoded)
        past = None
        for block in self.blocks(settings, shapes[INITIAL][2]):
            whole = block.count == 1
            frames, ends = None if whole else len(block.frames), architecture.ends
            static = Beginning(ends, architecture.scheduler, shapes[INITIAL], frames, rule.averages)
            noise, number = _given(given, block, schedule), np.int32(block.number)
            with pipe.strategy.stage("denoise"):
                state, drawn = pipe.call(begin, static, words, noise, schedule, pictures, number)
                inputs = encoded._replace(**drawn)
                begun = Begun(state, segments, self._facts(settings, seeds), [*arrays, *given.values()])
                state, past = self._denoised(begun, inputs, schedule, settings, block, past)
                frames = frames or architecture.latent_shape(settings)[2]
                made = pipe.call(finish, (ends, frames), state.x, latents_of(inputs))
            for hook in self.hooks:
                hook.denoised(made, block)
            yield made
        pipe.components.finish_stage(())

    def blocks(self, settings: Settings, frames: int) -> Iterator[Block]:
        """Yields the blocks of a video of so many latent frames; most models make a video as a whole."""
        size = self.pipe.architecture.block_frames or frames
        count = frames // size
        for number in range(count):
            yield Block(number, count, range(number * size, (number + 1) * size))

    def _denoised(
        self, begun: Begun, encoded: Encoded, schedule: Any, settings: Settings, block: Block, past: Any
    ) -> tuple[State, Any]:
        """Takes all steps of a block; returns the last state, and what the next block is given."""
        pipe, architecture, state, done = self.pipe, self.pipe.architecture, begun.state, 0
        if block.count == 1:
            for hook in self.hooks:
                state, done = hook.resumed(begun) or (state, done)
        caching = self.caching(settings, begun.segments, schedule, architecture.tables_for(encoded))
        steps = len(schedule.timesteps)
        before, total, watch = block.number * steps, block.count * steps, self._watch(block, steps, done)
        step: Step | None = None
        for segment in left_of(begun.segments, done):
            with self._stopping(step):
                network, seconds = pipe.components.take_over(segment.network, architecture.denoisers)
            if segment.start > done:
                for hook in self.hooks:
                    hook.switched(Switch(segment.network, segment.start, steps, seconds))
            denoiser, inputs, past = architecture.block_inputs(
                pipe, network, segment, encoded, state.x, self.batch_guidance, block.number, past
            )
            cache, rule = caching.of(segment.network, denoiser, inputs, pipe), segment.rule
            denoiser = replace(denoiser, cache=cache, guidance=type(rule))
            for index, scale in enumerate(segment.scales, segment.start):
                state = replace(state, kept=denoiser.cache.given(index, state.kept))
                guidance, now = rule.told(index, scale), one_step(schedule, index)
                state, x0, finite = pipe.call(take_step, at_step(denoiser, index, steps), state, inputs, guidance, now)
                if watch is not None:
                    reuses, time = denoiser.cache.reuses(index), float(schedule.timesteps[index])
                    step = Step(before + index, total, time, state, x0, reuses, pipe.colours)
                    with self._stopping(step):
                        watch.add(before + index, finite)
                        self._tell(step)
            if watch is not None:
                with self._stopping(step):
                    watch.wait()
            state = replace(state, kept=None)
            step = step and replace(step, state=replace(state, kept=()))  # what was kept is freed
            if block.count > 1 and not block.last:
                past = architecture.renewed(pipe, network, past, inputs, state.x)
            del denoiser, inputs  # the weights are freed before the next network is loaded
        return state, past

    def _watch(self, block: Block, steps: int, done: int) -> InFlight | None:
        """Returns the queue of steps that the device has not finished; None where nothing is executed."""
        if not self.pipe.strategy.executes:
            return None

        def count(done: int, total: int) -> None:
            if block.count == 1:
                self.count("step", done, total)
            elif done % steps == 0:
                self.count("block", done // steps, block.count)

        if block.count == 1 or block.number == 0:
            self.count(*(("step", done, steps) if block.count == 1 else ("block", 0, block.count)))
        return InFlight(block.count * steps, count)

    def _tell(self, step: Step) -> None:
        """Tells each hook of a step; raises Cancelled where one ends the run."""
        if any([hook.stepped(step) is False for hook in self.hooks]):  # each is told
            raise Cancelled(step.index)

    @contextmanager
    def _stopping(self, step: Step | None) -> Iterator[None]:
        """Tells each hook of the last step, if there is one, where the `with` block ends the run, as Ctrl-C does."""
        try:
            yield
        except BaseException:
            if step is not None:
                for hook in self.hooks:
                    hook.stopped(step)
            raise

    def caching(self, settings: Settings, segments: Sequence[Segment], schedule: Any, tables: Tables) -> Caching:
        """Returns the step caches of the segments' networks; raises WanjaxError where there can be none."""
        return Caching(self.pipe.architecture.cache_rule(settings), tables, segments, schedule, settings.steps)

    def _facts(self, settings: Settings, seeds: Sequence[int]) -> dict[str, Any]:
        """Returns everything but arrays on which the latents depend."""
        pipe = self.pipe
        return {
            "settings": settings.to_json(),
            "seeds": list(seeds),
            "scheduler": repr(pipe.architecture.scheduler),
            "tables": repr(pipe.architecture.tables),
            "mesh": dict(pipe.partitioner.mesh.shape),
            "batch_guidance": self.batch_guidance,
            "compiler": pipe.compiler,
            "loaded": pipe.components.recorded,
            "version": VERSION,
        }

    def frames(
        self, pieces: Iterable[GivenLatents], dtype: DTypeLike = jnp.uint8, *, video: int = 0, last: bool = True
    ) -> Iterator[Frames]:
        """Yields the frames of each chunk of a video, so that only that one and the next are in memory.

        The device decodes the next one while the caller has a chunk. `pieces` are latents of consecutive frames,
        [B C T H W]; `video` is the place of the video in their batch, of which it is the `last` to be decoded. Raises
        WanjaxError where they are not finite.
        """
        pipe, total = self.pipe, None
        if pipe.strategy.executes:
            finite = map(_finite, pieces)
            pieces = list(finite) if isinstance(pieces, Sequence) else finite
        decoder = DECODER if DECODER in pipe.components.names else "vae"
        vae = pipe.architecture.vae
        tiling = self.tiling and self.tiling.completed(vae.tiling, vae.spatial_factor)
        if isinstance(pieces, Sequence):
            if decoder == "vae":
                length = 1 + (sum(x.shape[2] for x in pieces) - 1) * vae.temporal_factor
                pipe.architecture.check_length(length, pipe.defaults.model)
            total = sum(chunk_count(x.shape[2], pipe.architecture.decoded_at_once(x.shape[2])) for x in pieces)
            self.count("chunk", 0, total)
        several: Any = pieces  # a sequence, but where a video comes in blocks
        at_once = pipe.architecture.decoded_at_once(pipe.architecture.block_frames or several[0].shape[2])

        def call(*arguments: Any) -> Any:
            with pipe.strategy.stage("decode"):
                return pipe.call(*arguments)

        chunks = decoded(pipe.components.get(decoder), pieces, at_once, dtype, tiling, call, video)
        for done, chunk in enumerate(chunks if total is None else _ahead(chunks), 1):
            yield chunk
            if total is not None:
                self.count("chunk", done, total)
        if last:
            pipe.components.finish_stage(())


def _finite(latents: Any) -> Any:
    """Returns latents; raises WanjaxError where some are not finite."""
    refuse_traced(latents)
    parts = [shard.data for shard in latents.addressable_shards] if isinstance(latents, jax.Array) else [latents]
    if not all(np.isfinite(np.asarray(part)).all() for part in parts):
        raise WanjaxError(f"the latents {list(latents.shape)} are not finite: denoise again, with dtype float32")
    return latents


def _ahead(chunks: Iterable[Frames]) -> Iterator[Frames]:
    """Yields chunks, each once the next one is begun; the devices send each to the host as soon as it is made."""
    begun: deque[Frames] = deque()
    for chunk in chunks:
        if isinstance(chunk, jax.Array):
            chunk.copy_to_host_async()
        begun.append(chunk)
        if len(begun) > 1:
            yield begun.popleft()
    yield from begun


def latents_of(encoded: Encoded) -> dict[str, Any]:
    """Returns the encoded pictures that are latents [B C T H W], by name."""
    return {name: x for name, x in encoded._asdict().items() if x is not None and len(x.shape) == 5}


def _given(given: Mapping[str, np.ndarray], block: Block, schedule: Any) -> Given:
    """Returns the part of the given noise that a block takes; of that of the steps, those that are taken."""
    frames = slice(block.frames.start, block.frames.stop)
    initial, of_steps = given.get(INITIAL), given.get(OF_STEPS)
    if of_steps is not None:
        of_steps = of_steps[len(of_steps) - len(schedule.timesteps) :, :, :, frames]
    others = {name: x for name, x in given.items() if name not in (INITIAL, OF_STEPS)}
    return Given(None if initial is None else initial[:, :, frames], of_steps, others or None)
