# SPDX-License-Identifier: Apache-2.0
"""Many videos of one pipeline equal those made one by one, also if they are denoised in one batch."""

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support import small_wan
from tests.support.calls import Counting
from tests.support.compare import error
from tests.support.quick import quick
from tests.support.types import unchecked
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.pipelines import run
from wanjax.pipelines.request import PreparedRequest
from wanjax.pipelines.wan.conditioning import WanConditioning
from wanjax.registry import presets

PROMPTS = ["a red circle moving right", "a blue square moving left"]
SMALL = {"size": (32, 32), "frames": 5, "steps": 2, "guidance_scale": 1.0}
SETTINGS = {"size": (12, 12), "frames": 5, "steps": 3}


@pytest.fixture(scope="module")
def nano():
    return wanjax.load("nano")


def test_prompts_and_seeds_give_the_videos_of_single_calls(nano):
    single = [nano(prompt, seed=seed, **SMALL) for prompt in PROMPTS for seed in (3, 4)]
    strategy = Counting()
    videos = nano.with_strategy(strategy)(PROMPTS, seeds=[3, 4], **SMALL)
    assert sum(count for call, count in strategy.calls.items() if call.stage == "encode") == len(PROMPTS)
    for video, reference in zip(videos, single, strict=True):
        np.testing.assert_array_equal(video.frames, reference.frames)
        assert video.settings == reference.settings


def test_each_video_is_yielded_before_the_next_is_made(nano):
    steps = []
    videos = nano.videos(PROMPTS, callback=lambda step: steps.append(step.index), **SMALL)
    assert next(videos).settings["prompt"] == PROMPTS[0]
    assert steps == [0, 1]


def test_skipped_videos_are_not_made(nano):
    """`skip` decides from the metadata of each video."""
    all_metadata = []

    def skip(metadata):
        all_metadata.append(metadata)
        return metadata["seed"] == 1

    videos = list(nano.videos(PROMPTS, seeds=[1, 2], skip=skip, **SMALL))
    assert [(metadata["prompt"], metadata["seed"]) for metadata in all_metadata] == [
        (p, seed) for p in PROMPTS for seed in (1, 2)
    ]
    assert [video.settings for video in videos] == [metadata for metadata in all_metadata if metadata["seed"] == 2]


def test_given_noise_makes_one_video(nano):
    noise = np.zeros(nano.model.spec.noise_shape(nano.settings(**SMALL)), np.float32)
    assert len(nano.videos(PROMPTS[:1], noise=noise, **SMALL).__next__().frames) == 5


def test_several_seeds_of_one_prompt(nano):
    assert [video.settings["seed"] for video in nano(PROMPTS[0], seeds=range(2), **SMALL)] == [0, 1]


@pytest.mark.parametrize(
    ("prompts", "seeds", "words"),
    [
        ([PROMPTS[0], 3], None, "prompt 3"),
        (PROMPTS, [0, 1.5], "seed 1.5 whole number"),
        (PROMPTS[0], range(30_000_001), "30,000,001 100,000"),
        (PROMPTS[:2], range(60_000), "60,000 120,000 100,000"),  # refused before the seeds are listed
    ],
)
def test_mistakes_are_reported_before_anything_is_encoded(prompts, seeds, words):
    pipe = wanjax.load("nano")
    with unchecked(), pytest.raises(WanjaxError, match=line_with_words(words)):
        pipe(prompts, seeds=seeds, **SMALL)
    assert not pipe.components.has("text_encoder")


@pytest.mark.parametrize(
    ("guidance_scale", "batch_guidance"), quick([(4.0, False)], product([1.0, 4.0], [False, True]))
)
def test_videos_denoised_together_equal_those_denoised_separately(guidance_scale, batch_guidance):
    pipe = small_wan.pipeline(2, None)
    random = np.random.default_rng(0)
    conditionings = [
        WanConditioning(*(jnp.asarray(random.normal(size=(1, 3, 8)), jnp.float32) for _ in range(2))) for _ in "ab"
    ]
    options = {"guidance_scale": guidance_scale, "batch_guidance": batch_guidance, **SETTINGS}
    separate = [
        pipe.denoise(conditioning, seed=seed, **options)
        for conditioning, seed in zip(conditionings, (5, 6), strict=True)
    ]
    latents = pipe.denoise(run.join_conditionings(conditionings, pipe.call), seeds=[5, 6], **options)
    assert latents.shape == (2, *separate[0].shape[1:])
    assert error(np.asarray(latents), np.concatenate([np.asarray(x, np.float64) for x in separate])) <= 1e-5


@pytest.mark.parametrize(("guidance_scale", "batch_size"), quick([(1.0, 2)], [(1.0, 2), (4.0, 1)]))
def test_a_batch_fills_the_dp_axis(guidance_scale, batch_size):
    """An axis of two takes two videos without guidance, or both prompts of one video with guidance."""
    pipe = small_wan.pipeline(2, small_wan.partitioner((2, 2, 2)))
    assert run.batch_size(pipe.partitioner, guidance_scale > 1) == batch_size
    conditioning = WanConditioning(jnp.ones((1, 3, 8)), jnp.zeros((1, 3, 8)))
    batch = run.join_conditionings([conditioning] * batch_size, pipe.call)
    latents = pipe.denoise(batch, seeds=[7] * batch_size, guidance_scale=guidance_scale, **SETTINGS)
    expected = small_wan.pipeline(2, None).denoise(conditioning, seed=7, guidance_scale=guidance_scale, **SETTINGS)
    assert error(np.asarray(latents[-1:]), np.asarray(expected, np.float64)) <= 1e-5


def test_the_last_batch_repeats_its_last_request():
    expected = [PreparedRequest(presets()["nano"].defaults, {"seed": seed}) for seed in range(3)]
    assert list(run.batches(expected, 2)) == [(expected[:2], 2), ([expected[2]] * 2, 1)]
