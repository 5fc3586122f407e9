# SPDX-License-Identifier: Apache-2.0
"""Print a plan for many videos: the possible meshes with their slices and costs, and the reason why one mesh is the
best."""

from collections.abc import Callable, Iterator
from math import ceil, inf

from rich.console import Console

from wanjax.cli.tables import print_table
from wanjax.figures import format_bytes, format_duration, format_mesh, format_number, format_range, pluralize
from wanjax.plan.scale import DOWNLOAD_RATE, LOAD_RATE, START_SECONDS, Option, Rejected, ScaleEstimate, Workload
from wanjax.pricing.costs import ValueRange
from wanjax.pricing.roofline import find_hardware

VIDEO_COLUMNS = ("slice", "mesh", "a video", "chip-seconds")
TOTAL_COLUMNS = ("slice", "slices", "hours")
# the sum of times that overlap
COMPILE_SUM = "{}, the sum of its programs, some of which this machine compiled at the same time"
MAX_CHIPS_PER_HOST = 8  # several workers can share the chips of a host


def print_scale(estimate: ScaleEstimate, console: Console) -> None:
    """Print the possible meshes as tables, and sentences about the best mesh."""
    workload = estimate.workload
    deadline = f" in {format_duration(workload.deadline)}" if workload.deadline else ", on one slice"
    price = f", at {format_number(workload.price)} a chip-hour" if workload.price else ""
    console.print(f"{pluralize(workload.requests, 'video')} by {estimate.model}{deadline}{price}; priced, not measured")
    if estimate.options:
        print_table(console, VIDEO_COLUMNS, [_video_cells(option) for option in estimate.options])
        costs = ("cost", "cost of 1,000") if workload.price else ("chip-hours",)
        print_table(console, (*TOTAL_COLUMNS, *costs), [_total_cells(estimate, option) for option in estimate.options])
    for line in _summary_lines(estimate):
        console.print(line)


def _video_cells(option: Option) -> tuple[str, ...]:
    """Format the numbers for one video, in the order of `VIDEO_COLUMNS`."""
    return (
        option.slice,
        format_mesh(option.plan.mesh),
        format_value_range(option.video_seconds, format_duration),
        format_value_range(option.chip_seconds, format_number),
    )


def _total_cells(estimate: ScaleEstimate, option: Option) -> tuple[str, ...]:
    """Format the numbers for all videos, in the order of `TOTAL_COLUMNS`, followed by the cost or the chip-hours."""
    hours = option.seconds.scaled_by(1 / 3600)
    row = (option.slice, format_value_range(option.slices, _count_text), format_value_range(hours, format_number))
    if (cost := estimate.cost(option)) is None:
        return *row, format_value_range(option.chip_hours, format_number)
    return (
        *row,
        format_value_range(cost, format_number),
        format_value_range(cost.scaled_by(1000 / estimate.workload.requests), format_number),
    )


def format_value_range(cost: ValueRange, text_of: Callable[[float], str]) -> str:
    """Format a range. An infinite end means that no number of slices meets the deadline."""
    return format_range(*("too late" if value == inf else text_of(value) for value in (min(cost), max(cost))))


def reason_for_best(estimate: ScaleEstimate) -> str | None:
    """Explain why the best mesh has the best throughput. Return None if there is no best mesh."""
    best, quickest = estimate.best, estimate.quickest
    if best is None or quickest is None:
        return None
    cost_text = (
        f"a video takes {format_number(best.chip_seconds.mid)} chip-seconds on {best.slice}, {_link_share(best)}"
    )
    if best is not quickest:
        return (
            f"{cost_text}; {quickest.slice} makes a single video soonest, in "
            f"{format_duration(quickest.video_seconds.mid)}, and "
            f"takes {format_number(quickest.chip_seconds.mid)}, {_link_share(quickest)}; the startup of a slice adds "
            f"{_startup_cost(best)} and {_startup_cost(quickest)}"
        )
    other_costs = "".join(
        f"; {format_number(option.chip_seconds.mid)} on {option.slice}"
        for option in estimate.options
        if option is not best
    )
    return f"{cost_text}, and it makes one video soonest{other_costs}"


def _summary_lines(estimate: ScaleEstimate) -> Iterator[str]:
    """Yield sentences about the slices that were left out, the best mesh, and the startup of its slice."""
    yield from filter(None, map(_rejection_reason, estimate.rejected))
    best = estimate.best
    if best is None:
        too_late = "no number of slices meets the deadline: the startup of a slice and one video alone take longer"
        yield too_late if estimate.options else "the video fits on none of the slices"
        return
    yield f"best for throughput: {best.slice}{_slice_count(estimate, best)}"
    yield f"why: {reason_for_best(estimate)}"
    if alternatives := " and ".join(option.slice for option in estimate.as_good):
        yield f"in doubt: the ranges of {best.slice} and {alternatives} overlap, so either may be cheaper"
    for doubt in best.plan.doubts:
        yield f"in doubt: {doubt}"
    yield _startup_sentence(estimate.workload, best)


def _slice_count(estimate: ScaleEstimate, best: Option) -> str:
    """Format how many slices to rent. If several workers fit on the slice of --chip, also give the number of such
    slices."""
    if estimate.workload.deadline is None:
        return ""
    devices = find_hardware(estimate.chip).devices
    workers, chips = devices // best.devices, pluralize(best.devices, "chip")
    count = f", {format_value_range(best.slices, _count_text)} of them"
    if workers < 2 or devices > MAX_CHIPS_PER_HOST or best.slices.high < workers:
        return count
    hosts = ValueRange(*(n if n == inf else ceil(n / workers) for n in best.slices))
    return (
        f"{count}, or {format_value_range(hosts, _count_text)} of {estimate.chip} with {workers} workers of "
        f"{chips} each"
    )


def _rejection_reason(other: Rejected) -> str | None:
    if other.plan is not None:
        return other.plan.advice
    if other.ratio == inf:
        return f"{other.slice} was not priced: the weights of a network do not fit on a chip"
    ratio = format_number(other.ratio)
    return f"{other.slice} was not priced: a step takes {ratio} times the fewest chip-seconds, by operations and bytes"


def _startup_sentence(workload: Workload, option: Option) -> str:
    """Write a sentence about the parts of a slice's startup time, and say where each number comes from."""
    start_seconds = START_SECONDS if workload.start is None else workload.start
    size_range = format_range(format_bytes(option.plan.disk_bytes), format_bytes(option.plan.download_bytes_at_most))
    rate_text = format_bytes(workload.download or DOWNLOAD_RATE)
    if workload.compiling is not None:
        compiling = f"{format_duration(workload.compiling)} (given)"
    elif option.plan.compile_seconds:
        compiling = f"0 s (a shared cache) to {COMPILE_SUM.format(format_duration(option.plan.compile_seconds))}"
    else:
        compiling = "not counted (not known)"
    return (
        f"the startup of a {option.slice}: {format_value_range(option.startup_seconds, format_duration)}; "
        "until it is ready "
        f"{format_duration(start_seconds)} ({_given_or_estimated(workload.start)}), {size_range} of weights at "
        f"{rate_text}/s ({_given_or_estimated(workload.download)}) and loaded at {format_bytes(LOAD_RATE)}/s "
        f"(measured), compiling {compiling}"
    )


def _given_or_estimated(value: float | None) -> str:
    return "estimated" if value is None else "given"


def _link_share(option: Option) -> str:
    communication_share = option.plan.step_breakdown.get("communication", 0) / (option.plan.step_seconds or 1)
    return f"{communication_share:.0%} of a step spent on collectives" if option.devices > 1 else "without collectives"


def _startup_cost(option: Option) -> str:
    return f"{format_number(option.devices * option.startup_seconds.mid)} on {option.slice}"


def _count_text(number: float) -> str:
    return f"{number:,.0f}"
