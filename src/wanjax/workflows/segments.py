# SPDX-License-Identifier: Apache-2.0
"""Segments of a video. Each segment continues the segment before it, and the workflow joins their frames."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.workflows.values import Batch, Latents, Pictures, SampledLatents

MAX_SEGMENTS = 1000


def joined_parts(pictures: Pictures) -> Iterator[Pictures]:
    """Yield the parts of joined pictures, in order.

    Args:
        pictures: The pictures. Pictures that are not joined have a single part.
    """
    if not isinstance(pictures, Batch) or pictures.times != 1:
        yield pictures
        return
    for part in pictures.parts:
        yield from joined_parts(part)


def join_segments(pictures: Batch) -> Pictures:
    """Describe the joined frames of segments as the frames of the first segment, with the number of segments in its
    condition.

    Args:
        pictures: The joined frames.

    Returns:
        The description, or `pictures` itself if a model did not make all parts.

    Raises:
        WanjaxError: The parts are not the segments of one video.
    """
    leaves = []
    for leaf in joined_parts(pictures):
        leaves.append(leaf)
        if leaf.latents is None or len(leaves) > MAX_SEGMENTS:
            return pictures
    first, segments = leaves[0], [_segment(leaf, pictures) for leaf in leaves]
    for number, (_, latents) in enumerate(segments):
        _check_follows(number, leaves, segments)
        if number and latents.segment is not None and latents.segment.overlap != leaves[number].skipped:
            raise WanjaxError(
                f"{leaves[number].node} leaves out {leaves[number].skipped} frames of a segment that takes over "
                f"{latents.segment.overlap}: link trim_image to batch_index in ComfyUI, and save again"
            )
    sampled, latents = segments[-1]
    assert latents.segment is not None
    settings = {"windows": len(segments), "overlap": latents.segment.overlap}
    note = f"{sampled.node} has noise of its own seed: wanjax draws the noise of all segments from one seed"
    sampled = segments[0][0]
    positive = replace(sampled.guider.positive, settings=settings, notes=(*sampled.guider.positive.notes, note))
    return replace(first, latents=replace(sampled, guider=replace(sampled.guider, positive=positive)))


def _segment(leaf: Pictures, pictures: Pictures) -> tuple[SampledLatents, Latents]:
    """Return the node that samples a segment, and its latents. Raises WanjaxError for other latents."""
    sampled = leaf.latents
    if (
        isinstance(sampled, SampledLatents)
        and isinstance(latents := sampled.latents, Latents)
        and latents.segment is not None
    ):
        return sampled, latents
    raise WanjaxError(
        f"{pictures.node} joins the videos of several samplers, and wanjax makes one video of each workflow: save each "
        f"part in a workflow of its own, such as that of {leaf.node}"
    )


def _check_follows(number: int, leaves: list[Pictures], segments: list[tuple[SampledLatents, Latents]]) -> None:
    """Raise WanjaxError unless a segment starts where the segment before it ends, and has the same settings."""
    sampled, latents = segments[number]
    segment, shape = latents.segment, latents.shape
    assert segment is not None
    first, first_latents = segments[0]
    previous = None if segment.previous is None else [*joined_parts(segment.previous)][-1].latents
    problem = None
    if number == 0:
        problem = None if previous is None else "continues frames that do not precede it in the video"
    elif previous is not segments[number - 1][0]:
        problem = f"does not continue the frames of {leaves[number - 1].node}"
    elif isinstance(shape.frames, int) and segment.start != number * (shape.frames - segment.overlap):
        problem = f"starts at frame {segment.start} of the clip, not where {segments[number - 1][1].node} ends"
    elif shape != first_latents.shape or segment.overlap != _overlap(segments[1][1]):
        problem = f"has another shape than {first_latents.node}"
    elif _settings(sampled) != _settings(first):
        problem = f"is made with other settings or inputs than {first_latents.node}"
    if problem:
        raise WanjaxError(
            f"{latents.node} {problem}, which wanjax does not support: without it {first.node} is left, "
            "a video of one segment"
        )


def _overlap(latents: Latents) -> int:
    return 0 if latents.segment is None else latents.segment.overlap


def _settings(sampled: SampledLatents) -> tuple[Any, ...]:
    """Return the settings that all segments of a video must share."""
    guider = sampled.guider
    texts = guider.positive.text, guider.negative and guider.negative.text
    return guider.model, guider.scale, sampled.steps, sampled.sampler, texts, dict(guider.positive.inputs)
