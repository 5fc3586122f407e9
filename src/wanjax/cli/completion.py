# SPDX-License-Identifier: Apache-2.0
"""Completions that a shell asks for beside those of click: names of models, and files.

Click's own scripts for bash, zsh and fish run `wanjax` with the variable _WANJAX_COMPLETE set.
"""

import os

import click
from click.shell_completion import CompletionItem


def complete_files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leaves the completion to the shell, which knows the files."""
    return [CompletionItem(incomplete, type="file")]


def complete_models(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the models that `wanjax models` lists; for a path, leaves the completion to the shell."""
    if incomplete.startswith((".", "~")) or os.sep in incomplete:
        return complete_files(ctx, parameter, incomplete)
    from wanjax.registry import presets  # imported late for a quick --help

    return [
        CompletionItem(name, help=preset.about) for name, preset in presets().items() if name.startswith(incomplete)
    ]


def complete_commands(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the commands of the group."""
    group = ctx.parent.command if ctx.parent else None
    assert isinstance(group, click.Group)
    return [CompletionItem(name) for name in group.list_commands(ctx) if name.startswith(incomplete)]
