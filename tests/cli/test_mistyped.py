# SPDX-License-Identifier: Apache-2.0
"""Mistyped commands: they are refused with the right name, and make no video."""

from pathlib import Path

import pytest

from tests.support.commands import refused, succeeded, wanjax
from tests.support.words import says
from wanjax.cli import stages


@pytest.fixture(autouse=True)
def prompts(tmp_path, monkeypatch) -> list[str]:
    """The prompts of which videos would have been made."""
    monkeypatch.chdir(tmp_path)
    made: list[str] = []
    monkeypatch.setattr(stages, "generate", lambda report, *, prompt, **_: made.append(prompt))
    return made


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["decod", "--dir", "d0"], "command 'decod' decode"),
        (["modles"], "wanjax models generate modles"),
        (["Plan", "nano"], "wanjax plan"),
        (["genrate", "a red circle"], "wanjax generate"),
        (["warm-up", "--model", "nano", "--help"], "wanjax warmup"),
        (["version"], "wanjax --version"),
        (["--dir", "d0", "decode"], "'decode' command wanjax decode"),
        (["paint", "--help"], "command 'paint' generate encode denoise decode plan"),
        (["price", "nano", "--chip", "v6e-8"], "--chip plan command 'price'"),
        (["a red circle", "--to", "diffusers"], "--to convert generate"),
        (["help", "decod"], "command 'decod' generate"),
    ],
)
def test_a_mistyped_command_makes_no_video(prompts, arguments, told):
    assert says(refused(*arguments), told)
    assert prompts == []
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("prompt", ["cat", "sunset", "decode the message", "help me", "a"])
def test_other_words_are_prompts(prompts, prompt):
    succeeded(wanjax(prompt, "--seed", "3"))
    succeeded(wanjax("--seed", "3", prompt))
    assert prompts == [prompt, prompt]


def test_a_prompt_may_be_a_command_s_name(prompts):
    succeeded(wanjax("generate", "decode"))
    assert prompts == ["decode"]


def test_help_is_a_command():
    assert succeeded(wanjax("help")).stdout == succeeded(wanjax("--help")).stdout
    for command in ("plan", "decode", "help"):
        assert succeeded(wanjax("help", command)).stdout == succeeded(wanjax(command, "--help")).stdout
