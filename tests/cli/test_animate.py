# SPDX-License-Identifier: Apache-2.0
"""The command and the library animate a character by a driving clip, with a tiny checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import wanjax as library
from tests.support.commands import refused, succeeded, wanjax
from tests.support.tiny import tiny_animate_checkpoint
from tests.support.words import has_line_with_words
from wanjax.checkpoints.files import save_safetensors
from wanjax.media.pictures import read_clip
from wanjax.media.video import Video

pytestmark = pytest.mark.usefixtures("cached_programs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a tiny checkpoint, a picture and a clip of 13 frames."""
    folder, random = tmp_path_factory.mktemp("animate"), np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (80, 60, 3), dtype=np.uint8)).save(folder / "character.png")
    Video(random.integers(0, 256, (13, 40, 60, 3), dtype=np.uint8), 24, {}).save(folder / "driving.mp4")
    tiny_animate_checkpoint(folder / "model")
    return folder


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def video_arguments(folder: Path, *more: str | Path) -> tuple[str | Path, ...]:
    """Return the arguments of a video."""
    inputs = ("--image", folder / "character.png", "--video", folder / "driving.mp4")
    return ("a woman", "--model", folder / "model", *inputs, "--dtype", "float32", "--seed", "1", *more)


def test_a_video_is_as_long_as_the_clip_and_has_the_picture_s_proportions(folder, tmp_path):
    result = succeeded(wanjax(*video_arguments(folder, "--out", tmp_path / "whole.mp4")))
    assert has_line_with_words(result.output, "window 2 of 2 48x64")
    frames = read_clip(tmp_path / "whole.mp4", 100, 24)
    assert frames.shape == (13, 64, 48, 3)
    succeeded(wanjax(*video_arguments(folder, "--windows", "1", "--out", tmp_path / "first.mp4")))
    first = read_clip(tmp_path / "first.mp4", 100, 24)
    assert len(first) == 9
    assert np.abs(first.astype(int) - frames[:9]).mean() < 2  # the mp4 is lossy
    record = json.loads(succeeded(wanjax("info", tmp_path / "whole.mp4", "--json")).output)
    assert (record["windows"], record["frames"], record["width"], record["clip_prompt"]) == (
        2,
        9,
        64,
        "人物动作的参考视频",
    )


@pytest.mark.slow  # tests/cli/test_pose.py has a quick test with a pose clip
def test_a_video_is_reproduced_from_its_metadata(folder, tmp_path):
    succeeded(wanjax(*video_arguments(folder, "--out", tmp_path / "whole.mp4")))
    succeeded(wanjax("generate", "--from", tmp_path / "whole.mp4", "--out", tmp_path / "again.mp4"))
    frames = read_clip(tmp_path / "whole.mp4", 100, 24)
    np.testing.assert_array_equal(read_clip(tmp_path / "again.mp4", 100, 24), frames)


def test_the_library_makes_the_same_frames_and_uses_the_clip_s_prompt(folder):
    pipe = library.load(folder / "model", dtype="float32")
    inputs = {"image": folder / "character.png", "video": folder / "driving.mp4", "seed": 1}
    video, with_clip_prompt = pipe("a woman", **inputs), pipe("a woman", **inputs, clip_prompt="a man dances")
    assert video.frames.shape == (13, 64, 48, 3)
    assert (video.frames != with_clip_prompt.frames).any()
    noise = np.zeros((2, 4, 4, 8, 6), np.float32)
    assert (pipe("a woman", **inputs, noise=noise).frames != video.frames).any()
    embeddings = pipe.encode("a woman", **inputs, windows=1)
    latents = pipe.denoise(embeddings, seed=1)
    assert latents.shape == (1, 4, 3, 8, 6)
    np.testing.assert_array_equal(pipe.decode(latents), video.frames[:9])  # the picture needs no bars


def test_noise_of_a_file_has_a_row_for_each_segment(folder, tmp_path):
    save_safetensors(tmp_path / "noise.safetensors", {"noise": np.zeros((2, 4, 4, 8, 6), np.float32)})
    arguments = video_arguments(folder, "--noise", tmp_path / "noise.safetensors", "--out", tmp_path / "noise.mp4")
    assert wanjax(*arguments).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--last-image", "character.png"), "character animation last image"),
        (("--mask", "driving.mp4"), "character animation mask"),
        (("--strength", "0.5"), "strength"),
        (("--resize", "crop"), "pads crop resize"),
        (("--overlap", "3"), "overlap 3 1 5"),
    ],
)
def test_inputs_that_do_not_fit_a_character_are_refused(folder, arguments, words):
    changed = [folder / x if "." in x and x[0] not in "-0" else x for x in arguments]
    assert has_line_with_words(refused(*video_arguments(folder, *changed)), words)


def test_a_driving_clip_is_required(folder):
    message = refused("a woman", "--model", folder / "model", "--image", folder / "character.png")
    assert has_line_with_words(message, "driving clip --video")


@pytest.mark.slow  # tests/cli/test_many.py has a quick test with a list of prompts
def test_a_table_animates_a_character_by_several_clips(folder, tmp_path):
    """The rows use one model; `batch` makes the same frames as `generate`."""
    Video(np.random.default_rng(1).integers(0, 256, (5, 40, 60, 3), dtype=np.uint8), 24, {}).save("short.mp4")
    character = str(folder / "character.png")
    rows = [
        {"prompt": "a woman", "image": character, "video": str(folder / "driving.mp4"), "seed": 1},
        {"prompt": "a woman", "image": character, "video": "short.mp4", "seed": 1},
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = "--model", folder / "model", "--dtype", "float32", "--out", "videos"
    succeeded(wanjax("batch", "rows.jsonl", *arguments))
    succeeded(wanjax(*video_arguments(folder, "--out", "alone.mp4")))
    videos = [read_clip(file, 100, 24) for file in sorted(Path("videos").rglob("*.mp4"))]
    assert sorted(map(len, videos)) == [5, 13]
    np.testing.assert_array_equal(max(videos, key=len), read_clip(Path("alone.mp4"), 100, 24))
