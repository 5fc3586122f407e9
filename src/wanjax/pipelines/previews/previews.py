# SPDX-License-Identifier: Apache-2.0
"""A callback that shows previews of a video at a few steps: in a file, on a terminal or in a notebook."""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import jax
from PIL import Image

from wanjax.pipelines.observers import Step
from wanjax.pipelines.previews.latent_preview import LatentPreview, Picture, strip
from wanjax.pipelines.progress import console
from wanjax.stores.paths import AnyPath, parse_path
from wanjax.stores.writing import writing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PREVIEW_COUNT = 6  # the number of steps that are shown
MAX_COLUMNS = 96  # the maximal width of a preview on a terminal


class Previews:
    """A callback for denoising that shows a strip of small images at a few steps.

    Previews are made in a thread, and the device does not wait for them. With several processes only the first shows
    them. `shown` is the number of completed steps at the last preview, 0 before the first.

    Args:
        file: An image, local or in a store, which each preview replaces; None writes none.
        looks: The number of steps that are shown, including the last.
        on: The terminal or notebook; None is that of this process.
    """

    def __init__(self, file: str | AnyPath | None = None, *, looks: int = PREVIEW_COUNT, on: "Console | None" = None):
        self.file = None if file is None else parse_path(file)
        self.looks = looks
        self.shown = 0
        self._console = console() if on is None else on
        self._handle: Any = None  # of the image in a notebook
        self._worker = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __call__(self, step: Step) -> None:
        """Show the step if it is one of the shown steps; raise the error of the previous preview, if any."""
        earlier_previews = step.index * self.looks // step.total
        if (step.index + 1) * self.looks // step.total > earlier_previews and jax.process_index() == 0:
            self.wait()
            assert step.latent_preview is not None
            run = copy_context().run  # a notebook reads the cell to display in from the context
            self._last = self._worker.submit(run, self._show, step, step.latent_preview())

    def wait(self) -> None:
        """Wait until the last preview is shown."""
        if self._last is not None:
            self._last.result()

    def _show(self, step: Step, latent_preview: LatentPreview) -> None:
        picture = strip(latent_preview.pictures(step.x0))
        title = f"preview after step {step.index + 1} of {step.total}"
        if self.file is not None:
            with writing(self.file) as temporary_file:
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
            self._handle = sys.modules["IPython"].display.display(image, display_id=True)  # a notebook has imported it
        else:
            self._handle.update(image)


def half_blocks(picture: Picture, columns: int) -> "Text":
    """Return an image as text: a character shows two pixels, one above the other, in its two colours."""
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
