# SPDX-License-Identifier: Apache-2.0
"""Videos that are made chunk by chunk equal the algorithm on all frames; programs and memory do not grow."""

import gc
import inspect
import pickle
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support import whole_sequence
from tests.support.compare import error
from tests.support.programs import num_compiled
from tests.support.quick import quick
from tests.support.small_wan import causal_pipeline, partitioner
from tests.support.tiny import tiny_causal_checkpoint
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.pipelines.denoiser import take_step
from wanjax.pipelines.frames import decode_chunk
from wanjax.pipelines.observers import Cancelled
from wanjax.pipelines.seeds import seed_to_key_data, solver_keys
from wanjax.pipelines.wan.causal_programs import renew
from wanjax.pipelines.wan.conditioning import WanConditioning

CHUNK_FRAMES, CHUNKS = 2, 5  # the window has three chunks
SIZE, FRAMES = (12, 20), 2 * (CHUNK_FRAMES * CHUNKS - 1) + 1
LATENTS = (1, 4, CHUNK_FRAMES * CHUNKS, 6, 10)
SETTINGS: dict[str, Any] = {"size": SIZE, "frames": FRAMES, "steps": 3}
LEVELS = [1.0, 5 * (2 / 3) / (1 + 4 * (2 / 3)), 5 * (1 / 3) / (1 + 4 * (1 / 3)), 0.0]  # three steps, shifted by 5


def make_conditioning(num_videos=1):
    random = np.random.default_rng(2)
    embeddings = (jnp.asarray(random.normal(size=(num_videos, 7, 8)), jnp.float32) for _ in range(2))
    return WanConditioning(*embeddings)


def make_noise():
    random = np.random.default_rng(3)
    shapes = {"noise": LATENTS, "step_noise": (3, *LATENTS)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def latents_by_algorithm(pipe, sink):
    """Return the latents of the algorithm in float64; each step is a pass over all frames so far."""
    model, text, noises = pipe.transformer, np.asarray(make_conditioning().prompt_embeds[0]), make_noise()
    latents = np.zeros((0, *LATENTS[3:], LATENTS[1]))
    for chunk in range(CHUNKS):
        positions = slice(chunk * CHUNK_FRAMES, (chunk + 1) * CHUNK_FRAMES)
        x = np.moveaxis(noises["noise"][0, :, positions], 0, -1).astype(np.float64)
        chunk_of_frame = np.arange((chunk + 1) * CHUNK_FRAMES) // CHUNK_FRAMES
        distance = chunk_of_frame[:, None] - chunk_of_frame[None]
        attended = (distance >= 0) & ((distance < 3 - sink) | (chunk_of_frame[None] < sink))
        for step, (level, next_level) in enumerate(pairwise(LEVELS)):
            times = np.where(chunk_of_frame < chunk, 0.0, 1000 * level)
            x0 = (
                x
                - level * whole_sequence.velocity(model, np.concatenate([latents, x]), times, text, attended)[positions]
            )
            noise = np.moveaxis(noises["step_noise"][step, 0, :, positions], 0, -1)
            x = (1 - next_level) * x0 + next_level * noise
        latents = np.concatenate([latents, x])
    return np.moveaxis(latents, -1, 0)[None]


@cache
def pipeline(sink=0, axes=None, rules="fsdp", heads=2):
    return causal_pipeline(heads, partitioner(axes, rules), window=3 * CHUNK_FRAMES, sink=sink * CHUNK_FRAMES)


@pytest.mark.parametrize("sink", quick([1], [0, 1]))
def test_each_step_attends_to_clean_earlier_chunks(sink):
    latents = pipeline(sink).denoise(make_conditioning(), noise=make_noise(), **SETTINGS)
    relative_error = error(latents, latents_by_algorithm(pipeline(sink), sink))
    print(f"{relative_error:.1e}")
    assert relative_error <= 1e-5
    assert error(latents, latents_by_algorithm(pipeline(sink), 1 - sink)) > 1e-3


def test_chunks_are_yielded_as_they_are_made():
    steps, pipe = [], pipeline()
    chunks = pipe.denoise_chunks(make_conditioning(), noise=make_noise(), callback=steps.append, **SETTINGS)
    first = next(chunks)
    assert [(step.index, step.total) for step in steps] == [(i, 15) for i in range(3)]
    assert steps[-1].latents.shape == first.shape == (1, 4, CHUNK_FRAMES, 6, 10)
    joined = np.concatenate([first, *chunks], axis=2)
    np.testing.assert_array_equal(joined, pipe.denoise(make_conditioning(), noise=make_noise(), **SETTINGS))
    assert [step.index for step in steps] == list(range(15))


def test_streamed_pixels_equal_those_of_decode():
    pipe = pipeline()
    clips = list(pipe.decode_stream(pipe.denoise_chunks(make_conditioning(), noise=make_noise(), **SETTINGS)))
    assert [len(clip) for clip in clips] == [3, 4, 4, 4, 4]
    decoded = pipe.decode(pipe.denoise(make_conditioning(), noise=make_noise(), **SETTINGS))
    np.testing.assert_array_equal(np.concatenate(clips), decoded)
    assert decoded.std() > 1


def test_a_longer_video_needs_no_other_program():
    pipe = causal_pipeline(2, None, window=3 * CHUNK_FRAMES)
    programs = (take_step, renew, decode_chunk)

    def count_compilations(chunks):
        counts_before = [num_compiled(program) for program in programs]
        options: dict[str, Any] = SETTINGS | {"size": (12, 28), "frames": 2 * (CHUNK_FRAMES * chunks - 1) + 1}
        assert len(list(pipe.decode_stream(pipe.denoise_chunks(make_conditioning(), **options)))) == chunks
        return [num_compiled(program) - size for program, size in zip(programs, counts_before, strict=True)]

    assert count_compilations(2) == [1, 1, 2]  # the first chunk of frames has no cache
    assert count_compilations(9) == [0, 0, 0]


def test_memory_does_not_grow():
    pipe, live_bytes = pipeline(), []
    options: dict[str, Any] = SETTINGS | {"frames": 2 * (CHUNK_FRAMES * 12 - 1) + 1, "steps": 2}
    gc.collect()
    gc.freeze()  # so that the collections below ignore objects of other tests
    for _ in pipe.decode_stream(pipe.denoise_chunks(make_conditioning(), **options)):
        gc.collect()
        live_bytes.append(sum(x.nbytes for x in jax.live_arrays()))
    assert len(live_bytes) == 12
    assert len(set(live_bytes[1:-1])) == 1  # the cache is not updated after the last chunk


EIGHT_DEVICES = [((1, 2, 4), "fsdp"), ((2, 2, 2), "tp"), ((1, 1, 8), "tp")]


@pytest.mark.parametrize(("axes", "rules"), quick(EIGHT_DEVICES[:1], EIGHT_DEVICES))
def test_eight_devices_make_the_same_latents(axes, rules):
    one_device = pipeline(1, heads=3).denoise(make_conditioning(), noise=make_noise(), **SETTINGS)
    relative_error = error(
        pipeline(1, axes, rules, 3).denoise(make_conditioning(), noise=make_noise(), **SETTINGS),
        np.asarray(one_device, np.float64),
    )
    print(f"{relative_error:.1e}")
    assert relative_error <= 1e-5


def test_videos_of_a_batch_equal_those_made_separately():
    pipe = pipeline()
    batch = pipe.denoise(make_conditioning(2), seeds=[3, 4], **SETTINGS)
    for video, seed in enumerate((3, 4)):
        conditioning = WanConditioning(*(x[video : video + 1] for x in make_conditioning(2)[:2]))
        assert error(batch[video], np.asarray(pipe.denoise(conditioning, seed=seed, **SETTINGS)[0], np.float64)) <= 1e-5


def test_every_chunk_and_every_seed_have_different_noise():
    keys_of_chunks = [
        jax.random.key_data(solver_keys(seed_to_key_data([3, 4]), jnp.int32(chunk))) for chunk in (0, 1, 2)
    ]
    assert len({tuple(key) for keys in keys_of_chunks for key in np.asarray(keys).tolist()}) == 6


def test_a_callback_stops_a_stream():
    chunks = pipeline().denoise_chunks(make_conditioning(), callback=lambda step: step.index < 4, **SETTINGS)
    next(chunks)
    with pytest.raises(Cancelled) as stopped:
        next(chunks)
    received = pickle.loads(pickle.dumps(stopped.value))  # as another process receives it
    assert received.step == stopped.value.step == 4
    assert str(received) == str(stopped.value) == "cancelled after step 5"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames": 17}, "17 frames 9 latent chunks 2 15 19"),
        ({"frames": 1}, "1 frames latent chunks 2 3"),
        ({"guidance_scale": 3.0}, "guidance 1"),
        ({"cache": "easycache"}, "steps step cache easycache"),
    ],
)
def test_settings_that_do_not_fit_a_stream_are_refused(options, message):
    with pytest.raises(WanjaxError, match=line_with_words(message)):
        pipeline().denoise_chunks(make_conditioning(), **SETTINGS | options)


REFUSED_KEYWORDS = {
    "clip_prompt": ("a dance", "no setting clip_prompt"),
    "keep": ("state", "makes videos chunk by chunk, which a file to continue from does not support"),
    "strength": (0.5, "a strength of 0.5 needs an input video"),
    "guidance_scale": (3.0, "distilled without guidance"),
    "guidance_scale_2": (3.0, "has no setting guidance_scale_2"),
    "boundary": (0.5, "has no setting boundary"),
    "boundary_step": (2, "has no setting boundary_step"),
    "dynamic_guidance": (True, "has no setting dynamic_guidance"),
    "cache": ("easycache", "too few steps for a step cache"),
    "windows": (2, "cannot continue a video in several windows"),
    "then": ("b", "cannot continue a video in several windows"),
    "overlap": (3, "joins the windows of a long video"),
    "match": ("colour", "joins the windows of a long video"),
    "guidance_rule": ("apg", "no effect without guidance"),
}
USED_KEYWORDS = {
    "noise": make_noise(),
    "seeds": [9],
    "seed": 9,
    "rng": "torch",
    "size": (12, 28),
    "height": 24,
    "width": 28,
    "frames": 7,
    "steps": 2,
    "flow_shift": 3.0,
    "sigmas": "diffusers",
    "follow": "diffusers",
}
KEYWORDS_WITHOUT_EFFECT = {  # on latents: there is no guidance, no other network and no earlier state
    "fps": 5,
    "batch_guidance": True,
    "switched": lambda switch: pytest.fail("there is only one network"),
    "continued": lambda done, total: pytest.fail("there is no earlier state"),
}


def test_every_keyword_of_denoise_has_a_test():
    keywords = inspect.signature(pipeline().denoise).parameters.keys() - {"conditioning", "callback"}
    assert keywords == {*REFUSED_KEYWORDS, *USED_KEYWORDS, *KEYWORDS_WITHOUT_EFFECT}


@pytest.mark.parametrize("name", REFUSED_KEYWORDS)
def test_keywords_that_streams_cannot_use_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    value, message = REFUSED_KEYWORDS[name]
    options: dict[str, Any] = SETTINGS | {name: value}
    with pytest.raises(WanjaxError, match=message):
        pipeline().denoise(make_conditioning(), **options)
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module")
def default_latents():
    return np.asarray(pipeline().denoise(make_conditioning(), **SETTINGS))


# a height and a width change the latents as a size does
@pytest.mark.parametrize("name", quick(USED_KEYWORDS.keys() - {"height", "width"}, USED_KEYWORDS))
def test_keywords_change_the_latents(name, default_latents):
    sides = {"height": SIZE[0], "width": SIZE[1]}  # a size is not passed together with a height or a width
    options: dict[str, Any] = {"frames": FRAMES, "steps": 3} | (sides if name in sides else {"size": SIZE})
    latents = np.asarray(pipeline().denoise(make_conditioning(), **options | {name: USED_KEYWORDS[name]}))
    assert latents.shape != default_latents.shape or error(latents, np.asarray(default_latents, np.float64)) > 1e-3


@pytest.mark.parametrize("name", KEYWORDS_WITHOUT_EFFECT)
def test_keywords_without_effect_change_nothing(name, default_latents):
    options: dict[str, Any] = SETTINGS | {name: KEYWORDS_WITHOUT_EFFECT[name]}
    np.testing.assert_array_equal(pipeline().denoise(make_conditioning(), **options), default_latents)


def test_a_callback_gets_the_steps_of_all_chunks_and_stops_denoising():
    steps = []
    pipeline().denoise(make_conditioning(), callback=steps.append, **SETTINGS)
    assert [step.index for step in steps] == list(range(15))
    with pytest.raises(Cancelled):
        pipeline().denoise(make_conditioning(), callback=lambda step: step.index < 4, **SETTINGS)


@pytest.mark.parametrize(
    "call",
    [
        lambda pipe: pipe.stream("a red circle"),
        lambda pipe: pipe.denoise_chunks(make_conditioning()),
        lambda pipe: next(pipe.decode_stream([])),
    ],
)
def test_only_causal_models_stream(call):
    with pytest.raises(WanjaxError, match="nano makes a video as a whole, so there are no chunks to stream"):
        call(wanjax.load("nano"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_causal_checkpoint(tmp_path_factory.mktemp("causal"))


def test_a_checkpoint_streams_from_a_prompt(checkpoint):
    pipe = wanjax.load(checkpoint)
    assert pipe.model.spec.is_chunked
    assert pipe.defaults.steps == 4
    assert (pipe.defaults.flow_shift, pipe.defaults.guidance_scale) == (5.0, 1.0)
    clips = list(pipe.stream("a red circle", seed=5, batch_guidance=True))
    assert [len(clip) for clip in clips] == [5, 8, 8, 8]
    np.testing.assert_array_equal(np.concatenate(clips), pipe("a red circle", seed=5).frames)
    with pytest.raises(WanjaxError, match=line_with_words("text video chunks")):
        pipe.stream("a red circle", video=np.zeros((29, 32, 32, 3), np.uint8))


def test_a_stream_checks_its_inputs_before_the_first_chunk(checkpoint, monkeypatch):
    pipe, settings_of_calls = wanjax.load(checkpoint), []
    prepare = pipe.prepare
    monkeypatch.setattr(
        pipe, "prepare", lambda **options: settings_of_calls.append(prepare(**options)[1]) or prepare(**options)
    )
    with pytest.raises(WanjaxError, match=line_with_words("noise shape")):
        pipe.stream("a red circle", noise=np.zeros((1, 2, 3, 4, 5), np.float32))
    pipe.stream("a red circle", seed=5)
    assert [settings.seed for settings in settings_of_calls[1:]] == [5]
