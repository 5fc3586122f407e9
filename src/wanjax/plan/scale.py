# SPDX-License-Identifier: Apache-2.0
"""Estimate many videos by a deadline: price each kind of slice, and find the slice that needs the fewest chip-hours."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil, inf
from typing import Any

from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.layers.offload import STAGES
from wanjax.pipelines.meshes import StepCost, choose_mesh, step_cost, step_seconds, weights_fit
from wanjax.plan.estimate import Estimate, estimate_video
from wanjax.plan.hardware import Hardware, OnProgress, find_priceable_hardware
from wanjax.pricing.chips import CARD_SLICES, SLICES, Slice
from wanjax.pricing.costs import ValueRange
from wanjax.pricing.roofline import find_hardware
from wanjax.registry import ModelDescription
from wanjax.sharding import SHARDING_RULES

MAX_RATIO = 1.5  # slices above this multiple of the best slice's estimated chip-seconds are not priced
START_SECONDS, DOWNLOAD_RATE, LOAD_RATE = 300.0, 200e6, 580e6
"""Defaults: the seconds until a slice is ready, the bytes per second of a download, and the bytes per second of loading
weights from a disk onto devices. The first two numbers are assumptions. The third is from the measurements in
docs/performance.md.
"""


@dataclass(frozen=True)
class Workload:
    """The videos to make, and the user's figures for the cloud; None for an unknown figure.

    `requests` is the number of videos. `deadline`, `start` and `compiling` are in seconds; `start` is the time until a
    slice is ready. `price` is the price of a chip-hour. `download` is in bytes per second.
    """

    requests: int
    deadline: float | None = None
    price: float | None = None
    start: float | None = None
    download: float | None = None
    compiling: float | None = None


@dataclass(frozen=True)
class Option:
    """The estimate for making all videos on slices of one kind. Each range has a low, a middle and a high value.

    `video_seconds` is the time of one video on a slice, and `startup_seconds` is the time before a slice's first video.
    `slices` is the number of slices that meet the deadline. It is 1 without a deadline, and infinite if no number of
    slices meets the deadline. `seconds` is the time for which the slices are rented. `chip_hours` is the sum of this
    time over all chips.
    """

    slice: str
    devices: int
    plan: Estimate
    video_seconds: ValueRange
    startup_seconds: ValueRange
    slices: ValueRange
    seconds: ValueRange
    chip_hours: ValueRange

    @property
    def chip_seconds(self) -> ValueRange:
        """The chip-seconds of one video, without the start-up of its slice."""
        return self.video_seconds.scaled_by(self.devices)

    @property
    def meets_deadline(self) -> bool:
        """Whether any number of slices meets the deadline, by the middle value of the range."""
        return self.chip_hours.mid < inf


@dataclass(frozen=True)
class Rejected:
    """A kind of slice on which a video does not fit, or which was not priced. `plan` is None if the slice was not
    priced.

    `ratio` is the chip-seconds of a step divided by the best slice's chip-seconds, by the model of
    `pipelines/meshes.py`. `ratio` is infinite if the weights do not fit.
    """

    slice: str
    ratio: float
    plan: Estimate | None = None


@dataclass(frozen=True)
class ScaleEstimate:
    """The options for making the videos on slices of one chip, and the rejected slices."""

    workload: Workload
    model: str
    chip: str
    options: Sequence[Option]
    rejected: Sequence[Rejected]

    @property
    def best(self) -> Option | None:
        """The option with the fewest chip-hours; None if no slice fits the model and meets the deadline."""
        return min(
            (option for option in self.options if option.meets_deadline),
            key=lambda option: option.chip_hours.mid,
            default=None,
        )

    @property
    def quickest(self) -> Option | None:
        """The option with the fastest single video."""
        return min(self.options, key=lambda option: option.video_seconds.mid, default=None)

    @property
    def as_good(self) -> list[Option]:
        """The other options whose range of chip-hours overlaps the best option's range."""
        best = self.best
        return [
            option
            for option in self.options
            if best and option is not best and option.chip_hours.low < best.chip_hours.high
        ]

    def cost(self, option: Option) -> ValueRange | None:
        """Compute the cost of an option; return None if the price of a chip-hour is unknown."""
        return option.chip_hours.scaled_by(self.workload.price) if self.workload.price else None

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
    description: ModelDescription,
    chip: str,
    workload: Workload,
    mesh: tuple[int, int, int] | None = None,
    *,
    sp: int | None = None,
    rules: str = "fsdp",
    attention: AttentionConfig = AUTO,
    on_progress: OnProgress = lambda running_names, done, total: None,
    **keywords: Any,
) -> ScaleEstimate:
    """Estimate many videos on `chip` and on each smaller slice of the same chip.

    `chip` itself is always priced. Another slice is not priced if the weights do not fit, or if a step takes far more
    chip-seconds by the model of `pipelines/meshes.py`. With a `mesh`, only `chip` is priced. The other arguments and
    the errors are as in `estimate`. `on_progress` gets the names of programs together with their slices.
    """
    hardware = find_priceable_hardware(chip)
    options = {"attention": attention, "rules": SHARDING_RULES[rules], "offload": keywords.get("offload", STAGES)}
    cost = step_cost(
        description.family, description.model, description.settings, param_dtype=description.param_dtype, **options
    )
    candidates = {chip: 1.0} if mesh else dict(_candidates(hardware, chip, sp, cost))
    accepted_options, rejected = [], []
    for name, ratio in candidates.items():
        if name != chip and ratio > MAX_RATIO:
            rejected.append(Rejected(name, ratio))
            continue

        def report(running_names: Sequence[str], done: int, total: int, name: str = name) -> None:
            on_progress([f"{program} on {name}" for program in running_names], done, total)

        plan = estimate_video(
            description, name, mesh, sp=sp, rules=rules, attention=attention, on_progress=report, **keywords
        )
        option = _to_option(workload, find_hardware(name).devices, plan)
        accepted_options.append(option) if option else rejected.append(Rejected(name, ratio, plan))
    return ScaleEstimate(workload, description.settings.model, chip, accepted_options, rejected)


def _candidates(hardware: Hardware, chip: str, sp: int | None, cost: StepCost) -> Iterator[tuple[str, float]]:
    """Yield the name of each slice, and the ratio of its chip-seconds per step to the lowest chip-seconds of any
    slice."""
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
    min_chip_seconds = min(slice_chip_seconds.values(), default=inf)
    for name in sorted(slice_chip_seconds.keys() | {chip}, key=lambda name: slices[name].devices):
        yield name, slice_chip_seconds[name] / min_chip_seconds if slice_chip_seconds.get(name, inf) < inf else inf


def chip_seconds(hardware: Slice, cost: StepCost, sp: int | None) -> float:
    """Estimate the chip-seconds of a step on a slice, by the model of `pipelines/meshes.py`. The result is infinite if
    the weights do not fit."""
    mesh = choose_mesh(cost, hardware.devices, hardware.memory, hardware.chip, sp=sp)
    return (
        hardware.devices * step_seconds(cost, mesh, hardware.chip) if weights_fit(cost, mesh, hardware.memory) else inf
    )


def _to_option(workload: Workload, devices: int, plan: Estimate) -> Option | None:
    """Build the option for the slice of a plan; return None if a video does not fit."""
    if plan.total_seconds is None or plan.total_seconds_low is None or plan.total_seconds_high is None or not plan.fits:
        return None
    video = ValueRange(plan.total_seconds_low, plan.total_seconds, plan.total_seconds_high)
    startup = startup_seconds(workload, plan)
    slices, seconds = (
        ValueRange(*x) for x in zip(*map(partial(_slices_and_seconds, workload), video, startup), strict=True)
    )
    low, mid, high = (
        devices * slice_count * rental_seconds / 3600
        for slice_count, rental_seconds in zip(slices, seconds, strict=True)
    )
    return Option(
        plan.chip, devices, plan, video, startup, slices, seconds, ValueRange(min(low, mid), mid, max(mid, high))
    )


def startup_seconds(workload: Workload, plan: Estimate) -> ValueRange:
    """Estimate the seconds before a slice's first video: start, download of the weights, loading and compiling.

    The low end assumes a converted checkpoint, and compiled programs from a shared cache. The high end assumes weights
    in float32, and the compile time of the plan.
    """
    start = START_SECONDS if workload.start is None else workload.start
    rate = workload.download or DOWNLOAD_RATE
    compiling = (0.0, plan.compile_seconds) if workload.compiling is None else (workload.compiling,) * 2
    sizes = plan.disk_bytes, plan.download_bytes_at_most
    low, high = (
        start + weight_bytes / rate + weight_bytes / LOAD_RATE + compile_seconds
        for weight_bytes, compile_seconds in zip(sizes, compiling, strict=True)
    )
    return ValueRange(low, (low + high) / 2, high)


def _slices_and_seconds(workload: Workload, video: float, startup: float) -> tuple[float, float]:
    """Return the smallest number of slices that meets the deadline, and the seconds for which these slices are rented.

    Both are infinite if no number of slices meets the deadline.
    """
    slices: float = 1
    if workload.deadline is not None:
        videos_per_slice = (workload.deadline - startup) // video
        if videos_per_slice < 1:
            return inf, inf
        slices = ceil(workload.requests / videos_per_slice)
    return slices, startup + ceil(workload.requests / slices) * video


def _finite(value: Any) -> Any:
    """Convert a value to JSON, with None for infinity."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if value == inf else value
