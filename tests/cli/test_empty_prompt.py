# SPDX-License-Identifier: Apache-2.0
"""A terminal asks for an empty prompt again; other interfaces refuse it, except the library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import refused, succeeded, wanjax
from tests.support.words import has_line_with_words
from wanjax.jobs.rows import read_requests
from wanjax.media import video as video_files

SHORT = ("--steps", "1", "--frames", "5", "--guidance-scale", "1")


@pytest.fixture(autouse=True)
def _in_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("prompt", [[], [""], [" \t"], ["--prompt", ""]], ids=str)
@pytest.mark.parametrize("command", ["generate", "encode"])
def test_an_empty_prompt_of_a_command_is_refused(command, prompt):
    output = refused(command, *prompt)
    assert has_line_with_words(output, "prompt --allow-empty-prompt")
    assert has_line_with_words(output, "empty" if prompt else "missing")


def test_an_intended_empty_prompt_makes_a_video_that_its_metadata_reproduces():
    succeeded(wanjax("", "--allow-empty-prompt", *SHORT, "--out", "a.mp4"))
    succeeded(wanjax("--from", "a.mp4", "--out", "b.mp4"))
    assert video_files.read_metadata("a.mp4")["prompt"] == video_files.read_metadata("b.mp4")["prompt"] == ""


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "", "allow_empty_prompt": True},
        {"allow_empty_prompt": "true"},
        {"prompt": "a", "allow_empty_prompt": True},
    ],
    ids=str,
)
def test_a_row_may_have_an_empty_prompt(row):
    Path("rows.jsonl").write_text(json.dumps(row))
    assert read_requests("rows.jsonl")[0].fields == {"prompt": row.get("prompt", "")}


def test_a_terminal_asks_for_a_missing_prompt():
    terminal, child = os.openpty()
    command = [sys.executable, "-m", "wanjax", "generate", "--model", "nowhere/at/all"]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child)
    os.close(child)
    output = b""
    while b"show?" not in output:
        output += os.read(terminal, 1024)
    os.write(terminal, b"\na red circle\n")  # an empty line asks again
    try:
        while piece := os.read(terminal, 1024):
            output += piece
    except OSError:  # the terminal's end
        pass
    os.close(terminal)
    assert process.wait() == 2
    assert b"nowhere/at/all" in output
    assert output.count(b"show?") == 2
    assert b"Traceback" not in output
