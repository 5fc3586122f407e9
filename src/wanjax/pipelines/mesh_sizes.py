# SPDX-License-Identifier: Apache-2.0
"""The sizes of a mesh's axes, and their text form.

This module does not import JAX, so that the command line rejects a mistyped mesh at once.
"""

from typing import NamedTuple

from wanjax.errors import WanjaxError
from wanjax.figures import format_mesh


class MeshSizes(NamedTuple):
    """The sizes of a mesh's axes."""

    dp: int = 1
    sp: int = 1
    tp: int = 1

    def __str__(self) -> str:
        return format_mesh(self._asdict())


class AutoMesh(NamedTuple):
    """A request for a mesh whose sizes are chosen automatically. If `sp` is set, only `dp` and `tp` are chosen."""

    sp: int | None = None

    def __str__(self) -> str:
        return "auto" if self.sp is None else f"auto,sp={self.sp}"


def parse_mesh(text: str) -> MeshSizes | AutoMesh:
    """Parse a mesh such as `dp=2,tp=4`, `auto` or `auto,sp=2`; raise WanjaxError for other text."""
    first, *others = (entry.strip() for entry in text.split(","))
    auto = first == "auto"
    axes, sizes = AutoMesh._fields if auto else MeshSizes._fields, {}
    for entry in others if auto else [first, *others]:
        name, _, size = (word.strip() for word in entry.partition("="))
        if name not in axes or name in sizes or not (size.isascii() and size.isdigit() and int(size)):
            forms = "dp=2,sp=1,tp=4, auto, or auto,sp=2, with a size of at least 1 for each axis"
            raise WanjaxError(f"the mesh {text!r} cannot be read: write it as {forms}")
        sizes[name] = int(size)
    return AutoMesh(**sizes) if auto else MeshSizes(**sizes)
