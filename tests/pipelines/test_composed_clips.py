# SPDX-License-Identifier: Apache-2.0
"""Control inputs that are composed into a clip and a mask: first and last pictures, and margins to outpaint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wanjax
from tests.support.commands import succeeded
from tests.support.commands import wanjax as run
from tests.support.quick import quick
from tests.support.tiny import tiny_control_checkpoint
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError, WanjaxWarning
from wanjax.media.bounds import MEDIA_LIMITS
from wanjax.media.metadata import load_settings
from wanjax.media.video import write_video

pytestmark = pytest.mark.usefixtures("cached_programs")

RANDOM = np.random.default_rng(2)
FIRST, LAST = RANDOM.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
CLIP = RANDOM.integers(0, 256, (9, 32, 32, 3), dtype=np.uint8)
SMALL: dict[str, Any] = {"size": "32x32", "frames": 9}
GREY = 127


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny_control_checkpoint(tmp_path_factory.mktemp("control"))


@pytest.fixture(scope="module")
def pipe(checkpoint):
    return wanjax.load(checkpoint)


def condition(pipe: Any, **inputs: Any) -> np.ndarray:
    return np.asarray(pipe.encode("a cat", **(SMALL | inputs)).condition)


def as_mask(values: Any) -> np.ndarray:
    """Return a mask with a value for each frame."""
    return np.broadcast_to(np.array(values, np.uint8)[:, None, None, None], (9, 32, 32, 3))


@pytest.mark.parametrize("last", quick([True], [False, True]))
def test_a_first_and_a_last_picture_are_fixed_frames_of_a_clip(pipe, last):
    """All other frames are grey in the clip and white in the mask."""
    pictures = {"image": FIRST} | ({"last_image": LAST} if last else {})
    condition_of_pictures = condition(pipe, **pictures)
    grey = np.full((7, 32, 32, 3), 0.5)  # exactly 0.5, unlike 127 / 255
    clip = np.concatenate([FIRST[None] / 255, grey, (LAST if last else np.full((32, 32, 3), GREY))[None] / 255])
    mask = as_mask([0, *[255] * 7, 0 if last else 255])
    condition_of_clip = condition(pipe, video=np.round(clip * 255).astype(np.uint8), mask=mask)
    fixed, changed, flags = np.split(condition_of_pictures, [4, 8], axis=1)
    fixed_of_clip, changed_of_clip, flags_of_clip = np.split(condition_of_clip, [4, 8], axis=1)
    np.testing.assert_array_equal(fixed, fixed_of_clip)
    np.testing.assert_array_equal(flags, flags_of_clip)
    np.testing.assert_allclose(changed, changed_of_clip, atol=0.05)  # 128 / 255 is nearly 0.5
    assert not np.array_equal(fixed, condition(pipe)[:, :4])


def test_a_first_picture_replaces_the_first_frame_of_the_clip(pipe):
    mask = as_mask([255] * 3 + [0] * 6)
    with pytest.warns(WanjaxWarning, match=line_with_words("later frames guided by clip")):
        composed = condition(pipe, image=FIRST, video=CLIP, mask=mask)
    clip, other_mask = np.concatenate([FIRST[None], CLIP[1:]]), as_mask([0, 255, 255] + [0] * 6)
    np.testing.assert_array_equal(composed, condition(pipe, video=clip, mask=other_mask))


def test_only_the_first_window_of_a_long_video_starts_from_its_picture(pipe):
    options = SMALL | {"seed": 3, "steps": 2}
    video = pipe("a cat", image=FIRST, windows=2, overlap=5, **options)
    first = pipe("a cat", image=FIRST, **options).frames
    np.testing.assert_array_equal(video.frames[:9], first)
    assert len(video.frames) == 13


def add_margins(clip: np.ndarray, value: int, left: int, top: int, right: int, bottom: int) -> np.ndarray:
    frames, height, width, channels = clip.shape
    canvas = np.full((frames, top + height + bottom, left + width + right, channels), value, np.uint8)
    canvas[:, top : top + height, left : left + width] = clip
    return canvas


@pytest.mark.parametrize("masked", quick([True], [False, True]))
def test_margins_are_grey_in_the_clip_and_white_in_its_mask(pipe, masked):
    """A mask of another size is padded in proportion."""
    mask = np.zeros((9, 32, 32, 3), np.uint8)
    if masked:
        mask = RANDOM.integers(0, 2, (9, 16, 16, 3), dtype=np.uint8) * 255
    outpainted = condition(pipe, video=CLIP, outpaint="16,32,16,0", size="64x64", **({"mask": mask} if masked else {}))
    clip, padded_mask = (
        add_margins(CLIP, GREY, 16, 32, 16, 0),
        add_margins(mask, 255, *((8, 16, 8, 0) if masked else (16, 32, 16, 0))),
    )
    np.testing.assert_array_equal(outpainted, condition(pipe, video=clip, mask=padded_mask, size="64x64"))


def test_the_size_follows_from_the_clip_with_its_margins(pipe):
    """The default area of this model is 32 x 32 pixels."""
    pictures, settings = pipe.prepare(video=CLIP, outpaint=" 48,0, 48,00")
    assert (settings.size, settings.outpaint) == ((16, 64), "48,0,48,0")
    assert pictures.clip("video").shape == pictures.clip("mask").shape == (9, 32, 128, 3)
    assert pipe.prepare(video=CLIP)[1].outpaint == "0,0,0,0"


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        *(({"outpaint": value}, "four whole numbers 120,0,120,0") for value in ("1,2,3", "a", "1,2,3,-4", "1.5,0,0,0")),
        ({"outpaint": "16385,0,0,0"}, "up to 16384"),
        ({"outpaint": "8,0,8,0"}, "outpaint 8,0,8,0 none video"),
        ({"outpaint": "16000,16000,16000,16000", "video": CLIP}, f"32032x32032 {MEDIA_LIMITS.max_clip_pixels:,}"),
    ],
)
def test_invalid_margins_are_refused(pipe, keywords, words):
    with pytest.raises(WanjaxError, match=line_with_words(words)) as error:
        pipe.prepare(**keywords)
    assert "\n" not in str(error.value)


def test_a_model_without_a_mask_has_no_margins():
    with pytest.raises(WanjaxError, match=line_with_words("nano no setting outpaint")):
        wanjax.load("nano").settings(outpaint="8,0,8,0")


def test_the_margins_of_a_command_are_stored(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_video("clip.mp4", CLIP, 8)
    shape = ("--size", "32x32", "--frames", "9")  # as in other tests, so that nothing is compiled again
    options = ("--model", str(checkpoint), "--video", "clip.mp4", *shape, "--steps", "1", "--outpaint")
    succeeded(run("a cat", *options, "16,0,16,0", "--dir", "stages", "--out", "a.mp4"))
    assert load_settings(Path("stages"))["outpaint"] == "16,0,16,0"
    assert "16,0,16,0" in succeeded(run("info", "a.mp4")).stdout
    failed = run("a cat", *options, "16", "--out", "b.mp4")
    assert failed.exit_code == 2
    assert "outpaint must be four whole numbers" in failed.stderr
    assert not Path("b.mp4").exists()


def test_a_video_without_margins_can_be_made_with_any_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metadata = {"model": "wan2.1-vace-1.3b", "prompt": "a", "steps": 2}
    for margins, name in (("0,0,0,0", "none.mp4"), ("8,0,8,0", "wide.mp4")):
        write_video(name, CLIP, 16, metadata | {"outpaint": margins})
    model_options = ("--model", "wan2.1-t2v-1.3b", "--print-command")
    assert "--outpaint" not in succeeded(run("generate", "--from", "none.mp4", *model_options)).stdout
    assert "--outpaint 8,0,8,0" in succeeded(run("generate", "--from", "wide.mp4", *model_options)).stdout
