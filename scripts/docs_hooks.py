# SPDX-License-Identifier: Apache-2.0
"""Hooks for MkDocs, which put the printed help of every command into the page of commands."""

from typing import Any

import click

from wanjax.cli import main
from wanjax.cli.report import Report
from wanjax.cli.sections import SHOW_ALL

PLACE = "<!-- the help of each command -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the placeholder in a page by the help of all commands."""
    return markdown.replace(PLACE, "\n\n".join(map(help_of, main.commands)))


def help_of(name: str) -> str:
    """Return the section of a command: its name, and its complete help."""
    group = click.Context(main, info_name="wanjax", obj=Report(), max_content_width=84, terminal_width=84)
    context = click.Context(main.commands[name], info_name=name, parent=group)
    context.meta[SHOW_ALL] = True
    return f"## wanjax {name}\n\n```text\n{context.get_help()}\n```"
