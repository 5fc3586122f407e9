# SPDX-License-Identifier: Apache-2.0
"""Traces of runs: the programs that a run calls, in order. Tracing loads no weights and computes nothing."""

from collections.abc import Sequence, Sized
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wanjax.execution import Trace
from wanjax.layers.tiling import Tiling
from wanjax.media.pictures import Pictures
from wanjax.pipelines.components import bytes_of
from wanjax.pipelines.memory import MIN_PROCESS_BYTES, check_memory, surely_fits
from wanjax.pipelines.model import Conditioning
from wanjax.pipelines.noise_inputs import VIDEO
from wanjax.pipelines.request import PreparedRequest
from wanjax.pipelines.run import LoadedPipeline, Run
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.tokenizer import TokenBatch
from wanjax.pricing.live_bytes import min_live_bytes


def trace_programs(
    pipe: LoadedPipeline,
    settings: Settings,
    pictures: Pictures | None = None,
    *,
    tiling: Tiling | None = None,
    batch_guidance: bool = False,
    memory: int | None = None,
) -> Trace:
    """Trace a run that makes a video: encode, denoise and decode.

    Args:
        pipe: The pipeline.
        settings: The settings of the video.
        pictures: The images and clips of the video.
        tiling: The tiling for encoding and decoding.
        batch_guidance: Whether both prompts run in one forward pass.
        memory: The memory of a device in bytes, as in `Components.abstract`. None means that memory never runs out.

    Returns:
        The trace. Each entry also has the bytes of the loaded networks that are not arguments of its program.
    """
    trace, traced_pipe = _traced(pipe, memory)
    for _, frames in Run(
        traced_pipe, [PreparedRequest(settings)], pictures, tiling=tiling, batch_guidance=batch_guidance
    ):
        for _ in frames:
            pass
    return trace


def _traced(pipe: LoadedPipeline, memory: int | None = None) -> tuple[Trace, LoadedPipeline]:
    """Return an empty trace, and a pipeline that records its calls in the trace."""
    components = pipe.runtime.components.abstract(memory)

    @cache
    def weight_bytes(network: nnx.Module) -> tuple[int, int]:
        return id(jax.tree.leaves(network)[0]), bytes_of(network)

    def resident_bytes(arguments: object) -> int:
        """Count the bytes of the loaded networks that are not arguments of a call."""
        argument_ids = {id(x) for x in jax.tree.leaves(arguments)}
        return sum(size for weight, size in map(weight_bytes, components.networks()) if weight not in argument_ids)

    trace = Trace(resident_bytes)
    return trace, pipe.with_strategy(trace, components)


def check_run_memory(
    pipe: LoadedPipeline,
    settings: Settings,
    pictures: Pictures | None = None,
    *,
    tiling: Tiling | None = None,
    batch_guidance: bool = False,
) -> None:
    """Before compiling anything, raise WanjaxError if the programs of a video need more than this machine's memory.

    Decoding is checked first, because its check downloads nothing. The other checks may download configs, which the run
    needs anyway. The arguments are those of `trace_programs`.
    """
    if _is_small(pipe, settings.size, settings.frames):
        return
    window_settings = replace(settings, windows=1, then="")  # all windows need the same memory
    check_decode_memory(pipe, pipe.model.spec.latent_shape(window_settings), tiling=tiling)
    pictures = pictures or needed_pictures(pipe, window_settings)
    trace = trace_programs(pipe, window_settings, pictures, tiling=tiling, batch_guidance=batch_guidance, memory=0)
    _check_peak(window_settings, trace)


def check_encode_memory(
    pipe: LoadedPipeline, settings: Settings, pictures: Pictures, *, tiling: Tiling | None = None
) -> None:
    """Raise WanjaxError if encoding images and clips needs more than this machine's memory.

    The arguments are those of `trace_programs`.
    """
    if pictures and not _is_small(pipe, settings.size, settings.frames):
        trace, traced_pipe = _traced(pipe, memory=0)
        Run(traced_pipe, [PreparedRequest(settings)], pictures, tiling=tiling).encode()
        _check_peak(settings, trace)


def check_denoise_memory(
    pipe: LoadedPipeline,
    conditioning: Conditioning,
    settings: Settings,
    *,
    num_videos: int = 1,
    batch_guidance: bool = False,
) -> None:
    """Raise WanjaxError if the steps of a video need more than this machine's memory.

    Args:
        pipe: The pipeline.
        conditioning: The output of `encode`.
        settings: The settings of the video.
        num_videos: The number of videos in the batch.
        batch_guidance: As in `Pipeline.denoise`.
    """
    if not _is_small(pipe, settings.size, settings.frames * num_videos):
        trace, traced_pipe = _traced(pipe, memory=0)
        run = Run(traced_pipe, [PreparedRequest(settings)], batch_guidance=batch_guidance)
        for _ in run.latents(conditioning, settings, [0] * num_videos):
            pass
        _check_peak(settings, trace)


def check_decode_memory(pipe: LoadedPipeline, shape: Sequence[int], *, tiling: Tiling | None = None) -> None:
    """Raise WanjaxError if decoding needs more than this machine's memory.

    Args:
        pipe: The pipeline.
        shape: The shape of the video's latents, [1 C T H W].
        tiling: As in `Pipeline.decode`.
    """
    vae = pipe.model.vae
    height, width = (vae.spatial_factor * size for size in shape[3:])
    frames = 1 + (shape[2] - 1) * vae.temporal_factor
    if _is_small(pipe, (height, width), frames):
        return
    spec, settings = pipe.model.spec, replace(pipe.defaults, height=height, width=width, frames=frames)

    def abstract(shape: Sequence[int]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), jnp.float32, sharding=pipe.runtime.partitioner.replicated)

    trace, traced_pipe = _traced(pipe, memory=0)
    latents = abstract(shape if not spec.chunk_frames else (*shape[:2], spec.chunk_frames, *shape[3:]))
    modalities = {name: abstract(modality_shape) for name, modality_shape in spec.modality_shapes(settings).items()}
    for _ in Run(traced_pipe, [], tiling=tiling).frames([{VIDEO: latents, **modalities} if modalities else latents]):
        pass
    _check_peak(settings, trace)


def _is_small(pipe: LoadedPipeline, size: tuple[int, int], frames: int) -> bool:
    """Return True if no check is needed: the video certainly fits, or the run is only traced."""
    sizes = pipe.runtime.components.sizes
    return not (pipe.runtime.strategy.executes and sizes) or surely_fits(size, frames, max(sizes.values()))


def peak_bytes(trace: Trace) -> tuple[int, str]:
    """Return a lower bound of a traced run's peak bytes, and the stage of that peak.

    The bytes are the sum of the bytes of a program, of the other loaded networks, and of the process. In a run that was
    traced with a `memory` of 0, each network is freed as soon as another network is needed.
    """
    program_bytes = [
        (min_live_bytes(entry.traced_program.abstract_call) + entry.resident_bytes, entry.stage)
        for entry in trace.programs
    ]
    peak, stage = max(program_bytes, default=(0, ""))
    return peak + MIN_PROCESS_BYTES, stage


def _check_peak(settings: Settings, trace: Trace) -> None:
    check_memory(settings, *peak_bytes(trace))


def needed_pictures(pipe: LoadedPipeline, settings: Settings) -> Pictures:
    """Create blank images and clips in the video's size for all inputs that the model requires."""
    image = np.zeros((*settings.size, 3), np.uint8)
    clip = np.broadcast_to(image, (settings.length, *image.shape))
    blank = {"image": image, "images": (image,), "clip": clip, "mask": clip}
    return Pictures(**{spec.name: blank[spec.kind] for spec in pipe.model.spec.inputs if spec.required})


class PlaceholderTokenizer:
    """A tokenizer for plans, which load no tokenizer.

    Every prompt gets the same length and number of real tokens.
    """

    pad_id = 0

    def __init__(self, length: int, tokens: int):
        self.length, self.tokens, self.backend = length, tokens, self

    def tokenize(self, texts: Sequence[str], length: int | None = None) -> TokenBatch:
        """Return a row of zeros as the tokens of each text."""
        shape = len(texts), length or self.length
        mask = np.broadcast_to(np.arange(shape[1]) < self.tokens, shape)
        return TokenBatch(np.zeros(shape, np.int32), mask, (None,) * len(texts))

    def encode(self, text: str) -> Any:
        """Return an encoding without tokens, as a placeholder for the encoding of the tokenizer's backend."""
        return type("Encoding", (), {"ids": ()})


class PlaceholderImageProcessor:
    """An image processor for plans, which returns blank images of the encoder's size."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, images: Sized, **options: object) -> np.ndarray:
        return np.zeros((len(images), self.size, self.size, 3), np.float32)
