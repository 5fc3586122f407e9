# SPDX-License-Identifier: Apache-2.0
"""What a plan keeps of a program: its bytes on a device, and its price by what the time goes to."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from wanjax.cache import keep, recall
from wanjax.plan.compile import Compiled, CompilerError, Job, compile_all
from wanjax.plan.kernels import alone, kernel_seconds, kernels
from wanjax.plan.pricing import Item, price

ATTENTION = "/attention/"  # the scope of the kernels' one door
SELF_ATTENTION = "/self_attention/attention/"
PARTS: tuple[str, ...] = ("attention", "matmuls", "elementwise", "copies", "communication")
PART_OF = {
    "kernels": "elementwise",
    "products": "matmuls",
    "elementwise": "elementwise",
    "layout": "copies",
    "collectives": "communication",
}
AT_ONCE = 2  # programs: each takes one core and up to four gigabytes
UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Digest:
    """A program on one device: bytes, and seconds of one run. `seconds` is None where it needs more than there is.

    `collectives` has for each kind and size of group how often it runs, the bytes on the wire and the seconds.
    """

    arguments: int
    peak: int
    seconds: float | None = None
    low: float = 0.0
    high: float = 0.0
    breakdown: Mapping[str, float] = field(default_factory=dict)
    self_attention: float = 0.0  # its kernels alone
    collectives: Sequence[Mapping[str, Any]] = ()
    compile_seconds: float = 0.0
    doubts: Sequence[str] = ()


def digests(jobs: Sequence[Job]) -> list[Digest]:
    """Of each job, in order, two at a time; what was compiled before is not compiled again. Raises as `compile_all`."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(_kept, jobs))


def _kept(job: Job) -> Digest:
    if (found := recall("prices", asdict(job))) is not None:
        return Digest(**found)
    made = digest(job)
    keep("prices", asdict(job), asdict(made))
    return made


def digest(job: Job) -> Digest:
    """Compiles the program, then each of its kernels alone, of those that are alike one. Raises as `compile_job`."""
    [result] = compile_all([job])
    if isinstance(result, CompilerError):
        if (needed := needed_bytes(str(result))) is None:
            raise result
        return Digest(arguments=0, peak=needed)
    calls = kernels(result)
    different = sorted(set(calls.values()))
    alones = compile_all([alone(job, call) for call in different], schedules=True) if different else []
    seconds = {
        call: kernel_seconds(call, compiled)
        for call, compiled in zip(different, alones, strict=True)
        if isinstance(compiled, Compiled)
    }
    return _digest(result, {name: seconds[call] for name, call in calls.items() if call in seconds})


def _digest(compiled: Compiled, of_kernels: Mapping[str, float]) -> Digest:
    priced = price(compiled, kernels=of_kernels)
    total = priced.total
    breakdown: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for item in priced.items:
        breakdown[_part(item)] += item.cost.mid
    return Digest(
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
        doubts=[f"the kernel {name} is not priced" for name in priced.unpriced]
        + [f"the loop {name} is counted once" for name in priced.unknown_loops],
    )


def _part(item: Item) -> str:
    """What an operation's time is told as: attention is its kernel, or its products; other kernels are elementwise."""
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


def needed_bytes(said: str) -> int | None:
    """What a program needs, from the compiler's words where that is more than there is."""
    found = re.search(r"Used ([\d.]+)([BKMGT]?) of [\d.]+[BKMGT]? hbm", said)
    return round(float(found[1]) * UNITS[found[2] or "B"]) if found else None
