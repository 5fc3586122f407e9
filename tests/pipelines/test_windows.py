# SPDX-License-Identifier: Apache-2.0
"""Each window of a long video continues from the last frames of the window before."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import wanjax
from tests.support.commands import succeeded
from tests.support.commands import wanjax as run
from tests.support.quick import quick
from tests.support.recorded import run_counts
from tests.support.tiny import (
    tiny_causal_checkpoint,
    tiny_checkpoint,
    tiny_control_checkpoint,
    tiny_hunyuan_checkpoint,
    tiny_image_checkpoint,
)
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.pipelines.settings import total_frames
from wanjax.pipelines.windows import FADE_FRAMES, fade_seam
from wanjax.registry import presets

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "nano"))
from reading import read

pytestmark = pytest.mark.usefixtures("cached_programs")

RANDOM = np.random.default_rng(0)
PICTURE = RANDOM.integers(0, 256, (32, 32, 3), dtype=np.uint8)
SMALL = {"frames": 5, "height": 32, "width": 32, "steps": 2}


@pytest.fixture(scope="module")
def image_checkpoint(tmp_path_factory):
    return tiny_image_checkpoint(tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def pipe(image_checkpoint):
    return wanjax.load(image_checkpoint)


@pytest.fixture(scope="module")
def control_pipe(tmp_path_factory):
    return wanjax.load(tiny_control_checkpoint(tmp_path_factory.mktemp("control")))


@pytest.mark.parametrize("rule", quick(["none"], ["none", "apg"]))
def test_each_window_equals_a_video_from_the_last_frame_of_the_previous_window(pipe, rule):
    """The average of a guidance rule starts again in each window."""
    options = {"image": PICTURE, "last_image": None, "guidance_scale": 5, "guidance_rule": rule, **SMALL}
    video = pipe("a cat", seed=2**64 - 2, then=["a dog", "a hen"], **options)
    expected = [pipe("a cat", seed=2**64 - 2, **options).frames]
    for prompt, seed in (("a dog", 2**64 - 1), ("a hen", 0)):
        window = pipe(prompt, seed=seed, **(options | {"image": expected[-1][-1]})).frames
        expected.append(fade_seam(expected[-1], window[1:]))
    np.testing.assert_array_equal(video.frames, np.concatenate(expected))
    assert len(video) == 13
    expected_settings = {"windows": 3, "overlap": 1, "then": "a dog\na hen", "seed": 2**64 - 2}
    assert {name: video.settings[name] for name in expected_settings} == expected_settings


def test_the_last_prompt_applies_to_all_later_windows():
    settings = wanjax.load("nano").settings(prompt="a cat", windows=4, then="a dog\n\n a hen ")
    assert settings.prompts == ["a cat", "a dog", "a hen", "a hen"]


@pytest.mark.parametrize("control", quick([True], [False, True]))
def test_a_window_with_a_control_clip_keeps_its_fixed_frames(control_pipe, control):
    """The window's part of a control clip follows the fixed frames."""
    clip = RANDOM.integers(0, 256, (total_frames(9, 2, 5), 32, 32, 3), dtype=np.uint8)
    shape = SMALL | {"frames": 9}
    options = {"video": clip} if control else {}
    video = control_pipe("a cat", windows=2, overlap=5, seed=3, **options, **shape)
    first = control_pipe("a cat", seed=3, **({"video": clip[:9]} if control else {}), **shape).frames
    rest = clip[9:] if control else np.full((4, 32, 32, 3), 127, np.uint8)
    mask_values = np.repeat(np.array([0, 255], np.uint8), [5, 4])
    mask = np.broadcast_to(mask_values[:, None, None, None], (9, 32, 32, 3)).copy()
    second = control_pipe("a cat", seed=4, video=np.concatenate([first[4:], rest]), mask=mask, **shape).frames
    np.testing.assert_array_equal(video.frames, np.concatenate([first, fade_seam(first, second[5:])]))


def test_a_small_jump_is_faded_and_motion_is_not():
    last_frame = np.full((1, 8, 8, 3), 100, np.uint8)
    frames = np.full((6, 8, 8, 3), 105, np.uint8)
    frames[:, 4:] = 200
    faded = fade_seam(last_frame, frames).astype(int)
    steps = np.diff(np.concatenate([last_frame[..., 0, 0, 0], faded[:, 0, 0, 0]]))
    assert (steps >= 0).all()
    assert steps.max() <= 2
    assert steps.sum() == 5
    np.testing.assert_array_equal(faded[:, 4:], frames[:, 4:])
    np.testing.assert_array_equal(faded[FADE_FRAMES:], frames[FADE_FRAMES:])


def test_a_plan_counts_every_window(pipe):
    one_window, two_windows = (pipe.settings(**SMALL, windows=windows) for windows in (1, 2))
    assert run_counts(pipe, two_windows) == {name: 2 * count for name, count in run_counts(pipe, one_window).items()}


UNSUPPORTED_CHECKPOINTS = {
    "text": tiny_checkpoint,
    "blocks": tiny_causal_checkpoint,
    "both ends": lambda folder: tiny_image_checkpoint(folder, last=True),
}


@pytest.mark.parametrize("kind", UNSUPPORTED_CHECKPOINTS)
def test_models_that_cannot_continue_a_video_refuse_windows(kind, tmp_path):
    with pytest.raises(WanjaxError, match=line_with_words("windows first picture")):
        wanjax.load(UNSUPPORTED_CHECKPOINTS[kind](tmp_path)).settings(windows=2)


def test_windows_of_hunyuanvideo_continue_from_a_picture(tmp_path):
    settings = wanjax.load(tiny_hunyuan_checkpoint(tmp_path, pictured=True)).settings(windows=2)
    assert settings.length == 2 * settings.frames - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windows": 1, "then": "a dog"}, line_with_words("2 prompts 1 window")),
        ({"windows": 2, "then": ["a", "b", "c"]}, line_with_words("4 prompts 2 windows")),
        ({"windows": 2, "overlap": 2}, line_with_words("one picture 2 1")),
        ({"windows": 0}, line_with_words("windows 0")),
        ({"windows": 2, "frames": 1}, line_with_words("frame overlap 1")),
        ({"then": [1]}, line_with_words("prompts text")),
        ({"then": '["a", "b"]', "windows": 2}, line_with_words("3 prompts 2 windows")),
        ({"overlap": 3}, line_with_words("overlap windows 2")),
        ({"match": "colour", "windows": 1}, line_with_words("match windows 2")),
    ],
)
def test_invalid_windows_are_refused(pipe, options, message):
    with pytest.raises(WanjaxError, match=message):
        pipe.settings(**options)


NOISE = np.zeros((1, 4, 2, 4, 4), np.float32)
CALLS_OF_ONE_WINDOW = [
    lambda pipe: pipe.encode("a", image=PICTURE, windows=2, **SMALL),
    lambda pipe: pipe.denoise(pipe.encode("a", image=PICTURE, **SMALL), windows=2, **SMALL),
    lambda pipe: pipe("a", image=PICTURE, windows=2, noise=NOISE, **SMALL),
]
SHORT_CLIP = {"video": np.zeros((12, 32, 32, 3), np.uint8), "windows": 2, "overlap": 5}


@pytest.mark.parametrize(
    ("fixture", "call", "words"),
    [
        *(("pipe", call, "window 2") for call in CALLS_OF_ONE_WINDOW),
        ("control_pipe", lambda pipe: pipe("a", **SHORT_CLIP, **(SMALL | {"frames": 9})), "12 frames 13"),
    ],
    ids=["encode", "denoise", "noise", "a control clip of fewer frames"],
)
def test_inputs_that_windows_cannot_use_are_refused(request, fixture, call, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        call(request.getfixturevalue(fixture))


def test_presets_have_an_overlap_that_their_models_accept():
    for preset in filter(lambda preset: preset.model, presets().values()):
        if preset.model.spec.continuation_input:
            preset.model.spec.check_settings(preset.defaults.updated({"windows": 2}))


def frames_of(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(file)) for file in sorted(folder.iterdir())])


def test_a_command_resumes_from_the_saved_windows(image_checkpoint, tmp_path, monkeypatch):
    """A video of two windows gets a third window; the first two windows are not denoised again."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PICTURE).save("in.png")
    shape = ("--frames", "5", "--size", "32x32", "--steps", "2", "--model", str(image_checkpoint), "--image", "in.png")
    messages = succeeded(run("a cat", "--windows", "2", *shape, "--dir", "stages", "--out", "two")).stderr
    assert "window 2 of 2: a cat" in messages
    assert "wanjax generate" not in messages  # the video is complete
    resume_options = ("--from", "stages", "--windows", "3", "--then", "a cat", "--then", "a dog", "--dir", "stages")
    messages = succeeded(run("generate", *resume_options, "--out", "three")).stderr
    assert messages.count("resumed after 2 of 2 steps") == 2
    two_windows, three_windows = frames_of(Path("two")), frames_of(Path("three"))
    np.testing.assert_array_equal(two_windows, three_windows[: len(two_windows)])
    assert len(three_windows) == 13
    for stage in ("denoise", "decode"):
        refused = run(stage, "--dir", "stages")
        assert refused.exit_code == 2
        assert "3 windows" in refused.stderr


@pytest.mark.slow  # tests/pipelines/test_follow.py has a quick test that reproduces a video of one window
def test_windows_are_reproduced_from_the_metadata(image_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PICTURE).save("in.png")
    shape = ("--frames", "5", "--size", "32x32", "--steps", "2", "--model", str(image_checkpoint), "--image", "in.png")
    windows = ("--windows", "3", "--then", "a cat", "--then", "a dog")
    succeeded(run("a cat", *windows, *shape, "--out", "three"))
    reproduced = succeeded(run("generate", "--from", "three/frame_00000.png", "--out", "reproduced")).stderr
    assert "window 3 of 3: a dog" in reproduced
    np.testing.assert_array_equal(frames_of(Path("reproduced")), frames_of(Path("three")))


SCENES = {
    "red circle": ("moving right", "staying still", "moving left", "moving right"),
    "blue square": ("moving left", "moving right", "moving left", "moving right"),
    "green triangle": ("growing", "shrinking", "growing", "staying still"),
}
READ_MOTIONS = {"moving right": "right", "moving left": "left", "growing": "grows", "shrinking": "shrinks"} | {
    "staying still": "stays"
}


@pytest.mark.slow
@pytest.mark.parametrize("subject", SCENES)
def test_four_windows_of_nano_follow_their_prompts_without_a_seam(subject):
    first, *later = (f"a {subject} {motion}" for motion in SCENES[subject])
    frames = wanjax.load("nano")(first, then=later, seed=3).frames
    assert len(frames) == 65
    changes = np.abs(np.diff(frames.astype(float), axis=0)).mean(axis=(1, 2, 3))
    seams = [16, 32, 48]
    for number, motion in enumerate(SCENES[subject]):
        window = read(frames[16 * number : 16 * number + 17])
        assert (f"{window.colour} {window.shape}", window.motion) == (subject, READ_MOTIONS[motion])
    assert changes[seams].mean() <= 1.5 * np.delete(changes, seams).mean()
    for seam in seams:
        assert changes[seam] <= 1.5 * np.delete(changes[seam - 15 : seam + 16], 15).mean()
