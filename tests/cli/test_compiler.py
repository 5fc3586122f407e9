# SPDX-License-Identifier: Apache-2.0
"""The compiler option sets `safe` and `fast`, on the command line and in the library."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import wanjax as library
from tests.support.commands import refused, succeeded, wanjax
from tests.support.tiny import tiny_checkpoint
from tests.support.words import has_line_with_words
from wanjax.errors import WanjaxError, WanjaxWarning
from wanjax.media import stage_files
from wanjax.media.metadata import load_settings
from wanjax.pipelines import denoiser, frames, sampling

pytestmark = pytest.mark.usefixtures("cached_programs")

SMALL = ("--size", "32x16", "--frames", "1", "--steps", "2", "--dtype", "float32")
FAST = ("--compiler", "fast")
NOTE = (
    "note: compiled without xla_no_such_option, which the compiler rejected: INVALID_ARGUMENT: No such compile option"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _with_a_rejected_option_in_the_fast_set(monkeypatch, tmp_path):
    """Add an option that XLA does not know to the fast set of two programs."""
    monkeypatch.chdir(tmp_path)
    rejected = {"xla_no_such_option": "true"}
    monkeypatch.setattr(sampling, "take_step", replace(denoiser.take_step, fast_options=lambda context: rejected))
    monkeypatch.setattr(frames, "decode_chunk", replace(frames.decode_chunk, fast_options=lambda context: rejected))


def latents(folder: str) -> np.ndarray:
    return np.asarray(stage_files.load_latents(Path(folder), load_settings(Path(folder))))


def test_a_rejected_option_gives_one_note_and_the_video_is_made(model):
    options = ("a red circle", "--model", model, *SMALL)
    fast = succeeded(wanjax(*options, *FAST, "--dir", "fast"))
    assert fast.stderr.count(NOTE) == fast.stderr.count("xla_no_such_option, which") == 1, fast.stderr
    assert Path("fast/output_video.mp4").exists()
    safe = succeeded(wanjax(*options, "--dir", "safe"))
    assert "note: compiled" not in safe.stderr
    assert np.array_equal(latents("fast"), latents("safe"))


def test_each_stage_accepts_a_compiler(model):
    succeeded(wanjax("encode", "a red circle", "--model", model, "--size", "32x16", "--frames", "1", *FAST))
    assert NOTE in succeeded(wanjax("denoise", "--steps", "2", *FAST)).stderr
    assert NOTE in succeeded(wanjax("decode", *FAST)).stderr


@pytest.mark.slow  # the test before it is quick, with the stages
def test_the_warm_up_accepts_a_compiler(model):
    assert NOTE in succeeded(wanjax("warmup", "--model", model, *SMALL, *FAST)).stderr


def library_error(*arguments: str) -> str:
    with pytest.raises(WanjaxError) as caught:
        library.load(*arguments, compiler="quick")
    return str(caught.value)


@pytest.mark.parametrize("command", ["generate a", "encode a", "denoise", "decode", "plan", "warmup", "load nano"])
def test_an_unknown_compiler_is_refused(command):
    name, *options = command.split()
    output = library_error(*options) if name == "load" else refused(name, *options, "--compiler", "quick")
    assert has_line_with_words(output, "'quick' safe fast")


def test_the_library_warns_of_a_rejected_option(model):
    pipe = library.load(model, compiler="fast", dtype="float32")
    with pytest.warns(WanjaxWarning, match="compiled without xla_no_such_option") as warned:
        pipe("a red circle", size=(16, 32), frames=1, steps=2)
    assert {str(warning.message).partition(",")[0] for warning in warned} == {"compiled without xla_no_such_option"}
    library.load(model, dtype="float32")("a red circle", size=(16, 32), frames=1, steps=2)  # warnings are errors here
