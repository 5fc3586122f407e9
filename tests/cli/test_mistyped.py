# SPDX-License-Identifier: Apache-2.0
"""Mistyped commands: they are refused with the right name, and make no video."""

from pathlib import Path

import pytest

from tests.support.commands import refused, succeeded, wanjax
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
        (["decod", "--dir", "d0"], "no command is named 'decod': `wanjax decode` is near"),
        (["modles"], "`wanjax models` is near; `wanjax generate modles` makes a video of this word"),
        (["Plan", "nano"], "`wanjax plan` is near"),
        (["genrate", "a red circle"], "`wanjax generate` is near"),
        (["warm-up", "--model", "nano", "--help"], "`wanjax warmup` is near"),
        (["version"], "`wanjax --version` is near"),
        (["--dir", "d0", "decode"], "'decode' is a command, which precedes its options: `wanjax decode ...`"),
        (["paint", "--help"], "no command is named 'paint': there are generate, encode, denoise, decode, plan"),
        (["price", "nano", "--chip", "v6e-8"], "--chip is an option of `wanjax plan`, and no command is named 'price'"),
        (["a red circle", "--verify"], "--verify is an option of `wanjax convert`, and `wanjax generate` has no such"),
        (["help", "decod"], "no command is named 'decod': there are generate"),
    ],
)
def test_a_mistyped_command_makes_no_video(prompts, arguments, told):
    assert told in refused(*arguments)
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
