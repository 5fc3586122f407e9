# SPDX-License-Identifier: Apache-2.0
"""Estimate many videos by a deadline: price each kind of slice, and find the one with the fewest chip-hours."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil, inf
from typing import Any

from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.pipelines.meshes import StepCost, choose_mesh, has_room, step_cost, step_seconds
from wanjax.plan.estimate import Estimate, estimate
from wanjax.plan.hardware import Hardware, OnProgress, find_priceable_hardware
from wanjax.pricing.chips import CARD_SLICES, SLICES, Slice
from wanjax.pricing.costs import Cost
from wanjax.pricing.roofline import find_hardware
from wanjax.registry import Outline
from wanjax.sharding import RULES

MAX_RATIO = 1.5  # slices above this ratio of chip-seconds to the best slice's, by a rough model, are not priced
START_SECONDS, DOWNLOAD_RATE, LOAD_RATE = 300.0, 200e6, 580e6
"""Defaults: seconds until a slice is ready and bytes per second of a download, both assumed, and bytes per second at
which weights are loaded from a disk onto devices, as measured in docs/performance.md."""


@dataclass(frozen=True)
class Workload:
    """The videos to make, and the user's figures for the cloud; None for an unknown figure.

    `requests` is the number of videos. `deadline` is in seconds, as are `start`, the time until a slice is ready, and
    `compiling`. `price` is the price of a chip-hour, and `download` is in bytes per second.
    """

    requests: int
    deadline: float | None = None
    price: float | None = None
    start: float | None = None
    download: float | None = None
    compiling: float | None = None


@dataclass(frozen=True)
class Option:
    """The estimate for making all videos on slices of one kind. Each range is a low, a middle and a high value.

    `video_seconds` is the time of one video on a slice, and `startup_seconds` the time before a slice's first video.
    `slices` is the number of slices that meet the deadline: 1 without a deadline, and infinite if no number meets it.
    `seconds` is the time for which the slices are rented, and `chip_hours` is the total of all their chips.
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
        """The chip-seconds of one video, without the start-up of its slice."""
        return self.video_seconds.scaled(self.devices)

    @property
    def in_time(self) -> bool:
        """Whether some number of slices meets the deadline, by the middle values."""
        return self.chip_hours.mid < inf


@dataclass(frozen=True)
class Rejected:
    """A kind of slice on which a video does not fit, or which was not priced, in which case `plan` is None.

    `ratio` is the chip-seconds of a step divided by those of the best slice, by the model of `pipelines/meshes.py`. It
    is infinite if the weights do not fit.
    """

    slice: str
    ratio: float
    plan: Estimate | None = None


@dataclass(frozen=True)
class ScaleEstimate:
    """The options for making the videos on slices of one chip (`ways`), and the rejected slices (`others`)."""

    bulk: Workload
    model: str
    chip: str
    ways: Sequence[Option]
    others: Sequence[Rejected]

    @property
    def best(self) -> Option | None:
        """The option with the fewest chip-hours; None if no slice fits the model and meets the deadline."""
        return min(
            (option for option in self.ways if option.in_time), key=lambda option: option.chip_hours.mid, default=None
        )

    @property
    def quickest(self) -> Option | None:
        """The option with the fastest single video."""
        return min(self.ways, key=lambda option: option.video_seconds.mid, default=None)

    @property
    def as_good(self) -> list[Option]:
        """The options whose range of chip-hours overlaps the range of the best option."""
        best = self.best
        return [
            option
            for option in self.ways
            if best and option is not best and option.chip_hours.low < best.chip_hours.high
        ]

    def cost(self, option: Option) -> Cost | None:
        """Return the cost of an option, if the price of a chip-hour is known."""
        return option.chip_hours.scaled(self.bulk.price) if self.bulk.price else None

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values. A range is a list, and infinite values are None."""
        best, quickest = self.best, self.quickest
        summary = {
            "best": best and best.slice,
            "cost": best and self.cost(best),
            "as_good": [option.slice for option in self.as_good],
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
    on_progress: OnProgress = lambda now, done, total: None,
    **keywords: Any,
) -> ScaleEstimate:
    """Estimate many videos on `chip` and on each smaller slice of the same chip.

    `chip` itself is always priced. Another slice is not priced if the weights do not fit, or if a step takes far more
    chip-seconds by the model of `pipelines/meshes.py`. With a `mesh`, only `chip` is priced. Other arguments and the
    errors are as in `estimate`. `on_progress` gets the names of programs together with their slices.
    """
    hardware = find_priceable_hardware(chip)
    options = {"attention": attention, "rules": RULES[rules], "offload": keywords.get("offload")}
    cost = step_cost(outline.family, outline.model, outline.settings, param_dtype=outline.param_dtype, **options)
    candidates = {chip: 1.0} if mesh else dict(_candidates(hardware, chip, sp, cost))
    ways, others = [], []
    for name, ratio in candidates.items():
        if name != chip and ratio > MAX_RATIO:
            others.append(Rejected(name, ratio))
            continue

        def report(now: Sequence[str], done: int, total: int, name: str = name) -> None:
            on_progress([f"{program} on {name}" for program in now], done, total)

        plan = estimate(outline, name, mesh, sp=sp, rules=rules, attention=attention, on_progress=report, **keywords)
        option = _to_option(bulk, find_hardware(name).devices, plan)
        ways.append(option) if option else others.append(Rejected(name, ratio, plan))
    return ScaleEstimate(bulk, outline.settings.model, chip, ways, others)


def _candidates(hardware: Hardware, chip: str, sp: int | None, cost: StepCost) -> Iterator[tuple[str, float]]:
    """Yield the name of each slice, and the ratio of its chip-seconds per step to the fewest of any slice."""
    if not isinstance(hardware, Slice):
        yield chip, 1.0
        return
    slice_chip_seconds: dict[str, float] = {}
    slices = {**SLICES, **CARD_SLICES}
    for name, candidate in slices.items():
        if (
            candidate.chip == hardware.chip
            and candidate.devices <= hardware.devices
            and candidate.devices % (sp or 1) == 0
        ):
            slice_chip_seconds[name] = chip_seconds(candidate, cost, sp)
    fewest = min(slice_chip_seconds.values(), default=inf)
    for name in sorted(slice_chip_seconds.keys() | {chip}, key=lambda name: slices[name].devices):
        yield name, slice_chip_seconds[name] / fewest if slice_chip_seconds.get(name, inf) < inf else inf


def chip_seconds(hardware: Slice, cost: StepCost, sp: int | None) -> float:
    """Return the chip-seconds of a step on a slice, by the model of meshes; infinite if the weights do not fit."""
    mesh = choose_mesh(cost, hardware.devices, hardware.memory, hardware.chip, sp=sp)
    return hardware.devices * step_seconds(cost, mesh, hardware.chip) if has_room(cost, mesh, hardware.memory) else inf


def _to_option(bulk: Workload, devices: int, plan: Estimate) -> Option | None:
    """Return the option for the slice of a plan; None if a video does not fit."""
    if plan.total_seconds is None or plan.total_seconds_low is None or plan.total_seconds_high is None or not plan.fits:
        return None
    video = Cost(plan.total_seconds_low, plan.total_seconds, plan.total_seconds_high)
    startup = startup_seconds(bulk, plan)
    slices, seconds = (Cost(*x) for x in zip(*map(partial(_fleet, bulk), video, startup), strict=True))
    low, mid, high = (
        devices * slice_count * held_seconds / 3600 for slice_count, held_seconds in zip(slices, seconds, strict=True)
    )
    return Option(plan.chip, devices, plan, video, startup, slices, seconds, Cost(min(low, mid), mid, max(mid, high)))


def startup_seconds(bulk: Workload, plan: Estimate) -> Cost:
    """Return the seconds before a slice's first video: start, download of the weights, loading and compiling.

    The low end assumes weights as `wanjax convert` stores them and compiled programs from a shared cache. The high end
    assumes weights in float32, and that compiling takes as long as it did for the plan.
    """
    start = START_SECONDS if bulk.start is None else bulk.start
    rate = bulk.download or DOWNLOAD_RATE
    compiling = (0.0, plan.compile_seconds) if bulk.compiling is None else (bulk.compiling,) * 2
    sizes = plan.disk_bytes, plan.download_bytes_at_most
    low, high = (
        start + weight_bytes / rate + weight_bytes / LOAD_RATE + compile_seconds
        for weight_bytes, compile_seconds in zip(sizes, compiling, strict=True)
    )
    return Cost(low, (low + high) / 2, high)


def _fleet(bulk: Workload, video: float, startup: float) -> tuple[float, float]:
    """Return the fewest slices that meet the deadline, and the seconds of their rent; infinite if none do."""
    slices: float = 1
    if bulk.deadline is not None:
        videos_per_slice = (bulk.deadline - startup) // video
        if videos_per_slice < 1:
            return inf, inf
        slices = ceil(bulk.requests / videos_per_slice)
    return slices, startup + ceil(bulk.requests / slices) * video


def _finite(value: Any) -> Any:
    """Return a value as JSON values, with None for infinity."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if value == inf else value
