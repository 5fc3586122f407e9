# SPDX-License-Identifier: Apache-2.0
"""The denoising loop. The loop makes the latents of a video chunk by chunk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from flax import nnx

from wanjax.pipelines.caching.phase_cache import step_cache
from wanjax.pipelines.caching.step_cache import StepCache
from wanjax.pipelines.denoiser import (
    Denoiser,
    InitStatic,
    ModelInputs,
    NoiseOverrides,
    Preparation,
    State,
    StepProgram,
    begin,
    finish,
    take_step,
)
from wanjax.pipelines.frames import AnyLatents
from wanjax.pipelines.guidance import CLASSIFIER_FREE, GuidanceRule, check_rule, choose_groups
from wanjax.pipelines.model import Chunk, ConditioningT, ModelSpec, VideoModel, latents_of
from wanjax.pipelines.noise_inputs import INITIAL, STEP_NOISE, VIDEO, NoiseInput, checked_noise_inputs, noise_name
from wanjax.pipelines.observers import Monitor, Observers, Progress, Start
from wanjax.pipelines.phases import Phase, dense_steps
from wanjax.pipelines.previews.latent_preview import LatentPreview
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.pipelines.seeds import seed_to_key_data
from wanjax.pipelines.settings import TORCH, Settings
from wanjax.pipelines.torch_noise import StepNoise, TorchNoise
from wanjax.pipelines.video_metadata import VERSION
from wanjax.schedulers import one_step
from wanjax.schedulers.base import Schedule
from wanjax.schedulers.noise import with_next_noise

StepCacheFactory = Callable[[Runtime, Denoiser, SplitNetwork, Schedule, Phase], StepCache]


def denoise(
    runtime: Runtime,
    model: VideoModel[ConditioningT],
    conditioning: ConditioningT,
    schedule: Schedule,
    phases: Sequence[Phase],
    state: State,
    monitor: Monitor,
    *,
    guidance: GuidanceRule = CLASSIFIER_FREE,
    make_cache: StepCacheFactory,
    batch_guidance: bool = False,
    completed_steps: int = 0,
    past: object = None,
    step_noise: StepNoise | None = None,
) -> tuple[State, object]:
    """Run the steps of a chunk. Return the final state, and the `past` of the next chunk.

    Args:
        runtime: Networks, devices and strategy.
        model: The family's model.
        conditioning: The output of `encode`, for all videos of the batch.
        schedule: The noise levels, as host arrays.
        phases: The phases of the schedule. Each has a network and the guidance scales of its steps.
        state: The latents and the solver's state before the first step.
        monitor: An object that is notified of every step, and may stop the loop.
        guidance: The rule that combines the predictions for the prompt and the negative prompt.
        make_cache: A function that creates the step cache of a phase.
        batch_guidance: Whether both prompts run in one forward pass.
        completed_steps: The number of steps that an earlier, stopped run has completed.
        past: The second result of this function for the previous chunk, such as keys and values of earlier chunks.
        step_noise: Draws the noise of the steps on the host. If it is None, the device draws the noise that the solver
            needs.
    """
    denoiser, chunk, total = model.denoiser, monitor.chunk, len(schedule.timesteps)
    with monitor:
        for phase in phases:
            if not (remaining_steps := phase.steps[max(0, completed_steps - phase.start) :]):
                continue
            module, load_seconds = runtime.components.swap_in(phase.network, model.spec.denoisers)
            if phase.start > completed_steps:
                monitor.switched(phase.network, phase.start, load_seconds)
            has_sparse_steps = model.spec.supports_radial and module.attention.radial
            network = SplitNetwork(*nnx.split(module))
            groups = choose_groups(phase.guided, batch_guidance, runtime.partitioner)
            preparation = Preparation(groups, guidance.nag, chunk.index, past)
            contexts = model.prepare(runtime, network, conditioning, state.x, preparation)
            inputs = ModelInputs(network.weights, *contexts, groups.batch * state.num_videos)
            cache = make_cache(runtime, denoiser, network, schedule, phase)
            for index in remaining_steps:
                reuses = cache.reuses(index)
                is_dense = index < dense_steps(total) and not reuses if has_sparse_steps else None
                skipped = guidance.blocks_to_skip(float(schedule.sigmas[index]))
                step = StepProgram(
                    denoiser, network.graphdef, model.scheduler, cache, type(guidance), is_dense, skipped
                )
                state = replace(state, cached=cache.cached_for(index, state.cached))
                if step_noise is not None:
                    state = with_noise(state, step_noise.draw(index))
                values = guidance.values(index, phase.scales[index - phase.start])
                values = (values, np.float32(guidance.skip_scale)) if skipped else values
                state, x0, is_finite = runtime.call(take_step, step, state, inputs, values, one_step(schedule, index))
                monitor.stepped(index, state, x0, is_finite, reuses)
            monitor.finish_phase()
            state = replace(state, cached=None)
            if not chunk.is_last:
                past = model.update_past(runtime, network, inputs, state.x)
            del module, network, preparation, contexts, inputs  # free the weights before the next network is loaded
    if step_noise is not None:
        step_noise.skip_to(total)
    return state, past


def with_noise(state: State, noise: Mapping[str, np.ndarray]) -> State:
    """Provide the noise of the next step.

    Args:
        state: The state before the step.
        noise: The noise of each modality, channels last.
    """
    if not isinstance(state.x, Mapping):
        return replace(state, solver=with_next_noise(state.solver, noise[VIDEO]))
    solvers: Any = state.solver
    updated = {name: with_next_noise(solvers[name], array) for name, array in noise.items()}
    return replace(state, solver={**solvers, **updated})


def sample(
    runtime: Runtime,
    model: VideoModel[ConditioningT],
    conditioning: ConditioningT,
    settings: Settings,
    seeds: Sequence[int],
    *,
    noise: NoiseInput | None = None,
    batch_guidance: bool = False,
    observers: Observers,
    latent_preview: Callable[[], LatentPreview] | None = None,
) -> Iterator[AnyLatents]:
    """Yield the latents of a batch of videos, one per seed, each chunk as soon as it is denoised.

    If the model has several passes, only the latents of the last pass are yielded.

    Args:
        runtime: Networks, devices and strategy.
        model: The family's model.
        conditioning: The output of `encode`.
        settings: The settings of the videos.
        seeds: The seed of each video.
        noise: Random arrays that replace the seeds' noise.
        batch_guidance: Whether both prompts run in one forward pass.
        observers: The observers, which are notified of every event.
        latent_preview: A function that creates the preview map.
    """
    spec, passes = model.spec, model.spec.passes_of(settings)
    shapes = spec.noise_inputs(settings, model.leading_frames(conditioning, settings), len(seeds))
    arrays = checked_noise_inputs(noise, shapes)
    torch_noise = None
    if settings.rng == TORCH:
        torch_noise = TorchNoise(seeds, spec.noise_spec, settings.dtype, executes=runtime.strategy.executes)
        for posterior in spec.posteriors:
            if (std := getattr(conditioning, posterior.std_name)) is not None and posterior.noise_name not in arrays:
                shape = (len(seeds), *std.shape[1:])
                arrays[posterior.noise_name] = torch_noise.draw_posterior(shape, settings.vae_dtype)
    steps = [
        len(spec.schedule(passes[0], conditioning).timesteps),
        *(later_pass.steps_with_strength for later_pass in passes[1:]),
    ]
    for pass_settings, step_count in zip(passes, steps, strict=True):
        check_rule(pass_settings.guidance_rule, pass_settings.guided, step_count)
    observers.notify("started", conditioning)
    for pass_index, pass_settings in enumerate(passes):
        progress = Progress(pass_index, len(passes), sum(steps[:pass_index]), sum(steps))
        latent_chunks = sample_pass(
            runtime,
            model,
            conditioning,
            pass_settings,
            seeds,
            progress,
            noise=arrays,
            torch_noise=torch_noise,
            batch_guidance=batch_guidance,
            observers=observers,
            latent_preview=latent_preview,
        )
        if progress.is_last:
            yield from latent_chunks
        else:
            [latents] = latent_chunks
            with runtime.strategy.stage("denoise"):
                conditioning = model.refine(runtime, conditioning, latents)
    runtime.components.finish_stage(())


def sample_pass(
    runtime: Runtime,
    model: VideoModel[ConditioningT],
    conditioning: ConditioningT,
    settings: Settings,
    seeds: Sequence[int],
    progress: Progress,
    *,
    noise: Mapping[str, np.ndarray],
    torch_noise: TorchNoise | None = None,
    batch_guidance: bool = False,
    observers: Observers,
    make_cache: StepCacheFactory | None = None,
    latent_preview: Callable[[], LatentPreview] | None = None,
) -> Iterator[AnyLatents]:
    """Yield the latents of one pass, chunk by chunk.

    Args:
        runtime, model, conditioning, seeds, batch_guidance, observers, latent_preview: As in `sample`.
        settings: The settings of the pass.
        progress: The index of the pass, and the number of steps before it.
        noise: The noise of all passes, with checked shapes.
        torch_noise: Draws the noise that `noise` lacks. If it is None, the device draws this noise.
        make_cache: A function that creates the step cache of a phase; None uses the rule in the settings.
    """
    spec, key_data, rule, pass_index = model.spec, seed_to_key_data(seeds), settings.guidance_rule, progress.pass_index
    schedule, modalities = spec.schedule(settings, conditioning), (VIDEO, *spec.extra_modalities)
    shapes = spec.noise_shapes(settings, model.leading_frames(conditioning, settings), len(seeds))
    steps = len(schedule.timesteps)
    phases, pictures, past = spec.phases(schedule, settings, pass_index), latents_of(conditioning, spec), None
    make_cache = make_cache or partial(step_cache, spec.cache_rule(settings), spec.tables_for(conditioning))
    json_values = json_inputs(runtime, model, settings, seeds, batch_guidance) | {"pass": pass_index}
    arrays = [*(x for x in conditioning if x is not None), *noise.values()]
    modality_shapes = tuple((name, shapes[name]) for name in spec.extra_modalities)
    if torch_noise is not None:
        names = {noise_name(name, INITIAL, pass_index): name for name in modalities}
        noise = {**{key: torch_noise.draw(shapes[name]) for key, name in names.items() if key not in noise}, **noise}
    for chunk in spec.chunks(shapes[VIDEO][2]):
        frames = None if chunk.num_chunks == 1 else len(chunk.frames)
        chunk_noise = noise_for_chunk(noise, spec, chunk, steps, pass_index)
        chunk_progress = progress._replace(
            earlier_steps=progress.earlier_steps + chunk.index * steps,
            total_steps=chunk.num_chunks * progress.total_steps,
        )
        init = InitStatic(
            model.scheduler,
            shapes[VIDEO],
            spec.posteriors,
            frames,
            rule.uses_running_average,
            modality_shapes,
            pass_index * len(modalities),
        )
        with runtime.strategy.stage("denoise"):
            state, sampled_fields = runtime.call(
                begin, init, key_data, chunk_noise, schedule, pictures, np.int32(chunk.index)
            )
            inputs, completed_steps = conditioning._replace(**sampled_fields), 0
            if chunk.num_chunks == 1:
                resumed = observers.notify("resumed", Start(state, phases, json_values, arrays, chunk_progress))
                state, completed_steps = next(filter(None, reversed(resumed)), (state, 0))
            monitor = Monitor(
                observers,
                chunk,
                chunk_progress,
                schedule.timesteps,
                latent_preview,
                runtime.strategy.executes,
                settings.dtype,
            )
            monitor.begin(completed_steps)
            step_noise = torch_noise and make_step_noise(torch_noise, spec, schedule, shapes, chunk, noise, pass_index)
            state, past = denoise(
                runtime,
                model,
                inputs,
                schedule,
                phases,
                state,
                monitor,
                guidance=rule,
                make_cache=make_cache,
                batch_guidance=batch_guidance,
                completed_steps=completed_steps,
                past=past,
                step_noise=step_noise,
            )
            static = model.denoiser, frames or spec.latent_shape(settings)[2]
            latents = runtime.call(finish, static, state.x, latents_of(inputs, spec))
        if progress.is_last:
            observers.notify("denoised", latents, chunk)
        yield latents


def noise_for_chunk(
    arrays: Mapping[str, np.ndarray], spec: ModelSpec, chunk: Chunk, steps: int, pass_index: int = 0
) -> NoiseOverrides:
    """Select the noise of a chunk and of the steps that run.

    Args:
        arrays: The caller's noise by name, for all passes and chunks.
        spec: The model's spec.
        chunk: The chunk.
        steps: The number of steps that run, which are the last steps of the schedule.
        pass_index: The index of the pass, from 0.
    """
    full_axis, frames = slice(None), slice(chunk.frames.start, chunk.frames.stop)

    def by_modality(kind: str, *steps: slice) -> dict[str, np.ndarray | None]:
        noise = {name: arrays.get(noise_name(name, kind, pass_index)) for name in (VIDEO, *spec.extra_modalities)}
        indices = {name: (*steps, full_axis, full_axis, frames) if name == VIDEO else (*steps,) for name in noise}
        return {name: x if x is None else x[indices[name]] for name, x in noise.items()}

    pictures = {
        posterior.noise_name: arrays[posterior.noise_name]
        for posterior in spec.posteriors
        if posterior.noise_name in arrays
    }
    return NoiseOverrides(by_modality(INITIAL), by_modality(STEP_NOISE, slice(-steps, None)), pictures or None)


def make_step_noise(
    torch_noise: TorchNoise,
    spec: ModelSpec,
    schedule: Schedule,
    shapes: Mapping[str, tuple[int, ...]],
    chunk: Chunk,
    provided: Mapping[str, np.ndarray],
    pass_index: int,
) -> StepNoise | None:
    """Return the noise of a chunk's steps, if the solver needs noise and the caller did not provide it; otherwise None.

    Args:
        torch_noise: Draws the noise.
        spec: The model's spec.
        schedule: The noise levels of the steps.
        shapes: The shapes of the whole video's noise, by modality.
        chunk: The chunk.
        provided: The provided noise by name.
        pass_index: The index of the pass, from 0.
    """
    batch, channels, _, *latent_size = shapes[VIDEO]
    chunk_shapes = {**shapes, VIDEO: (batch, channels, len(chunk.frames), *latent_size)}
    missing = {
        name: shape for name, shape in chunk_shapes.items() if noise_name(name, STEP_NOISE, pass_index) not in provided
    }
    if not (spec.scheduler.stochastic and missing):
        return None
    draws = [spec.scheduler.noise_draws(schedule, index) for index in range(len(schedule.timesteps))]
    return StepNoise(torch_noise, draws, missing)


def json_inputs(
    runtime: Runtime, model: VideoModel[Any], settings: Settings, seeds: Sequence[int], batch_guidance: bool
) -> dict[str, object]:
    """Collect everything that determines the latents, except arrays. Two runs of the same video have equal values.

    Args:
        runtime: Networks, devices and strategy.
        model: The model.
        settings: The settings of the pass.
        seeds: The seed of each video.
        batch_guidance: Whether both prompts run in one forward pass.
    """
    return {
        "settings": settings.to_json(),
        "seeds": list(seeds),
        "scheduler": repr(model.scheduler),
        "tables": repr(model.tables),
        "mesh": dict(runtime.partitioner.mesh.shape),
        "batch_guidance": batch_guidance,
        "compiler": runtime.compiler,
        "loaded": runtime.components.metadata,
        "version": VERSION,
    }
