# SPDX-License-Identifier: Apache-2.0
"""What a video can be made from beside its prompt, as data: options, requests and models' needs come from here.

No library is imported, so that `--help` is quick.
"""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from wanjax.errors import SettingError


class InputSpec(NamedTuple):
    """A picture or a clip that a video can be made from.

    Args:
        name: The keyword of the library, the field of a request and the entry of a video's metadata.
        kind: What is read: one picture, several, a clip, or a clip's mask, for which one picture may stand.
        noun: What it is called in a message, with its article.
        help: What it is for, in a sentence.
        page: The colour under what is transparent: black for clips that control, and for masks.
        required: True for a model that makes no video without it.
    """

    name: str
    kind: Literal["image", "images", "clip", "mask"]
    noun: str
    help: str
    page: Literal["white", "black"] = "white"
    required: bool = False

    @property
    def needed(self) -> "InputSpec":
        """The same for a model that makes no video without it."""
        return self._replace(required=True)

    @property
    def option(self) -> str:
        """The option of the command line; for several pictures it is repeated."""
        name = self.name.removesuffix("s") if self.kind == "images" else self.name
        return f"--{name.replace('_', '-')}"


IMAGE = InputSpec("image", "image", "an image", "The first frame, for models of image to video.")
LAST_IMAGE = InputSpec("last_image", "image", "a last image", "The last frame, for models of first and last frame.")
VIDEO = InputSpec(
    "video", "clip", "a video", "A clip for models that take one: they begin from it, or are guided by it."
)
CONTROL_VIDEO = VIDEO._replace(page="black")
"""A clip that guides a video, which begins from noise; from a `VIDEO` it begins itself."""
MASK = InputSpec(
    "mask", "mask", "a mask", "White where the clip is to be made anew: a clip, or one picture.", page="black"
)
REFERENCES = InputSpec("references", "images", "reference images", "Pictures of what the video should show.")
INPUTS = {one.name: one for one in (IMAGE, LAST_IMAGE, VIDEO, MASK, REFERENCES)}
"""The inputs that options, tables and requests may name: those of the families in the package and of registered ones.

`wanjax.register` adds the inputs of its family's presets, so what depends on them is computed when it is asked for.
"""


def check_inputs(names: Collection[str], model: str, purpose: str, specs: Sequence[InputSpec]) -> None:
    """Raise SettingError unless a model takes all inputs of these names, and they are all that it needs.

    Args:
        names: Names of the inputs that are given.
        model: Name of the model, for the message.
        purpose: What the model makes, for the message.
        specs: The inputs that it takes.
    """
    nouns = {name: spec.noun for name, spec in INPUTS.items()} | {spec.name: spec.noun for spec in specs}
    for name in names:
        if name not in [spec.name for spec in specs]:
            taken = " and ".join(spec.noun for spec in specs) or "a prompt alone"
            raise SettingError(f"{model} is made for {purpose} and cannot use {nouns[name]}: it takes {taken}", name)
    for spec in specs:
        if spec.required and spec.name not in names:
            raise SettingError(
                f"{model} is made for {purpose}: give {spec.noun} ({spec.option}) with the prompt", spec.name
            )
