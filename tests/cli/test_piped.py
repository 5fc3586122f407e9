# SPDX-License-Identifier: Apache-2.0
"""What commands print into a pipe: no bars, no colours, and "1 step" where there is one."""

import re
from pathlib import Path

import pytest
from PIL import Image

from tests.support.commands import succeeded, wanjax
from tests.support.quick import quick
from tests.support.tiny import tiny_checkpoint
from wanjax.figures import pluralize

pytestmark = pytest.mark.usefixtures("cached_programs")

ONE_STEP = ("--size", "32x16", "--frames", "1", "--steps", "1")
DRAWING = re.compile(r"[\x1b\r\u2500-\u259f]")  # escape sequences, boxes and bars
WRONG_PLURAL = re.compile(r"(?<![\w.,-])1 (?:[a-z-]+ )?(?!s\b|ms\b|is\b|as\b|us\b|has\b)[a-z]+s\b(?! (?:a|the)\b)")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_a_noun_agrees_with_its_number():
    assert [pluralize(n, "step") for n in (0, 1, 1000, 10_000)] == ["0 steps", "1 step", "1000 steps", "10,000 steps"]
    assert pluralize(2, "process") == "2 processes"


@pytest.mark.parametrize("every", quick([False], [False, True]), ids=["few", "every"])
def test_output_into_a_pipe_has_no_colours_and_no_wrong_plurals(every, model, tmp_path, monkeypatch):
    """Each command makes one of each thing, with FORCE_COLOR set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    (tmp_path / "data").mkdir()
    Image.new("RGB", (32, 32)).save("data/a.png")
    Path("data/a.txt").write_text("a red circle")
    Path("p.txt").write_text("a red circle\n")
    options = ("--model", model, "--dtype", "float32", *ONE_STEP)
    train = ("--size", "32x32", "--frames", "1", "--steps", "1", "--lora-rank", "1", "--out", "lora")
    similar_commands = (  # each prints most of what one of the others prints
        ("convert", model, "there"),
        ("convert", "there", "--verify"),
        ("warmup", *options, "--verbose"),
        ("train", model, "data", *train),  # it is complete already
        ("plan", model, "--chip", "cpu", *ONE_STEP, "--requests", "1"),
        ("plan", model, "--chip", "cpu", *ONE_STEP, "--train", "--lora-rank", "1"),
    )
    for command in (
        ("generate", "a red circle", *options, "--stats", "--preview", "--out", "a.mp4"),
        ("generate", "a red circle", *options, "--count", "1", "--out", "many"),
        ("batch", "p.txt", *options, "--seeds", "42", "--out", "many"),  # the video exists already
        ("train", model, "data", *train),
        ("plan", model, "--chip", "cpu", *ONE_STEP),
        ("models",),
        ("info", "a.mp4"),
        *(similar_commands if every else ()),
    ):
        output = succeeded(wanjax(*command)).output
        assert not DRAWING.findall(output), (command, output)
        assert WRONG_PLURAL.findall(output) == [], (command, output)
