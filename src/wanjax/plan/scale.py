# SPDX-License-Identifier: Apache-2.0
"""Many videos by a deadline: the price of each kind of slice, and the one with the fewest chip-hours."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil, inf
from typing import Any

from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.pipelines.meshes import StepCost, choose_mesh, has_room, step_cost, step_seconds
from wanjax.plan.estimate import Estimate, estimate
from wanjax.plan.hardware import Hardware, Tell, find_priceable_hardware
from wanjax.pricing.chips import CARD_SLICES, SLICES, Slice
from wanjax.pricing.costs import Cost
from wanjax.pricing.roofline import find_hardware
from wanjax.registry import Outline
from wanjax.sharding import RULES

WORTH_PRICING = 1.5  # times the fewest chip-seconds of a step by the model of `choose_mesh`, which is not exact
START, DOWNLOADED, LOADED = 300.0, 200e6, 580e6
"""The seconds until a slice is there, and the bytes a second at which weights are downloaded, which are estimates; the
bytes a second at which they are read from a disk and placed, as measured in docs/performance.md."""


@dataclass(frozen=True)
class Workload:
    """Videos to make, and the user's figures on the cloud; None is unknown.

    `deadline`, `start` and `compiling` are seconds, `price` is that of a chip-hour, and `download` bytes a second.
    """

    requests: int
    deadline: float | None = None
    price: float | None = None
    start: float | None = None
    download: float | None = None
    compiling: float | None = None


@dataclass(frozen=True)
class Option:
    """One way to make all videos, on slices of one kind. Each range is a low, a middle and a high value.

    `video_seconds` are those of a video on a slice, and `startup_seconds` those before its first. `slices` are as many
    as meet the deadline, one without a deadline; their ends are infinite where no number does. `seconds` are those
    for which the slices are held, and `chip_hours` those of all their chips.
    """

    slice: str
    devices: int
    plan: Estimate
    video_seconds: Cost
    startup_seconds: Cost
    slices: Cost
    seconds: Cost
    chip_hours: Cost

    @property
    def chip_seconds(self) -> Cost:
        """Those of a video, without the start of its slice."""
        return self.video_seconds.scaled(self.devices)

    @property
    def in_time(self) -> bool:
        """Whether some number of slices meets the deadline, by the middle of the prices."""
        return self.chip_hours.mid < inf


@dataclass(frozen=True)
class Rejected:
    """A kind of slice on which a video does not fit, or without a plan, which was not priced.

    A step takes `ratio` times the fewest chip-seconds by the model of `pipelines/meshes.py`; infinite where a chip has
    no room for the weights.
    """

    slice: str
    ratio: float
    plan: Estimate | None = None


@dataclass(frozen=True)
class ScaleEstimate:
    """All options for the videos on slices of one kind of chip, and the rejected slices."""

    bulk: Workload
    model: str
    chip: str
    ways: Sequence[Option]
    others: Sequence[Rejected]

    @property
    def best(self) -> Option | None:
        """The option with the fewest chip-hours; None if nothing fits or is in time."""
        return min((way for way in self.ways if way.in_time), key=lambda way: way.chip_hours.mid, default=None)

    @property
    def quickest(self) -> Option | None:
        """The option on which a single video is fastest."""
        return min(self.ways, key=lambda way: way.video_seconds.mid, default=None)

    @property
    def as_good(self) -> list[Option]:
        """The options whose range of chip-hours overlaps that of the best."""
        best = self.best
        return [way for way in self.ways if best and way is not best and way.chip_hours.low < best.chip_hours.high]

    def cost(self, way: Option) -> Cost | None:
        """Return the cost of an option, if the price of a chip-hour is known."""
        return way.chip_hours.scaled(self.bulk.price) if self.bulk.price else None

    def to_json(self) -> dict[str, Any]:
        """Return all fields; a range is a list, and an infinite end is None."""
        best, quickest = self.best, self.quickest
        summary = {
            "best": best and best.slice,
            "cost": best and self.cost(best),
            "as_good": [way.slice for way in self.as_good],
            "quickest": quickest and quickest.slice,
        }
        return _finite(summary | asdict(self))


def estimate_at_scale(
    outline: Outline,
    chip: str,
    bulk: Workload,
    mesh: tuple[int, int, int] | None = None,
    *,
    sp: int | None = None,
    rules: str = "fsdp",
    attention: AttentionConfig = AUTO,
    tell: Tell = lambda now, done, total: None,
    **how: Any,
) -> ScaleEstimate:
    """Price many videos on each slice of this chip that is no larger than `chip`.

    A slice whose chips have no room for the weights, or which takes far more chip-seconds a step by the model of
    `pipelines/meshes.py`, is not priced; `chip` itself always is. With a `mesh`, no other slice is looked at. Keywords
    are those of `estimate`, as are the errors. `tell` receives each program's name with its slice.
    """
    hardware = find_priceable_hardware(chip)
    options = {"attention": attention, "rules": RULES[rules], "offload": how.get("offload")}
    cost = step_cost(outline.family, outline.model, outline.settings, param_dtype=outline.param_dtype, **options)
    candidates = {chip: 1.0} if mesh else dict(_candidates(hardware, chip, sp, cost))
    ways, others = [], []
    for name, ratio in candidates.items():
        if name != chip and ratio > WORTH_PRICING:
            others.append(Rejected(name, ratio))
            continue

        def told(now: Sequence[str], done: int, total: int, name: str = name) -> None:
            tell([f"{program} on {name}" for program in now], done, total)

        plan = estimate(outline, name, mesh, sp=sp, rules=rules, attention=attention, tell=told, **how)
        way = _way(bulk, find_hardware(name).devices, plan)
        ways.append(way) if way else others.append(Rejected(name, ratio, plan))
    return ScaleEstimate(bulk, outline.settings.model, chip, ways, others)


def _candidates(hardware: Hardware, chip: str, sp: int | None, cost: StepCost) -> Iterator[tuple[str, float]]:
    """Yield the name of each slice, and its chip-seconds a step relative to the fewest, by the model of meshes."""
    if not isinstance(hardware, Slice):
        yield chip, 1.0
        return
    work: dict[str, float] = {}
    slices = {**SLICES, **CARD_SLICES}
    for name, other in slices.items():
        if other.chip == hardware.chip and other.devices <= hardware.devices and other.devices % (sp or 1) == 0:
            work[name] = chip_seconds(other, cost, sp)
    least = min(work.values(), default=inf)
    for name in sorted(work.keys() | {chip}, key=lambda name: slices[name].devices):
        yield name, work[name] / least if work.get(name, inf) < inf else inf


def chip_seconds(hardware: Slice, cost: StepCost, sp: int | None) -> float:
    """Return the chip-seconds of a step on a slice, by the model; infinite where the weights do not fit."""
    mesh = choose_mesh(cost, hardware.devices, hardware.memory, hardware.chip, sp=sp)
    return hardware.devices * step_seconds(cost, mesh, hardware.chip) if has_room(cost, mesh, hardware.memory) else inf


def _way(bulk: Workload, devices: int, plan: Estimate) -> Option | None:
    """Return the option of a plan's slices; None if a video does not fit."""
    if plan.total_seconds is None or plan.total_seconds_low is None or plan.total_seconds_high is None or not plan.fits:
        return None
    video = Cost(plan.total_seconds_low, plan.total_seconds, plan.total_seconds_high)
    startup = startup_seconds(bulk, plan)
    slices, seconds = (Cost(*x) for x in zip(*map(partial(_fleet, bulk), video, startup), strict=True))
    low, mid, high = (devices * n * held / 3600 for n, held in zip(slices, seconds, strict=True))
    return Option(plan.chip, devices, plan, video, startup, slices, seconds, Cost(min(low, mid), mid, max(mid, high)))


def startup_seconds(bulk: Workload, plan: Estimate) -> Cost:
    """Return the seconds before a slice's first video: to start, download the weights, load them and compile.

    At the low end weights are those that `wanjax convert` stores, and compiled programs come from a shared cache. At
    the high end weights are in float32, and all programs are compiled as long as they were for the plan.
    """
    start = START if bulk.start is None else bulk.start
    rate = bulk.download or DOWNLOADED
    compiling = (0.0, plan.compile_seconds) if bulk.compiling is None else (bulk.compiling,) * 2
    sizes = plan.disk_bytes, plan.download_bytes_at_most
    low, high = (start + n / rate + n / LOADED + more for n, more in zip(sizes, compiling, strict=True))
    return Cost(low, (low + high) / 2, high)


def _fleet(bulk: Workload, video: float, startup: float) -> tuple[float, float]:
    """Return the fewest slices that end in time, and the seconds for which they are held; infinite if none do."""
    slices: float = 1
    if bulk.deadline is not None:
        each = (bulk.deadline - startup) // video
        if each < 1:
            return inf, inf
        slices = ceil(bulk.requests / each)
    return slices, startup + ceil(bulk.requests / slices) * video


def _finite(value: Any) -> Any:
    """Return a value that JSON can hold."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if value == inf else value
