# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: the page of commands has the help of each, as it is printed."""

from typing import Any

import click

from wanjax.cli import main
from wanjax.cli.report import Report
from wanjax.cli.sections import SHOW_ALL

PLACE = "<!-- the help of each command -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the help of all commands into the page that has a place for it."""
    return markdown.replace(PLACE, "\n\n".join(map(help_of, main.commands)))


def help_of(name: str) -> str:
    """Return a command's section: its name, and all of its help."""
    group = click.Context(main, info_name="wanjax", obj=Report(), max_content_width=84, terminal_width=84)
    context = click.Context(main.commands[name], info_name=name, parent=group)
    context.meta[SHOW_ALL] = True
    return f"## wanjax {name}\n\n```text\n{context.get_help()}\n```"
