# SPDX-License-Identifier: Apache-2.0
"""Many videos by a deadline: the slices and the mesh that make them for the fewest chip-hours, each way priced."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil, inf
from typing import Any

from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.pipelines.meshes import StepCost, choose_mesh, has_room, step_cost, step_seconds
from wanjax.plan.outlook import Outlook, outlook
from wanjax.plan.places import Place, Tell, find_priceable
from wanjax.pricing.chips import SLICES, Slice
from wanjax.pricing.costs import Cost
from wanjax.pricing.roofline import find_place
from wanjax.registry import Outline
from wanjax.sharding import RULES

WORTH_PRICING = 1.5  # times the fewest chip-seconds of a step by the model of `choose_mesh`, which is not exact
START, DOWNLOADED, LOADED = 300.0, 200e6, 580e6
"""The seconds until a slice is there, and the bytes a second at which weights are downloaded, which are estimates; the
bytes a second at which they are read from a disk and placed, as measured in docs/performance.md."""


@dataclass(frozen=True)
class Bulk:
    """Videos to be made, and what the user knows of the place; None is not known.

    `deadline`, `start` and `compiling` are seconds, `price` is that of a chip-hour, and `download` bytes a second.
    """

    requests: int
    deadline: float | None = None
    price: float | None = None
    start: float | None = None
    download: float | None = None
    compiling: float | None = None


@dataclass(frozen=True)
class Way:
    """The making of all videos on slices of one kind; each range is a low, a middle and a high value.

    `video_seconds` are those of a video on a slice, and `startup_seconds` those before its first. `slices` are as many
    as meet the deadline, one without a deadline; their ends are infinite where no number does. `seconds` are those
    for which the slices are held, and `chip_hours` those of all their chips.
    """

    slice: str
    devices: int
    plan: Outlook
    video_seconds: Cost
    startup_seconds: Cost
    slices: Cost
    seconds: Cost
    chip_hours: Cost

    @property
    def chip_seconds(self) -> Cost:
        """Those of a video, without the start of its slice."""
        return self.video_seconds.times(self.devices)

    @property
    def in_time(self) -> bool:
        """Whether some number of slices meets the deadline, by the middle of the prices."""
        return self.chip_hours.mid < inf


@dataclass(frozen=True)
class NoWay:
    """Slices of a kind on which a video does not fit, by its plan; or which were not priced, without a plan.

    Then a step takes `ratio` times the fewest chip-seconds, by the model of `pipelines/meshes.py`; infinite where a
    chip has no room for the weights.
    """

    slice: str
    ratio: float
    plan: Outlook | None = None


@dataclass(frozen=True)
class Scale:
    """Every way to make the videos on the slices of one kind of chip, and the slices on which there is none."""

    bulk: Bulk
    model: str
    chip: str
    ways: Sequence[Way]
    others: Sequence[NoWay]

    @property
    def best(self) -> Way | None:
        """The way that takes the fewest chip-hours; None where nothing fits or is in time."""
        return min((way for way in self.ways if way.in_time), key=lambda way: way.chip_hours.mid, default=None)

    @property
    def quickest(self) -> Way | None:
        """The way on which a single video takes the shortest time."""
        return min(self.ways, key=lambda way: way.video_seconds.mid, default=None)

    @property
    def as_good(self) -> list[Way]:
        """The ways that may be the best too, as their range of chip-hours begins below the end of its own."""
        best = self.best
        return [way for way in self.ways if best and way is not best and way.chip_hours.low < best.chip_hours.high]

    def cost(self, way: Way) -> Cost | None:
        """Returns the cost of a way, where the price of a chip-hour is known."""
        return way.chip_hours.times(self.bulk.price) if self.bulk.price else None

    def to_json(self) -> dict[str, Any]:
        """Returns all fields; a range is a list, and an infinite end is None."""
        best, quickest = self.best, self.quickest
        told = {
            "best": best and best.slice,
            "cost": best and self.cost(best),
            "as_good": [way.slice for way in self.as_good],
            "quickest": quickest and quickest.slice,
        }
        return _finite(told | asdict(self))


def at_scale(
    outline: Outline,
    chip: str,
    bulk: Bulk,
    mesh: tuple[int, int, int] | None = None,
    *,
    sp: int | None = None,
    rules: str = "fsdp",
    attention: AttentionConfig = AUTO,
    tell: Tell = lambda now, done, total: None,
    **how: Any,
) -> Scale:
    """Prices the ways to make many videos on the slices of this chip that are no larger than `chip`.

    A slice whose chips have no room for the weights, or which takes far more chip-seconds a step by the model of
    `pipelines/meshes.py`, is not priced; `chip` itself always is. With a `mesh`, no other slice is looked at. Keywords
    are those of `outlook`, as are the errors. `tell` receives each program's name with its slice.
    """
    place = find_priceable(chip)
    asked = {"attention": attention, "rules": RULES[rules], "offload": how.get("offload")}
    cost = step_cost(outline.family, outline.architecture, outline.settings, param_dtype=outline.param_dtype, **asked)
    candidates = {chip: 1.0} if mesh else dict(_candidates(place, chip, sp, cost))
    ways, others = [], []
    for name, ratio in candidates.items():
        if name != chip and ratio > WORTH_PRICING:
            others.append(NoWay(name, ratio))
            continue

        def told(now: Sequence[str], done: int, total: int, name: str = name) -> None:
            tell([f"{program} on {name}" for program in now], done, total)

        plan = outlook(outline, name, mesh, sp=sp, rules=rules, attention=attention, tell=told, **how)
        way = _way(bulk, find_place(name).devices, plan)
        ways.append(way) if way else others.append(NoWay(name, ratio, plan))
    return Scale(bulk, outline.settings.model, chip, ways, others)


def _candidates(place: Place, chip: str, sp: int | None, cost: StepCost) -> Iterator[tuple[str, float]]:
    """Yields the name of each slice, and its chip-seconds a step relative to the fewest, by the model of meshes."""
    if not isinstance(place, Slice):
        yield chip, 1.0
        return
    work: dict[str, float] = {}
    for name, other in SLICES.items():
        if other.chip == place.chip and other.devices <= place.devices and other.devices % (sp or 1) == 0:
            work[name] = chip_seconds(other, cost, sp)
    least = min(work.values(), default=inf)
    for name in sorted(work.keys() | {chip}, key=lambda name: SLICES[name].devices):
        yield name, work[name] / least if work.get(name, inf) < inf else inf


def chip_seconds(place: Slice, cost: StepCost, sp: int | None) -> float:
    """Return the chip-seconds of a step on a slice, by the model; infinite where the weights do not fit."""
    mesh = choose_mesh(cost, place.devices, place.memory, place.chip, sp=sp)
    return place.devices * step_seconds(cost, mesh, place.chip) if has_room(cost, mesh, place.memory) else inf


def _way(bulk: Bulk, devices: int, plan: Outlook) -> Way | None:
    """Returns the way on slices of a plan; None where a video does not fit."""
    if plan.total_seconds is None or plan.total_seconds_low is None or plan.total_seconds_high is None or not plan.fits:
        return None
    video = Cost(plan.total_seconds_low, plan.total_seconds, plan.total_seconds_high)
    startup = startup_seconds(bulk, plan)
    slices, seconds = (Cost(*x) for x in zip(*map(partial(_fleet, bulk), video, startup), strict=True))
    low, mid, high = (devices * n * held / 3600 for n, held in zip(slices, seconds, strict=True))
    return Way(plan.chip, devices, plan, video, startup, slices, seconds, Cost(min(low, mid), mid, max(mid, high)))


def startup_seconds(bulk: Bulk, plan: Outlook) -> Cost:
    """Returns the seconds before a slice's first video: until it is there, has the weights, and has compiled.

    At the low end weights are those that `wanjax convert` stores, and compiled programs come from a shared cache. At
    the high end weights are in float32, and all programs are compiled as long as they were for the plan.
    """
    start = START if bulk.start is None else bulk.start
    rate = bulk.download or DOWNLOADED
    compiling = (0.0, plan.compile_seconds) if bulk.compiling is None else (bulk.compiling,) * 2
    sizes = plan.disk_bytes, plan.download_bytes_at_most
    low, high = (start + n / rate + n / LOADED + more for n, more in zip(sizes, compiling, strict=True))
    return Cost(low, (low + high) / 2, high)


def _fleet(bulk: Bulk, video: float, startup: float) -> tuple[float, float]:
    """Returns the fewest slices that end in time, and the seconds for which they are held; infinite if none do."""
    slices: float = 1
    if bulk.deadline is not None:
        each = (bulk.deadline - startup) // video
        if each < 1:
            return inf, inf
        slices = ceil(bulk.requests / each)
    return slices, startup + ceil(bulk.requests / slices) * video


def _finite(value: Any) -> Any:
    """Returns a value that JSON can hold."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if value == inf else value
