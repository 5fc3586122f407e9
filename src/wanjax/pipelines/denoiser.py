# SPDX-License-Identifier: Apache-2.0
"""The compiled parts of denoising: the initial state, a step, and the final latents.

    for each step t of the schedule:
        p₊, p₋ = predict(x, t) under the prompt and under the negative prompt
        p = p₋ + scale · (p₊ - p₋)                           # Ho and Salimans, Classifier-Free Guidance, 2022
                                                             # or another rule of `guidance`
        x = the scheduler's step from t along p

A family implements `Denoiser`; a step cache decides which of the network's blocks a prediction runs. `sampling` has the
loop.

x is one array, the video's latents, or a mapping of modalities that are denoised together. In the mapping, the video
has the name `VIDEO`. The network sees all modalities. Guidance and the scheduler treat each modality separately.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from wanjax.execution import ArrayOrShape, program
from wanjax.kernels.autodiff import forward_only
from wanjax.kernels.compiler_options import fast_matmul_options, matmul_options, random_options, scan_options
from wanjax.layers.stack import NO_BLOCK_CACHE, BlockCache, SkippedBlocks
from wanjax.pipelines.caching.step_cache import NO_CACHE, CachedArrays, StepCache, in_float32
from wanjax.pipelines.guidance import Groups, GuidanceRule, Latents
from wanjax.pipelines.noise_inputs import VIDEO
from wanjax.pipelines.seeds import KeyData, draw_noise, key_numbers, noise_of_frames, solver_keys
from wanjax.schedulers import Scheduler
from wanjax.schedulers.base import Schedule
from wanjax.sharding import replicate

LatentArray = Float[ArrayOrShape, "B T H W C"]  # latents as an argument or a result of a program
LatentTree = (
    Float[ArrayOrShape, "B ..."] | Mapping[str, Float[ArrayOrShape, "B ..."]]
)  # latents, or arrays of the same shapes
Noise = Float[ArrayOrShape | np.ndarray, "..."]
NoiseArrays = Noise | Mapping[str, Noise | None]  # one array, or arrays by modality
Tree = TypeVar("Tree")  # a tree of arrays


def select_modality(latents: Any, name: str = VIDEO) -> Any:
    """Return the latents, or other values, of one modality. A single array is the video.

    Args:
        latents: An array, or arrays by modality.
        name: The name of the modality.
    """
    return latents.get(name) if isinstance(latents, Mapping) else latents


def per_modality(function: Callable[..., tuple[object, ...]], x: object, *trees: object) -> tuple[Any, ...]:
    """Call a function for each modality of x and the same modality of `trees`; return each of its results by modality.

    Args:
        function: Called with the arrays of one modality.
        x: An array, or arrays by modality.
        trees: More trees with the modalities of x, or values that all modalities share.
    """
    tree = jax.tree.structure(x)
    results = [function(*arguments) for arguments in zip(*map(tree.flatten_up_to, (x, *trees)), strict=True)]
    return tuple(map(tree.unflatten, zip(*results, strict=True)))


@dataclass(frozen=True)
class Denoiser(ABC):
    """The methods of a family that are traced into a compiled step. A hashable value."""

    @abstractmethod
    def predict(
        self,
        network: Any,
        x: Any,
        t: Any,
        prompt: Any,
        shared: Any,
        blocks: BlockCache = NO_BLOCK_CACHE,
        dense: bool | None = None,
    ) -> Any:
        """Return the network's prediction [B T H W _C], or a mapping of predictions if there are several modalities.

        Args:
            network: The network, merged.
            x: The latents [B T H W C], or a mapping by modality.
            t: A tree of timesteps [B], as returned by `timesteps`.
            prompt: The context of the prompts, as returned by `VideoModel.prepare`.
            shared: The inputs that all prompts share.
            blocks: Decides which blocks of the network run, and what is cached between them.
            dense: False for radial self-attention.
        """

    @abstractmethod
    def embed_timesteps(self, network: Any, times: Any, unprojected: bool = False) -> Float[Array, "B _E"]:
        """Return the embedding of timesteps, as the blocks receive it.

        Args:
            network: The network.
            times: The output of `timesteps` for several steps.
            unprojected: Whether to return the embedding before its projection for the blocks.
        """

    def timesteps(self, schedule: Schedule) -> object:
        """Return the timestep of a schedule of one step, or a tree if the network needs several timesteps.

        Args:
            schedule: A schedule of one step.
        """
        return schedule.timesteps[0]

    def finalize(self, x: LatentTree, conditioning: Mapping[str, ArrayOrShape]) -> LatentTree:
        """Compute the final latents of the video from the latents after the last step.

        Args:
            x: The latents after the last step, [B T H W C], or a mapping by modality.
            conditioning: Encoded images by name.
        """
        return x


class Preparation(NamedTuple):
    """The inputs of `VideoModel.prepare`, which runs once before the steps of a network.

    Args:
        groups: The number of forward passes in a step, and of prompts in each.
        nag: The scale, tau and alpha of normalized attention guidance; None without it.
        chunk: The number of the chunk, if the video is denoised chunk by chunk.
        past: The result of `VideoModel.update_past` after the previous chunk.
    """

    groups: Groups
    nag: np.ndarray | None = None
    chunk: int = 0
    past: object = None


class StepProgram(NamedTuple):
    """The static inputs of a step. Each value is compiled separately.

    A step that reuses cached values is a separate program.

    Args:
        denoiser: The traced part of the model.
        graphdef: The network's definition.
        scheduler: The solver.
        cache: The step cache.
        guidance: The guidance rule.
        dense: Whether the step uses full self-attention in a model whose other steps use sparse attention. None if no
            step is sparse.
        skipped: The blocks that a further prediction for the prompt skips. Empty if there is no further prediction.
    """

    denoiser: Denoiser
    graphdef: nnx.GraphDef[Any]
    scheduler: Scheduler
    cache: StepCache = NO_CACHE
    guidance: type[GuidanceRule] = GuidanceRule
    dense: bool | None = None
    skipped: tuple[int, ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelInputs:
    """The inputs that are the same in every step.

    Args:
        weights: The network's weights.
        prompts: The context of each forward pass of a step; the prompts of all videos precede the negative prompts.
        shared: The inputs that all prompts share.
        batch: The number of prompts in each forward pass.
    """

    weights: Any
    prompts: tuple[Any, ...]
    shared: Any
    batch: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The values that each step updates.

    Args:
        x: The latents, [B T H W C], or a mapping by modality.
        solver: The scheduler's state.
        cached: The values that each forward pass cached; None for a step that runs all blocks.
        average: The moving average of a guidance rule with momentum; None for other rules.
    """

    x: Any  # [B T H W C], or a mapping by modality
    solver: object
    cached: CachedArrays | None = None  # a tuple for each forward pass
    average: Any = None  # [B T H W C], or a mapping by modality

    @property
    def num_videos(self) -> int:
        """The number of videos in the batch."""
        return jax.tree.leaves(self.x)[0].shape[0]


class Posterior(NamedTuple):
    """The distribution of encoded images or videos, from which each video samples its latents.

    Args:
        noise_name: The name under which callers can provide the noise.
        key_number: The number of the noise's key among a seed's keys.
        mean_name: The conditioning field with the mean. The sample replaces it.
        std_name: The conditioning field with the standard deviation.
    """

    noise_name: str
    key_number: int
    mean_name: str
    std_name: str

    @property
    def input_name(self) -> str:
        """The name of the picture or clip."""
        return self.mean_name.partition("_")[0]


def draw_posteriors(
    posteriors: tuple[Posterior, ...],
    pictures: Mapping[str, Array],
    key_data: KeyData,
    noises: Mapping[str, Array | np.ndarray],
) -> dict[str, Array]:
    """Sample the latents of images for each seed, with the noise of the seed or with provided noise.

    Args:
        posteriors: The distributions to sample from.
        pictures: Encoded images by name.
        key_data: The two words of each video's seed.
        noises: Provided noise, by name.
    """
    samples = {}
    for posterior in posteriors:
        if (std := pictures.get(posterior.std_name)) is not None:
            shape = (len(key_data), *std.shape[1:])
            noise = (
                noises[posterior.noise_name]
                if posterior.noise_name in noises
                else draw_noise(key_data, shape, posterior.key_number)
            )
            samples[posterior.mean_name] = pictures[posterior.mean_name] + std * noise.astype(jnp.float32)
    return samples


def pad_front(x: Latents, frames: int) -> Float[Array, "B ... C"]:
    """Pad latents at the front to `frames` frames, by repeating the first frame.

    Args:
        x: The latents [B T H W C].
        frames: The number of frames of the result.
    """
    return jnp.concatenate([x[:, :1]] * (frames - x.shape[1]) + [x], axis=1)


class InitStatic(NamedTuple):
    """The static inputs for the initial state of a chunk.

    Args:
        scheduler: The solver.
        shape: The shape of the whole video's noise, [B C T H W].
        posteriors: The distributions to sample latents from.
        chunk_frames: The number of frames in a chunk; None for a video that is denoised as a whole.
        uses_running_average: True if the guidance rule carries an average.
        modality_shapes: The shapes of further modalities, [B C ...], by name.
        modality_offset: The number of modalities in earlier passes. The offset gives this pass its own noise.
    """

    scheduler: Scheduler
    shape: tuple[int, ...]
    posteriors: tuple[Posterior, ...] = ()
    chunk_frames: int | None = None
    uses_running_average: bool = False
    modality_shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    modality_offset: int = 0


class NoiseOverrides(NamedTuple):
    """Provided noise that is used instead of the seeds' noise.

    Args:
        initial: The initial noise of this chunk, [B C T H W], by modality. None means: draw it from the seeds.
        step_noise: The noise of the chunk's steps, [steps B C T H W], by modality. None means: draw it from the seeds.
        pictures: The noise for sampled latents of images, by name.
    """

    initial: NoiseArrays | None = None  # [B C T H W]
    step_noise: NoiseArrays | None = None  # [steps B C T H W]
    pictures: Mapping[str, Float[Array | np.ndarray, "B ..."]] | None = None


@program(random_options)
def begin(
    static: InitStatic,
    key_data: KeyData,
    noise_inputs: NoiseOverrides,
    schedule: Schedule,
    pictures: Mapping[str, Array],
    number: Int[Array, ""],
) -> tuple[State, Mapping[str, Array]]:
    """Compute the state before the first step of a chunk. Also return the sampled latents of images, by name.

    Args:
        static: The static inputs of the program.
        key_data: The two words of each video's seed.
        noise_inputs: Provided noise that is used instead of the seeds' noise.
        schedule: The noise levels of the steps.
        pictures: Encoded images by name.
        number: The number of the chunk, from 0.
    """
    image_latents = draw_posteriors(static.posteriors, pictures, key_data, noise_inputs.pictures or {})
    shapes = {VIDEO: static.shape, **dict(static.modality_shapes)}

    def begin_modality(name: str) -> tuple[Latents, object, Latents | None]:
        """Return the latents of a modality, the solver's state and the average."""
        noise_key_number, step_key_number = key_numbers(static.modality_offset + [*shapes].index(name))
        if (initial := select_modality(noise_inputs.initial, name)) is not None:
            noise = initial.astype(jnp.float32)
        elif static.chunk_frames is None:
            noise = draw_noise(key_data, shapes[name], noise_key_number)
        else:
            noise = noise_of_frames(key_data, shapes[name], number * static.chunk_frames, static.chunk_frames)
        noise = jnp.moveaxis(
            jax.lax.optimization_barrier(noise), 1, -1
        )  # prevents XLA from fusing the noise with later operations, which would change the rounding
        if (latents := {**pictures, **image_latents}.get(f"{name}_latents")) is None:
            x = static.scheduler.start(schedule, noise)
        else:  # start from a video with added noise
            clean_latents = pad_front(jnp.moveaxis(latents.astype(jnp.float32), 1, -1), noise.shape[1])
            x = static.scheduler.add_noise(schedule, clean_latents, noise)
        keys = solver_keys(key_data, 0 if static.chunk_frames is None else number, step_key_number)
        step_noise = select_modality(noise_inputs.step_noise, name)
        step_noise_args = () if step_noise is None else (jnp.moveaxis(step_noise, 2, -1),)
        average = jnp.zeros_like(x) if static.uses_running_average else None
        return x, static.scheduler.init(schedule, x, keys, *step_noise_args), average

    x, solver, average = per_modality(
        begin_modality, {name: name for name in shapes} if static.modality_shapes else VIDEO
    )
    return State(x, solver, average=average), image_latents


@program(random_options)
def draw(shape: tuple[int, ...], key_data: KeyData) -> Float[Array, "B C T H W"]:
    """Draw the seeds' initial noise.

    Args:
        shape: The shape of one video's latents, [1 C T H W].
        key_data: The two words of each video's seed.
    """
    return draw_noise(key_data, shape)


@program(scan_options)
def finish(static: tuple[Denoiser, int], x: LatentTree, pictures: Mapping[str, Array]) -> LatentTree:
    """Convert the latents after the last step to the final latents: [B _C _T H W] for the video, [B C ...] for other
    modalities.

    Args:
        static: The denoiser, and the number of frames.
        x: The latents after the last step, [B T H W C], or a mapping by modality.
        pictures: Encoded images by name.
    """
    denoiser, frames = static
    x = denoiser.finalize(x, pictures)
    video = select_modality(x)[:, -frames:]
    return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 1), {**x, VIDEO: video} if isinstance(x, Mapping) else video)


@program(scan_options)
def join(axis: int, parts: tuple[Tree, ...]) -> Tree:
    """Concatenate the arrays of trees along an axis.

    Args:
        axis: The axis.
        parts: Trees of the same structure.
    """
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=axis), *parts)


@program(matmul_options, donated=("state",), fast_options=fast_matmul_options)
def take_step(
    static: StepProgram, state: State, inputs: ModelInputs, guidance: Any, schedule: Schedule
) -> tuple[State, LatentTree, Bool[Array, ""]]:
    """Take one step. Also return the predicted clean latents, and whether all latents are finite.

    Args:
        static: The static inputs of the program.
        state: The state before the step; its buffers are reused.
        inputs: The network's inputs besides latents and timestep.
        guidance: The guidance rule's values for this step, usually a scale. If the step skips blocks, a tuple of these
            values and the scale of the difference.
        schedule: A schedule of one step.
    """
    guidance, skip_scale = guidance if static.skipped else (guidance, None)
    denoiser, network = static.denoiser, nnx.merge(static.graphdef, inputs.weights)
    num_videos, scheduler = state.num_videos, static.scheduler

    def repeat(x: Latents) -> Float[Array, "_P ... C"]:
        return jnp.broadcast_to(x, (inputs.batch // num_videos, *x.shape)).reshape(-1, *x.shape[1:])

    x = jax.tree.map(repeat, state.x)
    t = jax.tree.map(lambda time: jnp.full((inputs.batch,), time), denoiser.timesteps(schedule))
    predict = partial(denoiser.predict, network, x, t, dense=static.dense)
    forwards = [partial(predict, prompt, inputs.shared) for prompt in inputs.prompts]
    with forward_only():
        predictions, cached = static.cache.predictions(forwards, state.x, state.cached)
        prediction_with_skips = in_float32(forwards[0](SkippedBlocks(static.skipped))) if static.skipped else None
    prediction = jax.tree.map(lambda *forwards: jnp.concatenate(forwards), *predictions)
    clean = partial(scheduler.x0, schedule, 0)
    if static.skipped:
        difference = jax.tree.map(
            lambda x, y: skip_scale * (x[:num_videos] - y[:num_videos]), prediction, prediction_with_skips
        )
    else:
        difference = jax.tree.map(lambda x: None, prediction)

    def step(
        x: Latents,
        solver: object,
        average: Latents | None,
        prediction: Float[Array, "_P ... C"],
        difference: Latents | None,
    ) -> tuple[object, ...]:
        prediction, average = replicate(static.guidance.combine(prediction, num_videos, guidance, x, clean, average))
        if difference is not None:
            prediction = replicate(prediction + difference)
        x0 = replicate(clean(prediction, x))
        x, solver = replicate(scheduler.step(schedule, 0, prediction, x, solver))
        return x, solver, average, x0, jnp.isfinite(x).all()

    x, solver, average, x0, finite = per_modality(step, state.x, state.solver, state.average, prediction, difference)
    return State(x, solver, cached, average), x0, reduce(jnp.logical_and, jax.tree.leaves(finite))
