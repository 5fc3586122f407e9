# SPDX-License-Identifier: Apache-2.0
"""A run: encode, denoise and decode, for one or many videos, from the command, the library or the server.

    for request, frames in Run(pipe, requests, pictures, observers=[ProgressObserver(None), ResumeObserver(file)]):
        write(request, frames)

The strategy decides what happens to programs: an executed run makes videos, and a traced run only records the same
calls. Observers handle everything else: progress, saving, previews, stopping. A video that is denoised chunk by chunk
is a run of several chunks, each using the memory of earlier ones; its frames are yielded as they are ready. A video of
several windows goes through the three stages once per window.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from wanjax.errors import WanjaxError
from wanjax.execution import Strategy, refuse_traced
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Clip, Pictures
from wanjax.pipelines.caching.rules import check_apart
from wanjax.pipelines.components import Components
from wanjax.pipelines.denoiser import join, stream_of
from wanjax.pipelines.frames import AnyLatents, Call, Decoded, Frames, chunk_count
from wanjax.pipelines.model import Conditioning, Field, VideoModel
from wanjax.pipelines.noise_inputs import NoiseInput
from wanjax.pipelines.observers import Observer, Observers, not_finite_advice
from wanjax.pipelines.previews.latent_preview import LatentPreview
from wanjax.pipelines.request import PreparedRequest
from wanjax.pipelines.runtime import Runtime
from wanjax.pipelines.sampling import sample
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.video_shape import with_shape
from wanjax.pipelines.windows import fade_seam, pictures_of, windows_of
from wanjax.sharding import Partitioner


@runtime_checkable
class Loaded(Protocol):
    """A loaded checkpoint, as a run needs it: a `Pipeline`, whose module imports this one."""

    @property
    def runtime(self) -> Runtime: ...

    model: VideoModel[Any]
    defaults: Settings

    def latent_preview(self) -> LatentPreview: ...

    def under(self, strategy: Strategy, components: Components | None = None) -> "Loaded": ...


class Run:
    """Makes videos that differ only in prompt and seed.

    Args:
        pipe: The pipeline.
        requests: The videos.
        pictures: Their images and clips.
        noise: Random arrays that replace the seed's, for one video.
        tiling: The tiling for encoding and decoding.
        batch_guidance: Whether both prompts run in one forward. Raises WanjaxError with a guidance cache.
        observers: They are notified of every event.
    """

    def __init__(
        self,
        pipe: Loaded,
        requests: Sequence[PreparedRequest],
        pictures: Pictures | None = None,
        *,
        noise: NoiseInput | None = None,
        tiling: Tiling | None = None,
        batch_guidance: bool = False,
        observers: Sequence[Observer] = (),
    ):
        self.pipe, self.requests, self.pictures = pipe, requests, pictures or Pictures()
        self.runtime, self.model, self.observers = pipe.runtime, pipe.model, Observers(observers)
        self.noise, self.tiling, self.batch_guidance = noise, tiling, batch_guidance
        for request in requests:
            check_apart(request.settings.cache, batch_guidance)

    def __iter__(self) -> Iterator[tuple[PreparedRequest, Iterator[Frames | Clip]]]:
        """Yield each request with an iterator over its video's chunks of frames, which must be exhausted."""
        if not self.requests:
            return
        settings = self.requests[0].settings
        if settings.windows > 1:
            texts: dict[str, Conditioning] = {}
            for request in self.requests:
                yield request, self._windows(request.settings, texts)
            return
        conditioning = self.encode()
        size = batch_size(self.runtime.partitioner, settings.guided) if len(self.requests) > 1 else 1
        for batch, count in batches(self.requests, size):
            inputs = join_conditionings([conditioning[request.settings.prompt] for request in batch], self.runtime.call)
            latent_chunks: Iterable[AnyLatents] = self.latents(
                inputs, settings, [request.settings.seed for request in batch]
            )
            if count > 1 or not self.model.spec.streams:
                with self.stage("denoise"):
                    latent_chunks = list(latent_chunks)
            for video, request in enumerate(batch[:count]):
                yield (
                    request,
                    self.frames(latent_chunks, video=video, last=video + 1 == count, seed=request.settings.seed),
                )

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Run a stage in the contexts of all observers.

        Args:
            name: The name of the stage.
        """
        return self.observers.stage(name)

    def count(self, unit: str, done: int, total: int) -> None:
        """Report to all observers how far a stage is.

        Args:
            unit: The name of the unit, such as "step".
            done: The number of completed units.
            total: The number of all units.
        """
        self.observers.notify("count", unit, done, total)

    def encode(self) -> dict[str, Conditioning]:
        """Encode each prompt once, and the shared images and clips; return the outputs by prompt."""
        with self.stage("encode"), self.runtime.strategy.stage("encode"):
            texts = self._encode_texts()
            picture_fields = self._encode_pictures(self.pictures, self.requests[0].settings)
        conditioning = {prompt: text._replace(**picture_fields) for prompt, text in texts.items()}
        for one in conditioning.values():
            self.observers.notify("encoded", one)
        return conditioning

    def _encode_texts(self) -> dict[str, Conditioning]:
        """Encode each prompt once, without images; return the outputs by prompt."""
        windows = [window for request in self.requests for window in windows_of(request.settings)]
        prompts = {window_settings.prompt: window_settings for _, _, window_settings in windows}
        texts = {
            prompt: self.model.encode_text(self.runtime, window_settings) for prompt, window_settings in prompts.items()
        }
        return self.runtime.components.finish_stage(texts)

    def _encode_pictures(self, pictures: Pictures, settings: Settings) -> Mapping[str, Field | None]:
        """Encode images and clips; return fields of the encode stage's output."""
        picture_fields = self.model.encode_inputs(self.runtime, pictures, settings, tiling=self.tiling)
        picture_fields = with_shape(picture_fields, self.model.conditioning_type, pictures, settings)
        return self.runtime.components.finish_stage(picture_fields)

    def _windows(self, settings: Settings, texts: dict[str, Conditioning]) -> Iterator[Clip]:
        """Yield the frames of each window of a video; the first window also encodes `texts`."""
        strategy, before = self.runtime.strategy, None
        for window in windows_of(settings):
            self.observers.notify("window", window)
            window_settings = window.settings
            pictures = pictures_of(window, self.pictures, before, self.model.spec.continued_by)
            with self.stage("encode"), strategy.stage("encode"):
                texts.update({} if texts else self._encode_texts())
                conditioning = texts[window_settings.prompt]._replace(
                    **self._encode_pictures(pictures, window_settings)
                )
            with self.stage("denoise"):
                latent_chunks = list(self.latents(conditioning, window_settings, [window_settings.seed]))
            with self.stage("decode"):
                chunks = self.frames(latent_chunks, seed=window_settings.seed)
                chunks = [strategy.read(x, np.zeros(x.shape, np.uint8)) for x in chunks]
            frames = np.concatenate(chunks)
            if before is not None:
                frames = np.concatenate([before, fade_seam(before, frames[len(before) :])])
            yield frames[0 if before is None else len(before) :]
            before = frames[-window_settings.overlap :]

    def decode_stage(self, request: PreparedRequest) -> AbstractContextManager[None]:
        """Run the consumer of a video's frames in the decode stage; windows open their own stages.

        Args:
            request: The video.
        """
        return nullcontext() if request.settings.windows > 1 else self.stage("decode")

    def latents(self, conditioning: Conditioning, settings: Settings, seeds: Sequence[int]) -> Iterator[AnyLatents]:
        """Yield the latents of a batch of videos, one per seed, each chunk as soon as it is denoised.

        Args:
            conditioning: The output of `encode`.
            settings: The settings of the video.
            seeds: The seed of each video.
        """
        return sample(
            self.runtime,
            self.model,
            conditioning,
            settings,
            seeds,
            noise=self.noise,
            batch_guidance=self.batch_guidance,
            observers=self.observers,
            latent_preview=self.pipe.latent_preview,
        )

    def frames(
        self,
        latent_chunks: Iterable[AnyLatents],
        dtype: DTypeLike = jnp.uint8,
        *,
        video: int = 0,
        last: bool = True,
        seed: int | None = None,
    ) -> Iterator[Frames]:
        """Yield the frames of each chunk of a video. Only that chunk and the next are in memory.

        The device decodes the next chunk while the caller has the current one. Observers receive what is decoded along
        with the frames (`Observer.decoded`). Raises WanjaxError if latents are not finite.

        Args:
            latent_chunks: The latents of consecutive frames, [B C T H W] or streams.
            dtype: The type of the frames: uint8, or a float type for [0, 1].
            video: The index of the video in its batch.
            last: Whether it is the last of its batch to be decoded.
            seed: The seed; None is that of the first request.
        """
        runtime, spec, total = self.runtime, self.model.spec, None
        if seed is None:
            seed = (self.requests[0].settings if self.requests else self.pipe.defaults).seed
        if runtime.strategy.executes:
            finite = (_finite(x, self.pipe.defaults.dtype) for x in latent_chunks)
            latent_chunks = list(finite) if isinstance(latent_chunks, Sequence) else finite
        tiling = self.tiling and self.tiling.completed(spec.vae.tiling, spec.vae.spatial_factor)
        if isinstance(latent_chunks, Sequence):
            lengths = [stream_of(x).shape[2] for x in latent_chunks]
            if runtime.components.decoder == "vae":
                spec.check_length(1 + (sum(lengths) - 1) * spec.vae.temporal_factor, self.pipe.defaults.model)
            total = sum(chunk_count(length, spec.decode_lengths(length)) for length in lengths)
            self.observers.notify("count", "chunk", 0, total)
        chunks = self._decoded(
            self.model.decode(runtime, latent_chunks, seed=seed, dtype=dtype, tiling=tiling, video=video)
        )
        for done, chunk in enumerate(chunks if total is None else _one_ahead(chunks), 1):
            yield chunk
            if total is not None:
                self.observers.notify("count", "chunk", done, total)
        if last:
            runtime.components.finish_stage(())

    def _decoded(self, chunks: Iterator[Decoded]) -> Iterator[Frames]:
        """Yield the frames of chunks, and pass their other arrays to the observers."""
        while True:
            with self.runtime.strategy.stage("decode"):
                chunk = next(chunks, None)
            if chunk is None:
                return
            if chunk.extras:
                self.observers.notify("decoded", chunk.extras)
            yield chunk.frames


def _finite(latents: AnyLatents, dtype: str) -> AnyLatents:
    """Return latents; raise WanjaxError if any is not finite, with advice for the dtype of the networks."""
    for x in jax.tree.leaves(latents):
        refuse_traced(x)
        parts = [shard.data for shard in x.addressable_shards] if isinstance(x, jax.Array) else [x]
        if not all(np.isfinite(np.asarray(part)).all() for part in parts):
            advice = not_finite_advice(dtype)
            raise WanjaxError(f"the latents {list(x.shape)} are not finite: denoise again, and {advice}")
    return latents


def _one_ahead(chunks: Iterable[Frames]) -> Iterator[Frames]:
    """Yield each chunk once the next has started; its copy to the host starts as soon as it is decoded."""
    queue: deque[Frames] = deque()
    for chunk in chunks:
        if isinstance(chunk, jax.Array):
            chunk.copy_to_host_async()
        queue.append(chunk)
        if len(queue) > 1:
            yield queue.popleft()
    yield from queue


def batch_size(partitioner: Partitioner, guided: bool) -> int:
    """Return the number of videos to denoise at once: as many as the mesh's axis `dp` splits.

    Without `dp`, denoising one video after another needs less memory and, except for small models, no more time.

    Args:
        partitioner: The mesh.
        guided: Whether each step also runs the negative prompt.
    """
    dp = partitioner.size("dp")
    return max(1, dp // 2) if guided else dp


def batches(requests: Sequence[PreparedRequest], size: int) -> Iterator[tuple[Sequence[PreparedRequest], int]]:
    """Yield batches of equal size, each with the number of its requests; the last request is repeated to fill a batch.

    Args:
        requests: The videos.
        size: The number of videos in a batch.
    """
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        yield [*batch, *[batch[-1]] * (size - len(batch))], len(batch)


def join_conditionings(conditioning: Sequence[Any], call: Call) -> Any:
    """Concatenate outputs of `encode_text` along their first axis; host arrays stay on the host.

    Args:
        conditioning: The output of `encode_text` for each video.
        call: Calls a program.
    """
    if len(conditioning) == 1:
        return conditioning[0]
    columns = list(zip(*(jax.tree.leaves(one) for one in conditioning), strict=True))
    on_host = [all(isinstance(x, np.ndarray) for x in column) for column in columns]
    parts = tuple(zip(*(column for column, host in zip(columns, on_host, strict=True) if not host), strict=True))
    concatenated = iter(call(join, 0, parts)) if parts else iter(())
    leaves = [
        np.concatenate(column) if host else next(concatenated) for column, host in zip(columns, on_host, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(conditioning[0]), leaves)
