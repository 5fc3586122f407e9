# SPDX-License-Identifier: Apache-2.0
"""Traces of runs: the programs that a run calls, in order, without loading weights or computing anything."""

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
from wanjax.pipelines.memory import PROCESS, check_held, is_small
from wanjax.pipelines.model import Conditioning
from wanjax.pipelines.noise_inputs import VIDEO
from wanjax.pipelines.request import PreparedRequest
from wanjax.pipelines.run import Loaded, Run
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.text.tokenizer import TokenBatch
from wanjax.pricing.live_bytes import min_live_bytes


def trace_programs(
    pipe: Loaded,
    settings: Settings,
    pictures: Pictures | None = None,
    *,
    tiling: Tiling | None = None,
    batch_guidance: bool = False,
    room: int | None = None,
) -> Trace:
    """Trace a run that makes a video: encode, denoise and decode.

    The keywords are those of `Pipeline.videos`; `room` is the `memory` of `Components.abstract`. Each program's entry
    has the bytes of the loaded networks that are not among its arguments.
    """
    trace, traced_pipe = _traced(pipe, room)
    for _, frames in Run(
        traced_pipe, [PreparedRequest(settings)], pictures, tiling=tiling, batch_guidance=batch_guidance
    ):
        for _ in frames:
            pass
    return trace


def _traced(pipe: Loaded, room: int | None = None) -> tuple[Trace, Loaded]:
    """Return a trace, and a pipeline whose calls it records."""
    components = pipe.runtime.components.abstract(room)

    @cache
    def weight_bytes(network: nnx.Module) -> tuple[int, int]:
        return id(jax.tree.leaves(network)[0]), bytes_of(network)

    def resident_bytes(arguments: object) -> int:
        """Return the bytes of the networks that are loaded but not among the arguments of a call."""
        passed = {id(x) for x in jax.tree.leaves(arguments)}
        return sum(size for weight, size in map(weight_bytes, components.networks()) if weight not in passed)

    trace = Trace(resident_bytes)
    return trace, pipe.under(trace, components)


def check_making(
    pipe: Loaded,
    settings: Settings,
    pictures: Pictures | None = None,
    *,
    tiling: Tiling | None = None,
    batch_guidance: bool = False,
) -> None:
    """Raise WanjaxError if the programs of a video need more than this machine's memory, before any is compiled.

    Decoding is checked first, since that needs no download. The checks of the other stages download the configs that
    they need; the video needs them in any case. The arguments are those of `trace_programs`.
    """
    if _is_small(pipe, settings.size, settings.frames):
        return
    window_settings = replace(settings, windows=1, then="")  # all windows need the same memory
    check_decoding(pipe, pipe.model.spec.latent_shape(window_settings), tiling=tiling)
    pictures = pictures or needed_pictures(pipe, window_settings)
    _check(
        window_settings,
        trace_programs(pipe, window_settings, pictures, tiling=tiling, batch_guidance=batch_guidance, room=0),
    )


def check_encoding(pipe: Loaded, settings: Settings, pictures: Pictures, *, tiling: Tiling | None = None) -> None:
    """Raise WanjaxError if encoding images and clips needs more than this machine's memory.

    The arguments are those of `trace_programs`.
    """
    if pictures and not _is_small(pipe, settings.size, settings.frames):
        trace, traced_pipe = _traced(pipe, room=0)
        Run(traced_pipe, [PreparedRequest(settings)], pictures, tiling=tiling).encode()
        _check(settings, trace)


def check_denoising(
    pipe: Loaded, conditioning: Conditioning, settings: Settings, *, videos: int = 1, batch_guidance: bool = False
) -> None:
    """Raise WanjaxError if the steps of a video need more than this machine's memory.

    Args:
        pipe: The pipeline.
        conditioning: The output of `encode`.
        settings: The settings of the video.
        videos: The number of videos in the batch.
        batch_guidance: As in `Pipeline.denoise`.
    """
    if not _is_small(pipe, settings.size, settings.frames * videos):
        trace, traced_pipe = _traced(pipe, room=0)
        run = Run(traced_pipe, [PreparedRequest(settings)], batch_guidance=batch_guidance)
        for _ in run.latents(conditioning, settings, [0] * videos):
            pass
        _check(settings, trace)


def check_decoding(pipe: Loaded, shape: Sequence[int], *, tiling: Tiling | None = None) -> None:
    """Raise WanjaxError if decoding needs more than this machine's memory.

    Args:
        pipe: The pipeline.
        shape: The shape of the video's latents, [1 C T H W].
        tiling: As in `Pipeline.decode`.
    """
    vae = pipe.model.vae
    height, width = (vae.spatial_factor * cells for cells in shape[3:])
    frames = 1 + (shape[2] - 1) * vae.temporal_factor
    if _is_small(pipe, (height, width), frames):
        return
    spec, settings = pipe.model.spec, replace(pipe.defaults, height=height, width=width, frames=frames)

    def shaped(shape: Sequence[int]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), jnp.float32, sharding=pipe.runtime.partitioner.replicated)

    trace, traced_pipe = _traced(pipe, room=0)
    latents = shaped(shape if not spec.chunk_frames else (*shape[:2], spec.chunk_frames, *shape[3:]))
    others = {name: shaped(one) for name, one in spec.stream_shapes(settings).items()}
    for _ in Run(traced_pipe, [], tiling=tiling).frames([{VIDEO: latents, **others} if others else latents]):
        pass
    _check(settings, trace)


def _is_small(pipe: Loaded, size: tuple[int, int], frames: int) -> bool:
    """Return whether no check is needed: nothing is executed, or the video certainly fits."""
    sizes = pipe.runtime.components.sizes
    return not (pipe.runtime.strategy.executes and sizes) or is_small(size, frames, max(sizes.values()))


def peak_bytes(trace: Trace) -> tuple[int, str]:
    """Return the minimum bytes that a traced run needs at its peak, and the stage of the peak.

    They are those of a program, the networks loaded besides it, and the process. A run that was traced with a `room` of
    0 keeps no network that can be freed for another.
    """
    each = [(min_live_bytes(one.instance.lowering) + one.resident_bytes, one.stage) for one in trace.programs]
    held, stage = max(each, default=(0, ""))
    return held + PROCESS, stage


def _check(settings: Settings, trace: Trace) -> None:
    check_held(settings, *peak_bytes(trace))


def needed_pictures(pipe: Loaded, settings: Settings) -> Pictures:
    """Return blank images and clips in the video's size for all inputs that the model requires."""
    page = np.zeros((*settings.size, 3), np.uint8)
    blank = {"image": page, "images": (page,), "clip": (clip := np.stack([page] * settings.frames)), "mask": clip}
    return Pictures(**{one.name: blank[one.kind] for one in pipe.model.spec.inputs if one.required})


class NoTokenizer:
    """A tokenizer for plans, which have none: each prompt has a given length and number of real tokens."""

    pad_id = 0

    def __init__(self, length: int, tokens: int):
        self.length, self.tokens, self.backend = length, tokens, self

    def tokenize(self, texts: Sequence[str], length: int | None = None) -> TokenBatch:
        """Return tokens 0 for each text."""
        shape = len(texts), length or self.length
        mask = np.broadcast_to(np.arange(shape[1]) < self.tokens, shape)
        return TokenBatch(np.zeros(shape, np.int32), mask, (None,) * len(texts))

    def encode(self, text: str) -> Any:
        """Return no tokens, as the tokenizer's backend."""
        return type("Encoding", (), {"ids": ()})


class NoProcessor:
    """An image processor for plans: it returns blank images of the encoder's size."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, images: Sized, **how: object) -> np.ndarray:
        return np.zeros((len(images), self.size, self.size, 3), np.float32)
