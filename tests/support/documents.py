# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation, and the blocks of code in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"(?:^<!-- (run(?:: \w+)?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code: the note before it that it is to be run, its language, and its text."""

    run: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCED.findall(page.read_text(encoding="utf-8"))]


def commands(text: str) -> list[str]:
    """Returns the lines of a shell's block that are commands."""
    lines = text.replace("\\\n", "").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]
