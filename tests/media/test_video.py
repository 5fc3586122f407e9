# SPDX-License-Identifier: Apache-2.0
"""A video as a value: a sequence of frames, with a description, that a notebook can play."""

import base64
import pickle
import re

import numpy as np
import pytest
from PIL import Image

from wanjax.errors import WanjaxError
from wanjax.media import video as video_files
from wanjax.media.video import Video
from wanjax.signals import run_cleanups

FRAMES = np.random.default_rng(0).integers(0, 256, (5, 32, 64, 3), dtype=np.uint8)
SETTINGS = {"prompt": 'a "red" circle <b>', "seed": 7}


@pytest.fixture
def video() -> Video:
    return Video(FRAMES, 8, SETTINGS)


def test_a_video_is_a_sequence_of_its_frames(video):
    assert len(video) == 5
    np.testing.assert_array_equal(video[0], FRAMES[0])
    np.testing.assert_array_equal(video[-1], FRAMES[4])
    np.testing.assert_array_equal(video[1:3], FRAMES[1:3])
    np.testing.assert_array_equal(np.stack(list(video)), FRAMES)
    with pytest.raises(IndexError):
        video[5]


def test_frames_are_converted_for_pillow(video):
    images = video.to_pil()
    assert [image.size for image in images] == [(64, 32)] * 5
    np.testing.assert_array_equal(np.asarray(images[3]), FRAMES[3])


def test_the_repr_of_a_video_describes_it(video):
    assert repr(video) == """Video: 5 frames of 64x32 at 8 a second, 'a "red" circle <b>', seed 7"""
    assert repr(Video(FRAMES[:, :, :3], 16, {})) == "Video: 5 frames of 3x32 at 16 a second"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("seed", "video.settings['seed']"),
        ("prompt", "video.settings['prompt']"),
        ("metadata", "video.settings"),
        ("write", "video.save('NAME.mp4')"),
        ("images", "video.frames"),
        ("show", "notebook"),
        ("latents", "pipe.denoise"),
    ],
)
def test_a_guessed_attribute_gives_a_hint(video, name, words):
    with pytest.raises(AttributeError, match=re.escape(words)):
        getattr(video, name)
    assert not hasattr(video, "foo")
    assert pickle.loads(pickle.dumps(video)).settings == SETTINGS


def embedded_settings(html: str, kind: str, tmp_path) -> dict:
    """Return the settings in the video of a data URI in HTML, after it is written to a file."""
    data = re.search(rf'src="data:{kind};base64,([^"]*)"', html)[1]
    path = tmp_path / f"embedded.{kind.rpartition('/')[2]}"
    path.write_bytes(base64.b64decode(data))
    return video_files.read_metadata(path)


def test_a_notebook_plays_an_mp4(video, tmp_path):
    html = video._repr_html_()
    assert html.startswith("<video ")
    assert 'width="256" height="128"' in html
    assert 'title="a &quot;red&quot; circle &lt;b&gt;"' in html
    assert embedded_settings(html, "video/mp4", tmp_path) == SETTINGS


def test_a_notebook_plays_a_gif_if_an_mp4_is_impossible(tmp_path):
    odd = Video(FRAMES[:, :31, :33], 8, SETTINGS)
    html = odd._repr_html_()
    assert html.startswith("<img ")
    assert embedded_settings(html, "image/gif", tmp_path) == SETTINGS
    with Image.open(tmp_path / "embedded.gif") as image:
        assert (image.n_frames, image.size) == (5, (33, 31))


def test_a_notebook_plays_a_gif_without_ffmpeg(video, tmp_path, monkeypatch):
    def missing(*_):
        raise WanjaxError("there is no ffmpeg")

    monkeypatch.setattr(video_files, "run_ffmpeg", missing)
    html = video._repr_html_()
    monkeypatch.undo()
    assert embedded_settings(html, "image/gif", tmp_path) == SETTINGS


def test_a_stopped_process_leaves_no_file_of_a_notebook(video, monkeypatch):
    file_exists = []

    def save(self, path):
        path.write_bytes(b"half of a video")
        run_cleanups()
        file_exists.append(path.exists())
        path.parent.mkdir()
        path.write_bytes(b"")

    monkeypatch.setattr(Video, "save", save)
    video._repr_html_()
    assert file_exists == [False]


def test_a_large_video_is_played_at_its_size():
    large = Video(np.zeros((1, 64, 300, 3), np.uint8), 8, {})
    assert 'width="300" height="64"' in large._repr_html_()
