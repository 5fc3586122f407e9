# SPDX-License-Identifier: Apache-2.0
"""Convert a control clip and a mask that nodes compose to the inputs of a request.

A controlled video (VACE) keeps the pixels of its clip where its mask is black. wanjax can compose three such pairs of
clip and mask: a first and a last picture, a clip with margins, and a clip that the model replaces as a whole.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from wanjax.media.inputs import BACKGROUND, IMAGE, LAST_IMAGE, MASK, VIDEO
from wanjax.workflows.values import Batch, MarginMask, Margins, PaddedPictures, Pictures, SolidFrames, Unknown

MAX_FRAMES = 100_000  # of a video
GREY = 0.5  # the grey level of frames that the model replaces
TOLERANCE = 0.01  # the tolerance of a level


@dataclass(frozen=True)
class ComposedInputs:
    """The inputs and settings that replace the pictures and masks of composing nodes.

    Args:
        inputs: Pictures and clips by the names of wanjax's inputs.
        settings: Settings of the video.
        notes: Sentences about differences from ComfyUI.
        missing: Sentences about inputs that wanjax cannot compose, so that the user has to give them.
    """

    inputs: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


def read_composed_inputs(inputs: Mapping[str, Any], frames: Any) -> ComposedInputs:
    """Replace a composed clip and mask by inputs and settings with which wanjax composes the same clip and mask.

    Args:
        inputs: Pictures and clips by the names of wanjax's inputs.
        frames: The number of frames of the video, or `Unknown`.

    Returns:
        The result. It has the inputs unchanged if they are plain files, or if wanjax cannot compose them.
    """
    video, mask = inputs.get(VIDEO.name), inputs.get(MASK.name)
    others = {name: value for name, value in inputs.items() if name not in (VIDEO.name, MASK.name)}
    if not isinstance(frames, int) or not 0 < frames <= MAX_FRAMES or not isinstance(mask, Pictures | None):
        return ComposedInputs(inputs)
    masks = [1.0] * frames if mask is None else _masks(mask, frames)
    if (
        isinstance(mask, Batch)
        and masks is not None
        and masks == [masks[0]] * frames
        and isinstance(masks[0], Pictures)
    ):
        return ComposedInputs({**inputs, MASK.name: masks[0]})  # one picture is the mask of all frames
    if isinstance(video, PaddedPictures) and masks == [video.margins] * frames:
        notes = (f"{video.node} fades the mask of its margins: in wanjax the mask has a hard edge",)
        return ComposedInputs(
            others | {VIDEO.name: Pictures(video.file, video.node, frames=video.frames)},
            {"outpaint": video.margins.sides},
            notes if video.margins.feathering else (),
        )
    has_background = BACKGROUND.name in inputs  # the mask then belongs to the background
    if isinstance(video, Pictures) and video.is_loaded and mask and masks == [1.0] * frames and not has_background:
        return ComposedInputs(others | {VIDEO.name: video})
    if isinstance(video, Pictures) and masks is not None and (pictures := _end_pictures(video, masks)) is not None:
        return ComposedInputs(others | pictures, notes=_colour_notes(video, masks))
    if isinstance(video, Pictures | Unknown) and masks is not None and (count := _continued(masks)):
        sentence = (
            f"{video.node} composes a video when it runs, with {count} frames of a longer clip: save that video "
            f"and its mask in ComfyUI, and give them by {VIDEO.option} FILE and {MASK.option} FILE"
        )
        return ComposedInputs(inputs, missing=dict.fromkeys((VIDEO.name, MASK.name), sentence))
    return ComposedInputs(inputs)


def _continued(masks: list[Any]) -> int:
    """Return the number of first frames that a mask keeps, if the model replaces all later frames; otherwise 0."""
    count = next((number for number, level in enumerate(masks) if level != 0), 0)
    return count if masks[count:] == [1.0] * (len(masks) - count) else 0


def _masks(mask: Pictures, frames: int) -> list[float | Margins | Pictures] | None:
    """Return an entry for each frame of a mask: its grey level, its margins, or the mask itself if it has neither.

    Frames after the end of the mask are white, as in ComfyUI. Return None if the mask has an unknown number of frames.
    """
    leaves = _frames(mask, frames)
    if leaves is None:
        return None
    levels = [
        leaf.level if isinstance(leaf, SolidFrames) else leaf.margins if isinstance(leaf, MarginMask) else leaf
        for leaf in leaves
    ]
    return levels + [1.0] * (frames - len(levels))


def _frames(pictures: Pictures, count: int) -> list[Pictures] | None:
    """List the pictures of at most `count` frames. Return None if a part has an unknown number of frames."""
    leaves: list[Pictures] = []
    for leaf in islice(_leaves(pictures), count):
        if leaf is None:
            return None
        leaves.append(leaf)
    return leaves


def _leaves(pictures: Pictures) -> Iterator[Pictures | None]:
    """Yield the pictures of each frame. Yield None for a part with an unknown number of frames, which has at least one
    frame."""
    if not isinstance(pictures, Batch):
        frames = pictures.frames
        yield from [pictures] * min(max(1, frames), MAX_FRAMES) if isinstance(frames, int) else [None]
        return
    limit = pictures.frames if isinstance(pictures.frames, int) else MAX_FRAMES
    repeated = (leaf for _ in range(pictures.times) for part in pictures.parts for leaf in _leaves(part))
    yield from islice(repeated, min(max(1, limit), MAX_FRAMES))


def _end_pictures(video: Pictures, masks: list[Any]) -> dict[str, Pictures] | None:
    """Return the first and the last picture, if the mask keeps only these frames; otherwise None."""
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
        and all(isinstance(leaf, SolidFrames) for leaf in changed)
    )
    return {pictures[frame]: leaf for frame, leaf in unmasked.items() if leaf is not None} if is_readable else None


def _colour_notes(video: Pictures, masks: list[Any]) -> tuple[str, ...]:
    """Return notes about replaced frames that have another colour than grey."""
    leaves = _frames(video, len(masks)) or []
    nodes = [
        leaf.node
        for leaf, level in zip(leaves, masks, strict=False)
        if level == 1 and isinstance(leaf, SolidFrames) and abs(leaf.level - GREY) > TOLERANCE
    ]
    return tuple(
        f"{node} sets the colour of the frames that the model replaces: in wanjax they are grey, as in training"
        for node in dict.fromkeys(nodes)
    )
