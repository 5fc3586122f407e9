# SPDX-License-Identifier: Apache-2.0
"""The choice of a mesh for a video, by a model that is cheap enough to try on every mesh.

The model counts, for each device, the operations of its heads, tokens and prompts, the bytes of its weights'
all-gather, and the bytes of the tokens that attention exchanges, but for keys that go round a ring beside its work. It
assumes the same share of the peak on all meshes, so only the order of its results is meaningful. The best mesh is then
compiled and priced.
"""

from collections.abc import Iterator
from math import ceil

from wanjax.compilers.chips import Slice
from wanjax.errors import WanjaxError
from wanjax.figures import quantity
from wanjax.pipelines.model import Forward
from wanjax.sharding import hides_ring

ATTENTION, PRODUCTS = 0.5, 0.75  # shares of the peak
BYTES = 2  # a bfloat16 number
Axes = tuple[int, int, int]


def choose_mesh(
    place: Slice,
    work: Forward,
    *,
    guided: bool,
    parameters: int,
    sp: int | None = None,
    ring: bool = False,
    spread: bool = True,
) -> Axes:
    """Returns the sizes of dp, sp and tp with which a step is fastest, among the meshes on which the weights fit.

    `ring` tells whether the chosen attention can pass keys round (`Attention.passes_keys`), `spread` whether `sp` and
    `tp` divide the weights. Raises WanjaxError where no mesh has the given `sp`.
    """
    found = [axes for axes in meshes(place.devices, guided) if sp in (None, axes[1])]
    if not found:
        raise WanjaxError(f"{quantity(place.devices, 'device')} cannot be divided by sp={sp}: a divisor would do")
    room = [axes for axes in found if has_room(place, axes, parameters, spread=spread)]
    told = {"guided": guided, "parameters": parameters, "ring": ring, "spread": spread}
    return min(room or found, key=lambda axes: step_seconds(place, work, axes, **told))


def has_room(place: Slice, axes: Axes, parameters: int, *, spread: bool = True) -> bool:
    """Tells whether the weights, as far as `sp` and `tp` divide them, leave a fifth of a chip's memory.

    Weights that are whole on each chip may leave less: a plan tells whether it is enough.
    """
    share, most = (axes[1] * axes[2], 0.8) if spread else (1, 1.0)
    return BYTES * parameters / share < most * place.chip.hbm


def meshes(devices: int, guided: bool) -> Iterator[Axes]:
    """Yields every mesh of the devices; under guidance also those with its two prompts on dp."""
    for dp in (1, 2) if guided and devices % 2 == 0 else (1,):
        parts = devices // dp
        yield from ((dp, parts // tp, tp) for tp in range(1, parts + 1) if parts % tp == 0)


def step_seconds(
    place: Slice, work: Forward, axes: Axes, *, guided: bool, parameters: int, ring: bool = False, spread: bool = True
) -> float:
    """Returns the seconds of one step, by the model."""
    chip, (dp, sp, tp) = place.chip, axes
    parts, forwards = sp * tp, (2 if guided else 1) / dp
    others = sum(work.flops.values()) - work.scores
    padding = ceil(work.heads / tp) * tp / work.heads  # for heads that do not divide evenly
    compute = (work.scores * padding / ATTENTION + others / PRODUCTS) / parts / chip.flops
    gathered = BYTES * parameters * (parts - 1) / parts if spread else 0
    own = BYTES * work.layers * work.tokens / parts * work.width  # a device's share of one of q, k, v, output
    traded = 4 * own * padding * (tp / 4 if tp > 1 else 0)
    passed = 2 * own * (sp - 1)
    merged = 3 * 4 / BYTES * own * (sp - 1) / chip.bandwidth  # partial outputs, in float32
    if ring and work.ring and tp == 1:
        passed, merged = 0 if hides_ring(work.tokens, sp) else passed, 0
    sent = (gathered / _rings(parts) + traded / _rings(tp) + passed / _rings(sp)) / chip.link
    return forwards * (compute + sent + merged)


def _rings(devices: int) -> int:
    """Returns the number of a chip's links that a group of devices uses."""
    return 1 if devices <= 2 else 2
