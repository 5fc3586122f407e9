# SPDX-License-Identifier: Apache-2.0
"""The functions of nodes that compose frames and masks from other frames and masks. `composition` reads the results."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from wanjax.workflows.evaluate import NodeInputs
from wanjax.workflows.node_functions import file_property, side_of
from wanjax.workflows.values import Batch, MarginMask, Margins, PaddedPictures, Pictures, SolidFrames, Unknown

MAX_COLOUR = 3 * 255  # the sum of the three channels of white
MAX_CROPPING = 0.01  # the relative difference that is allowed between the aspect ratios of a clip and of its file


def _solid_mask(node: NodeInputs) -> SolidFrames | Unknown:
    level = node.number("value", 1.0)
    return level if isinstance(level, Unknown) else _solid_frames(node, level, 1)


def _empty_image(node: NodeInputs) -> SolidFrames | Unknown:
    colour, count = node.integer("color", 0), node.integer("batch_size", 1)
    if isinstance(colour, Unknown):
        return colour
    if isinstance(count, Unknown):
        return count
    return _solid_frames(node, sum(colour >> bits & 255 for bits in (0, 8, 16)) / MAX_COLOUR, count)


def _solid_frames(node: NodeInputs, level: float, frames: int) -> SolidFrames:
    return SolidFrames(
        None, node.graph_node, node.integer("width", 512), node.integer("height", 512), max(1, frames), level=level
    )


def _invert(node: NodeInputs) -> SolidFrames | Unknown:
    mask = node("mask")
    if isinstance(mask, SolidFrames):
        return replace(mask, node=node.graph_node, level=1 - mask.level)
    return Unknown(node.graph_node, "inverts a mask when it runs, which wanjax does not support")


def _repeat(node: NodeInputs) -> Any:
    pictures, times = node("image"), node.integer("amount", 1)
    if not isinstance(pictures, Pictures) or isinstance(times, Unknown):
        return times if isinstance(times, Unknown) else pictures
    return _batch(node, (pictures,), max(1, times))


def _join_pair(node: NodeInputs) -> Any:
    return _join(node, ("image1", "image2"))


def _join_all(node: NodeInputs) -> Any:
    numbers = {name: name.removeprefix("images.image") for name in node.graph_node.inputs}
    return _join(
        node, sorted((name for name, text in numbers.items() if text.isdecimal()), key=lambda x: int(numbers[x]))
    )


def _join(node: NodeInputs, names: Any) -> Any:
    """Describe the pictures of some inputs, joined one after another."""
    parts = [node(name) for name in names if node.has(name)]
    unknown_parts = [part for part in parts if not isinstance(part, Pictures)]
    if unknown_parts or not parts:
        return unknown_parts[0] if unknown_parts else Unknown(node.graph_node, "joins no pictures")
    return parts[0] if len(parts) == 1 else _batch(node, tuple(parts), 1)


def _batch(node: NodeInputs, parts: tuple[Pictures, ...], times: int) -> Batch:
    counts = [part.frames for part in parts]
    frames = sum(counts) * times if all(isinstance(count, int) for count in counts) else None
    return Batch(None, node.graph_node, parts[0].width, parts[0].height, frames, parts=parts, times=times)


def _pad(node: NodeInputs) -> Any:
    pictures = node("image")
    if not isinstance(pictures, Pictures) or not pictures.is_loaded:
        unknown = (
            pictures
            if isinstance(pictures, Unknown)
            else Unknown(node.graph_node, "adds margins to pictures that nodes compose")
        )
        return unknown, unknown
    left, top, right, bottom = (node.integer(name, 0) for name in ("left", "top", "right", "bottom"))
    width = _total(side_of(node, pictures, "width"), left, right)
    height = _total(side_of(node, pictures, "height"), top, bottom)
    margins = Margins(_in_pixels_of_file(node, pictures, (left, top, right, bottom)), node.integer("feathering", 0))
    return (
        PaddedPictures(pictures.file, node.graph_node, width, height, pictures.frames, margins=margins),
        MarginMask(None, node.graph_node, width, height, 1, margins=margins),
    )


def _total(*numbers: int | Unknown) -> int | Unknown:
    """Add numbers. The sum is `Unknown` if a number is `Unknown`."""
    total = 0
    for number in numbers:
        if isinstance(number, Unknown):
            return number
        total += number
    return total


def _in_pixels_of_file(
    node: NodeInputs, pictures: Pictures, sides: Iterable[int | Unknown]
) -> tuple[int, ...] | Unknown:
    """Convert numbers of pixels from pictures, which may be resized, to their file."""
    assert pictures.file is not None
    known_sides, ratios = [], []
    for side in sides:
        if isinstance(side, Unknown):
            return side
        known_sides.append(side)
    for name in ("width", "height"):
        resized = getattr(pictures, name)
        original = 1 if resized is None else file_property(node, pictures.file, name)
        if isinstance(resized, Unknown):
            return resized
        if isinstance(original, Unknown):
            return original
        ratios.append(original / max(1, resized or 1))
    if max(ratios) > (1 + MAX_CROPPING) * min(ratios):
        return Unknown(
            node.graph_node,
            "adds margins to a clip that was cropped or stretched before, which wanjax does not support",
        )
    return tuple(round(side * ratio) for side, ratio in zip(known_sides, ratios * 2, strict=True))


FUNCTIONS: dict[str, Callable[[NodeInputs], Any]] = {
    "SolidMask": _solid_mask,
    "EmptyImage": _empty_image,
    "InvertMask": _invert,
    "RepeatImageBatch": _repeat,
    "ImageBatch": _join_pair,
    "BatchImagesNode": _join_all,
    "ImagePadForOutpaint": _pad,
}
"""For each type of node that composes pictures, the function that describes its outputs."""
