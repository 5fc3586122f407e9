# SPDX-License-Identifier: Apache-2.0
"""What a plan keeps of a program: its bytes on a device, and its price by what the time goes to."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from wanjax.cache import keep, recall
from wanjax.plan.compile import Compiled, CompilerError, Job, compile_all
from wanjax.plan.kernels import alone, kernel_seconds, kernels
from wanjax.plan.pricing import Item, price

ATTENTION = "/attention/"  # the scope of the kernels' one door
SELF_ATTENTION = "/self_attention/attention/"
PARTS = ("attention", "matmuls", "elementwise", "copies", "communication")
PART_OF = {
    "kernels": "elementwise",
    "products": "matmuls",
    "elementwise": "elementwise",
    "layout": "copies",
    "collectives": "communication",
}
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
    """Of each job, in order; what was compiled before is not compiled again. Raises as `compile_all` does."""
    kept = {index: recall("prices", asdict(job)) for index, job in enumerate(jobs)}
    missing = [index for index, found in kept.items() if found is None]
    if missing:
        for index, made in zip(missing, _made([jobs[index] for index in missing]), strict=True):
            kept[index] = asdict(made)
            keep("prices", asdict(jobs[index]), kept[index])
    return [Digest(**kept[index]) for index in range(len(jobs))]


def _made(jobs: Sequence[Job]) -> list[Digest]:
    """Compiles the programs, then each of their kernels alone, of those that are alike one."""
    results = compile_all(jobs)
    calls = {
        (index, signature)
        for index, result in enumerate(results)
        if isinstance(result, Compiled)
        for signature in kernels(result).values()
    }
    wanted = sorted(calls)
    seconds: dict[Any, float] = {}
    if wanted:
        alones = compile_all([alone(jobs[index], signature) for index, signature in wanted], schedules=True)
        for call, result in zip(wanted, alones, strict=True):
            if isinstance(result, Compiled):
                seconds[call] = kernel_seconds(result)
    return [_digest(index, result, seconds) for index, result in enumerate(results)]


def _digest(index: int, result: Compiled | CompilerError, seconds: Mapping[Any, float]) -> Digest:
    if isinstance(result, CompilerError):
        needed = needed_bytes(str(result))
        if needed is None:
            raise result
        return Digest(arguments=0, peak=needed)
    of_kernels = {
        name: seconds[index, signature] for name, signature in kernels(result).items() if (index, signature) in seconds
    }
    priced = price(result, kernels=of_kernels)
    total = priced.total
    breakdown = dict.fromkeys(PARTS, 0.0)
    for item in priced.items:
        breakdown[_part(item)] += item.cost.mid
    return Digest(
        arguments=result.memory.arguments,
        peak=result.memory.peak,
        seconds=total.mid,
        low=total.low,
        high=total.high,
        breakdown=breakdown,
        self_attention=sum(
            item.cost.mid for item in priced.items if SELF_ATTENTION in item.scope and _part(item) == "attention"
        ),
        collectives=_collectives(priced.items),
        compile_seconds=result.seconds,
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
