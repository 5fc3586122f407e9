# SPDX-License-Identifier: Apache-2.0
"""The mesh that suits a video, by a model that is cheap enough to ask of all of them: the best is then compiled.

It counts, for each device, the operations of its heads, tokens and prompts, the bytes of the weights that it gathers,
and those of the tokens that attention sends it. What a part of the peak is reached is the same for all meshes, so that
only their order is to be trusted.
"""

from collections.abc import Iterator
from math import ceil

from wanjax.models.wan.config import TransformerConfig
from wanjax.plan.chips import Slice
from wanjax.plan.flops import forward_flops

ATTENTION, PRODUCTS = 0.5, 0.75  # of the peak
BYTES = 2  # of an entry in bfloat16
Axes = tuple[int, int, int]


def choose_mesh(
    place: Slice, config: TransformerConfig, *, tokens: int, text: int, guided: bool, parameters: int
) -> Axes:
    """The dp, sp and tp of all devices of the slice by which a step is quickest and its weights fit."""
    found = list(meshes(place.devices, guided))
    room = [axes for axes in found if BYTES * parameters / (axes[1] * axes[2]) < 0.8 * place.chip.hbm]

    def seconds(axes: Axes) -> float:
        return step_seconds(place, config, axes, tokens=tokens, text=text, guided=guided, parameters=parameters)

    return min(room or found, key=seconds)


def meshes(devices: int, guided: bool) -> Iterator[Axes]:
    """All there are, guidance on dp or not."""
    for dp in (1, 2) if guided and devices % 2 == 0 else (1,):
        parts = devices // dp
        yield from ((dp, parts // tp, tp) for tp in range(1, parts + 1) if parts % tp == 0)


def step_seconds(
    place: Slice, config: TransformerConfig, axes: Axes, *, tokens: int, text: int, guided: bool, parameters: int
) -> float:
    """Of one step, by the model."""
    chip, (dp, sp, tp) = place.chip, axes
    parts, forwards = sp * tp, (2 if guided else 1) / dp
    scores = 4 * config.layers * tokens * tokens * config.width
    others = sum(forward_flops(config, tokens=tokens, text=text).values()) - scores
    made_up = ceil(config.heads / tp) * tp / config.heads  # heads that fill up
    compute = (scores * made_up / ATTENTION + others / PRODUCTS) / parts / chip.flops
    gathered = BYTES * parameters * (parts - 1) / parts
    own = BYTES * config.layers * tokens / parts * config.width  # a device's tokens, in one of q, k, v and the answer
    traded = 4 * own * made_up * (tp / 4 if tp > 1 else 0)
    passed = 2 * own * (sp - 1)
    merged = 3 * 4 / BYTES * own * (sp - 1) / chip.bandwidth  # partial answers, in float32
    sent = (gathered / _rings(parts) + traded / _rings(tp) + passed / _rings(sp)) / chip.link
    return forwards * (compute + sent + merged)


def _rings(devices: int) -> int:
    """Links of a chip that a group of devices uses."""
    return 1 if devices <= 2 else 2
