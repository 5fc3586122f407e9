# SPDX-License-Identifier: Apache-2.0
"""The price of a program as a plan reports it: bytes on one device, and seconds divided into parts."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from wanjax.plan.compile import Compiled, CompilerError, Job, compile_all
from wanjax.plan.kept import keep, recall
from wanjax.plan.kernels import kernel_calls, kernel_job, kernel_seconds
from wanjax.plan.pricing import Item, price

ATTENTION = "/attention/"  # the scope of the dispatcher, through which every attention kernel is called
SELF_ATTENTION = "/self_attention/attention/"
PARTS: tuple[str, ...] = ("attention", "matmuls", "elementwise", "copies", "communication")
PART_OF = {
    "kernels": "elementwise",
    "products": "matmuls",
    "elementwise": "elementwise",
    "copies": "copies",
    "collectives": "communication",
}
AT_ONCE = 2  # compilations, each of one core and up to four gigabytes
UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Priced:
    """A program on one device: bytes, and seconds per run. `seconds` is None if the program does not fit in memory.

    `collectives` lists, for each kind and group size, the number of runs, the bytes on the wire and the seconds.
    """

    arguments: int
    peak: int
    seconds: float | None = None
    low: float = 0.0
    high: float = 0.0
    breakdown: Mapping[str, float] = field(default_factory=dict)
    self_attention: float = 0.0  # seconds in its kernels or products
    collectives: Sequence[Mapping[str, Any]] = ()
    compile_seconds: float = 0.0
    doubts: Sequence[str] = ()

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of every part, 0 for those of a program that does not fit."""
        return {part: self.breakdown.get(part, 0.0) for part in PARTS}


def price_all(jobs: Sequence[Job]) -> list[Priced]:
    """Prices the jobs, two at a time, and returns the prices in order. Earlier prices come from the user's cache.

    Raises the errors of `compile_all`.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(_price_once, jobs))


def _price_once(job: Job) -> Priced:
    if (found := recall("prices", asdict(job))) is not None:
        return Priced(**found)
    made = price_job(job)
    keep("prices", asdict(job), asdict(made))
    return made


def price_job(job: Job) -> Priced:
    """Compiles and prices a program. Its distinct kernels are compiled again, each on its own, for their schedules.

    Raises the errors of `compile_job`, except that a program that is too large returns the bytes that it needs.
    """
    [result] = compile_all([job])
    if isinstance(result, CompilerError):
        if (needed := needed_bytes(str(result))) is None:
            raise result
        return Priced(arguments=0, peak=needed)
    calls = kernel_calls(result)
    distinct = sorted(set(calls.values()))
    results = compile_all([kernel_job(job, call) for call in distinct], schedules=True) if distinct else []
    seconds = {
        call: kernel_seconds(call, compiled)
        for call, compiled in zip(distinct, results, strict=True)
        if isinstance(compiled, Compiled)
    }
    return _priced(result, {name: seconds[call] for name, call in calls.items() if call in seconds})


def _priced(compiled: Compiled, kernel_prices: Mapping[str, float]) -> Priced:
    priced = price(compiled, kernels=kernel_prices)
    total = priced.total
    breakdown: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for item in priced.items:
        breakdown[_part(item)] += item.cost.mid
    return Priced(
        arguments=compiled.memory.arguments,
        peak=compiled.memory.peak,
        seconds=total.mid,
        low=total.low,
        high=total.high,
        breakdown=breakdown,
        self_attention=sum(
            item.cost.mid for item in priced.items if SELF_ATTENTION in item.scope and _part(item) == "attention"
        ),
        collectives=_collectives(priced.items),
        compile_seconds=compiled.seconds,
        doubts=[*compiled.refused]
        + [f"the kernel {name} is not priced" for name in priced.unpriced]
        + [f"the loop {name} is counted once" for name in priced.unknown_loops],
    )


def _part(item: Item) -> str:
    """Returns the part of a step that an operation belongs to.

    Kernels and products in attention's scope are "attention"; other kernels are elementwise.
    """
    if item.kind in ("kernels", "products") and ATTENTION in item.scope:
        return "attention"
    return PART_OF[item.kind]


def _collectives(items: Sequence[Item]) -> list[dict[str, Any]]:
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for item in items:
        if item.kind != "collectives":
            continue
        name = re.sub(r"(-start)?(\.\d+)*$", "", item.name)
        row = found.setdefault(
            (name, item.group), {"operation": name, "devices": item.group, "times": 0, "bytes": 0, "seconds": 0.0}
        )
        row["times"] += item.times
        row["bytes"] += item.bytes
        row["seconds"] += item.cost.mid
    return [found[key] for key in sorted(found)]


def needed_bytes(message: str) -> int | None:
    """Returns the bytes that a program needs, from the compiler's out-of-memory message; None for another message."""
    found = re.search(r"Used ([\d.]+)([BKMGT]?) of [\d.]+[BKMGT]? hbm", message)
    return round(float(found[1]) * UNITS[found[2] or "B"]) if found else None
