# SPDX-License-Identifier: Apache-2.0
"""Read the control clip and the mask that nodes compose as the inputs of a request.

A controlled video (VACE) keeps the pixels of its clip where its mask is black. wanjax composes three such pairs of clip
and mask itself: a first and a last picture, a clip with margins, and a clip that is made anew as a whole.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from wanjax.media.inputs import BACKGROUND, IMAGE, LAST_IMAGE, MASK, VIDEO
from wanjax.workflows.values import Batch, Border, Margins, Pictures, Solid, Unknown, Widened

MAX_FRAMES = 100_000  # of a video
GREY = 0.5  # the level of frames that a model makes anew
TOLERANCE = 0.01  # of a level


@dataclass(frozen=True)
class Composition:
    """The inputs and settings for what nodes compose.

    Args:
        inputs: Pictures and clips by the names of wanjax's inputs.
        settings: Settings of the video.
        notes: Sentences on what differs.
        missing: Sentences on inputs that wanjax cannot compose and the user has to give.
    """

    inputs: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


def read_composition(inputs: Mapping[str, Any], frames: Any) -> Composition:
    """Replace a composed clip and mask by the inputs and settings with which wanjax composes the same.

    Args:
        inputs: Pictures and clips by the names of wanjax's inputs.
        frames: The number of frames of the video, or `Unknown`.

    Returns:
        The inputs unchanged if they are plain files, or if wanjax cannot compose the same.
    """
    video, mask = inputs.get(VIDEO.name), inputs.get(MASK.name)
    others = {name: value for name, value in inputs.items() if name not in (VIDEO.name, MASK.name)}
    if not isinstance(frames, int) or not 0 < frames <= MAX_FRAMES or not isinstance(mask, Pictures | None):
        return Composition(inputs)
    masks = [1.0] * frames if mask is None else _masks(mask, frames)
    if (
        isinstance(mask, Batch)
        and masks is not None
        and masks == [masks[0]] * frames
        and isinstance(masks[0], Pictures)
    ):
        return Composition({**inputs, MASK.name: masks[0]})  # one picture for all frames
    if isinstance(video, Widened) and masks == [video.margins] * frames:
        notes = (f"{video.node} fades the mask of its margins, and here the mask has an edge",)
        return Composition(
            others | {VIDEO.name: Pictures(video.file, video.node, frames=video.frames)},
            {"outpaint": video.margins.sides},
            notes if video.margins.feathering else (),
        )
    has_background = BACKGROUND.name in inputs  # whose mask it is
    if isinstance(video, Pictures) and video.is_loaded and mask and masks == [1.0] * frames and not has_background:
        return Composition(others | {VIDEO.name: video})
    if isinstance(video, Pictures) and masks is not None and (pictures := _end_pictures(video, masks)) is not None:
        return Composition(others | pictures, notes=_colour_notes(video, masks))
    if isinstance(video, Pictures | Unknown) and masks is not None and (count := _continued(masks)):
        sentence = (
            f"{video.node} composes a video when it runs, of {count} frames of a clip that goes on: save that video "
            f"and its mask in ComfyUI, and give them by {VIDEO.option} FILE and {MASK.option} FILE"
        )
        return Composition(inputs, missing=dict.fromkeys((VIDEO.name, MASK.name), sentence))
    return Composition(inputs)


def _continued(masks: list[Any]) -> int:
    """Return the number of frames at the start that a mask keeps, if all later frames are made anew; else 0."""
    count = next((number for number, level in enumerate(masks) if level != 0), 0)
    return count if masks[count:] == [1.0] * (len(masks) - count) else 0


def _masks(mask: Pictures, frames: int) -> list[float | Margins | Pictures] | None:
    """Return the level of the mask of each frame, or its margins, or the mask itself if it is of another kind.

    Frames behind the end of the mask are white, as in ComfyUI. None if the mask has an unknown number of frames.
    """
    leaves = _frames(mask, frames)
    if leaves is None:
        return None
    levels = [
        leaf.level if isinstance(leaf, Solid) else leaf.margins if isinstance(leaf, Border) else leaf for leaf in leaves
    ]
    return levels + [1.0] * (frames - len(levels))


def _frames(pictures: Pictures, count: int) -> list[Pictures] | None:
    """List the pictures of at most `count` frames. None if one of them has an unknown number of frames."""
    leaves: list[Pictures] = []
    for leaf in islice(_leaves(pictures), count):
        if leaf is None:
            return None
        leaves.append(leaf)
    return leaves


def _leaves(pictures: Pictures) -> Iterator[Pictures | None]:
    """Yield the pictures of each frame; None for an unknown number of frames. Each part has at least one frame."""
    if not isinstance(pictures, Batch):
        frames = pictures.frames
        yield from [pictures] * min(max(1, frames), MAX_FRAMES) if isinstance(frames, int) else [None]
        return
    limit = pictures.frames if isinstance(pictures.frames, int) else MAX_FRAMES
    repeated = (leaf for _ in range(pictures.times) for part in pictures.parts for leaf in _leaves(part))
    yield from islice(repeated, min(max(1, limit), MAX_FRAMES))


def _end_pictures(video: Pictures, masks: list[Any]) -> dict[str, Pictures] | None:
    """Return the first and the last picture, if these are the only frames that the mask keeps; else None."""
    leaves = _frames(video, len(masks))
    if leaves is None or any(level not in (0, 1) for level in masks):
        return None
    unmasked = {
        frame: leaves[frame] if frame < len(leaves) else None for frame, level in enumerate(masks) if level == 0
    }
    changed = [leaf for leaf, level in zip(leaves, masks, strict=False) if level == 1]
    pictures = {0: IMAGE.name, len(masks) - 1: LAST_IMAGE.name}
    is_readable = (
        (not unmasked or 0 in unmasked)
        and unmasked.keys() <= pictures.keys()
        and all(leaf is not None and leaf.is_loaded and leaf.frames == 1 for leaf in unmasked.values())
        and all(isinstance(leaf, Solid) for leaf in changed)
    )
    return {pictures[frame]: leaf for frame, leaf in unmasked.items() if leaf is not None} if is_readable else None


def _colour_notes(video: Pictures, masks: list[Any]) -> tuple[str, ...]:
    """Say that frames which are made anew have another colour than grey."""
    leaves = _frames(video, len(masks)) or []
    nodes = [
        leaf.node
        for leaf, level in zip(leaves, masks, strict=False)
        if level == 1 and isinstance(leaf, Solid) and abs(leaf.level - GREY) > TOLERANCE
    ]
    return tuple(
        f"{node} fills the frames that are made anew, and here they are grey, as the model was trained"
        for node in dict.fromkeys(nodes)
    )
