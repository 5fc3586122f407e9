# SPDX-License-Identifier: Apache-2.0
"""The types of node outputs: descriptions of models, conditions, latents, pictures and videos."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from wanjax.workflows.graph import Node


@dataclass(frozen=True)
class Unknown:
    """The output of a node that wanjax does not know, or whose value needs a file that is missing.

    Args:
        node: The node.
        reason: The reason why the value is unknown: the end of a sentence that begins with the node.
        is_missing_file: Whether the reason is that a picture or clip is missing.
    """

    node: Node
    reason: str = "is not known to wanjax"
    is_missing_file: bool = False


INPUT = "input"  # the kind of pictures and clips, which is also the name of their folder in ComfyUI


def base_name(name: str) -> str:
    """Return the last part of a file's name in a workflow. The name may be a path of Windows.

    Args:
        name: The name.
    """
    return PurePosixPath(name.replace("\\", "/").removesuffix(" [input]").removesuffix(" [output]")).name


class AnyLatents:
    """Latents before or after sampling."""


@dataclass(frozen=True)
class File:
    """A file that a node loads.

    Args:
        name: The name of the file in the workflow, which may have folders.
        kind: The folder of ComfyUI that contains the file, such as "loras".
        node: The node.
    """

    name: str
    kind: str
    node: Node


@dataclass(frozen=True)
class Model:
    """A denoiser with its LoRAs and their strengths, and with the settings that nodes attach to it."""

    file: File
    loras: tuple[tuple[File, float], ...] = ()
    shift: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Encoder:
    """Text encoders, described by their files."""

    files: tuple[File, ...]


@dataclass(frozen=True)
class Decoder:
    """A VAE."""

    file: File


@dataclass(frozen=True)
class Vision:
    """A vision encoder, or the features of a picture from it."""

    file: File


@dataclass(frozen=True)
class Shape:
    """The shape of a video. A number may be `Unknown`."""

    width: Any
    height: Any
    frames: Any
    count: Any = 1


@dataclass(frozen=True)
class Pictures:
    """A picture or a clip.

    Args:
        file: The file, or None for pictures that nodes compose or make.
        node: The node that loads or composes them.
        width: The width after all resizing; None is the width of the file.
        height: The height after all resizing; None is the height of the file.
        frames: The number of frames; None is all frames of the file.
        latents: The latents from which pictures are decoded, or None.
        is_tiled: Whether the pictures are decoded in tiles.
        decoder: The decoder of the latents.
        skipped: The number of first decoded frames that are left out.
    """

    file: File | None
    node: Node
    width: Any = None
    height: Any = None
    frames: Any = None
    latents: AnyLatents | None = None
    is_tiled: bool = False
    decoder: Decoder | None = None
    skipped: int = 0

    @property
    def is_loaded(self) -> bool:
        """Whether the pictures come from a file, possibly resized."""
        return self.file is not None


@dataclass(frozen=True)
class SolidFrames(Pictures):
    """Frames or masks of one grey level that a node makes: 0 is black, and 1 is white."""

    level: float = 0.0


@dataclass(frozen=True)
class Batch(Pictures):
    """Pictures one after another. The whole sequence is repeated `times` times."""

    parts: tuple[Pictures, ...] = ()
    times: int = 1


@dataclass(frozen=True)
class Margins:
    """Margins that a node adds to pictures.

    Args:
        sides: The pixels at the left, the top, the right and the bottom, or `Unknown`.
        feathering: The number of pixels over which the mask fades into the pictures.
    """

    sides: tuple[int, ...] | Unknown
    feathering: Any = 0


@dataclass(frozen=True)
class PaddedPictures(Pictures):
    """Pictures of a file with grey margins."""

    margins: Margins = Margins(())

    @property
    def is_loaded(self) -> bool:
        return False


@dataclass(frozen=True)
class MarginMask(Pictures):
    """A mask that is white in the margins of pictures."""

    margins: Margins = Margins(())


@dataclass(frozen=True)
class Condition:
    """The condition of a video: a prompt and pictures.

    Args:
        text: The prompt; None if a node has replaced it by zeros.
        encoder: The text encoder.
        node: The node that made the condition.
        inputs: Pictures and clips by the names of wanjax's inputs.
        settings: Settings of a video that a node attaches. A value may be `Unknown`.
        notes: Sentences about differences from ComfyUI.
    """

    text: Any
    encoder: Encoder | None
    node: Node
    inputs: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Segment:
    """A segment of a video that follows a clip.

    Args:
        start: The index of the clip's frame at which the segment starts.
        overlap: The number of frames that a segment repeats from the segment before it.
        previous: The pictures that the segment continues; None for the first segment.
    """

    start: int
    overlap: int
    previous: Pictures | None = None


@dataclass(frozen=True)
class Latents(AnyLatents):
    """Latents before sampling: the shape of a video, with the inputs that a node has added.

    Args:
        shape: The shape of the video.
        node: The node that made them.
        inputs: Pictures by the names of wanjax's inputs, for models whose latents contain pictures.
        segment: The segment of a longer video; None for a whole video.
    """

    shape: Shape
    node: Node
    inputs: Mapping[str, Any] = field(default_factory=dict)
    segment: "Segment | None" = None


@dataclass(frozen=True)
class Steps:
    """Noise levels: the schedule's name, the number of steps of the whole schedule, and the range of steps that run."""

    schedule: Any
    count: Any
    start: Any = 0
    end: Any = None
    denoise: Any = 1.0
    model: Model | None = None


@dataclass(frozen=True)
class Guider:
    """A model with conditions and a guidance scale."""

    model: Model
    positive: Condition
    negative: Condition | None
    scale: Any


@dataclass(frozen=True)
class Noise:
    """The initial noise. The seed is None if no noise is added."""

    seed: Any


@dataclass(frozen=True)
class Sampler:
    """A solver, by ComfyUI's name."""

    name: Any


@dataclass(frozen=True)
class SampledLatents(AnyLatents):
    """Latents that a node has sampled."""

    node: Node
    guider: Guider
    steps: Steps
    sampler: Sampler
    noise: Noise
    latents: AnyLatents
    is_finished: bool = True


@dataclass(frozen=True)
class VideoOutput:
    """A video that a node loads or makes: its pictures and frames per second."""

    pictures: Pictures
    fps: Any
    node: Node
