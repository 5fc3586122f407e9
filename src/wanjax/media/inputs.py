# SPDX-License-Identifier: Apache-2.0
"""The inputs of a video beside its prompt: pictures, clips and masks.

Options, fields of requests and the inputs of models are all derived from this table. It imports no library, so that
`--help` is quick.
"""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from wanjax.errors import SettingError


class InputSpec(NamedTuple):
    """A picture or a clip that a video can be made from.

    Args:
        name: The keyword of the library, the field of a request and the entry of a video's metadata.
        kind: One picture, several pictures, a clip, or a mask, which is a clip or one picture for all frames.
        noun: Its name in messages, with an article.
        help: Its purpose, in a sentence.
        page: The colour behind transparent pixels: black for control clips and masks.
        required: Whether the model makes no video without it.
    """

    name: str
    kind: Literal["image", "images", "clip", "mask"]
    noun: str
    help: str
    page: Literal["white", "black"] = "white"
    required: bool = False

    @property
    def needed(self) -> "InputSpec":
        """This input, required."""
        return self._replace(required=True)

    @property
    def option(self) -> str:
        """The option of the command line; repeat it for several pictures."""
        name = self.name.removesuffix("s") if self.kind == "images" else self.name
        return f"--{name.replace('_', '-')}"


IMAGE = InputSpec("image", "image", "an image", "The first frame, for models of image to video.")
LAST_IMAGE = InputSpec("last_image", "image", "a last image", "The last frame, for models of first and last frame.")
VIDEO = InputSpec(
    "video", "clip", "a video", "A clip for models that take one: they begin from it, or are guided by it."
)
CONTROL_VIDEO = VIDEO._replace(page="black")
"""A clip that guides a video from noise; a video from a `VIDEO` starts from the clip's own latents."""
MASK = InputSpec(
    "mask", "mask", "a mask", "White where the clip is to be made anew: a clip, or one picture.", page="black"
)
REFERENCES = InputSpec("references", "images", "reference images", "Pictures of what the video should show.")
INPUTS = {spec.name: spec for spec in (IMAGE, LAST_IMAGE, VIDEO, MASK, REFERENCES)}
"""The inputs of all families, by name.

`wanjax.register` adds those of a new family, so everything derived from this table is computed on use, not on import.
"""


def check_inputs(names: Collection[str], model: str, purpose: str, specs: Sequence[InputSpec]) -> None:
    """Raise SettingError if the model does not take one of these inputs, or lacks one that it requires.

    Args:
        names: Names of the inputs of the request.
        model: Name of the model, for the message.
        purpose: What the model makes, for the message.
        specs: The inputs that the model takes.
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
