# SPDX-License-Identifier: Apache-2.0
"""The price of a program as a plan reports it: bytes on one device, and seconds divided into parts."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, NamedTuple

from wanjax.pricing.chips import Slice
from wanjax.pricing.compile import Compiled, accepted, check_compiler, compiled
from wanjax.pricing.costs import Item, price_compiled
from wanjax.pricing.exporting import CompilerError, Job, export, trace
from wanjax.pricing.kept import is_any_kept, keep, pricing_digest, recall, versions
from wanjax.pricing.kernels import Call, kernel_calls, kernel_seconds, kernels_of, same_kernel
from wanjax.pricing.lowering import Lowering

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
UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Priced:
    """A program on one device: bytes, and seconds per run. `seconds` is None if the program does not fit in memory.

    `least` are those of a run that takes the cheaper side of every branch. `collectives` lists, for each kind and group
    size, the number of runs, the bytes on the wire and the seconds.
    """

    arguments: int
    peak: int
    seconds: float | None = None
    least: float | None = None
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


def price_all(place: Slice, lowerings: Sequence[Lowering]) -> list[Priced]:
    """Prices programs for a slice and returns the prices in order. Raises the errors of `prices`."""
    found = dict(prices(place, lowerings))
    return [found[number] for number in range(len(lowerings))]


def check_priceable() -> None:
    """Raise WanjaxError where no program of a TPU can be priced: there is no compiler, and no price is kept.

    Asked before anything is traced. Where some prices are kept, only the trace tells whether they are the ones needed.
    """
    if not is_any_kept("prices"):
        check_compiler()


def prices(
    place: Slice, lowerings: Sequence[Lowering], begun: Callable[[int], Any] = lambda number: None
) -> Iterator[tuple[int, Priced]]:
    """Yields the number of each program and its price, in the order in which they are known.

    Prices that were kept come at once, and need no compiler. The other programs are compiled in one process, each
    distinct one once, and their kernels in a second, for their schedules. `begun` gets the number of a program when
    its compilation begins. A program that is too large is priced as the bytes that it needs. Raises the errors of
    `exporting.trace` and `compile.compiled`, and CompilerError for a program that does not compile.
    """
    asked: dict[str, list[int]] = {}
    missing: dict[str, _Asked] = {}
    for number, lowering in enumerate(lowerings):
        traced = trace(lowering, place)
        job = traced.export()
        name = _name(job)
        asked.setdefault(name, []).append(number)
        if name in missing:
            continue
        if (found := _recalled("prices", job)) is not None:
            yield number, Priced(**found)
        else:
            missing[name] = _Asked(job, kernels_of(traced))
    for name, priced in _made(missing, lambda name: begun(asked[name][0])):
        _keep("prices", missing[name].job, asdict(priced))
        yield from ((number, priced) for number in asked[name])


class _Asked(NamedTuple):
    """A program that is to be compiled, and its kernels."""

    job: Job
    kernels: Mapping[Call, Lowering]


def _made(programs: Mapping[str, _Asked], begun: Callable[[str], Any]) -> Iterator[tuple[str, Priced]]:
    """Compiles programs and their kernels, and yields the name of each and its price once both are known.

    `begun` gets the name of each program, not those of kernels, when its compilation begins.
    """
    if not programs:
        return
    check_compiler()
    seconds: dict[str, float | None] = {}
    calls: dict[str, tuple[Call, Job]] = {}
    needed: dict[str, dict[Call, str]] = {}  # the kernels of each program, by the names of their jobs
    for name, program in programs.items():
        jobs = _exported(program)
        needed[name] = {call: _name(job) for call, job in jobs.items()}
        calls |= {_name(job): (call, job) for call, job in jobs.items()}
    for name, (_, job) in calls.items():
        if (found := _recalled("kernels", job)) is not None:
            seconds[name] = found
    named = {name: program.job for name, program in programs.items()}
    kernels = {name: job for name, (_, job) in calls.items() if name not in seconds}
    names, waiting = [*named, *kernels], {}
    every = [*named.values(), *kernels.values()]
    kernels_from = len(named)

    def tell(number: int) -> None:
        if number < kernels_from:
            begun(names[number])

    for number, result in compiled(every, schedules=range(kernels_from, len(every)), begun=tell):
        name = names[number]
        if number >= kernels_from:
            seconds[name] = _kernel_price(*calls[name], result)
        elif isinstance(result, CompilerError):
            yield name, _too_large(result)
        else:
            waiting[name] = result
        for done in [done for done in waiting if seconds.keys() >= set(needed[done].values())]:
            known = {call: seconds[kernel] for call, kernel in needed[done].items()}
            yield done, _with_kernels(waiting.pop(done), known)


def _exported(program: _Asked) -> dict[Call, Job]:
    """Returns the jobs of a program's kernels; one that cannot be lowered alone is left out, and has no price."""
    found: dict[Call, Job] = {}
    for call, kernel in program.kernels.items():
        with suppress(CompilerError):
            found[call] = export(kernel, program.job.slice)
    return found


def _name(job: Job) -> str:
    return json.dumps(job.key)


def _kernel_price(call: Call, job: Job, result: Compiled | CompilerError) -> float | None:
    """Returns the seconds of a kernel, and keeps them; None where it does not compile alone."""
    if isinstance(result, CompilerError):
        return None
    seconds = kernel_seconds(call, result)
    _keep("kernels", job, seconds)
    return seconds


def _too_large(error: CompilerError) -> Priced:
    """Returns the bytes that a program needs, or raises its error if it is another."""
    if (needed := needed_bytes(str(error))) is None:
        raise error
    return Priced(arguments=0, peak=needed)


def _with_kernels(program: Compiled, known: Mapping[Call, float | None]) -> Priced:
    """Prices a compiled program whose kernels take so many seconds."""
    seconds: dict[str, float] = {}
    for name, call in kernel_calls(program).items():
        kernel = same_kernel(call, known)
        found = None if kernel is None else known[kernel]
        if found is not None:
            seconds[name] = found
    return _priced(program, seconds)


def _key(job: Job) -> dict[str, Any]:
    """Returns all that a price depends on, but for the compiler's version."""
    return {**job.key, "pricing": pricing_digest(), "versions": versions("jax", "jaxlib")}


def _keep(kind: str, job: Job, value: Any) -> None:
    keep(kind, _key(job), {"libtpu": version("libtpu"), "value": value})


def _recalled(kind: str, job: Job) -> Any:
    """Returns what was kept by this version of the compiler or, where there is none, by one that jax accepts."""
    found = recall(kind, _key(job))
    if found is None:
        return None
    same = versions("libtpu").get("libtpu", found["libtpu"]) == found["libtpu"]
    return found["value"] if same and accepted().contains(found["libtpu"], prereleases=True) else None


def _priced(program: Compiled, kernel_prices: Mapping[str, float]) -> Priced:
    priced = price_compiled(program, kernels=kernel_prices)
    total = priced.total
    breakdown: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for item in priced.items:
        breakdown[_part(item)] += item.cost.mid
    return Priced(
        arguments=program.memory.arguments,
        peak=program.memory.peak,
        seconds=total.mid,
        least=price_compiled(program, kernels=kernel_prices, cheapest=True).total.mid,
        low=total.low,
        high=total.high,
        breakdown=breakdown,
        self_attention=sum(
            item.cost.mid for item in priced.items if SELF_ATTENTION in item.scope and _part(item) == "attention"
        ),
        collectives=_collectives(priced.items),
        compile_seconds=program.seconds,
        doubts=[*program.refused]
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
    """Returns the bytes that a program needs, from the compiler's out-of-memory message; None for another message.

    Where temporaries alone are too large the message has the bytes of those.
    """
    found = re.search(r"Used ([\d.]+)([BKMGT]?) of [\d.]+[BKMGT]? hbm", message)
    found = found or re.search(r"temporaries \(([\d.]+)([BKMGT]?)\) exceeds available HBM", message)
    return round(float(found[1]) * UNITS[found[2] or "B"]) if found else None
