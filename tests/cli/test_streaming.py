# SPDX-License-Identifier: Apache-2.0
"""The commands with a model that makes a video chunk by chunk."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import wanjax
from tests.support.tiny import tiny_causal_checkpoint
from tests.support.warm import cached_program_names
from tests.support.warm import wanjax as wanjax_command
from tests.support.words import has_line_with_words
from wanjax.checkpoints.files import load_safetensors
from wanjax.cli import main
from wanjax.media.stage_files import LATENTS_FILE
from wanjax.media.video import write_video

pytestmark = pytest.mark.usefixtures("cached_programs")

OPTIONS = ("--seed", "3", "--frames", "21")


def run(*arguments, status=0):
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_causal_checkpoint(tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def video(model):
    return wanjax.load(model)("a red circle", seed=3, frames=21)


def frames_of(folder):
    return np.stack([np.asarray(Image.open(path)) for path in sorted(folder.iterdir())])


def test_generate_writes_what_the_library_makes(model, video, tmp_path):
    messages = run(
        "a red circle", "--model", model, *OPTIONS, "--dir", tmp_path / "stages", "--out", tmp_path / "frames"
    )
    np.testing.assert_array_equal(frames_of(tmp_path / "frames"), video.frames)
    assert load_safetensors(tmp_path / "stages" / LATENTS_FILE)["latents"].shape == (1, 4, 6, 4, 4)
    assert "stream: chunk 3 of 3" in messages.stderr
    assert "21 frames, " in messages.stderr
    assert " a second, for playback at 16" in messages.stderr


def test_frames_are_written_as_they_come(model, tmp_path, monkeypatch):
    """Two of three chunks are written when the third is requested."""
    lengths = []

    def write(path, frames, fps, record):
        def stop_at_the_third():
            for clip in frames:
                lengths.append(len(clip))
                if len(lengths) == 3:
                    raise RuntimeError("stopped")
                yield clip

        return write_video(path, stop_at_the_third(), fps, record)

    monkeypatch.setattr("wanjax.jobs.maker.write_video", write)
    run("a red circle", "--model", model, *OPTIONS, "--out", tmp_path / "frames", status=1)
    assert lengths == [5, 8, 8]


def test_the_stages_with_files_make_the_same_video(model, video, tmp_path):
    run("encode", "a red circle", "--model", model, "--frames", 21, "--dir", tmp_path / "stages")
    run("denoise", "--seed", 3, "--dir", tmp_path / "stages")
    run("decode", "--dir", tmp_path / "stages", "--out", tmp_path / "frames")
    np.testing.assert_array_equal(frames_of(tmp_path / "frames"), video.frames)


def test_a_causal_model_shows_previews_and_makes_several_seeds(model, video, tmp_path):
    run("a red circle", "--model", model, *OPTIONS, "--preview", "--dir", tmp_path, "--out", tmp_path / "v.mp4")
    assert (tmp_path / "preview.png").exists()
    run("a red circle", "--model", model, "--frames", 21, "--seeds", "3,4", "--out", tmp_path / "videos")
    assert len(list((tmp_path / "videos").glob("*.mp4"))) == 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("generate a --model {} --frames 17", "17 frames 5 latent"),
        ("generate a --model {} --frames 17", "13 21 frames"),
        ("train {} data --out out", "training chunk"),
        ("calibrate {}", "calibrating chunk"),
        ("plan wan2.1-t2v-1.3b-causal --train --chip v6e-8", "training chunk"),
    ],
)
def test_settings_that_a_causal_model_lacks_are_refused(command, words, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    Image.new("RGB", (32, 32)).save("data/a.png")
    (tmp_path / "data" / "a.txt").write_text("a red circle")
    assert has_line_with_words(run(*command.format(model).split(), status=2).stderr, words)


def test_a_causal_model_is_converted_and_back(model, video, tmp_path):
    run("convert", model, tmp_path / "converted")
    again = wanjax.load(tmp_path / "converted")("a red circle", seed=3, frames=21)
    np.testing.assert_array_equal(again.frames, video.frames)
    run("convert", tmp_path / "converted", tmp_path / "back", "--to", "diffusers")
    config = json.loads((tmp_path / "back" / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "CausalWanTransformer3DModel"


@pytest.mark.slow  # tests/cli/test_warmup.py has a quick test with another model
def test_nothing_is_compiled_after_a_warmup(model, tmp_path):
    wanjax_command(tmp_path, "warmup", "--model", str(model), *OPTIONS)
    before = cached_program_names(tmp_path)
    assert len(before) > 5
    message = wanjax_command(tmp_path, "generate", "a red circle", "--model", str(model), *OPTIONS, "--out", "a.mp4")
    assert message.count("cached") == 2, message
    assert cached_program_names(tmp_path) == before
