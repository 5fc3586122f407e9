# SPDX-License-Identifier: Apache-2.0
"""A callback that shows at a few steps what a video will be: in a file, on a terminal, in a notebook."""

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

LOOKS = 6  # steps that are shown
COLUMNS = 96  # of a terminal, at most, that a preview takes


class Previews:
    """A callback for denoising that shows a strip of small pictures at a few steps.

    Pictures are made beside the device's work, which does not wait for them. Several processes show them once. `shown`
    counts the steps that had been taken at the last look, 0 before the first.

    Args:
        file: A picture, here or in a store, which each look replaces; None writes none.
        looks: The number of steps that are shown, the last one included.
        on: The terminal or notebook; None is that of this process.
    """

    def __init__(self, file: str | AnyPath | None = None, *, looks: int = LOOKS, on: "Console | None" = None):
        self.file = None if file is None else parse_path(file)
        self.looks = looks
        self.shown = 0
        self._console = console() if on is None else on
        self._handle: Any = None  # a notebook's
        self._worker = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __call__(self, step: Step) -> None:
        """Show the step if it is one of those; raise what went wrong at the look before."""
        looked = step.index * self.looks // step.total
        if (step.index + 1) * self.looks // step.total > looked and jax.process_index() == 0:
            self.wait()
            assert step.latent_preview is not None
            run = copy_context().run  # a notebook finds the cell that the picture belongs to in it
            self._last = self._worker.submit(run, self._look, step, step.latent_preview())

    def wait(self) -> None:
        """Wait until the last look is shown."""
        if self._last is not None:
            self._last.result()

    def _look(self, step: Step, latent_preview: LatentPreview) -> None:
        page = strip(latent_preview.pictures(step.x0))
        title = f"preview after step {step.index + 1} of {step.total}"
        if self.file is not None:
            with writing(self.file) as beside:
                Image.fromarray(page).save(beside, format="PNG")
        if self._console.is_jupyter:
            self._display(page)
        elif self._console.is_terminal and self._console.color_system in ("256", "truecolor"):
            self._console.print(title, half_blocks(page, min(COLUMNS, self._console.width)), sep="\n")
        self.shown = step.index + 1

    def _display(self, page: Picture) -> None:
        """Show a picture in a notebook, in place of the one before."""
        image = Image.fromarray(page)
        if self._handle is None:
            self._handle = sys.modules["IPython"].display.display(image, display_id=True)  # a notebook has imported it
        else:
            self._handle.update(image)


def half_blocks(page: Picture, columns: int) -> "Text":
    """Return a picture as text: a character shows two pixels, one above the other, in its two colours."""
    from rich.text import Text

    height, width, _ = page.shape
    rows = max(1, round(columns * height / width / 2))
    pixels: Any = Image.fromarray(page).resize((columns, 2 * rows), Image.Resampling.BOX)
    text = Text()
    for row in range(rows):
        for column in range(columns):
            upper, lower = (pixels.getpixel((column, 2 * row + half)) for half in (0, 1))
            text.append("▀", f"rgb{upper} on rgb{lower}".replace(" ", "").replace("on", " on "))
        text.append("\n")
    return text
