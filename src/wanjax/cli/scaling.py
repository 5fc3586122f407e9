# SPDX-License-Identifier: Apache-2.0
"""A plan of many videos as it is printed: each way with its slices and its cost, and why one is the best."""

from collections.abc import Callable, Iterator
from math import ceil, inf

from rich.console import Console

from wanjax.cli.tables import print_table
from wanjax.figures import between, digits, duration, in_bytes, mesh_text, quantity
from wanjax.plan.scale import DOWNLOAD_RATE, LOAD_RATE, START_SECONDS, Option, Rejected, ScaleEstimate, Workload
from wanjax.pricing.costs import Cost
from wanjax.pricing.roofline import find_hardware

VIDEO = ("slice", "mesh", "a video", "chip-seconds")
ALL = ("slice", "slices", "hours")
SUM = "{}, the sum of its programs here, some at once"  # of seconds of compiling, which overlap
HOST = 8  # the most chips of one host, which several workers can share


def show_scale(estimate: ScaleEstimate, console: Console) -> None:
    """Print the ways as tables, and sentences on the best one."""
    bulk = estimate.bulk
    deadline = f" in {duration(bulk.deadline)}" if bulk.deadline else ", on one slice"
    price = f", at {digits(bulk.price)} a chip-hour" if bulk.price else ""
    console.print(f"{quantity(bulk.requests, 'video')} by {estimate.model}{deadline}{price}; priced, not measured")
    if estimate.ways:
        print_table(console, VIDEO, [_video(way) for way in estimate.ways])
        costs = ("cost", "cost of 1,000") if bulk.price else ("chip-hours",)
        print_table(console, (*ALL, *costs), [_all(estimate, way) for way in estimate.ways])
    for line in _sentences(estimate):
        console.print(line)


def _video(way: Option) -> tuple[str, ...]:
    """Return the figures of one video, under the headings of `VIDEO`."""
    return way.slice, mesh_text(way.plan.mesh), spread(way.video_seconds, duration), spread(way.chip_seconds, digits)


def _all(estimate: ScaleEstimate, way: Option) -> tuple[str, ...]:
    """Return the figures of all videos, under the headings of `ALL` and their cost, or chip-hours."""
    hours = way.seconds.scaled(1 / 3600)
    row = (way.slice, spread(way.slices, _count), spread(hours, digits))
    if (cost := estimate.cost(way)) is None:
        return *row, spread(way.chip_hours, digits)
    return *row, spread(cost, digits), spread(cost.scaled(1000 / estimate.bulk.requests), digits)


def spread(cost: Cost, text_of: Callable[[float], str]) -> str:
    """Return the ends of a range as text; an end that is infinite is too late for any number of slices."""
    return between(*("too late" if x == inf else text_of(x) for x in (min(cost), max(cost))))


def why(estimate: ScaleEstimate) -> str | None:
    """Return why the best way is the best for throughput; None where there is none."""
    best, quickest = estimate.best, estimate.quickest
    if best is None or quickest is None:
        return None
    cost = f"a video takes {digits(best.chip_seconds.mid)} chip-seconds on {best.slice}, {_links(best)}"
    if best is not quickest:
        return (
            f"{cost}; {quickest.slice} makes one video soonest, in {duration(quickest.video_seconds.mid)}, and takes "
            f"{digits(quickest.chip_seconds.mid)}, {_links(quickest)}; the start of a slice adds {_started(best)} and "
            f"{_started(quickest)}"
        )
    more = "".join(f"; {digits(way.chip_seconds.mid)} on {way.slice}" for way in estimate.ways if way is not best)
    return f"{cost}, and it makes one video soonest{more}"


def _sentences(estimate: ScaleEstimate) -> Iterator[str]:
    """Yield sentences on the slices that were left out, the best way, and the start of its slice."""
    yield from filter(None, map(_why_not, estimate.others))
    best = estimate.best
    if best is None:
        late = "no number of slices is in time: one video and the start of a slice take longer"
        yield late if estimate.ways else "a video fits none of them"
        return
    yield f"best for throughput: {best.slice}{_number(estimate, best)}"
    yield f"why: {why(estimate)}"
    if near := " and ".join(way.slice for way in estimate.as_good):
        yield f"in doubt: the ranges of {best.slice} and {near} overlap, so either may be cheaper"
    for doubt in best.plan.doubts:
        yield f"in doubt: {doubt}"
    yield _start(estimate.bulk, best)


def _number(estimate: ScaleEstimate, best: Option) -> str:
    """Return how many slices are to be rented, and how many of the chip that was asked for if workers share those."""
    if estimate.bulk.deadline is None:
        return ""
    devices = find_hardware(estimate.chip).devices
    workers, chips = devices // best.devices, quantity(best.devices, "chip")
    count = f", {spread(best.slices, _count)} of them"
    if workers < 2 or devices > HOST or best.slices.high < workers:
        return count
    hosts = Cost(*(n if n == inf else ceil(n / workers) for n in best.slices))
    return f"{count}, or {spread(hosts, _count)} of {estimate.chip} with {workers} workers of {chips} each"


def _why_not(other: Rejected) -> str | None:
    if other.plan is not None:
        return other.plan.advice
    if other.ratio == inf:
        return f"{other.slice} was not priced: a chip has no room for the weights of a network"
    times = digits(other.ratio)
    return f"{other.slice} was not priced: a step takes {times} times the fewest chip-seconds, by operations and bytes"


def _start(bulk: Workload, way: Option) -> str:
    """Return a sentence about what the start of a slice is made of, each part with its source."""
    start = START_SECONDS if bulk.start is None else bulk.start
    sizes = between(in_bytes(way.plan.disk_bytes), in_bytes(way.plan.download_bytes_at_most))
    rate = in_bytes(bulk.download or DOWNLOAD_RATE)
    if bulk.compiling is not None:
        compiling = f"{duration(bulk.compiling)} (given)"
    elif way.plan.compile_seconds:
        compiling = f"0 s (a shared cache) to {SUM.format(duration(way.plan.compile_seconds))}"
    else:
        compiling = "not counted (not known)"
    return (
        f"the start of a {way.slice}: {spread(way.startup_seconds, duration)}; until it is there {duration(start)} "
        f"({_source(bulk.start)}), {sizes} of weights at {rate}/s ({_source(bulk.download)}) and loaded at "
        f"{in_bytes(LOAD_RATE)}/s (measured), compiling {compiling}"
    )


def _source(value: float | None) -> str:
    return "estimated" if value is None else "given"


def _links(way: Option) -> str:
    share = way.plan.step_breakdown.get("communication", 0) / (way.plan.step_seconds or 1)
    return f"{share:.0%} of a step waiting for links" if way.devices > 1 else "which waits for no links"


def _started(way: Option) -> str:
    return f"{digits(way.devices * way.startup_seconds.mid)} on {way.slice}"


def _count(number: float) -> str:
    return f"{number:,.0f}"
