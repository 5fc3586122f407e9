# SPDX-License-Identifier: Apache-2.0
"""A family from outside the package works in every command and in the library."""

import json
import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import wanjax
from tests.support.calls import Counting, differences, recorded_calls, wrong_shardings
from tests.support.clips import write_clips
from tests.support.compare import error
from tests.support.families import registered
from tests.support.programs import num_compiled
from tests.support.toy import LENGTH, TOY
from tests.support.toy.checkpoint import write_checkpoint
from tests.support.words import has_line_with_words
from wanjax import loading, registry
from wanjax.checkpoints.files import load_safetensors, save_safetensors
from wanjax.cli import main
from wanjax.errors import WanjaxError
from wanjax.media.stage_files import EMBEDDINGS_FILE, LATENTS_FILE
from wanjax.media.video import read_metadata
from wanjax.pipelines.caching.cache_tables import CacheTables, MagCacheTable, TeaCacheTable
from wanjax.pipelines.denoiser import take_step
from wanjax.pipelines.tracing import trace_programs
from wanjax.plan.estimate import estimate_video


@pytest.fixture(scope="module", autouse=True)
def _registered():
    with registered(TOY):
        yield


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("toy"), TOY)


def run(*arguments, status=0):
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def video(toy):
    return wanjax.load(toy)("a red circle", seed=3)


def test_generate_and_the_stages_make_the_same_video_as_the_library(toy, video, tmp_path):
    assert video.frames.shape == (5, 32, 32, 3)
    assert video.frames.std() > 1
    at_once, three = tmp_path / "one", tmp_path / "three"
    run("a red circle", "--model", toy, "--seed", 3, "--dir", at_once, "--out", tmp_path / "frames")
    run("encode", "a red circle", "--model", toy, "--dir", three)
    run("denoise", "--seed", 3, "--dir", three)
    run("decode", "--dir", three, "--out", tmp_path / "again")
    assert load_safetensors(at_once / EMBEDDINGS_FILE)["prompt_mask"].dtype == bool
    assert load_safetensors(at_once / LATENTS_FILE)["latents"].shape == (1, 3, 3, 8, 8)
    for folder in (tmp_path / "frames", tmp_path / "again"):
        pngs = [np.asarray(Image.open(path)) for path in sorted(folder.iterdir())]
        np.testing.assert_array_equal(np.stack(pngs), video.frames)
    assert read_metadata(tmp_path / "frames")["seed"] == 3


def test_the_seed_decides_each_step_s_noise_too(toy, video):
    pipe = wanjax.load(toy)
    noise = pipe.noise(pipe.settings(seed=3))
    again, another = (pipe("a red circle", seed=seed, noise=noise).frames for seed in (3, 4))
    np.testing.assert_array_equal(again, video.frames)
    assert (another != video.frames).any()


def test_masked_tokens_change_nothing(toy):
    pipe = wanjax.load(toy)
    conditioning = pipe.encode("a red circle")
    assert not conditioning.prompt_mask.all()
    width = conditioning.prompt_embeds.shape[1]
    hidden = jnp.where(conditioning.prompt_mask[:, :width, None], conditioning.prompt_embeds, 100.0)
    latents = [
        pipe.denoise(e, seed=0, guidance_scale=1.0) for e in (conditioning, conditioning._replace(prompt_embeds=hidden))
    ]
    assert error(*map(np.asarray, latents)) <= 1e-6


def test_a_truncated_prompt_is_reported(toy, tmp_path):
    message = run("encode", "a red circle moving right " * 5, "--model", toy, "--dir", tmp_path)
    assert has_line_with_words(message.stderr, f"model {LENGTH}")


def test_eight_devices_agree_with_one(toy):
    one_device, together = wanjax.load(toy), wanjax.load(toy, mesh="dp=2,sp=2,tp=2")
    latents, spread = (np.asarray(pipe.denoise(pipe.encode("a red circle"), seed=3)) for pipe in (one_device, together))
    assert error(spread, latents.astype(np.float64)) <= 1e-5
    assert np.abs(together.decode(latents).astype(int) - one_device.decode(latents)).max() <= 1


def test_a_conversion_and_back_restores_the_weights(toy, video, tmp_path):
    run("convert", toy, tmp_path / "converted")
    np.testing.assert_array_equal(wanjax.load(tmp_path / "converted")("a red circle", seed=3).frames, video.frames)
    run("convert", tmp_path / "converted", tmp_path / "back", "--to", "diffusers")
    for name in TOY.presets[0].model.spec.networks:
        [file] = (tmp_path / "back" / name).glob("*.safetensors")
        restored, original = load_safetensors(file), load_safetensors(toy / name / "model.safetensors")
        assert restored.keys() == original.keys()
        assert all(np.array_equal(restored[key], original[key]) for key in original)


def test_a_lora_is_merged(toy, tmp_path):
    key, random = "blocks.1.video_out", np.random.default_rng(1)
    a, b = (random.normal(size=size).astype(np.float32) for size in ((2, 16), (16, 2)))
    save_safetensors(
        tmp_path / "a.safetensors", {f"transformer.{key}.lora_A.weight": a, f"transformer.{key}.lora_B.weight": b}
    )
    loras = ((), f"{tmp_path / 'a.safetensors'}:0.5")
    kernels = [kernel(wanjax.load(toy, lora=lora)) for lora in loras]
    np.testing.assert_allclose(kernels[1] - kernels[0], 0.5 * (b @ a).T, rtol=1e-5, atol=1e-5)


def test_a_lora_is_trained(toy, tmp_path):
    data = write_clips(tmp_path / "data", 2)
    shape = (
        "--size",
        "32x32",
        "--frames",
        5,
        "--one-size",
        "--steps",
        2,
        "--lora-rank",
        2,
        "--lora-target",
        "video_out",
    )
    run("train", toy, data, "--out", tmp_path / "out", *shape)
    loras = ((), tmp_path / "out" / "lora.safetensors")
    before, after = (kernel(wanjax.load(toy, lora=lora)) for lora in loras)
    assert 0 < np.abs(after - before).max() < 1e-2


def kernel(pipe):
    return np.asarray(pipe.components.get("transformer").blocks.video_out.kernel[...][1])


def test_the_commands_models_plan_and_warmup_accept_the_family(toy, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "toy" in [model["name"] for model in json.loads(run("models", "--json").stdout)]
    for name in ("toy", toy):
        planned = json.loads(run("plan", name, "--chip", "cpu", "--json").stdout)
        assert planned["fits"]
        assert planned["step_seconds"] > 0
        assert planned["stages"].keys() == {"encode", "denoise", "decode"}
    assert "the compiled programs are in" in run("warmup", "--model", toy).stderr


@pytest.mark.parametrize("mesh", [None, "dp=2,sp=2,tp=2"])
def test_a_plan_traces_the_executed_programs_without_code_of_the_family(toy, mesh):
    """A family gives plans only the length of its prompts."""
    pipe, counting = wanjax.load(toy, mesh=mesh), Counting()
    pipe.with_strategy(counting)("a red circle")
    planned = loading.abstract_pipeline(registry.model_description(str(toy)), pipe.partitioner)
    assert not differences(counting.calls, recorded_calls(trace_programs(planned, planned.settings())))
    assert not wrong_shardings(counting.shardings)


@pytest.mark.parametrize("cache", ["none", "magcache:.2,1,.1", "easycache:9,2"])
def test_a_video_of_the_toy_is_estimated(cache):
    tables = CacheTables(MagCacheTable((1.0,) * 6, (1.0,) * 6, 0.1, 2, 0.2))
    description = registry.model_description("toy")
    settings = description.settings.updated({"steps": 6, "cache": cache})
    result = estimate_video(
        replace(description, model=replace(description.model, tables=tables), settings=settings), "cpu"
    )
    assert {row.name for row in result.programs} >= {"encode_texts", "embed_texts", "step", "finish", "decode_first"}
    assert (result.reusing_steps > 0) is (cache != "none")
    assert result.total_seconds > result.step_seconds > 0


REFUSED = {  # the request to a model of this family, and what the message names
    "an image": (lambda toy: run("a", "--model", toy, "--image", "x.png", status=2).stderr, "image prompt alone"),
    "an option": (lambda toy: run("a", "--model", toy, "--flow-shift", 3, status=2).stderr, "no setting --flow-shift"),
    "a keyword": (lambda toy: library_error(lambda: wanjax.load(toy)("a", flow_shift=3.0)), "flow_shift"),
    "its name again": (lambda toy: library_error(lambda: wanjax.register(TOY)), "toy registered already"),
}


def test_a_model_s_name_in_place_of_a_family_is_refused():
    """In a new process, where annotations are not checked."""
    code = "import wanjax; wanjax.register('nano')"
    message = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert has_line_with_words(message.splitlines()[-1], "WanjaxError Family 'nano' wanjax.load")


def library_error(call):
    with pytest.raises(WanjaxError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_settings_of_other_families_are_refused(toy, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (32, 32)).save("x.png")
    refuse, words = REFUSED[name]
    assert has_line_with_words(refuse(toy), words)


@pytest.mark.parametrize("cache", ["magcache", "teacache", "easycache:9,2", "guidance:2"])
def test_every_step_cache_works(toy, cache):
    pipe = wanjax.load(toy)
    ratios = (1.0, 1.01, 0.99, 1.0, 0.98, 0.9)
    tables = CacheTables(MagCacheTable(ratios, ratios, 0.1, 2, 0.2), TeaCacheTable((0.0,), 0.3, 1, 2))
    pipe.model = replace(pipe.model, tables=tables)
    conditioning, kinds = pipe.encode("a red circle"), []
    uncached = pipe.denoise(conditioning, seed=0, steps=6)
    cached = pipe.denoise(conditioning, seed=0, steps=6, cache=cache, callback=lambda step: kinds.append(step.reuses))
    assert kinds[0] is False
    assert any(kinds)
    assert np.isfinite(cached).all()
    assert error(np.asarray(cached), np.asarray(uncached, np.float64)) > 0


def test_a_step_cache_needs_two_more_programs(toy):
    """One program reuses cached values; the other computes them, unlike the program without a cache."""
    pipe = wanjax.load(toy)
    conditioning = pipe.encode("a red circle")
    uncached = pipe.denoise(conditioning, seed=0, steps=4)
    before = num_compiled(take_step)
    cached = pipe.denoise(conditioning, seed=0, steps=4, cache="deepcache:0,4,2")
    assert num_compiled(take_step) == before + 2
    assert np.isfinite(cached).all()
    assert error(np.asarray(cached), np.asarray(uncached, np.float64)) > 0
