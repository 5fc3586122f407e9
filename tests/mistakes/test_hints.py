# SPDX-License-Identifier: Apache-2.0
"""A hint suggests only similar names: a wrong hint is worse than none."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import wanjax
from tests.support.types import unchecked
from tests.support.words import has_line_with_words, line_with_words
from wanjax.cli import main
from wanjax.cli.arguments import message_with_option
from wanjax.errors import SettingError, WanjaxError, near_names
from wanjax.jobs.rows import RowError
from wanjax.pipelines.pipeline import Pipeline
from wanjax.pipelines.request import VideoRequest, field_names
from wanjax.pipelines.settings import missing_setting
from wanjax.pipelines.validation import check_frames
from wanjax.training import LoraConfig, OptimizerConfig, TrainConfig, train

SIMILAR_NAMES = {
    "stepz": "steps",
    "step": "steps",
    "stpes": "steps",
    "promt": "prompt",
    "hight": "height",
    "imag": "image",
    "img": "image",
    "sed": "seed",
    "flowshift": "flow_shift",
    "guidance": "guidance_rule",
    "reference": "references",
    "negativ_prompt": "negative_prompt",
}
DISSIMILAR_NAMES = ("mesh", "n", "colour", "foo", "x", "se", "length", "")


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return wanjax.load("nano")


@pytest.mark.parametrize("name", SIMILAR_NAMES)
def test_a_similar_name_is_suggested(name):
    assert near_names(name, sorted(field_names()), 1) == [SIMILAR_NAMES[name]]


@pytest.mark.parametrize("name", DISSIMILAR_NAMES)
def test_a_dissimilar_name_is_not_suggested(name):
    assert near_names(name, sorted(field_names())) == []


def error_message(call, **keywords) -> str:
    with unchecked(), pytest.raises(SettingError) as caught:
        call("a red circle", **keywords)
    return str(caught.value)


def test_a_call_suggests_its_keywords(pipe):
    assert has_line_with_words(error_message(pipe, reference=[]), "'reference' pipe(prompt, references=...)")
    assert has_line_with_words(error_message(pipe, callbak=print), "'callbak' pipe(prompt, callback=...)")
    assert has_line_with_words(error_message(pipe, stepz=2), "'stepz' use steps")
    for method in (pipe, pipe.encode):
        assert "follow" not in error_message(method, foo=1)
    assert has_line_with_words(error_message(pipe, length=5), "'length' frames")
    assert has_line_with_words(error_message(pipe, num_steps=5), "'num_steps' steps")
    assert error_message(pipe, seconds=1) == "'seconds' is not a keyword here: use frames; fps frames make a second"


@pytest.mark.parametrize("method", ["encode", "encode_prompts"])
def test_a_method_of_one_prompt_says_so(pipe, method):
    with unchecked(), pytest.raises(SettingError, match=r"one text.*'a red circle'.*for each prompt"):
        getattr(pipe, method)(["a red circle"])


def test_a_method_suggests_its_keywords(pipe):
    settings = pipe.settings()
    assert has_line_with_words(error_message(pipe.encode_prompts, negative="a dog"), "'negative' negative_prompt")
    with unchecked(), pytest.raises(SettingError, match="use steps"):
        pipe.prepare(stepz=1)
    for method, keyword, words in (
        (pipe.draws, "reference", "'reference' use references"),
        (pipe.noise, "foo", "'foo' settings references"),
        (pipe.truncations, "folow", "'folow' use follow"),
    ):
        with unchecked(), pytest.raises(SettingError) as caught:
            method(settings, **{keyword: 1})
        assert has_line_with_words(str(caught.value), words)


@pytest.mark.parametrize(
    ("method", "keyword", "words"),
    [
        ("encode", "callback", "'callback' pipe(prompt, callback=...) pipe.denoise(conditioning, callback=...)"),
        ("encode", "seeds", "'seeds' pipe.denoise(conditioning, seeds=...)"),
        ("encode", "batch_guidance", "'batch_guidance' pipe.denoise(conditioning, batch_guidance=...)"),
        ("denoise", "image", "'image' pipe.encode(prompt, image=...)"),
        ("denoise", "tiling", "'tiling' pipe.decode(latents, tiling=...)"),
        ("denoise", "latents", "'latents' use noise"),
        ("decode", "steps", "'steps' pipe.settings(steps=...)"),
        ("noise", "seed", "'seed' pipe.settings(seed=...)"),
        ("encode_video", "size", "'size' pipe.settings(size=...)"),
        ("stream", "latents", "'latents' use noise"),
    ],
)
def test_a_keyword_of_another_stage_is_told_with_its_stage(pipe, method, keyword, words):
    call = partial(pipe.denoise, pipe.encode("a red circle")) if method == "denoise" else getattr(pipe, method)
    arguments = [] if method == "denoise" else ["a red circle"]
    with unchecked(), pytest.raises(SettingError) as caught:
        call(*arguments, **{keyword: 1})
    assert has_line_with_words(str(caught.value), words)


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("learning_rate", "'learning_rate' optimizer=OptimizerConfig(learning_rate=...)"),
        ("rank", "'rank' lora=LoraConfig(rank=...)"),
        ("sample_prompt", "'sample_prompt' use sample_prompts"),
    ],
)
def test_a_setting_of_training_is_told_with_its_place(tmp_path, pipe, keyword, words):
    with unchecked(), pytest.raises(SettingError) as caught:
        train(pipe, tmp_path, tmp_path / "out", **{keyword: 1})
    assert has_line_with_words(str(caught.value), words)


@pytest.mark.parametrize(
    ("config", "keywords", "words"),
    [
        (TrainConfig, {"expert": "first"}, "expert both high low 'first'"),
        (TrainConfig, {"cut": "middle"}, "cut head uniform windows 'middle'"),
        (TrainConfig, {"timesteps": "normal"}, "timesteps logit-normal 'normal'"),
        (TrainConfig, {"lora_format": "kohya"}, "lora_format diffusers comfy 'kohya'"),
        (TrainConfig, {"resize": "fit"}, "resize crop pad stretch 'fit'"),
        (TrainConfig, {"buckets": "no"}, "buckets True False 'no'"),
        (TrainConfig, {"min_frames": 0}, "min_frames 0 give 1"),
        (TrainConfig, {"latent_cache": 3}, "latent_cache path 3"),
        (TrainConfig, {"sample_prompts": "a red circle"}, "sample_prompts list texts 'a red circle'"),
        (LoraConfig, {"targets": "to_q"}, "targets list texts 'to_q'"),
        (OptimizerConfig, {"name": "adam"}, "name adamw adafactor muon 'adam'"),
        (OptimizerConfig, {"lr_scheduler": "cos"}, "lr_scheduler constant cosine linear 'cos'"),
    ],
)
def test_a_setting_of_training_of_a_wrong_type_is_refused(config, keywords, words):
    with unchecked(), pytest.raises(WanjaxError) as caught:
        config(**keywords)
    assert has_line_with_words(str(caught.value), words)


@pytest.mark.parametrize("name", ["generate", "load_pipeline", "pipeline", "train", "WanPipeline", "from_pretrained"])
def test_a_guessed_name_gives_a_hint(name):
    with pytest.raises(AttributeError, match=rf"`{name}` .*wanjax"):
        getattr(wanjax, name)


@pytest.mark.parametrize("name", ["generate", "cuda", "to", "from_pretrained"])
def test_a_guessed_method_gives_a_hint(pipe, name):
    with pytest.raises(AttributeError, match=rf"`{name}` .*wanjax"):
        getattr(pipe, name)


def test_an_attribute_of_another_library_or_a_setting_gives_a_hint(pipe):
    with pytest.raises(AttributeError, match=r"pipe\.transformer"):
        _ = pipe.unet
    with pytest.raises(AttributeError, match=r"pipe\.transformer"):
        pipe.unet = None
    with pytest.raises(AttributeError, match=r"steps is a setting .* pipe\(prompt, steps=\.\.\.\)"):
        _ = pipe.steps
    with pytest.raises(AttributeError, match=r"steps is a setting .* pipe\(prompt, steps=\.\.\.\)"):
        pipe.steps = 4
    with pytest.raises(AttributeError, match=r"did you mean progress\?"):
        pipe.progres = False


def test_a_wrong_value_of_an_attribute_is_refused(pipe):
    with pytest.raises(AttributeError, match=r"pipe\.progress .*True, False or None, got 'no'"):
        pipe.progress = "no"
    with pytest.raises(AttributeError, match=r"pipe\.attention .*wanjax\.load\(MODEL, attention=\.\.\.\)"):
        pipe.attention = "reference"


@pytest.mark.parametrize("frames", [np.full((5, 16, 16, 3), x, np.float32) for x in (200, -1, np.nan)])
def test_frames_outside_of_0_and_1_are_refused(frames):
    with pytest.raises(WanjaxError, match=line_with_words("frames floats from 0 to 1")):
        check_frames(frames)
    check_frames(np.full((5, 16, 16, 3), 1.01, np.float32))  # a resampling filter may overshoot


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LoraConfig(rank="8"), "rank whole number '8'"),
        (lambda: LoraConfig(rank=True), "rank whole number True"),
        (lambda: OptimizerConfig(learning_rate="1e-4"), "learning_rate number '1e-4'"),
        (lambda: TrainConfig(steps=1.5), "steps whole number 1.5"),
        (lambda: TrainConfig(lora=8), "lora LoraConfig(rank=8) 8"),
        (lambda: TrainConfig(optimizer="adam"), "optimizer OptimizerConfig(learning_rate=1e-4) 'adam'"),
        (lambda: train("nano", "clips", "out"), "pipeline 'nano' wanjax.load(MODEL)"),
    ],
)
def test_a_training_setting_of_another_type_is_refused(make, words):
    with unchecked(), pytest.raises(WanjaxError, match=line_with_words(words)):
        make()


def test_a_command_names_a_setting_by_its_option():
    strength = SettingError("a strength of 0.5 needs an input video: give a video too, or no strength", "strength")
    assert message_with_option(strength) == "a strength of 0.5 needs an input video: give --video too, or no --strength"
    prompt = SettingError("prompt must be valid text", "prompt")
    assert message_with_option(prompt) == "prompt must be valid text"
    assert (
        message_with_option(SettingError("flow_shift must be above 0", "flow_shift")) == "--flow-shift must be above 0"
    )


def test_a_command_names_all_settings_of_a_message_by_their_options():
    generate, train = main.commands["generate"], main.commands["train"]
    for error, command, words in (
        (missing_setting("boundary_step", "nano", ()), generate, "nano has no setting --boundary-step"),
        (missing_setting("shift", "nano", ()), generate, "nano has no setting --shift"),
        (
            SettingError("set guidance_scale above 1", "guidance_rule"),
            generate,
            "--guidance-scale 1",
        ),
        (WanjaxError("holdout_every is 1: give 0"), train, "--holdout-every 1"),
        (WanjaxError("call pipe(guidance_scale=4), guidance_scale.txt"), generate, "pipe(guidance_scale=4)"),
        (RowError("line 2: set guidance_scale above 1"), generate, "line 2 set guidance_scale 1"),
    ):
        assert has_line_with_words(message_with_option(error, command), words)


def test_a_pipeline_of_a_name_points_to_load():
    build: Any = wanjax.Pipeline
    with pytest.raises(WanjaxError, match=r"wanjax.load\('nano'\)"):
        build("nano")


@pytest.mark.parametrize("name", ["n", "count", "seeds", "num_videos_per_prompt", "prompts"])
def test_a_field_for_several_videos_is_refused_with_the_reason(name):
    with pytest.raises(WanjaxError, match=f"'{name}' is not a field here: one request makes one video"):
        VideoRequest.parse({"prompt": "a", name: 2})


@pytest.mark.parametrize("name", ["out", "output", "output_path", "save", "filename", "file"])
def test_the_name_of_a_file_is_no_keyword_and_no_field(pipe, name):
    assert has_line_with_words(error_message(pipe, **{name: "x.mp4"}), f"'{name}' video.save('NAME.mp4')")
    with pytest.raises(WanjaxError, match=f"'{name}' is not a field here: .*give --out to the command"):
        VideoRequest.parse({"prompt": "a", name: "x.mp4"})


def test_an_upload_as_file_is_told_the_names_of_inputs():
    with pytest.raises(WanjaxError, match=line_with_words("'file' image video")):
        VideoRequest.parse({"prompt": "a", "file": "x.png"})
