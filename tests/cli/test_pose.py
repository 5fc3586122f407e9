# SPDX-License-Identifier: Apache-2.0
"""The command and the library make a character follow a pose clip and a face, with a tiny checkpoint."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wanjax as library
from tests.support.commands import refused, succeeded, wanjax
from tests.support.tiny import tiny_pose_checkpoint
from tests.support.words import has_line_with_words
from wanjax.media.pictures import read_clip
from wanjax.media.video import Video

pytestmark = pytest.mark.usefixtures("cached_programs")
CLIPS = {"pose": (48, 64), "face": (20, 20), "background": (48, 64), "mask": (48, 64)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a tiny checkpoint, a picture, and four clips of 13 frames."""
    folder, random = tmp_path_factory.mktemp("pose"), np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (80, 60, 3), dtype=np.uint8)).save(folder / "character.png")
    for name, size in CLIPS.items():
        Video(random.integers(0, 256, (13, *size, 3), dtype=np.uint8), 30, {}).save(folder / f"{name}.mp4")
    tiny_pose_checkpoint(folder / "model")
    return folder


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def video_arguments(folder: Path, *more: str | Path, face: bool = True) -> tuple[str | Path, ...]:
    """Return the arguments of a video."""
    inputs = ("--image", folder / "character.png", "--video", folder / "pose.mp4")
    inputs = (*inputs, "--face", folder / "face.mp4") if face else inputs
    return ("a woman", "--model", folder / "model", *inputs, "--dtype", "float32", "--seed", "1", *more)


def test_a_video_is_as_long_and_as_large_as_the_pose_clip(folder, tmp_path):
    result = succeeded(wanjax(*video_arguments(folder, "--out", tmp_path / "whole.mp4")))
    assert has_line_with_words(result.output, "window 2 of 2")
    frames = read_clip(tmp_path / "whole.mp4", 100, 30)
    assert frames.shape == (13, 48, 64, 3)
    record = json.loads(succeeded(wanjax("info", tmp_path / "whole.mp4", "--json")).output)
    assert (record["windows"], record["frames"], record["fps"]) == (2, 9, 30)
    assert record["face"] == str(folder / "face.mp4")
    succeeded(wanjax("generate", "--from", tmp_path / "whole.mp4", "--out", tmp_path / "again.mp4"))
    np.testing.assert_array_equal(read_clip(tmp_path / "again.mp4", 100, 30), frames)


def test_a_background_and_a_mask_replace_the_character(folder, tmp_path):
    more = ("--background", folder / "background.mp4", "--mask", folder / "mask.mp4", "--windows", "1")
    succeeded(wanjax(*video_arguments(folder, *more, "--out", tmp_path / "replaced.mp4")))
    succeeded(wanjax(*video_arguments(folder, "--windows", "1", "--out", tmp_path / "animated.mp4")))
    replaced, animated = (read_clip(tmp_path / f"{name}.mp4", 100, 30) for name in ("replaced", "animated"))
    assert replaced.shape == animated.shape == (9, 48, 64, 3)
    assert (replaced != animated).any()


def test_the_library_makes_the_same_frames_and_uses_every_input(folder):
    pipe = library.load(folder / "model", dtype="float32")
    clips = {"video": folder / "pose.mp4", "face": folder / "face.mp4"}
    inputs: dict[str, Any] = {"image": folder / "character.png", **clips, "seed": 1, "windows": 1}
    embeddings: Any = pipe.encode("a woman", **inputs)
    assert embeddings.face_pictures.shape == (1, 9, 16, 16, 3)
    latents = pipe.denoise(embeddings, seed=1)
    assert latents.shape == (1, 4, 3, 6, 8)
    np.testing.assert_array_equal(pipe.decode(latents), pipe("a woman", **inputs).frames)
    replacement: Any = read_clip(folder / "background.mp4", 100, 30)
    for name in ("video", "face"):
        changed = pipe.denoise(pipe.encode("a woman", **{**inputs, name: replacement}), seed=1)
        assert (changed != latents).any(), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--last-image", "character.png"), "character animation last image"),
        (("--background", "background.mp4"), "background mask --mask"),
        (("--mask", "mask.mp4"), "mask background --background"),
        (("--strength", "0.5"), "strength"),
        (("--resize", "crop"), "pads crop resize"),
        (("--overlap", "3"), "overlap 3 1 5"),
    ],
)
def test_inputs_that_do_not_fit_a_character_are_refused(folder, arguments, words):
    changed = [folder / x if "." in x and x[0] not in "-0" else x for x in arguments]
    assert has_line_with_words(refused(*video_arguments(folder, *changed)), words)


def test_a_face_is_required(folder):
    assert has_line_with_words(refused(*video_arguments(folder, face=False)), "clip of the face --face")
