# SPDX-License-Identifier: Apache-2.0
"""A run makes one or many videos: it encodes, denoises and decodes them.

The command line, the library and the server all use this module.

    for request, frames in Run(pipe, requests, pictures, observers=[ProgressObserver(None), ResumeObserver(file)]):
        write(request, frames)

The strategy decides what happens to programs. An executed run makes videos. A traced run makes the same calls, but only
records them. Observers handle everything else: progress, saving, previews, stopping. A causal model denoises a video
chunk by chunk, with keys and values of earlier chunks. The run yields the frames of each chunk as soon as they are
ready. A video of several windows goes through the three stages once per window.
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
from wanjax.execution import Strategy, reject_tracer
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Clip, Pictures
from wanjax.pipelines.caching.rules import check_separate_forwards
from wanjax.pipelines.components import Components
from wanjax.pipelines.denoiser import join, select_modality
from wanjax.pipelines.frames import AnyLatents, Call, Decoded, Frames, chunk_count
from wanjax.pipelines.model import Conditioning, Field, VideoModel
from wanjax.pipelines.noise_inputs import NoiseInput, noise_of_window
from wanjax.pipelines.observers import Observer, Observers, not_finite_advice
from wanjax.pipelines.previews.latent_preview import LatentPreview
from wanjax.pipelines.request import PreparedRequest
from wanjax.pipelines.runtime import Runtime
from wanjax.pipelines.sampling import sample
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.validation import check_flag
from wanjax.pipelines.video_shape import add_shape
from wanjax.pipelines.windows import Seam, windows_of
from wanjax.sharding import Partitioner


@runtime_checkable
class LoadedPipeline(Protocol):
    """The part of `Pipeline` that a run needs. This module cannot import `Pipeline`, which imports this module."""

    @property
    def runtime(self) -> Runtime: ...

    @property
    def model_name(self) -> str: ...

    model: VideoModel[Any]
    defaults: Settings

    def latent_preview(self) -> LatentPreview: ...

    def with_strategy(self, strategy: Strategy, components: Components | None = None) -> "LoadedPipeline": ...


class Run:
    """A run, which makes videos that differ only in prompt and seed.

    Args:
        pipe: The pipeline.
        requests: The requests for the videos.
        pictures: The images and clips of the videos.
        noise: Random arrays to use instead of the seed's, for one video.
        tiling: The tiling for encoding and decoding.
        batch_guidance: Whether both prompts run in one forward pass. A guidance cache does not support this.
        observers: The observers, which are notified of every event.
    """

    def __init__(
        self,
        pipe: LoadedPipeline,
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
        check_flag(batch_guidance, "batch_guidance")
        for request in requests:
            check_separate_forwards(request.settings.cache, batch_guidance=batch_guidance)

    def __iter__(self) -> Iterator[tuple[PreparedRequest, Iterator[Frames | Clip]]]:
        """Yield each request with an iterator over the frames of its video, in chunks. The caller must exhaust this
        iterator."""
        if not self.requests:
            return
        settings = self.requests[0].settings
        if self.model.spec.in_windows(settings):
            text_conditioning: dict[str, Conditioning] = {}
            for request in self.requests:
                yield request, self._window_frames(request.settings, text_conditioning)
            return
        conditioning = self.encode()
        size = batch_size(self.runtime.partitioner, settings.guided) if len(self.requests) > 1 else 1
        for batch, count in batches(self.requests, size):
            inputs = join_conditionings([conditioning[request.settings.prompt] for request in batch], self.runtime.call)
            latent_chunks: Iterable[AnyLatents] = self.latents(
                inputs, settings, [request.settings.seed for request in batch]
            )
            if count > 1 or not self.model.spec.is_chunked:
                with self.stage("denoise"):
                    latent_chunks = list(latent_chunks)
            for video, request in enumerate(batch[:count]):
                is_last = video + 1 == count
                yield request, self.frames(latent_chunks, video=video, is_last=is_last, seed=request.settings.seed)

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Run a stage in the contexts of all observers.

        Args:
            name: The name of the stage.
        """
        return self.observers.stage(name)

    def report_progress(self, unit: str, done: int, total: int) -> None:
        """Report the progress of a stage to all observers.

        Args:
            unit: The name of the unit, such as "step".
            done: The number of completed units.
            total: The number of all units.
        """
        self.observers.notify("progressed", unit, done, total)

    def encode(self) -> dict[str, Conditioning]:
        """Encode each prompt once, and the shared images and clips; return the conditioning of each prompt."""
        with self.stage("encode"):
            with self.runtime.strategy.stage("encode"):
                text_conditioning = self._encode_texts()
                settings, spec = self.requests[0].settings, self.model.spec
                window = spec.windowing.windows(settings, self.pictures)[0]
                pictures = spec.windowing.pictures(window, settings, self.pictures, None, spec.continuation_input)
                picture_conditioning = self._encode_pictures(pictures, window.settings)
            conditioning = {prompt: text._replace(**picture_conditioning) for prompt, text in text_conditioning.items()}
            for prompt_conditioning in conditioning.values():
                self.observers.notify("encoded", prompt_conditioning)
        return conditioning

    def _encode_texts(self) -> dict[str, Conditioning]:
        """Encode each prompt once, without images; return the conditioning of each prompt."""
        windows = [window for request in self.requests for window in windows_of(request.settings)]
        prompts = {window_settings.prompt: window_settings for _, _, window_settings in windows}
        text_conditioning = {
            prompt: self.model.encode_text(self.runtime, window_settings) for prompt, window_settings in prompts.items()
        }
        return self.runtime.components.finish_stage(text_conditioning)

    def _encode_pictures(self, pictures: Pictures, settings: Settings) -> Mapping[str, Field | None]:
        """Encode images and clips; return the fields of the conditioning that belong to them."""
        picture_conditioning = self.model.encode_inputs(self.runtime, pictures, settings, tiling=self.tiling)
        picture_conditioning = add_shape(picture_conditioning, self.model.conditioning_type, pictures, settings)
        return self.runtime.components.finish_stage(picture_conditioning)

    def _window_frames(self, settings: Settings, text_conditioning: dict[str, Conditioning]) -> Iterator[Clip]:
        """Yield the new frames of each window of a video. The first window encodes the prompts of all windows."""
        strategy, spec, previous_frames = self.runtime.strategy, self.model.spec, None
        for window in spec.windowing.windows(settings, self.pictures):
            self.observers.notify("window", window)
            window_settings = window.settings
            pictures = spec.windowing.pictures(
                window, settings, self.pictures, previous_frames, spec.continuation_input
            )
            with self.stage("encode"), strategy.stage("encode"):
                text_conditioning.update({} if text_conditioning else self._encode_texts())
                conditioning = text_conditioning[window_settings.prompt]._replace(
                    **self._encode_pictures(pictures, window_settings)
                )
            with self.stage("denoise"):
                noise = self.noise if window.count == 1 else noise_of_window(self.noise, window.index)
                latent_chunks = list(self.latents(conditioning, window_settings, [window_settings.seed], noise))
            with self.stage("decode"):
                chunks = self.frames(latent_chunks, spec.windowing.dtype, seed=window_settings.seed)
                chunks = [strategy.to_host(x, np.zeros(x.shape, x.dtype)) for x in chunks]
            frames = np.concatenate(chunks)
            frames, previous_frames, drift = spec.windowing.finish(
                window, settings, self.pictures, frames, previous_frames
            )
            if drift is not None:
                self.observers.notify("joined", Seam(window.index, drift))
            yield frames

    def decode_stage(self, request: PreparedRequest) -> AbstractContextManager[None]:
        """Return the context manager of the decode stage, in which the caller uses a video's frames.

        For a video of several windows it does nothing, because each window opens its own stages.

        Args:
            request: The request for the video.
        """
        return nullcontext() if self.model.spec.in_windows(request.settings) else self.stage("decode")

    def latents(
        self,
        conditioning: Conditioning,
        settings: Settings,
        seeds: Sequence[int],
        noise: NoiseInput | None = None,
    ) -> Iterator[AnyLatents]:
        """Yield the latents of a batch of videos, one per seed, each chunk as soon as it is denoised.

        Args:
            conditioning: The output of `encode`.
            settings: The settings of the video.
            seeds: The seed of each video.
            noise: Random arrays to use instead of the seed's; None uses the `noise` of the run.
        """
        return sample(
            self.runtime,
            self.model,
            conditioning,
            settings,
            seeds,
            noise=self.noise if noise is None else noise,
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
        is_last: bool = True,
        seed: int | None = None,
    ) -> Iterator[Frames]:
        """Yield the frames of each chunk of a video. Only the yielded chunk and the next chunk are in memory.

        The device decodes the next chunk while the caller uses the current one. Observers receive the decoded arrays
        that are not frames, such as sound (`Observer.decoded`).

        Args:
            latent_chunks: The latents of consecutive frames, [B C T H W], or a mapping by modality.
            dtype: The type of the frames: uint8, or a float type for [0, 1].
            video: The index of the video in its batch.
            is_last: Whether this is the last video of the batch to be decoded.
            seed: The seed of noise that the decoder adds; None is the seed of the first request.

        Raises:
            WanjaxError: Latents are not finite.
        """
        runtime, spec, total = self.runtime, self.model.spec, None
        if seed is None:
            seed = (self.requests[0].settings if self.requests else self.pipe.defaults).seed
        if runtime.strategy.executes:
            checked_chunks = (_checked_latents(x, self.pipe.defaults.dtype) for x in latent_chunks)
            latent_chunks = list(checked_chunks) if isinstance(latent_chunks, Sequence) else checked_chunks
        tiling = self.tiling and self.tiling.with_defaults(spec.vae.tiling, spec.vae.spatial_factor)
        if isinstance(latent_chunks, Sequence):
            lengths = [select_modality(x).shape[2] for x in latent_chunks]
            if runtime.components.decoder == "vae":
                spec.check_length(1 + (sum(lengths) - 1) * spec.vae.temporal_factor, self.pipe.model_name)
            total = sum(chunk_count(length, spec.decode_lengths(length)) for length in lengths)
            self.observers.notify("progressed", "chunk", 0, total)
        chunks = self._chunk_frames(
            self.model.decode(runtime, latent_chunks, seed=seed, dtype=dtype, tiling=tiling, video=video)
        )
        for done, chunk in enumerate(chunks if total is None else _prefetch(chunks), 1):
            yield chunk
            if total is not None:
                self.observers.notify("progressed", "chunk", done, total)
        if is_last:
            runtime.components.finish_stage(())

    def _chunk_frames(self, chunks: Iterator[Decoded]) -> Iterator[Frames]:
        """Yield the frames of decoded chunks, and notify the observers of other decoded arrays."""
        while True:
            with self.runtime.strategy.stage("decode"):
                chunk = next(chunks, None)
            if chunk is None:
                return
            if chunk.extras:
                self.observers.notify("decoded", chunk.extras)
            yield chunk.frames


def _checked_latents(latents: AnyLatents, dtype: str) -> AnyLatents:
    """Return latents unchanged; raise WanjaxError with advice for the networks' dtype if a value is not finite."""
    for x in jax.tree.leaves(latents):
        reject_tracer(x)
        shards = [shard.data for shard in x.addressable_shards] if isinstance(x, jax.Array) else [x]
        if not all(np.isfinite(np.asarray(shard)).all() for shard in shards):
            advice = not_finite_advice(dtype)
            raise WanjaxError(f"the latents {list(x.shape)} are not finite: denoise again, and {advice}")
    return latents


def _prefetch(chunks: Iterable[Frames]) -> Iterator[Frames]:
    """Start to decode the next chunk before a chunk is yielded. Copies to the host start at once."""
    queue: deque[Frames] = deque()
    for chunk in chunks:
        if isinstance(chunk, jax.Array):
            chunk.copy_to_host_async()
        queue.append(chunk)
        if len(queue) > 1:
            yield queue.popleft()
    yield from queue


def batch_size(partitioner: Partitioner, guided: bool) -> int:
    """Return the number of videos to denoise at once, which the mesh's axis `dp` determines.

    Without `dp` it is one video, because larger batches need more memory and only save time for small models.

    Args:
        partitioner: The mesh.
        guided: Whether each step also runs the negative prompt.
    """
    dp = partitioner.axis_size("dp")
    return max(1, dp // 2) if guided else dp


def batches(requests: Sequence[PreparedRequest], size: int) -> Iterator[tuple[Sequence[PreparedRequest], int]]:
    """Yield batches of equal size, each with its number of real requests.

    Copies of the last request fill the last batch.

    Args:
        requests: The requests for the videos.
        size: The number of videos in a batch.
    """
    for start in range(0, len(requests), size):
        batch = requests[start : start + size]
        yield [*batch, *[batch[-1]] * (size - len(batch))], len(batch)


def join_conditionings(conditioning: Sequence[Any], call: Call) -> Any:
    """Concatenate the conditioning of several videos along the first axis; host arrays stay on the host.

    Args:
        conditioning: The conditioning of each video.
        call: A function that calls a program.
    """
    if len(conditioning) == 1:
        return conditioning[0]
    fields = list(zip(*(jax.tree.leaves(x) for x in conditioning), strict=True))  # the arrays of all videos, by field
    on_host = [all(isinstance(x, np.ndarray) for x in arrays) for arrays in fields]
    device_arrays = tuple(
        zip(*(arrays for arrays, is_host in zip(fields, on_host, strict=True) if not is_host), strict=True)
    )
    concatenated = iter(call(join, 0, device_arrays)) if device_arrays else iter(())
    leaves = [
        np.concatenate(arrays) if is_host else next(concatenated)
        for arrays, is_host in zip(fields, on_host, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(conditioning[0]), leaves)
