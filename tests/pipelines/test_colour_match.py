# SPDX-License-Identifier: Apache-2.0
"""The colours of each window of a long video are matched to the window before."""

import numpy as np
import pytest

import wanjax
from tests.support import drifts
from tests.support.quick import quick
from tests.support.tiny import tiny_control_checkpoint
from wanjax.pipelines.colour_match import ColourMap, fit_colours, match_colours, oklab_to_srgb, srgb_to_oklab
from wanjax.pipelines.observers import Observer
from wanjax.pipelines.request import PreparedRequest
from wanjax.pipelines.run import Run
from wanjax.pipelines.windows import FADE_FRAMES, join_window

pytestmark = pytest.mark.usefixtures("cached_programs")


@pytest.mark.parametrize("contrast", quick([0.5], [1.0, 0.5]))
@pytest.mark.parametrize("change", [drifts.gain, drifts.hue, drifts.moving_gradient])
def test_a_colour_drift_over_eight_windows_is_removed(change, contrast):
    assert drifts.remaining_drift_share(change, contrast) <= 0.1


def test_a_drift_of_brightness_is_removed_from_dull_pictures():
    assert drifts.remaining_drift_share(drifts.gain, 0.1) <= 0.1


@pytest.mark.parametrize("colour", ["grey", "one"])
def test_pictures_with_few_colours_keep_their_contrast(colour):
    """Noise in the repeated frames is not mistaken for contrast."""
    corrected = frames = (
        drifts.synthetic_clip(0.02) if colour == "one" else np.repeat(drifts.synthetic_clip(0.5)[..., :1], 3, -1)
    )
    random = np.random.default_rng(1)
    for _ in range(drifts.WINDOWS):
        noisy = drifts.to_bytes(corrected + random.normal(0, 4, corrected.shape))
        corrected = match_colours(corrected, fit_colours(noisy[:1], corrected[:1]))
    assert corrected.std() == pytest.approx(frames.std(), rel=0.03)


def test_equal_colours_stay_as_they_are():
    frames = drifts.synthetic_clip(1.0)
    np.testing.assert_array_equal(match_colours(frames, ColourMap(np.eye(3), np.zeros(3))), frames)
    new_frames, drift = join_window(frames[-2:], np.concatenate([frames[-2:], frames]), "colour")
    assert np.abs(new_frames[FADE_FRAMES:].astype(int) - frames[FADE_FRAMES:]).max() <= 1
    assert drift.colour == 0


def test_a_table_of_colours_approximates_the_map():
    frames = drifts.synthetic_clip(0.6)
    colour_map = ColourMap(np.diag([1.04, 0.97, 1.03]), np.array([0.01, -0.004, 0.006]))
    expected = 255 * oklab_to_srgb(colour_map(srgb_to_oklab(frames / 255)))
    np.testing.assert_allclose(match_colours(frames, colour_map), expected, atol=1.0)


def test_oklab_has_published_values():
    """The values are those of the author's article, for the primaries of sRGB and for white."""
    colours = np.eye(4, 3)
    colours[3] = 1
    expected = [[0.628, 0.225, 0.126], [0.866, -0.234, 0.179], [0.452, -0.032, -0.312], [1, 0, 0]]
    np.testing.assert_allclose(srgb_to_oklab(colours), expected, atol=1e-3)
    np.testing.assert_allclose(oklab_to_srgb(srgb_to_oklab(colours)), colours, atol=1e-6)


class SeamRecorder(Observer):
    def __init__(self):
        self.seams = []

    def joined(self, seam):
        self.seams.append(seam)


def test_a_run_matches_its_windows_and_reports_their_drift(tmp_path):
    pipe = wanjax.load(tiny_control_checkpoint(tmp_path / "control"))
    videos, seams = {}, {}
    for match in ("none", "colour"):
        observer = SeamRecorder()
        pictures, settings = pipe.prepare(
            prompt="a cat", windows=2, overlap=5, match=match, seed=3, frames=9, height=32, width=32, steps=2
        )
        run = Run(pipe, [PreparedRequest(settings)], pictures, observers=[observer])
        for _, chunks in run:
            videos[match] = np.concatenate([np.asarray(chunk) for chunk in chunks])
        seams[match] = observer.seams
    assert [seam.window for seam in seams["colour"]] == [1]
    np.testing.assert_array_equal(videos["colour"][:9], videos["none"][:9])
    assert (videos["colour"][9:] != videos["none"][9:]).any()
    assert seams["none"][0].drift.remaining is None
    assert seams["colour"][0].drift.remaining < 0.3 * seams["colour"][0].drift.colour
