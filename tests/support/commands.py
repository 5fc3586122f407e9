# SPDX-License-Identifier: Apache-2.0
"""Helpers that run `wanjax` in this process."""

import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from wanjax.cli import main
from wanjax.cli.report import Report
from wanjax.pipelines.request import VideoRequest


def wanjax(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), prog_name="wanjax")


def succeeded(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


def files(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


class Arguments(dict[str, Any]):
    """The arguments that a command passes on, by name, with the fields of its request; None for a missing name."""

    def __missing__(self, name: str) -> None:
        return None

    def keep(self, *arguments: Any, **named: Any) -> None:
        """Replace the arguments by those of another call."""
        self.clear()
        self.update(named)
        for argument in arguments:
            if isinstance(argument, Report):
                self["report"] = argument
            elif isinstance(argument, VideoRequest):
                self.update(argument.fields)
            elif hasattr(argument, "_asdict"):
                self.update(argument._asdict())


def refused(*arguments: str | Path, status: int = 2, started: bool | None = None) -> str:
    """Run a command that must fail, and return its error message.

    With `started` False, the command must fail before the first stage.
    """
    result = wanjax(*arguments)
    assert result.exit_code == status, (result.output, result.exception)
    assert result.stdout == ""
    assert started is not False or not re.search(r"^encode\b", result.stderr, re.MULTILINE), result.stderr
    messages = re.findall(r"^wanjax: (.*(?:\n  .*)*)$", result.stderr, re.MULTILINE)
    assert len(messages) == 1, result.stderr
    rest = result.stderr.partition(messages[0])[2].strip()
    assert rest == "" or rest.startswith(("completed work is kept", "no video is complete", "no work is complete"))
    assert not [path for path in Path().rglob("*") if path.name.startswith(".") or "partial" in path.name]
    return messages[0]
