# SPDX-License-Identifier: Apache-2.0
"""A callback that shows previews of a video at a few steps: in a file, on a terminal or in a notebook."""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from os import PathLike
from typing import TYPE_CHECKING, Any

import jax
from PIL import Image

from wanjax.errors import WanjaxError, repr_short
from wanjax.pipelines.observers import Step
from wanjax.pipelines.previews.latent_preview import LatentPreview, Picture, make_filmstrip
from wanjax.pipelines.progress import console
from wanjax.stores.paths import AnyPath, RemotePath, parse_path
from wanjax.stores.writing import atomic_write

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PREVIEW_COUNT = 6  # the default number of steps to show
MAX_COLUMNS = 96  # the maximum width of a preview on a terminal


class Previews:
    """A callback for denoising. At a few steps it shows a strip of small images.

    Previews are made in a thread, and the device does not wait for them. With several processes only the first process
    shows previews. `shown` is the number of completed steps at the last preview, 0 before the first.

    Args:
        file: The path or URL of an image that each new preview overwrites; None writes no file.
        looks: The number of steps that are shown, including the last.
        on: The terminal or notebook; None is the terminal or notebook of this process.
    """

    def __init__(self, file: str | AnyPath | None = None, *, looks: int = PREVIEW_COUNT, on: "Console | None" = None):
        _check_arguments(file, looks)
        self.file = None if file is None else parse_path(file)
        self.looks = looks
        self.shown = 0
        self._console = console() if on is None else on
        self._handle: Any = None  # the identifier of the image in a notebook
        self._worker = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __call__(self, step: Step) -> None:
        """Show the step if it is one of the shown steps; raise the error of the previous preview, if any."""
        earlier_previews = step.index * self.looks // step.total
        if (step.index + 1) * self.looks // step.total > earlier_previews and jax.process_index() == 0:
            self.wait()
            assert step.latent_preview is not None
            run = copy_context().run  # the context tells the notebook which cell displays the image
            self._last = self._worker.submit(run, self._show, step, step.latent_preview())

    def wait(self) -> None:
        """Wait until the last preview is shown."""
        if self._last is not None:
            self._last.result()

    def _show(self, step: Step, latent_preview: LatentPreview) -> None:
        picture = make_filmstrip(latent_preview.pictures(step.x0))
        title = f"preview after step {step.index + 1} of {step.total}"
        if self.file is not None:
            with atomic_write(self.file) as temporary_file:
                Image.fromarray(picture).save(temporary_file, format="PNG")
        if self._console.is_jupyter:
            self._display_in_notebook(picture)
        elif self._console.is_terminal and self._console.color_system in ("256", "truecolor"):
            self._console.print(title, half_blocks(picture, min(MAX_COLUMNS, self._console.width)), sep="\n")
        self.shown = step.index + 1

    def _display_in_notebook(self, picture: Picture) -> None:
        """Show an image in a notebook, replacing the previous one."""
        image = Image.fromarray(picture)
        if self._handle is None:
            self._handle = sys.modules["IPython"].display.display(image, display_id=True)  # notebooks import IPython
        else:
            self._handle.update(image)


def half_blocks(picture: Picture, columns: int) -> "Text":
    """Draw an image as text. Each character shows two pixels, one above the other, by its two colours."""
    from rich.text import Text

    height, width, _ = picture.shape
    rows = max(1, round(columns * height / width / 2))
    pixels: Any = Image.fromarray(picture).resize((columns, 2 * rows), Image.Resampling.BOX)
    text = Text()
    for row in range(rows):
        for column in range(columns):
            upper, lower = (pixels.getpixel((column, 2 * row + half)) for half in (0, 1))
            text.append("▀", f"rgb{upper} on rgb{lower}".replace(" ", "").replace("on", " on "))
        text.append("\n")
    return text


def _check_arguments(file: Any, looks: Any) -> None:
    """Raise WanjaxError unless `file` is a path or None, and `looks` a number above 0."""
    if not isinstance(file, str | PathLike | RemotePath | None):
        raise WanjaxError(f"the file of previews must be a path, got {repr_short(file)}: give one such as preview.png")
    if file is not None and not str(file).lower().endswith(".png"):
        raise WanjaxError(f"the file of previews must be a .png, got {repr_short(str(file))}: give another suffix")
    if isinstance(looks, bool) or not isinstance(looks, int) or looks < 1:
        advice = f"give one such as {PREVIEW_COUNT}"
        raise WanjaxError(f"looks must be a whole number of at least 1, got {repr_short(looks)}: {advice}")
