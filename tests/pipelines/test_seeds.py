# SPDX-License-Identifier: Apache-2.0
"""A seed gives the same noise under every flag of JAX; invalid seeds are refused, and random ones are stored."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wanjax
from tests.support.commands import refused, succeeded
from tests.support.commands import wanjax as run
from tests.support.tiny import compile_cache, tiny_checkpoint
from tests.support.words import has_line_with_words, line_with_words
from wanjax.errors import WanjaxError
from wanjax.execution import partitionable_prng
from wanjax.media.metadata import load_settings
from wanjax.media.video import read_metadata
from wanjax.pipelines import seeds
from wanjax.pipelines.cogvideox.conditioning import POSTERIORS
from wanjax.pipelines.seeds import draw_noise, key_numbers, seed_to_key_data, solver_keys
from wanjax.pipelines.settings import read_seeds

SMALL = {"size": (16, 32), "frames": 5, "steps": 2, "guidance_scale": 1.0, "dtype": "float32"}
OPTIONS = ("--size", "32x16", "--frames", "5", "--steps", "2", "--guidance-scale", "1", "--dtype", "float32")
SHAPE = (1, 4, 3, 5, 6)
FLAGS = [
    {"jax_enable_x64": True},
    {"jax_default_prng_impl": "rbg"},
    {"jax_default_prng_impl": "unsafe_rbg"},
    {"jax_threefry_partitionable": False},
    {"jax_random_seed_offset": 7},
    {"jax_enable_custom_prng": True},
    {"jax_enable_x64": True, "jax_default_prng_impl": "rbg", "jax_threefry_partitionable": False},
]
VIDEO = """
import json, sys
import jax
for name, value in json.loads(sys.argv[1]).items():
    jax.config.update(name, value)
import numpy as np, wanjax
video = wanjax.load(sys.argv[2])("a", size=(16, 32), frames=5, steps=2, guidance_scale=1.0, seed=5)
np.save(sys.argv[3], video.frames)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module", autouse=True)
def xla(tmp_path_factory):
    with compile_cache(tmp_path_factory.getbasetemp() / "xla") as folder:
        yield folder


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def with_flags(flags: dict, draw):
    """Call `draw` with these flags of JAX, and restore the flags."""
    with ExitStack() as stack:
        for name, value in flags.items():
            stack.callback(jax.config.update, name, getattr(jax.config, name))
            jax.config.update(name, value)
        return np.asarray(draw())


def initial_noise(seed: int, shape: tuple[int, ...] = SHAPE) -> jax.Array:
    with partitionable_prng():
        return draw_noise(seed_to_key_data([seed]), shape)


def drawn_keys(seed: int) -> jax.Array:
    with partitionable_prng():
        return solver_keys(seed_to_key_data([seed]))


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("seed", [0, 42, 2**40 + 7])
def test_the_noise_is_the_same_under_every_flag(flags, seed):
    for draw in (
        lambda: initial_noise(seed),
        lambda: jax.random.key_data(drawn_keys(seed)),
    ):
        expected = draw()
        noise = with_flags(flags, draw)
        assert noise.dtype == expected.dtype
        np.testing.assert_array_equal(noise, expected)


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31, 2**32 - 1])
def test_seeds_below_32_bits_give_the_noise_of_jax(seed):
    np.testing.assert_array_equal(initial_noise(seed), jax.random.normal(jax.random.key(seed), SHAPE))


def test_the_noise_of_a_seed_never_changes():
    """Later versions of JAX may change defaults, but not this noise."""
    exact = [-1.0978881, -0.64294845, 0.18318748, -0.11200721]
    np.testing.assert_allclose(initial_noise(2**33 + 5, (1, 4))[0], exact, rtol=1e-6)


def test_the_noise_of_steps_has_a_separate_key():
    """The key of step noise does not change between versions, and step noise is independent of initial noise."""
    key = jax.random.fold_in(jax.random.key(42), 1)
    assert np.array_equal(jax.random.key_data(drawn_keys(42))[0], jax.random.key_data(key))
    first = np.asarray(jax.random.normal(key, SHAPE))
    assert abs(np.corrcoef(first.ravel(), np.asarray(initial_noise(42)).ravel())[0, 1]) < 0.2


def test_all_bits_of_a_seed_affect_the_noise():
    noises = [np.asarray(initial_noise(seed)) for seed in (0, *(2**bit for bit in range(64)), 2**64 - 1)]
    assert len({noise.tobytes() for noise in noises}) == len(noises)


@pytest.mark.slow
def test_a_video_is_the_same_under_all_flags_together(model, xla):
    """The video is made in a new process, so that nothing is compiled before the flags are set."""
    frames = wanjax.load(model)("a", seed=5, **SMALL).frames
    command = [sys.executable, "-c", VIDEO, json.dumps(FLAGS[-1]), model, "frames.npy"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(xla)}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    np.testing.assert_array_equal(np.load("frames.npy"), frames)


@pytest.mark.parametrize("seed", [2**64, 10**20, -2, 1.5, 3.0, True, "3", "many", [3], np.float32(3), np.True_])
def test_invalid_seeds_are_refused(model, seed):
    pipe = wanjax.load(model)
    with pytest.raises(WanjaxError, match=line_with_words("seed whole number 0 2^64 - 1 -1 random")):
        pipe("a", seed=seed, **SMALL)
    assert not pipe.components.has("text_encoder")


@pytest.mark.parametrize("seed", ["100000000000000000000", "-2", "many", "1.5"])
def test_invalid_seeds_are_refused_by_the_command(model, seed):
    assert has_line_with_words(refused("a", "--model", model, *OPTIONS, "--seed", seed), f"seed {seed} whole number")


@pytest.mark.parametrize("seed", [np.int64(3), np.uint8(3), jnp.int32(3)])
def test_integers_of_other_types_are_seeds(model, seed):
    assert type(wanjax.load(model).settings(seed=seed).seed) is int


def test_a_drawn_seed_is_stored_and_reproduces_the_video(model):
    pipe = wanjax.load(model)
    first, second = (pipe("a", seed=seed, **SMALL) for seed in (-1, "random"))
    assert 0 <= first.settings["seed"] < 2**32
    assert first.settings["seed"] != second.settings["seed"]
    reproduced = pipe("a", seed=first.settings["seed"], **SMALL)
    np.testing.assert_array_equal(reproduced.frames, first.frames)


def test_denoise_reports_the_drawn_seed(model):
    pipe = wanjax.load(model)
    conditioning = pipe.encode("a")
    with pytest.warns(UserWarning, match=r"the seed \d+ was drawn at random") as caught:
        latents = pipe.denoise(conditioning, seed=-1, **SMALL)
    seed = int(str(caught[0].message).split()[2])
    np.testing.assert_array_equal(pipe.denoise(conditioning, seed=seed, **SMALL), latents)
    with pytest.warns(UserWarning, match=r"the seed \d+ was drawn at random") as caught:
        latents = pipe.denoise(conditioning, seeds=[-1], **SMALL)
    seed = int(str(caught[0].message).split()[2])
    np.testing.assert_array_equal(pipe.denoise(conditioning, seeds=[seed], **SMALL), latents)


def test_the_warning_names_the_caller_s_line(tmp_path):
    """The script runs in a new process, because the tests wrap each function to check its types."""
    script = tmp_path / "mine.py"
    script.write_text("import wanjax\npipe = wanjax.load('nano')\npipe.denoise(pipe.encode('a'), seed=-1, noise=0)\n")
    output = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300).stderr
    assert f"{script}:3: UserWarning: the seed" in output


def test_the_command_prints_a_drawn_seed(model):
    output = succeeded(
        run("a", "--model", model, *OPTIONS, "--seed", "random", "--dir", "one", "--out", "one.mp4")
    ).stderr
    seed = read_metadata("one.mp4")["seed"]
    assert f"seed {seed} (drawn), float32" in output
    assert load_settings(Path("one"))["seed"] == seed
    output = succeeded(run("denoise", "--seed", "-1", "--dir", "one", "--force")).stderr
    second_seed = load_settings(Path("one"))["seed"]
    assert f"seed {second_seed} (drawn)" in output
    assert second_seed not in (seed, -1)


def test_a_single_process_draws_a_seed_without_communication(monkeypatch):
    monkeypatch.setattr(seeds.secrets, "randbits", lambda bits: 2**bits - 1)
    assert seeds.draw() == 2**32 - 1


def test_every_stream_of_latents_has_different_noise():
    """Each stream has two keys of its own. A model's video keys are the same with and without other streams."""
    numbers = [number for modality in range(9) for number in key_numbers(modality)]
    assert numbers[:2] == [0, 1]
    assert len({*numbers, *(posterior.key_number for posterior in POSTERIORS)}) == 18 + len(POSTERIORS)


def test_a_range_with_a_dash_is_answered_with_dots():
    with pytest.raises(WanjaxError, match=line_with_words("1 - 4 dash 1..4")):
        read_seeds("7,1 - 4")
