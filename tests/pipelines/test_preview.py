# SPDX-License-Identifier: Apache-2.0
"""Previews: small pictures of a video that is not finished."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import wanjax
from tests.support.commands import succeeded
from tests.support.commands import wanjax as command
from tests.support.quick import quick
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.media.video import read_metadata
from wanjax.pipelines.previews.latent_preview import LatentToRGB, fit_colours, make_filmstrip, synthetic_clip
from wanjax.pipelines.previews.previews import Previews, half_blocks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/nano"))
from clips import COLOURS

pytestmark = pytest.mark.usefixtures("cached_programs")

PROMPT = "a blue square moving right"
FEW_STEPS = {"steps": 8, "seed": 1}
SPATIAL, TEMPORAL = 4, 2


@pytest.fixture(scope="module")
def pipe():
    return wanjax.load("nano")


def encode_linearly(frames):
    """Encode frames linearly: five channels mix the mean colour of a cell, with other weights for the first frame."""
    random = np.random.default_rng(1)
    first, later = (random.normal(size=(3, 5)) for _ in range(2))
    count, height, width, _ = frames.shape
    cells = frames.reshape(count, height // SPATIAL, SPATIAL, width // SPATIAL, SPATIAL, 3).mean((2, 4)) / 255
    means = cells[1:].reshape(-1, TEMPORAL, *cells.shape[1:]).mean(1)
    return np.moveaxis(np.concatenate([cells[:1] @ first + 0.3, means @ later - 0.2]), -1, 0)[None]


def test_a_missing_preview_decoder_is_reported(pipe):
    for call in (lambda: wanjax.load("nano", decoder="nope"), lambda: pipe.preview_with("nope")):
        with pytest.raises(WanjaxError, match=line_with_words("no file nope")):
            call()


def test_previews_of_a_linear_autoencoder_are_exact():
    frames = synthetic_clip(1 + 2 * TEMPORAL, SPATIAL)
    assert len(np.unique(frames)) > 100
    pictures = fit_colours(encode_linearly, SPATIAL, TEMPORAL).pictures(encode_linearly(frames))
    assert pictures.shape == (1, 3, frames.shape[1] // SPATIAL, frames.shape[2] // SPATIAL, 3)
    averaged = frames.reshape(len(frames), *pictures.shape[2:3], SPATIAL, -1, SPATIAL, 3).mean((2, 4))
    np.testing.assert_allclose(pictures[0, 0], averaged[0], atol=1)
    np.testing.assert_allclose(pictures[0, 1:], averaged[1:].reshape(2, TEMPORAL, *averaged.shape[1:]).mean(1), atol=1)


def test_a_strip_has_a_row_for_each_video_and_at_most_six_pictures():
    videos = np.arange(2 * 21)[:, None, None, None].astype(np.uint8).repeat(10, 1).repeat(8, 2).repeat(3, 3)
    page = make_filmstrip(videos.reshape(2, 21, 10, 8, 3))
    assert page.shape == (2 * 100, 6 * 80, 3)
    assert [page[0, 40 + 80 * i, 0] for i in range(6)] == [0, 4, 8, 12, 16, 20]
    assert make_filmstrip(videos[:1].reshape(1, 1, 10, 8, 3)).shape == (100, 80, 3)


def read_image(file):
    with Image.open(file) as image:
        return np.asarray(image)


def name_of_colour(pictures):
    """Return the name of the colour of the cells that differ most from the rest of their pictures."""
    pages = pictures.reshape(len(pictures), -1, 3) / 255
    rest = np.median(pages, axis=1, keepdims=True)
    cells = pages[np.arange(len(pages)), np.square(pages - rest).sum(-1).argmax(1)]
    return min(COLOURS, key=lambda name: np.square(np.median(cells, axis=0) - COLOURS[name]).sum())


@pytest.mark.parametrize("colour", quick(["red"], ["red", "blue", "yellow"]))
def test_previews_show_the_colour_at_half_of_the_steps(pipe, colour):
    previews = []
    pipe(f"a {colour} circle moving right", **FEW_STEPS, callback=lambda step: previews.append(step.preview()))
    assert previews[0].shape == (1, 5, 8, 8, 3)
    assert name_of_colour(previews[len(previews) // 2 - 1][0, 1:]) == colour


def test_previews_do_not_change_the_video_and_the_last_one_remains(tmp_path):
    pipe, file, steps = wanjax.load("nano"), tmp_path / "preview.png", []
    latents = pipe.denoise(pipe.encode(PROMPT), **FEW_STEPS, callback=lambda step: steps.append(step))
    assert not pipe.components.has("vae")
    previews = Previews(file, looks=3)
    np.testing.assert_array_equal(pipe.denoise(pipe.encode(PROMPT), **FEW_STEPS, callback=previews), latents)
    previews.wait()
    assert not pipe.components.has("vae")
    np.testing.assert_array_equal(read_image(file), make_filmstrip(pipe.latent_preview().pictures(steps[-1].x0)))
    assert list(tmp_path.iterdir()) == [file]


def test_a_terminal_with_colours_shows_each_preview(pipe):
    def terminal_output(**terminal):
        page = io.StringIO()
        previews = Previews(looks=4, on=Console(file=page, width=80, highlight=False, **terminal))
        pipe(PROMPT, **FEW_STEPS, callback=previews)
        previews.wait()
        return page.getvalue()

    text = terminal_output(force_terminal=True, color_system="truecolor")
    assert [f"preview after step {step} of 8" in text for step in range(1, 9)] == [False, True] * 4
    assert "▀" in text
    assert terminal_output(force_terminal=False) == ""


def test_half_blocks_have_the_colours_of_their_pixels():
    page = np.zeros((2, 2, 3), np.uint8)
    page[0, 1] = 255, 0, 7
    text = half_blocks(page, 2)
    assert text.plain == "▀▀\n"
    assert [str(span.style) for span in text.spans] == ["rgb(0,0,0) on rgb(0,0,0)", "rgb(255,0,7) on rgb(0,0,0)"]


def test_an_error_of_a_preview_is_raised(pipe, tmp_path):
    previews = Previews(tmp_path / "missing" / "preview.png", looks=2)
    with pytest.raises(wanjax.WanjaxError, match="cannot be written"):
        pipe(PROMPT, **FEW_STEPS, callback=previews)


def test_the_command_saves_previews(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--steps", "2", "--seed", "1"]
    succeeded(command("generate", PROMPT, "--dir", "one", "--preview", *options))
    assert read_image("one/preview.png").shape == (96, 5 * 96, 3)
    assert "preview" not in read_metadata("one/output_video.mp4")
    succeeded(command("generate", PROMPT, "--out", "many", "--seeds", "1,2", "--preview", *options[:2]))
    assert read_image("many/preview.png").shape == (96, 5 * 96, 3)


def test_previews_use_the_colours_of_the_model(pipe):
    latent_preview = pipe.latent_preview()
    assert isinstance(latent_preview, LatentToRGB)
    assert latent_preview is pipe.latent_preview()
    assert latent_preview.weights.shape == (2, 16, 3)
