# SPDX-License-Identifier: Apache-2.0
"""Prices of programs as a plan reports them: bytes on one device, and seconds divided into parts."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from wanjax.pricing.card_costs import count_kernels, price_on_card
from wanjax.pricing.chips import Card, Slice, abstract_mesh, find_slice
from wanjax.pricing.compile import CHECKS, CUDA_WHEELS, Compiled, Workspace, accepted_libtpu, compile_jobs, temporary
from wanjax.pricing.costs import Item, price_compiled
from wanjax.pricing.digests import digest, pricing_digest, versions
from wanjax.pricing.exporting import CompilerError, Job, export, trace
from wanjax.pricing.lowering import Lowering
from wanjax.pricing.pallas_kernels import Call, KernelSeconds, kernel_calls, kernel_seconds, kernels_of, same_kernel

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
class Price:
    """A program on one device: bytes, and seconds of a run.

    Args:
        arguments: Bytes of the arguments.
        peak: Bytes at the peak.
        seconds: Seconds of a run; None where the program does not fit in memory.
        least: Seconds of a run that takes the cheaper side of every branch.
        low: The lower end of the range of `seconds`.
        high: The upper end of it.
        worst: The upper end where kernels do all of their rare work: attention with every head on its safe path.
            None where kernels have no schedule.
        breakdown: Seconds by part.
        self_attention: Seconds in its kernels or products.
        collectives: For each kind and group size: the number of runs, bytes on the wire and seconds.
        compile_seconds: Time that the compiler took.
        doubts: Sentences on the price's uncertainties.
        kernels: On cards, how often a run starts each kind of kernel.
    """

    arguments: int
    peak: int
    seconds: float | None = None
    least: float | None = None
    low: float = 0.0
    high: float = 0.0
    worst: float | None = None
    breakdown: Mapping[str, float] = field(default_factory=dict)
    self_attention: float = 0.0  # seconds in its kernels or products
    collectives: Sequence[Mapping[str, Any]] = ()
    compile_seconds: float = 0.0
    doubts: Sequence[str] = ()
    kernels: Mapping[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of every part; 0 if the program does not fit."""
        return {part: self.breakdown.get(part, 0.0) for part in PARTS}


@runtime_checkable
class Results(Protocol):
    """A cache of prices between processes: JSON values by a kind and a JSON key."""

    def get(self, kind: str, key: Mapping[str, Any]) -> Any:
        """Return the value of this key, or None."""

    def put(self, kind: str, key: Mapping[str, Any], value: Any) -> None:
        """Store a value, if the store is writable."""

    def has(self, kind: str) -> bool:
        """Return whether there is any value of a kind."""
        ...


def no_visited_words(kernel: str, operands: Any) -> None:
    """Return None for every kernel, so that both sides of each branch count."""


@dataclass(frozen=True)
class Pricer:
    """Price programs on TPUs that need not be present, with their own compiler.

    Attributes:
        attention: The named scope in which a program computes attention, None for no such part.
        self_attention: The named scope around it, of self-attention.
        visits: Function of a kernel's name and its operands' dtypes and shapes. For a kernel whose data-dependent
            branches guard rare cases it returns sample values of the kernel's input words, over which the price is
            averaged; for other kernels it returns None.
        results: Cache of prices between processes; None disables it.
        workspace: Context manager that makes a folder for the compiler's files and removes it.
    """

    attention: str | None = None
    self_attention: str | None = None
    visits: Callable[[str, Any], Sequence[int | None] | None] = no_visited_words
    results: Results | None = None
    workspace: Workspace = temporary

    def price(
        self,
        function: Callable[..., Any],
        *shapes: Any,
        mesh: Mapping[str, int] | Mesh | AbstractMesh | None = None,
        chip: str = "v6e-8",
        donate: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Price:
        """Price any JAX function; `wanjax.price` documents the arguments and errors."""
        target = find_slice(chip)
        axes = mesh.shape if isinstance(mesh, Mesh | AbstractMesh) else mesh
        target_mesh = abstract_mesh(target, None if axes is None else dict(axes))
        self.check()
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding_on(target_mesh, x)), shapes
        )
        [price] = self.price_all(target, [Lowering(function, arguments, tuple(donate), options)])
        return price

    def check(self, platform: str = "tpu") -> None:
        """Raise WanjaxError if there is neither a compiler of this platform nor a cached price.

        Call it before tracing. Where some prices are cached, only the trace shows whether they suffice.
        """
        if self.results is None or platform != "tpu" or not self.results.has("prices"):
            CHECKS[platform]()

    def price_all(self, target: Slice, lowerings: Sequence[Lowering]) -> list[Price]:
        """Return the prices of programs on a slice, in order. Raises the errors of `prices`."""
        prices = dict(self.prices(target, lowerings))
        return [prices[number] for number in range(len(lowerings))]

    def prices(
        self, target: Slice, lowerings: Sequence[Lowering], on_start: Callable[[int], Any] = lambda number: None
    ) -> Iterator[tuple[int, Price]]:
        """Yield the number of each program and its price, as soon as each is known.

        Cached prices come at once and need no compiler. The other programs are compiled in one process, duplicates
        only once, and their kernels in a second process, for their schedules. `on_start` gets a program's number when
        its compilation begins. A program that does not fit in memory gets a price without seconds, with the bytes that
        it needs. Raises the errors of `exporting.trace` and `compile.compile_jobs`, and CompilerError for a program
        that does not compile.
        """
        numbers: dict[str, list[int]] = {}
        missing: dict[str, _UncachedProgram] = {}
        for number, lowering in enumerate(lowerings):
            traced = trace(lowering, target)
            job = traced.export()
            name = _name(job)
            numbers.setdefault(name, []).append(number)
            if name in missing:
                continue
            if (cached := self.recall("prices", job)) is not None:
                yield number, Price(**cached)
            else:
                missing[name] = _UncachedProgram(job, kernels_of(traced))
        for name, priced in self._compile_missing(missing, lambda name: on_start(numbers[name][0])):
            self.keep("prices", missing[name].job, asdict(priced))
            yield from ((number, priced) for number in numbers[name])

    def key(self, job: Job) -> dict[str, Any]:
        """Return everything that a price depends on except the compiler's version."""
        file = getattr(sys.modules[self.visits.__module__], "__file__", None)  # a notebook has none
        settings_key = [self.attention, self.self_attention, digest([Path(file)] if file else ())]
        compiler = set(CUDA_WHEELS.values()) if isinstance(job.slice.chip, Card) else ()
        made_with = versions("jax", "jaxlib", *sorted(compiler))
        return {**job.key, "pricer": settings_key, "pricing": pricing_digest(), "versions": made_with}

    def keep(self, kind: str, job: Job, value: Any) -> None:
        """Cache a price with the version of the compiler that made it."""
        if self.results is not None:
            compiler = {} if isinstance(job.slice.chip, Card) else {"libtpu": version("libtpu")}
            self.results.put(kind, self.key(job), {**compiler, "value": value})

    def recall(self, kind: str, job: Job) -> Any:
        """Return the cached value of this version of the compiler or, without a compiler, of one that jax accepts."""
        entry = None if self.results is None else self.results.get(kind, self.key(job))
        if entry is None:
            return None
        if isinstance(job.slice.chip, Card):  # its compiler is part of the key
            return entry["value"]
        same = versions("libtpu").get("libtpu", entry["libtpu"]) == entry["libtpu"]
        return entry["value"] if same and accepted_libtpu().contains(entry["libtpu"], prereleases=True) else None

    def _compile_missing(
        self, programs: Mapping[str, "_UncachedProgram"], on_start: Callable[[str], Any]
    ) -> Iterator[tuple[str, Price]]:
        """Compile programs and their kernels, and yield the name of each and its price once both are known.

        `on_start` gets the name of each program, not those of kernels, when its compilation begins.
        """
        if not programs:
            return
        seconds: dict[str, KernelSeconds | None] = {}
        calls: dict[str, tuple[Call, Job]] = {}
        kernel_names: dict[str, dict[Call, str]] = {}  # the kernels of each program, by the names of their jobs
        for name, program in programs.items():
            jobs = _export_kernels(program)
            kernel_names[name] = {call: _name(job) for call, job in jobs.items()}
            calls |= {_name(job): (call, job) for call, job in jobs.items()}
        for name, (_, job) in calls.items():
            if (kernel_price := self.recall("kernels", job)) is not None:
                seconds[name] = KernelSeconds(*kernel_price)
        program_jobs = {name: program.job for name, program in programs.items()}
        kernels = {name: job for name, (_, job) in calls.items() if name not in seconds}
        names, waiting = [*program_jobs, *kernels], {}
        every = [*program_jobs.values(), *kernels.values()]
        kernels_from = len(program_jobs)

        def report_start(number: int) -> None:
            if number < kernels_from:
                on_start(names[number])

        schedules = range(kernels_from, len(every))
        for number, result in compile_jobs(every, schedules=schedules, on_start=report_start, workspace=self.workspace):
            name = names[number]
            if number >= kernels_from:
                seconds[name] = self._kernel_price(*calls[name], result)
            elif isinstance(result, CompilerError):
                yield name, _too_large(result)
            else:
                waiting[name] = result
            for done in [done for done in waiting if seconds.keys() >= set(kernel_names[done].values())]:
                kernel_prices = {call: seconds[kernel] for call, kernel in kernel_names[done].items()}
                program = waiting.pop(done)
                yield done, self.divide(program, _kernel_times(program, kernel_prices))

    def _kernel_price(self, call: Call, job: Job, result: Compiled | CompilerError) -> KernelSeconds | None:
        """Return the seconds of a kernel and cache them; None if it does not compile alone."""
        if isinstance(result, CompilerError):
            return None
        seconds = kernel_seconds(result, self.visits(call.kernel, call.operands))
        self.keep("kernels", job, seconds)
        return seconds

    def divide(self, program: Compiled, kernels: Mapping[str, KernelSeconds]) -> Price:
        """Return the price of a compiled program in parts; `kernels` are the seconds of its kernels by name."""
        on_card = isinstance(program.slice.chip, Card)
        if on_card and program.memory.peak > program.slice.memory:  # which the GPU's compiler does not refuse
            return Price(program.memory.arguments, program.memory.peak, compile_seconds=program.seconds)
        typical = {name: seconds.typical for name, seconds in kernels.items()}
        worst = {name: seconds.worst for name, seconds in kernels.items()}
        price = price_on_card if on_card else partial(price_compiled, kernels=typical)
        priced = price(program)
        total = priced.total
        breakdown: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for item in priced.items:
            breakdown[self._part(item)] += item.cost.mid
        around = f"/{self.self_attention}/{self.attention}/"
        return Price(
            arguments=program.memory.arguments,
            peak=program.memory.peak,
            seconds=total.mid,
            least=price(program, cheapest=True).total.mid,
            low=total.low,
            high=total.high,
            worst=None if on_card else price_compiled(program, worst).total.high,
            breakdown=breakdown,
            self_attention=sum(
                item.cost.mid for item in priced.items if around in item.scope and self._part(item) == "attention"
            ),
            collectives=_collectives(priced.items),
            compile_seconds=program.seconds,
            doubts=[*program.refused]
            + [f"the kernel {name} is not priced" for name in priced.unpriced]
            + [f"the loop {name} is counted once" for name in priced.unknown_loops],
            kernels=count_kernels(program, priced) if on_card else {},
        )

    def _part(self, item: Item) -> str:
        """Return the part of a step that an operation belongs to.

        Kernels and products in attention's scope are "attention"; other kernels are elementwise.
        """
        if item.kind in ("kernels", "products") and f"/{self.attention}/" in item.scope:
            return "attention"
        return PART_OF[item.kind]


class _UncachedProgram(NamedTuple):
    """A program to compile, and its kernels."""

    job: Job
    kernels: Mapping[Call, Lowering]


def _sharding_on(mesh: AbstractMesh, x: Any) -> NamedSharding:
    """Return the sharding of a shape on a mesh."""
    sharding = getattr(x, "_sharding", None)  # `sharding` fails for a PartitionSpec without a mesh of real devices
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    return NamedSharding(mesh, spec if isinstance(spec, PartitionSpec) else PartitionSpec())


def _export_kernels(program: _UncachedProgram) -> dict[Call, Job]:
    """Export a program's kernels; one that cannot be lowered alone is left out and has no price."""
    jobs: dict[Call, Job] = {}
    for call, kernel in program.kernels.items():
        with suppress(CompilerError):
            jobs[call] = export(kernel, program.job.slice)
    return jobs


def _name(job: Job) -> str:
    return json.dumps(job.key)


def _kernel_times(program: Compiled, prices: Mapping[Call, KernelSeconds | None]) -> dict[str, KernelSeconds]:
    """Return the known seconds of a compiled program's kernels, by their names in it."""
    seconds_by_name: dict[str, KernelSeconds] = {}
    for name, call in kernel_calls(program).items():
        kernel = same_kernel(call, prices)
        seconds = None if kernel is None else prices[kernel]
        if seconds is not None:
            seconds_by_name[name] = seconds
    return seconds_by_name


def _too_large(error: CompilerError) -> Price:
    """Return the price of a program that does not fit in memory; re-raise any other error."""
    if (needed := needed_bytes(str(error))) is None:
        raise error
    return Price(arguments=0, peak=needed)


def _collectives(items: Sequence[Item]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for item in items:
        if item.kind != "collectives":
            continue
        name = re.sub(r"(-start)?(\.\d+)*$", "", item.name)
        row = rows.setdefault(
            (name, item.group), {"operation": name, "devices": item.group, "times": 0, "bytes": 0, "seconds": 0.0}
        )
        row["times"] += item.times
        row["bytes"] += item.bytes
        row["seconds"] += item.cost.mid
    return [rows[key] for key in sorted(rows)]


def needed_bytes(message: str) -> int | None:
    """Return the bytes that a program needs, from the compiler's out-of-memory message; None for another message.

    If the temporaries alone are too large, the message has only their bytes.
    """
    match = re.search(r"Used ([\d.]+)([BKMGT]?) of [\d.]+[BKMGT]? hbm", message)
    match = match or re.search(r"temporaries \(([\d.]+)([BKMGT]?)\) exceeds available HBM", message)
    return round(float(match[1]) * UNITS[match[2] or "B"]) if match else None
