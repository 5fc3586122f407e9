# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation, and the blocks of code in them."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import click

from wanjax.cli import DEFAULT_COMMAND, main
from wanjax.cli.report import Report
from wanjax.registry import presets

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
FENCED = re.compile(r"(?:^<!-- (run(?:: \w+)?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code: the marker that it runs, its language, and its text."""

    run: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*match) for match in FENCED.findall(page.read_text(encoding="utf-8"))]


def commands(text: str) -> list[str]:
    """Return the commands in a block of shell code."""
    lines = text.replace("\\\n", "").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def calls(line: str) -> list[list[str]]:
    """Return the calls of `wanjax` in a line, also in quotes."""
    result = []
    for part in re.split(r"&&|\||>", line):
        words = shlex.split(part, comments=True)
        inner = [word for word in words if word.startswith("wanjax ")]
        words = shlex.split(inner[0]) if inner else words
        if "wanjax" in words:
            result.append(words[words.index("wanjax") + 1 :])
    return result


def check_call(words: list[str]) -> None:
    """Parse the arguments of a call, and check that its model exists if the model has a plain name."""
    words = [word for word in words if word != "--version"]
    if not words:
        return
    name, rest = (words[0], words[1:]) if words[0] in main.commands else (DEFAULT_COMMAND, words)
    group = click.Context(main, info_name="wanjax", obj=Report())
    context = main.commands[name].make_context(name, list(rest), parent=group)
    for model in (context.params.get("model"), context.params.get("model_option")):
        assert model is None or "/" in model or model in presets() or model == "my-model", model
