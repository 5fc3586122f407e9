# SPDX-License-Identifier: Apache-2.0
"""The denoising loop, which makes the latents of a video chunk by chunk."""

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
    GivenNoise,
    Init,
    ModelInputs,
    Preparation,
    State,
    StepProgram,
    begin,
    finish,
    take_step,
)
from wanjax.pipelines.frames import AnyLatents
from wanjax.pipelines.guidance import CLASSIFIER_FREE, GuidanceRule, check_rule, grouping
from wanjax.pipelines.model import Chunk, ConditioningT, ModelSpec, VideoModel, latents_of
from wanjax.pipelines.noise_inputs import INITIAL, STEP_NOISE, VIDEO, NoiseInput, checked_noise_inputs, noise_name
from wanjax.pipelines.observers import Monitor, Observers, Progress, Start
from wanjax.pipelines.phases import Phase, dense_steps
from wanjax.pipelines.previews.latent_preview import LatentPreview
from wanjax.pipelines.runtime import Runtime, SplitNetwork
from wanjax.pipelines.seeds import seed_to_key_data
from wanjax.pipelines.settings import Settings
from wanjax.pipelines.video_metadata import VERSION
from wanjax.schedulers import one_step
from wanjax.schedulers.base import Schedule

Caches = Callable[[Runtime, Denoiser, SplitNetwork, Schedule, Phase], StepCache]  # the last arguments of `step_cache`


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
    caches: Caches,
    batch_guidance: bool = False,
    done: int = 0,
    memory: object = None,
) -> tuple[State, object]:
    """Run the steps of a chunk; return the last state, and the memory for the next chunk.

    Args:
        runtime: Networks, devices and strategy.
        model: The family's model.
        conditioning: The output of `encode`, for all videos of the batch.
        schedule: The noise levels, as host arrays.
        phases: Which network runs which steps, with the guidance scales.
        state: The latents and the solver's state before the first step.
        monitor: Receives every step, and may end the loop.
        guidance: The rule that combines the predictions for the prompt and the negative prompt.
        caches: Returns the step cache of a phase.
        batch_guidance: Whether both prompts run in one forward.
        done: The number of steps that an earlier, stopped run has completed.
        memory: The memory that this function returned for the chunk before.
    """
    denoiser, chunk, total = model.denoiser, monitor.chunk, len(schedule.timesteps)
    with monitor:
        for phase in phases:
            if not (remaining_steps := phase.steps[max(0, done - phase.start) :]):
                continue
            module, load_seconds = runtime.components.swap_in(phase.network, model.spec.denoisers)
            if phase.start > done:
                monitor.switched(phase.network, phase.start, load_seconds)
            sparse = model.spec.radial_attention and module.attention.radial
            network = SplitNetwork(*nnx.split(module))
            groups = grouping(phase.guided, batch_guidance, runtime.partitioner)
            purpose = Preparation(groups, guidance.nag, chunk.number, memory)
            contexts = model.prepare(runtime, network, conditioning, state.x, purpose)
            inputs = ModelInputs(network.weights, *contexts, groups.batch * state.videos)
            cache = caches(runtime, denoiser, network, schedule, phase)
            for index in remaining_steps:
                reuses = cache.reuses(index)
                dense = index < dense_steps(total) and not reuses if sparse else None
                step = StepProgram(denoiser, network.graphdef, model.scheduler, cache, type(guidance), dense)
                state = replace(state, cached=cache.cached_for(index, state.cached))
                values = guidance.values(index, phase.scales[index - phase.start])
                state, x0, finite = runtime.call(take_step, step, state, inputs, values, one_step(schedule, index))
                monitor.stepped(index, state, x0, finite, reuses)
            monitor.finish_phase()
            state = replace(state, cached=None)
            if not chunk.last:
                memory = model.update_memory(runtime, network, inputs, state.x)
            del module, network, purpose, contexts, inputs  # the weights are freed before the next network is loaded
    return state, memory


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

    With several passes, they are the latents of the last.

    Args:
        runtime: Networks, devices and strategy.
        model: The family's model.
        conditioning: The output of `encode`.
        settings: The settings of the videos.
        seeds: One for each video.
        noise: Random arrays that replace the seeds'.
        batch_guidance: Whether both prompts run in one forward.
        observers: They are notified of every event.
        latent_preview: Creates the preview map.
    """
    spec, passes = model.spec, model.spec.passes_of(settings)
    shapes = spec.noise_inputs(settings, model.leading_frames(conditioning, settings), len(seeds))
    arrays = checked_noise_inputs(noise, shapes)
    steps = [len(spec.schedule(passes[0], conditioning).timesteps), *(later.strong_steps for later in passes[1:])]
    for pass_settings, count in zip(passes, steps, strict=True):
        check_rule(pass_settings.guidance_rule, pass_settings.guided, count)
    observers.notify("started", conditioning)
    for number, pass_settings in enumerate(passes):
        progress = Progress(number, len(passes), sum(steps[:number]), sum(steps))
        latent_chunks = sample_pass(
            runtime,
            model,
            conditioning,
            pass_settings,
            seeds,
            progress,
            noise=arrays,
            batch_guidance=batch_guidance,
            observers=observers,
            latent_preview=latent_preview,
        )
        if progress.last:
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
    batch_guidance: bool = False,
    observers: Observers,
    caches: Caches | None = None,
    latent_preview: Callable[[], LatentPreview] | None = None,
) -> Iterator[AnyLatents]:
    """Yield the latents of one pass, chunk by chunk.

    Args:
        runtime, model, conditioning, seeds, batch_guidance, observers, latent_preview: As in `sample`.
        settings: The settings of the pass.
        progress: The position of the pass.
        noise: The noise of all passes, checked.
        caches: Returns the step cache of a phase; None uses the rule in the settings.
    """
    spec, key_data, rule, number = model.spec, seed_to_key_data(seeds), settings.guidance_rule, progress.number
    schedule, streams = spec.schedule(settings, conditioning), (VIDEO, *spec.latent_streams)
    shapes = spec.noise_shapes(settings, model.leading_frames(conditioning, settings), len(seeds))
    steps = len(schedule.timesteps)
    phases, pictures, memory = spec.phases(schedule, settings, number), latents_of(conditioning, spec), None
    caches = caches or partial(step_cache, spec.cache_rule(settings), spec.tables_for(conditioning))
    facts = facts_of(runtime, model, settings, seeds, batch_guidance) | {"pass": number}
    arrays = [*(x for x in conditioning if x is not None), *noise.values()]
    stream_shapes = tuple((name, shapes[name]) for name in spec.latent_streams)
    for chunk in spec.chunks(shapes[VIDEO][2]):
        frames = None if chunk.count == 1 else len(chunk.frames)
        chunk_noise = given_noise(noise, spec, chunk, steps, number)
        chunk_progress = progress._replace(
            earlier_steps=progress.earlier_steps + chunk.number * steps, total=chunk.count * progress.total
        )
        init = Init(
            model.scheduler,
            shapes[VIDEO],
            spec.posteriors,
            frames,
            rule.keeps_average,
            stream_shapes,
            number * len(streams),
        )
        with runtime.strategy.stage("denoise"):
            state, drawn = runtime.call(begin, init, key_data, chunk_noise, schedule, pictures, np.int32(chunk.number))
            inputs, done = conditioning._replace(**drawn), 0
            if chunk.count == 1:
                resumed = observers.notify("resumed", Start(state, phases, facts, arrays, chunk_progress))
                state, done = next(filter(None, reversed(resumed)), (state, 0))
            monitor = Monitor(
                observers,
                chunk,
                chunk_progress,
                schedule.timesteps,
                latent_preview,
                runtime.strategy.executes,
                settings.dtype,
            )
            monitor.begin(done)
            state, memory = denoise(
                runtime,
                model,
                inputs,
                schedule,
                phases,
                state,
                monitor,
                guidance=rule,
                caches=caches,
                batch_guidance=batch_guidance,
                done=done,
                memory=memory,
            )
            static = model.denoiser, frames or spec.latent_shape(settings)[2]
            latents = runtime.call(finish, static, state.x, latents_of(inputs, spec))
        if progress.last:
            observers.notify("denoised", latents, chunk)
        yield latents


def given_noise(
    arrays: Mapping[str, np.ndarray], spec: ModelSpec, chunk: Chunk, steps: int, number: int = 0
) -> GivenNoise:
    """Select a chunk's part of the provided noise, and of the step noise that of the steps that run.

    Args:
        arrays: Noise by name, of all passes and chunks.
        spec: The model's spec.
        chunk: The chunk.
        steps: The number of steps that run; they are the last ones.
        number: The number of the pass, from 0.
    """
    all_, frames = slice(None), slice(chunk.frames.start, chunk.frames.stop)

    def by_stream(kind: str, *steps: slice) -> dict[str, np.ndarray | None]:
        noise = {name: arrays.get(noise_name(name, kind, number)) for name in (VIDEO, *spec.latent_streams)}
        parts = {name: (*steps, all_, all_, frames) if name == VIDEO else (*steps,) for name in noise}
        return {name: x if x is None else x[parts[name]] for name, x in noise.items()}

    pictures = {posterior.noise: arrays[posterior.noise] for posterior in spec.posteriors if posterior.noise in arrays}
    return GivenNoise(by_stream(INITIAL), by_stream(STEP_NOISE, slice(-steps, None)), pictures or None)


def facts_of(
    runtime: Runtime, model: VideoModel[Any], settings: Settings, seeds: Sequence[int], batch_guidance: bool
) -> dict[str, object]:
    """Return everything except arrays that the latents depend on.

    Args:
        runtime: Networks, devices and strategy.
        model: The model.
        settings: The settings of the pass.
        seeds: The seed of each video.
        batch_guidance: Whether both prompts run in one forward.
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
