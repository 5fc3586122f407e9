# SPDX-License-Identifier: Apache-2.0
"""The sizes of a mesh's axes, and the text that gives them.

JAX is not imported here, so that the command line refuses a mistyped mesh at once.
"""

from typing import NamedTuple

from wanjax.errors import WanjaxError
from wanjax.figures import mesh_text


class MeshSizes(NamedTuple):
    """The sizes of a mesh's axes."""

    dp: int = 1
    sp: int = 1
    tp: int = 1

    def __str__(self) -> str:
        return mesh_text(self._asdict())


class AutoMesh(NamedTuple):
    """A mesh that is to be chosen, with a given `sp` unless it is None."""

    sp: int | None = None

    def __str__(self) -> str:
        return "auto" if self.sp is None else f"auto,sp={self.sp}"


def parse_mesh(text: str) -> MeshSizes | AutoMesh:
    """Read a mesh such as `dp=2,tp=4`, `auto` or `auto,sp=2`; raise WanjaxError for other text."""
    first, *others = (entry.strip() for entry in text.split(","))
    auto = first == "auto"
    axes, sizes = AutoMesh._fields if auto else MeshSizes._fields, {}
    for entry in others if auto else [first, *others]:
        name, _, size = (word.strip() for word in entry.partition("="))
        if name not in axes or name in sizes or not (size.isascii() and size.isdigit() and int(size)):
            forms = "dp=2,sp=1,tp=4, auto, or auto,sp=2, with 1 or more for an axis"
            raise WanjaxError(f"the mesh {text!r} cannot be read: write it as {forms}")
        sizes[name] = int(size)
    return AutoMesh(**sizes) if auto else MeshSizes(**sizes)
