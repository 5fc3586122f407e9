# SPDX-License-Identifier: Apache-2.0
"""Options that choose the scheduler, attention and devices, with their names here and in older scripts."""

from pathlib import Path

import numpy as np
import pytest

import wanjax as library
from tests.support.commands import Arguments, refused, succeeded, wanjax
from tests.support.compare import error
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words
from wanjax import registry, schedulers
from wanjax.checkpoints.files import load_safetensors
from wanjax.cli import planning, stages
from wanjax.cli.options import CHOICES
from wanjax.kernels.attention import IMPLEMENTATIONS, AttentionConfig
from wanjax.media import stage_files
from wanjax.media.metadata import load_settings
from wanjax.pipelines import guidance
from wanjax.pipelines.caching import rules as caching
from wanjax.pipelines.caching.rules import cache_rule
from wanjax.pipelines.guidance import guidance_rule
from wanjax.pipelines.mesh_sizes import AutoMesh

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = ("--size", "32x16", "--frames", "5", "--steps", "2", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(folder: str) -> np.ndarray:
    return load_safetensors(Path(folder) / stage_files.LATENTS_FILE)["latents"].copy()


def latents(folder: str) -> bytes:
    return read(folder).tobytes()


def test_a_chosen_scheduler_is_used_by_the_next_stage(model):
    succeeded(wanjax("encode", "a", "--model", model, "--dir", "one"))
    succeeded(wanjax("denoise", *SMALL, "--dir", "one"))
    default = latents("one")
    succeeded(wanjax("denoise", *SMALL, "--scheduler", "euler", "--dir", "one", "--force"))
    euler = latents("one")
    assert euler != default
    assert load_settings(Path("one"))["scheduler"] == "euler"
    succeeded(wanjax("denoise", *SMALL, "--dir", "one", "--force"))
    assert latents("one") == euler
    succeeded(wanjax("denoise", *SMALL, "--scheduler", "unipc", "--dir", "one", "--force"))
    assert latents("one") == default


@pytest.mark.parametrize(
    ("option", "read", "implemented"),
    [
        ("attention", AttentionConfig.parse, {*IMPLEMENTATIONS}),
        ("cache", cache_rule, {*caching.RULES}),
        ("guidance_rule", guidance_rule, {*guidance.RULES}),
        ("scheduler", schedulers.parse, {*schedulers.SCHEDULERS}),
    ],
)
def test_names_listed_without_jax_are_valid_and_complete(option, read, implemented):
    """An option refuses names that are not in this list. The tables of implementations need JAX."""
    assert implemented <= {*CHOICES[option]}
    for name in CHOICES[option]:
        read(name)


@pytest.fixture
def parsed(record_arguments) -> Arguments:
    """The arguments that the command line passes to `generate` or to `plan`, which do not run."""
    return record_arguments({stages: ["generate"], planning: ["plan"]})


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ("", "attention", None),
        ("--attention auto", "attention", None),
        ("--attention chunked", "attention", "chunked"),
        ("--window 4096", "attention", "auto:window=4096"),
        ("--window_size 4096 --attention chunked", "attention", "chunked:window=4096"),
        (
            "--bqsize 3328 --bkvsize 2816 --bkvcomputesize 256",
            "attention",
            "flash_tpu:block_q=3328,block_kv=2816,block_kv_compute=256",
        ),
        ("--use_custom_attention", "attention", "flash_tpu"),
        ("--use_custom_attention --window_size 9", "attention", "flash_tpu:window=9"),
        ("--use_k_smooth --block-q 512", "attention", "flash_tpu:block_q=512,center_keys"),
        ("--attention flash_tpu:block_q=512 --window 9", "attention", "flash_tpu:block_q=512,window=9"),
        ("", "mesh", None),
        ("--use_dp", "mesh", AutoMesh()),
        ("--sp_num 2", "mesh", AutoMesh(2)),
        ("--use_dp --sp_num 1 --mesh auto", "mesh", AutoMesh(1)),
        ("--use_fsdp", "rules", "fsdp"),
        ("--use_fsdp --rules fsdp", "rules", "fsdp"),
        ("--rules tp", "rules", "tp"),
    ],
)
def test_the_option_names_of_older_scripts_are_accepted(parsed, options, name, value):
    for command in (["a"], ["plan"]):
        succeeded(wanjax(*command, *options.split()))
        assert (str(parsed[name]) if isinstance(parsed[name], AttentionConfig) else parsed[name]) == value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "--use_custom_attention --attention chunked",
            "--use-custom-attention --attention flash_tpu chunked",
        ),
        ("--use_dp --mesh tp=4", "--use-dp --mesh"),
        ("--sp_num 2 --mesh tp=4", "--sp-num --mesh"),
        ("--use_fsdp --rules tp", "--use-fsdp --rules fsdp tp"),
        ("--window 0", "--window 0 1"),
        ("--attention chunked:window=x", "window 'chunked:window=x' number tokens"),
        ("--use_k_smooth", "center_keys flash_tpu TPUs leave"),
        ("--use_custom_attention", "flash_tpu TPUs chunked auto"),
        ("--sp_num 3", "8 devices sp=3"),
        ("--mesh auto,tp=2", "mesh 'auto,tp=2'"),
        ("--scheduler unipc:foo=1", "option 'foo=1' 'unipc:foo=1' unipc:order=1"),
        ("--scheduler unipc:2", "'unipc:2' unipc euler dpm++ consistency rcm rcm-ode"),  # the schedulers for this model
        ("--scheduler unipc:2", "unipc:order=1 consistency:timesteps=1000,757,522 rcm:sigma_max=200"),
    ],
)
def test_invalid_or_contradictory_options_are_refused(model, options, words):
    assert has_line_with_words(refused("a", "--model", model, *SMALL, *options.split()), words)


def test_plan_takes_its_model_as_argument_or_option(parsed):
    for command in (
        ["plan", "wan2.1-t2v-14b"],
        ["plan", "--model", "wan2.1-t2v-14b"],
        ["plan", "--model_id", "wan2.1-t2v-14b", "wan2.1-t2v-14b"],
    ):
        succeeded(wanjax(*command))
        assert parsed["model"] == command[-1]
    succeeded(wanjax("plan"))
    assert parsed["model"] == "nano"
    assert has_line_with_words(
        refused("plan", "nano", "--model", "wan2.1-t2v-14b"), "model nano --model wan2.1-t2v-14b"
    )


@pytest.mark.slow  # quick tests check what `--window` passes on, and windows in tests/kernels
def test_a_window_confines_self_attention(model):
    """A window as long as the video changes nothing; a short one gives what the library gives."""
    for name, window in (("whole", []), ("wide", ["--window", "99"]), ("narrow", ["--window", "2"])):
        succeeded(wanjax("encode", "a", "--model", model, "--dir", name, "--dtype", "float32"))
        succeeded(wanjax("denoise", *SMALL, "--dir", name, *window))
    assert np.abs(read("wide") - read("whole")).max() < 1e-5
    assert np.abs(read("narrow") - read("whole")).max() > 1e-4
    pipe = library.load(model, attention="reference:window=2", dtype="float32")
    expected = pipe.denoise(pipe.encode("a"), size=(16, 32), frames=5, steps=2)
    assert error(read("narrow"), np.float64(expected)) < 1e-5


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Wan2.2-I2V-14B-Diffusers", "wan2.2-i2v-a14b"),
        ("Wan-AI/Wan2.2-I2V-14B-Diffusers", "wan2.2-i2v-a14b"),
        ("Wan2.1-T2V-14B-Diffusers", "wan2.1-t2v-14b"),
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "wan2.1-t2v-14b"),
        ("wan2.1-t2v-14b-4step", "wan2.1-t2v-14b-4step"),
    ],
)
def test_the_name_of_a_repository_selects_its_preset(name, preset, tmp_path):
    assert registry.model_description(name).settings.model == preset
    Path(name).mkdir(parents=True)
    if "/" not in name:  # a folder has priority over a repository name without its owner
        assert registry.find_preset(name) == (registry.presets()[name] if name == preset else None)
