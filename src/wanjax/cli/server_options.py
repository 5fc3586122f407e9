# SPDX-License-Identifier: Apache-2.0
"""The options of `serve` alone."""

from pathlib import Path

import click

from wanjax.cli.options import preview_decoder, together

serving = together(
    click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen at."),
    click.option(
        "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
    ),
    click.option(
        "--token",
        metavar="TEXT",
        help="What a request has to show; WANJAX_TOKEN in the environment sets it too, and hides it from other users.",
    ),
    click.option(
        "--dir",
        "folder",
        type=click.Path(path_type=Path, file_okay=False),
        default="wanjax_served",
        show_default=True,
        metavar="FOLDER",
        help="Where requests and videos are kept.",
    ),
    click.option(
        "--max-queue", type=click.IntRange(min=1), default=32, show_default=True, help="Videos that may wait."
    ),
    click.option(
        "--max-pixels",
        type=click.IntRange(min=1),
        metavar="N",
        help="Pixels that a video may have, over all frames.  [default: four times those of the model's own video]",
    ),
    click.option(
        "--max-steps", type=click.IntRange(min=1), default=200, show_default=True, help="Steps that one may take."
    ),
    click.option(
        "--max-upload", type=click.IntRange(min=1), default=32, show_default=True, help="MiB that a request may have."
    ),
    click.option("--preview", is_flag=True, help="Show on the page, at a few steps, what a video will be."),
    preview_decoder,
    click.option(
        "--rehearse/--no-rehearse",
        default=True,
        show_default=True,
        help="Load the model and compile its default video's programs at once, or with the first request.",
    ),
)
