# SPDX-License-Identifier: Apache-2.0
"""The inputs of a video in addition to its prompt: pictures, clips and masks.

Options, fields of requests and the inputs of models are all derived from this table. This module imports no library, so
that `--help` is quick.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

from wanjax.errors import SettingError

CLIP_SUFFIXES = (".mp4", ".mov", ".webm", ".mkv", ".m4v")  # the suffixes of video files, which are never pictures


class InputSpec(NamedTuple):
    """An input from which a video can be made: a picture or a clip.

    Args:
        name: The keyword of the library, the field of a request and the entry of a video's metadata.
        kind: One picture, several pictures, a clip, or a mask. A mask is a clip, or one picture for all frames.
        noun: The name of the input in messages, with an article.
        help: The purpose of the input, in a sentence.
        background: The colour behind transparent pixels: black for control clips and masks.
        required: Whether the model needs this input.
    """

    name: str
    kind: Literal["image", "images", "clip", "mask"]
    noun: str
    help: str
    background: Literal["white", "black"] = "white"
    required: bool = False

    @property
    def needed(self) -> "InputSpec":
        """A copy of this input that is required."""
        return self._replace(required=True)

    @property
    def option(self) -> str:
        """The option of the command line. The user repeats it for several pictures."""
        name = self.name.removesuffix("s") if self.kind == "images" else self.name
        return f"--{name.replace('_', '-')}"


IMAGE = InputSpec("image", "image", "an image", "The first frame, for models of image to video.")
LAST_IMAGE = InputSpec("last_image", "image", "a last image", "The last frame, for models of first and last frame.")
VIDEO = InputSpec(
    "video",
    "clip",
    "a video",
    "A clip for models that take one. Depending on the model, the video starts from the clip or is guided by it.",
)
CONTROL_VIDEO = VIDEO._replace(background="black")
"""A clip that guides a video. The video starts from noise. In contrast, with `VIDEO` the video starts from the latents
of the clip."""
MASK = InputSpec(
    "mask", "mask", "a mask", "A clip or one picture, white where the model makes new content.", background="black"
)
REFERENCES = InputSpec("references", "images", "reference images", "Pictures of what the video should show.")
FACE = InputSpec("face", "clip", "a clip of the face", "A clip of the face, cut out of each frame of the pose clip.")
BACKGROUND = InputSpec("background", "clip", "a background", "A clip whose person is replaced where the mask is white.")
INPUT_SPECS = {spec.name: spec for spec in (IMAGE, LAST_IMAGE, VIDEO, FACE, BACKGROUND, MASK, REFERENCES)}
"""The inputs of all families, by name.

`wanjax.register` adds the inputs of a new family. Values that depend on this table must therefore be computed on use,
not on import.
"""


def check_inputs(
    names: Collection[str],
    model: str,
    purpose: str,
    specs: Sequence[InputSpec],
    example_model: Callable[[str], str | None] = lambda name: None,
) -> None:
    """Raise SettingError if the model does not take one of these inputs, or if an input that it requires is missing.

    Args:
        names: Names of the inputs of the request.
        model: Name of the model, for the message.
        purpose: What the model makes, for the message.
        specs: The inputs that the model takes.
        example_model: Returns a model that takes an input, for the message. None names no model.
    """
    nouns = {name: spec.noun for name, spec in INPUT_SPECS.items()} | {spec.name: spec.noun for spec in specs}
    for name in names:
        if name not in [spec.name for spec in specs]:
            supported_inputs = " and ".join(spec.noun for spec in specs) or "a prompt alone"
            example = f"; {other_model} takes {nouns[name]}" if (other_model := example_model(name)) else ""
            raise SettingError(
                f"{model} is made for {purpose} and cannot use {nouns[name]}: it takes {supported_inputs}{example}",
                name,
            )
    for spec in specs:
        if spec.required and spec.name not in names:
            raise SettingError(
                f"{model} is made for {purpose}: give {spec.noun} ({spec.option}) with the prompt", spec.name
            )
