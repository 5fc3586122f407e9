# SPDX-License-Identifier: Apache-2.0
"""A new family that uses only shared code, and has what no other family has: sound, a reference, two passes."""

import json
from copy import copy
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import wanjax
from tests.support.calls import Counting, differences, recorded_calls, wrong_shardings
from tests.support.clips import write_clips
from tests.support.compare import error
from tests.support.families import registered
from tests.support.quick import quick
from tests.support.toy.checkpoint import write_checkpoint
from tests.support.toy_sound import DRIVING, TOY_SOUND
from tests.support.words import has_line_with_words
from wanjax import loading, registry
from wanjax.cli import main
from wanjax.errors import WanjaxError
from wanjax.media.inputs import INPUT_SPECS
from wanjax.media.pictures import read_clip
from wanjax.media.video import read_metadata
from wanjax.pipelines.caching.cache_tables import CacheTables, MagCacheTable
from wanjax.pipelines.observers import Cancelled, Observer
from wanjax.pipelines.request import PreparedRequest
from wanjax.pipelines.run import Run
from wanjax.pipelines.tracing import needed_pictures, trace_programs

PICTURE = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
CLIP = np.stack([np.roll(PICTURE, 4 * number, 1) for number in range(5)])
STEPS = 3 + 2  # the steps of both passes
TABLES = CacheTables(MagCacheTable(*[(1.0, 1.01, 0.99, 1.0, 0.98, 0.9)] * 2, 0.1, 2, 0.2))


@pytest.fixture(scope="module", autouse=True)
def _registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(INPUT_SPECS, DRIVING.name, DRIVING)
        with registered(TOY_SOUND):
            yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("toy-sound"), TOY_SOUND)


@pytest.fixture(scope="module")
def pipe(folder):
    return wanjax.load(folder)


@pytest.fixture(scope="module")
def conditioning(pipe):
    return pipe.encode("a red circle", image=PICTURE)


@pytest.fixture(scope="module")
def latents(pipe, conditioning):
    return pipe.denoise(conditioning, seed=3)


class Sounds(Observer):
    """Collects the decoded sound."""

    def __init__(self) -> None:
        self.sounds: list[np.ndarray] = []

    def decoded(self, extras: Any) -> None:
        self.sounds.append(np.asarray(extras["audio"]))


def frames_and_sound(pipe: Any, seeds: list[int], *prompts: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the frames and the sound of a video for each prompt and seed."""
    pictures, settings = pipe.prepare(image=PICTURE)
    expected = [settings.updated({"prompt": prompt, "seed": seed}) for prompt in prompts for seed in seeds]
    run = Run(pipe, [PreparedRequest(fields) for fields in expected], pictures, observers=[sounds := Sounds()])
    return [np.concatenate([np.asarray(chunk) for chunk in frames]) for _, frames in run], sounds.sounds


def differing_names(first: Any, second: Any) -> list[str]:
    return [name for name in first if not np.array_equal(np.asarray(first[name]), np.asarray(second[name]))]


def test_a_call_equals_the_stages(pipe, latents):
    assert {name: x.shape for name, x in latents.items()} == {"video": (1, 3, 3, 16, 16), "audio": (1, 5, 8)}
    video = pipe("a red circle", image=PICTURE, seed=3)
    assert video.frames.shape == (5, 64, 64, 3)
    assert video.frames.std() > 1
    np.testing.assert_array_equal(pipe.decode(latents, seed=3), video.frames)
    assert (pipe.decode(latents, seed=4) != video.frames).any()  # the decoder's noise


def test_sound_does_not_change_the_frames(pipe):
    [frames], [sound] = frames_and_sound(pipe, [3], "a red circle")
    np.testing.assert_array_equal(frames, pipe("a red circle", image=PICTURE, seed=3).frames)
    assert sound.shape == (32,)
    assert np.isfinite(sound).all()


def test_both_streams_and_both_passes_have_different_noise(pipe, conditioning, latents):
    """The seed decides all noise that the caller does not pass by name."""
    shapes = pipe.draws(pipe.settings(seed=3))
    assert {name: shape[2:] for name, shape in shapes.items()} == {
        "noise": (3, 8, 8), "audio_noise": (8,), "noise_2": (3, 16, 16), "audio_noise_2": (8,)
    }  # fmt: skip
    same = pipe.denoise(conditioning, seed=3, noise={"noise": pipe.noise(pipe.settings(seed=3))})
    assert not differing_names(latents, same)
    for name, shape in shapes.items():
        changed = pipe.denoise(conditioning, seed=3, noise={name: np.ones(shape, np.float32)})
        assert sorted(differing_names(latents, changed)) == ["audio", "video"], name


def test_the_second_pass_begins_from_the_latents_of_the_first(pipe, conditioning):
    """Its step numbers continue those of the first pass."""
    steps = []
    pipe.denoise(conditioning, seed=3, callback=lambda step: steps.append((step.index, step.total, step.x0.shape[3:])))
    assert steps == [(n, STEPS, (8, 8) if n < 3 else (16, 16)) for n in range(STEPS)]


def test_a_preview_shows_the_video(pipe, conditioning):
    shapes = []
    pipe.denoise(conditioning, seed=3, callback=lambda step: shapes.append(step.preview().shape))
    assert shapes == [(1, 3, 8, 8, 3)] * 3 + [(1, 3, 16, 16, 3)] * 2


def test_the_reference_changes_the_latents(pipe, latents):
    changed = pipe.denoise(pipe.encode("a red circle", image=255 - PICTURE), seed=3)
    assert len(differing_names(latents, changed)) == 2


def test_a_driving_clip_changes_the_latents(pipe, latents):
    changed = pipe.denoise(pipe.encode("a red circle", image=PICTURE, driving=CLIP), seed=3)
    assert len(differing_names(latents, changed)) == 2


def test_an_input_of_one_family_has_an_option_a_column_and_metadata(folder, pipe, tmp_path):
    """The command, a row of a table and `--from` accept the input of a new family."""
    expected = pipe("a red circle", image=PICTURE, driving=CLIP, seed=3)
    expected.save(tmp_path / "expected.mp4")
    Image.fromarray(PICTURE).save(tmp_path / "x.png")
    (tmp_path / "clip").mkdir()
    for number, frame in enumerate(CLIP):
        Image.fromarray(frame).save(tmp_path / f"clip/{number}.png")
    row = {"prompt": "a red circle", "image": "x.png", "driving": "clip", "seed": 3}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    options = ("--image", tmp_path / "x.png", "--driving", tmp_path / "clip")
    _run("a red circle", "--model", folder, *options, "--seed", 3, "--out", tmp_path / "one.mp4")
    _run("batch", tmp_path / "rows.jsonl", "--model", folder, "--out", tmp_path / "many")
    [several] = (tmp_path / "many").glob("*.mp4")
    _run("--from", several, "--out", tmp_path / "again.mp4")
    for file in (tmp_path / "one.mp4", several, tmp_path / "again.mp4"):
        assert read_metadata(file)["driving"] == str(tmp_path / "clip")
        np.testing.assert_array_equal(read_clip(file, 5, 8), read_clip(tmp_path / "expected.mp4", 5, 8))


def command_error(*arguments):
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == 2, result.output
    return result.output


def library_error(call, *arguments, **more):
    with pytest.raises(WanjaxError) as caught:
        call(*arguments, **more)
    return str(caught.value)


REFUSED = {  # the request, and what the message names
    "a clip in the library": (
        lambda pipe, folder: library_error(wanjax.load("nano").prepare, prompt="a", driving=CLIP),
        "nano driving",
    ),
    "a clip in the command": (
        lambda pipe, folder: command_error("a", "--model", "nano", "--driving", "."),
        "nano driving",
    ),
    "latents of a video alone": (
        lambda pipe, folder: library_error(pipe.decode, np.zeros((1, 16, 5, 8, 8), np.float32)),
        "audio",
    ),
    "training": (lambda pipe, folder: command_error("train", folder, "clips", "--out", "x"), "audio"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_of_one_family_are_refused_by_the_other(folder, pipe, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write_clips(tmp_path / "clips", 1)
    refuse, words = REFUSED[name]
    assert has_line_with_words(refuse(pipe, folder), words)


def test_an_input_of_one_family_is_in_the_help():
    assert "--driving" in _run("generate", "--help-all").stdout


@pytest.mark.parametrize("name", ["steps", "image"])
def test_an_input_needs_a_name_that_no_setting_or_input_has(name):
    """Otherwise one option would have two meanings."""
    [preset] = TOY_SOUND.presets
    model = copy(preset.model)
    vars(model)["spec"] = replace(model.spec, inputs=(DRIVING._replace(name=name),))
    with pytest.raises(WanjaxError, match=name):
        wanjax.register(replace(TOY_SOUND, pipelines=(), presets=(replace(preset, name="x", model=model),)))


@pytest.mark.slow
def test_eight_devices_agree_with_one(folder, pipe, conditioning, latents):
    on_mesh = wanjax.load(folder, mesh="dp=2,sp=2,tp=2")
    mesh_latents = on_mesh.denoise(on_mesh.encode("a red circle", image=PICTURE), seed=3)
    for name, x in mesh_latents.items():
        assert error(np.asarray(x), np.asarray(latents[name], np.float64)) <= 1e-5, name
    frames = [decoder.decode(jax.tree.map(np.asarray, latents), seed=3).astype(int) for decoder in (pipe, on_mesh)]
    assert np.abs(frames[0] - frames[1]).max() <= 1


@pytest.mark.parametrize("mesh", quick([None], [None, "dp=4,sp=1,tp=2"]))
def test_videos_of_a_batch_equal_those_made_one_by_one(folder, pipe, mesh):
    on_mesh = pipe if mesh is None else wanjax.load(folder, mesh=mesh)
    frames, sounds = frames_and_sound(on_mesh, [3, 4], "a red circle", "a dog")
    for number, (prompt, seed) in enumerate([(p, s) for p in ("a red circle", "a dog") for s in (3, 4)]):
        [separate], [sound] = frames_and_sound(pipe, [seed], prompt)
        assert np.abs(frames[number].astype(int) - separate).max() <= (mesh is not None)
        assert error(sounds[number], sound.astype(np.float64)) <= (0 if mesh is None else 1e-5)


@pytest.mark.parametrize("seeds", [[3, 4]])
def test_a_batch_equals_its_videos(pipe, conditioning, seeds):
    together = jax.tree.map(lambda x: None if x is None else np.concatenate([np.asarray(x)] * 2), conditioning)
    latents = pipe.denoise(together._replace(video_shape=conditioning.video_shape), seeds=seeds)
    for number, seed in enumerate(seeds):
        separate = pipe.denoise(conditioning, seed=seed)
        for name, x in latents.items():
            assert error(np.asarray(x[number]), np.asarray(separate[name][0], np.float64)) <= 1e-5


@pytest.mark.parametrize("rule", quick(["none"], ["none", "apg"]))
@pytest.mark.parametrize("last", quick([0, 2, 3], range(STEPS - 1)))
def test_a_stopped_run_continues_to_the_same_bits(pipe, conditioning, tmp_path, last, rule):
    uninterrupted = pipe.denoise(conditioning, seed=3, guidance_rule=rule)
    resumed = []
    with pytest.raises(Cancelled):
        pipe.denoise(
            conditioning, seed=3, guidance_rule=rule, keep=tmp_path / "x", callback=lambda step: step.index < last
        )
    again = pipe.denoise(
        conditioning, seed=3, guidance_rule=rule, keep=tmp_path / "x", continued=lambda *steps: resumed.append(steps)
    )
    assert not differing_names(uninterrupted, again)
    assert resumed[-1] == (last + 1, STEPS)


@pytest.mark.parametrize("mesh", quick([None], [None, "dp=2,sp=2,tp=2"]))
def test_a_plan_traces_the_executed_programs(folder, mesh):
    pipe, counting = wanjax.load(folder, mesh=mesh), Counting()
    pipe.with_strategy(counting)("a red circle", image=PICTURE)
    planned = loading.abstract_pipeline(registry.model_description(str(folder)), pipe.partitioner)
    settings = planned.settings()
    trace = trace_programs(planned, settings, needed_pictures(planned, settings))
    assert not differences(counting.calls, recorded_calls(trace))
    assert not wrong_shardings(counting.shardings)


@pytest.mark.parametrize(
    "cache", quick(["easycache:9,2"], ["easycache:9,2", "magcache", "deepcache:0,4,2", "guidance:2"])
)
def test_step_caches_store_both_streams(pipe, conditioning, tmp_path, cache):
    """A reused step changes the latents of both streams. A stopped run keeps the cached values of both."""
    uncached, reused, file = pipe.denoise(conditioning, seed=3, steps=6), [], tmp_path / "x"
    pipe = copy(pipe)
    pipe.model = replace(pipe.model, tables=TABLES)
    cached = pipe.denoise(conditioning, seed=3, steps=6, cache=cache, callback=lambda step: reused.append(step.reuses))
    with pytest.raises(Cancelled):
        pipe.denoise(conditioning, seed=3, steps=6, cache=cache, keep=file, callback=lambda step: step.index < 3)
    assert not differing_names(cached, pipe.denoise(conditioning, seed=3, steps=6, cache=cache, keep=file))
    assert any(reused)
    assert not any(reused[6:])  # the second pass
    assert len(differing_names(uncached, cached)) == 2
    assert all(np.isfinite(x).all() for x in cached.values())


def test_the_command_makes_a_video_at_once_and_in_stages(folder, tmp_path):
    Image.fromarray(PICTURE).save(tmp_path / "x.png")
    request = ("a red circle", "--model", folder, "--image", tmp_path / "x.png")
    at_once, three = tmp_path / "one", tmp_path / "three"
    _run(*request, "--seed", 3, "--dir", at_once, "--out", tmp_path / "frames")
    _run("encode", *request, "--dir", three)
    _run("denoise", "--seed", 3, "--dir", three)
    _run("decode", "--dir", three, "--out", tmp_path / "again")
    for name in ("frames", "again"):
        pngs = [np.asarray(Image.open(path)) for path in sorted((tmp_path / name).iterdir())]
        np.testing.assert_array_equal(
            np.stack(pngs), wanjax.load(folder)("a red circle", image=PICTURE, seed=3).frames, err_msg=name
        )


@pytest.mark.slow
def test_a_plan_prices_both_passes_and_the_inputs(folder, tmp_path):
    (tmp_path / "clip").mkdir()
    for number, frame in enumerate(CLIP):
        Image.fromarray(frame).save(tmp_path / f"clip/{number}.png")
    planned = json.loads(_run("plan", folder, "--chip", "cpu", "--json").stdout)
    Image.fromarray(PICTURE).save(tmp_path / "x.png")
    options = ("--image", tmp_path / "x.png", "--driving", tmp_path / "clip")
    driven = json.loads(_run("plan", folder, *options, "--chip", "cpu", "--json").stdout)
    assert planned["fits"]
    assert driven["step_seconds"] > planned["step_seconds"]  # its keys and values are read in every step
    assert planned["total_seconds"] > 3 * planned["step_seconds"]


def _run(*arguments: Any) -> Any:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result
