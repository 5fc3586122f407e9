# SPDX-License-Identifier: Apache-2.0
"""The bundled model: it matches its recipe, is small, and makes the video that a prompt describes."""

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

import wanjax
from tests.support.commands import succeeded
from tests.support.commands import wanjax as command
from tests.support.documents import ROOT, blocks, commands
from tests.support.words import has_line_with_words
from wanjax.media.pictures import read_clip
from wanjax.pipelines.wan.model import WanModel
from wanjax.pipelines.wan.presets import NANO, PRESETS

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "nano"))
import captions
import recipe
from reading import read

CONFIGS = {
    "model_index.json": recipe.MODEL_INDEX,
    "generation_config.json": recipe.DEFAULTS,
    "scheduler/scheduler_config.json": recipe.SCHEDULER,
    "text_encoder/config.json": recipe.TEXT_ENCODER,
    "transformer/config.json": recipe.TRANSFORMER,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_nano_matches_its_recipe(name):
    assert json.loads((NANO / name).read_text()) == CONFIGS[name]


def test_the_words_that_nano_understands_are_those_of_its_captions():
    assert {word for word in captions.vocabulary() if word.isalpha()} == PRESETS[0].domain.words


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        (["A red circle, moving right."], []),
        (["moving right", "--frames", "17"], []),
        (
            ["a cat on a red sofa"],
            ["nano does not know 'cat', 'sofa': it was trained on one coloured shape that moves"],
        ),
        (["a red circle", "--size", "256x256"], ["nano was trained only on 64x64 and 17 frames: 256x256 may show"]),
        (["a red circle", "--frames", "33", "--size", "64x128"], ["64x128 and 33 frames may show only"]),
    ],
)
def test_untrained_words_give_a_note(options, notes, monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(WanModel, "encode_text", interrupted)  # after all notes are printed
    monkeypatch.chdir(tmp_path)
    note_lines = [line for line in command(*options).stderr.splitlines() if line.startswith("note: ")]
    assert len(note_lines) == len(notes)
    assert all(note in line for note, line in zip(notes, note_lines, strict=True))


def test_a_converted_copy_gives_the_same_notes(tmp_path):
    succeeded(command("convert", "nano", str(tmp_path / "copy")))
    copied = wanjax.load(str(tmp_path / "copy"))
    settings = copied.settings(size=(32, 32), frames=5)
    assert copied.domain == PRESETS[0].domain
    assert has_line_with_words("\n".join(copied.notes(settings)), "trained only on 32x32")
    for prompt, words in (("a cat", "does not know 'cat'"), ("a red circle", None)):
        notes = copied.notes(copied.settings(prompt=prompt))
        assert has_line_with_words("\n".join(notes), words) if words else not notes


@pytest.mark.parametrize(
    ("scheduler", "options", "words"),
    [
        ("rcm", {"flow_shift": 9}, "flow shift 9 rcm"),
        ("euler", {"flow_shift": 9, "sigmas": "comfy-linear-quadratic"}, "flow shift 9 comfy-linear-quadratic"),
        ("euler", {"flow_shift": 9}, None),
        ("rcm", {}, None),
    ],
)
def test_a_flow_shift_without_effect_gives_a_note(scheduler, options, words):
    pipe = wanjax.load("nano").with_solver(scheduler)
    notes = [*pipe.notes(pipe.settings(steps=4, **options))]
    assert has_line_with_words("\n".join(notes), words) if words else not notes


def test_nano_is_small_enough_for_the_package():
    assert sum(file.stat().st_size for file in NANO.rglob("*") if file.is_file()) < 20_000_000


@pytest.mark.parametrize(
    ("prompt", "colour"), [("a red circle moving right", "red"), ("a blue square growing", "blue")]
)
def test_nano_follows_its_prompts(prompt, colour):
    video = wanjax.load()(prompt, seed=0)
    assert video.frames.shape == (17, 64, 64, 3)
    assert video.frames.dtype == np.uint8
    assert read(video.frames).colour == colour


@pytest.mark.slow
def test_the_examples_of_a_picture_and_of_windows_follow_their_prompts(tmp_path, monkeypatch):
    """Runs the commands of the guides."""
    monkeypatch.chdir(tmp_path)
    pages = (ROOT / f"docs/guides/{name}.md" for name in ("picture", "long"))
    lines = [line for page in pages for block in blocks(page) if block.run == "run" for line in commands(block.text)]
    calls = [shlex.split(line)[1:] for line in lines if line.startswith("wanjax ")]
    names = ("circle.mp4", "frames/", "up.mp4", "there-and-back.mp4")
    chosen = {name: next(words for words in calls if words[-1] == name) for name in names}
    chosen["circle.mp4"] = next(words for words in calls if words[-2:] == ["--out", "circle.mp4"])
    for words in chosen.values():
        succeeded(command(*words))
    first, up, long = (read_clip(name, 400, 8) for name in ("circle.mp4", "up.mp4", "there-and-back.mp4"))
    assert np.abs(up[0].astype(int) - first[0]).mean() < 8  # it begins from the picture
    readings = [read(clip) for clip in (first, up, long[:17], long[16:])]
    assert [(reading.colour, reading.shape, reading.motion) for reading in readings] == [
        ("red", "circle", motion) for motion in ("right", "up", "right", "left")
    ]


def test_equal_seeds_give_equal_videos_and_different_seeds_different_ones():
    pipe = wanjax.load()
    first, again, another = (pipe("a green circle", seed=seed, steps=4).frames for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != another).any()


def test_batched_guidance_gives_the_same_latents():
    pipe = wanjax.load()
    embeddings = pipe.encode("a yellow square moving up")
    separate, batched = (pipe.denoise(embeddings, steps=2, seed=5, batch_guidance=batch) for batch in (False, True))
    assert np.linalg.norm(separate - batched) <= 1e-5 * np.linalg.norm(separate)


def test_a_callback_sees_each_step_and_stops():
    pipe = wanjax.load()
    steps = []

    def callback(step: wanjax.Step) -> bool:
        steps.append((step.index, step.total, step.x0.shape))
        return step.index < 1

    with pytest.raises(wanjax.Cancelled):
        pipe.denoise(pipe.encode("a red circle"), steps=4, callback=callback)
    assert steps == [(0, 4, (1, 16, 5, 8, 8)), (1, 4, (1, 16, 5, 8, 8))]
