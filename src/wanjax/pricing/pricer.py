# SPDX-License-Identifier: Apache-2.0
"""Price programs: bytes on one device, and seconds divided into parts such as attention and communication."""

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

from wanjax.pricing.card_costs import count_kernels, price_on_gpu
from wanjax.pricing.chips import Card, Slice, abstract_mesh, find_slice
from wanjax.pricing.compile import (
    COMPILER_CHECKS,
    CUDA_WHEELS,
    Compiled,
    Workspace,
    accepted_libtpu,
    compile_jobs,
    temporary_folder,
)
from wanjax.pricing.costs import PricedOperation, price_compiled
from wanjax.pricing.digests import digest, pricing_digest, versions
from wanjax.pricing.exporting import CompileJob, CompilerError, export, trace
from wanjax.pricing.lowering import AbstractCall
from wanjax.pricing.pallas_kernels import (
    KernelCall,
    KernelSeconds,
    find_kernel_of_call,
    kernel_calls,
    kernel_seconds,
    kernels_of,
)

BREAKDOWN_KEYS: tuple[str, ...] = ("attention", "matmuls", "elementwise", "copies", "communication", "offload")
BREAKDOWN_KEY_BY_KIND = {
    "kernels": "elementwise",
    "matmuls": "matmuls",
    "elementwise": "elementwise",
    "copies": "copies",
    "collectives": "communication",
    "offload": "offload",
}
UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Price:
    """The price of one run of a program on one device.

    Args:
        argument_bytes: Bytes of the arguments.
        peak_bytes: Bytes at the peak.
        seconds: Seconds of a run; None if the program does not fit in memory.
        least: Seconds of a run that takes the cheapest branch of every conditional.
        low: The lower end of the range of `seconds`.
        high: The upper end of the range of `seconds`.
        worst: The upper end if kernels do all of their rarely needed work, for example if every attention head takes
            its running-max path. None if kernels have no schedule.
        breakdown: Seconds by part.
        self_attention: Seconds of the kernels or products of self-attention.
        collectives: For each kind of collective and group size: the number of runs, bytes on the wire and seconds.
        compile_seconds: Seconds that the compiler took.
        doubts: Sentences about the causes of uncertainty.
        kernels: How often a run starts each kind of kernel; only for cards.
    """

    argument_bytes: int
    peak_bytes: int
    seconds: float | None = None
    least: float | None = None
    low: float = 0.0
    high: float = 0.0
    worst: float | None = None
    breakdown: Mapping[str, float] = field(default_factory=dict)
    self_attention: float = 0.0
    collectives: Sequence[Mapping[str, Any]] = ()
    compile_seconds: float = 0.0
    doubts: Sequence[str] = ()
    kernels: Mapping[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of every part; 0 for all if the program does not fit."""
        return {part: self.breakdown.get(part, 0.0) for part in BREAKDOWN_KEYS}


@runtime_checkable
class Results(Protocol):
    """The interface of a cache of prices that processes share.

    Each value is JSON, stored under a kind and a JSON key.
    """

    def get(self, kind: str, key: Mapping[str, Any]) -> Any:
        """Return the value of a key, or None."""

    def put(self, kind: str, key: Mapping[str, Any], value: Any) -> None:
        """Store a value, if the cache is writable."""

    def has(self, kind: str) -> bool:
        """Return True if there is any value of a kind."""
        ...


def no_visited_words(kernel: str, operands: Any) -> None:
    """Return no sample input words for any kernel. Both sides of each data-dependent branch then count."""


@dataclass(frozen=True)
class Pricer:
    """Prices programs on TPUs and cards that may be absent, with the compilers for these devices.

    Attributes:
        attention: The named scope in which a program computes attention; None if there is none.
        self_attention: The named scope of self-attention, which contains the scope `attention`.
        matmul_scope: The named scope of kernels that are matrix products; None if there are none.
        visits: Called with a kernel's name, and the dtypes and shapes of its operands. For a kernel with data-dependent
            branches to rare cases, it returns sample values of the kernel's input words. The price is the mean over
            these values. For other kernels, it returns None.
        results: Cache of prices, shared by processes; None for no cache.
        workspace: Context manager of a folder for the compiler's files.
    """

    attention: str | None = None
    self_attention: str | None = None
    matmul_scope: str | None = None
    visits: Callable[[str, Any], Sequence[int | None] | None] = no_visited_words
    results: Results | None = None
    workspace: Workspace = temporary_folder

    def price(
        self,
        function: Callable[..., Any],
        *shapes: Any,
        mesh: Mapping[str, int] | Mesh | AbstractMesh | None = None,
        chip: str = "v6e-8",
        donate: Sequence[int] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Price:
        """Price any JAX function. The arguments and errors are those of `wanjax.price`."""
        target = find_slice(chip)
        axes = mesh.shape if isinstance(mesh, Mesh | AbstractMesh) else mesh
        target_mesh = abstract_mesh(target, None if axes is None else dict(axes))
        self.check()
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding_on(target_mesh, x)), shapes
        )
        [price] = self.price_all(target, [AbstractCall(function, arguments, tuple(donate), options)])
        return price

    def check(self, platform: str = "tpu") -> None:
        """Raise WanjaxError if there is neither a compiler for this platform nor a cached price.

        Call this before tracing. If the cache has any price, no error is raised, because only the trace shows whether
        the cached prices suffice.
        """
        if self.results is None or platform != "tpu" or not self.results.has("prices"):
            COMPILER_CHECKS[platform]()

    def price_all(self, target: Slice, abstract_calls: Sequence[AbstractCall]) -> list[Price]:
        """Price programs on a slice, and return the prices in order. Raises the errors of `prices`."""
        prices = dict(self.prices(target, abstract_calls))
        return [prices[index] for index in range(len(abstract_calls))]

    def prices(
        self, target: Slice, abstract_calls: Sequence[AbstractCall], on_start: Callable[[int], Any] = lambda index: None
    ) -> Iterator[tuple[int, Price]]:
        """Yield the index and the price of each program, as soon as the price is known.

        Cached prices come first and need no compiler. The other programs are compiled in one process; equal programs
        are compiled only once. Kernels are compiled in a second process, with schedules. `on_start` is called with a
        program's index when its compilation starts. The price of a program that does not fit in memory has the bytes
        that it needs, but no seconds. Raises the errors of `exporting.trace` and `compile.compile_jobs`, and
        CompilerError for a program that does not compile.
        """
        indices: dict[str, list[int]] = {}
        missing: dict[str, _UncachedProgram] = {}
        for index, abstract_call in enumerate(abstract_calls):
            traced = trace(abstract_call, target)
            job = traced.export()
            name = _job_name(job)
            indices.setdefault(name, []).append(index)
            if name in missing:
                continue
            if (cached := self.recall("prices", job)) is not None:
                yield index, Price(**cached)
            else:
                missing[name] = _UncachedProgram(job, kernels_of(traced))
        for name, priced in self._compile_missing(missing, lambda name: on_start(indices[name][0])):
            self.store("prices", missing[name].job, asdict(priced))
            yield from ((index, priced) for index in indices[name])

    def key(self, job: CompileJob) -> dict[str, Any]:
        """Return everything that determines a price, except the version of libtpu."""
        file = getattr(sys.modules[self.visits.__module__], "__file__", None)  # a notebook has no `__file__`
        settings_key = [self.attention, self.self_attention, digest([Path(file)] if file else ())]
        compiler = set(CUDA_WHEELS.values()) if isinstance(job.slice.chip, Card) else ()
        installed = versions("jax", "jaxlib", *sorted(compiler))
        return {**job.key, "pricer": settings_key, "pricing": pricing_digest(), "versions": installed}

    def store(self, kind: str, job: CompileJob, value: Any) -> None:
        """Cache a price, together with the version of the compiler that gave it."""
        if self.results is not None:
            compiler = {} if isinstance(job.slice.chip, Card) else {"libtpu": version("libtpu")}
            self.results.put(kind, self.key(job), {**compiler, "value": value})

    def recall(self, kind: str, job: CompileJob) -> Any:
        """Return the cached price that the installed version of the compiler gave, or None.

        If no compiler is installed, the price may be from any version that jax accepts.
        """
        entry = None if self.results is None else self.results.get(kind, self.key(job))
        if entry is None:
            return None
        if isinstance(job.slice.chip, Card):  # the version of a card's compiler is part of the key
            return entry["value"]
        is_same_compiler = versions("libtpu").get("libtpu", entry["libtpu"]) == entry["libtpu"]
        is_valid = is_same_compiler and accepted_libtpu().contains(entry["libtpu"], prereleases=True)
        return entry["value"] if is_valid else None

    def _compile_missing(
        self, programs: Mapping[str, "_UncachedProgram"], on_start: Callable[[str], Any]
    ) -> Iterator[tuple[str, Price]]:
        """Compile programs and their kernels; yield the name and the price of each program.

        `on_start` is called with the name of a program, not of a kernel, when its compilation starts.
        """
        if not programs:
            return
        seconds: dict[str, KernelSeconds | None] = {}
        calls: dict[str, tuple[KernelCall, CompileJob]] = {}
        kernel_names: dict[str, dict[KernelCall, str]] = {}  # the kernels of each program, by the names of their jobs
        for name, program in programs.items():
            jobs = _export_kernels(program)
            kernel_names[name] = {call: _job_name(job) for call, job in jobs.items()}
            calls |= {_job_name(job): (call, job) for call, job in jobs.items()}
        for name, (_, job) in calls.items():
            if (kernel_price := self.recall("kernels", job)) is not None:
                seconds[name] = KernelSeconds(*kernel_price)
        program_jobs = {name: program.job for name, program in programs.items()}
        kernels = {name: job for name, (_, job) in calls.items() if name not in seconds}
        names, compiled_programs = [*program_jobs, *kernels], {}
        all_jobs = [*program_jobs.values(), *kernels.values()]
        first_kernel = len(program_jobs)

        def report_start(index: int) -> None:
            if index < first_kernel:
                on_start(names[index])

        schedules = range(first_kernel, len(all_jobs))
        for index, result in compile_jobs(
            all_jobs, schedules=schedules, on_start=report_start, workspace=self.workspace
        ):
            name = names[index]
            if index >= first_kernel:
                seconds[name] = self._price_kernel(*calls[name], result)
            elif isinstance(result, CompilerError):
                yield name, _price_if_too_large(result)
            else:
                compiled_programs[name] = result
            for ready_name in [
                name for name in compiled_programs if seconds.keys() >= set(kernel_names[name].values())
            ]:
                kernel_prices = {call: seconds[kernel] for call, kernel in kernel_names[ready_name].items()}
                program = compiled_programs.pop(ready_name)
                yield ready_name, self.divide(program, _kernel_times(program, kernel_prices))

    def _price_kernel(
        self, call: KernelCall, job: CompileJob, result: Compiled | CompilerError
    ) -> KernelSeconds | None:
        """Price a kernel and cache its seconds; return None if it does not compile on its own."""
        if isinstance(result, CompilerError):
            return None
        seconds = kernel_seconds(result, self.visits(call.name, call.operands))
        self.store("kernels", job, seconds)
        return seconds

    def divide(self, program: Compiled, kernels: Mapping[str, KernelSeconds]) -> Price:
        """Price a compiled program, divided into parts. `kernels` has the seconds of its kernels by name."""
        on_card = isinstance(program.slice.chip, Card)
        if on_card and program.memory.peak > program.slice.memory:  # the GPU compiler does not check memory
            return Price(program.memory.arguments, program.memory.peak, compile_seconds=program.seconds)
        typical = {name: seconds.typical for name, seconds in kernels.items()}
        worst = {name: seconds.worst for name, seconds in kernels.items()}
        price = price_on_gpu if on_card else partial(price_compiled, kernels=typical)
        priced = price(program)
        total = priced.total
        breakdown: dict[str, float] = dict.fromkeys(BREAKDOWN_KEYS, 0.0)
        for item in priced.items:
            breakdown[self._breakdown_key(item)] += item.cost.mid
        scope_part = f"/{self.self_attention}/{self.attention}/"
        return Price(
            argument_bytes=program.memory.arguments,
            peak_bytes=program.memory.peak,
            seconds=total.mid,
            least=price(program, cheapest=True).total.mid,
            low=total.low,
            high=total.high,
            worst=None if on_card else price_compiled(program, worst).total.high,
            breakdown=breakdown,
            self_attention=sum(
                item.cost.mid
                for item in priced.items
                if scope_part in item.scope and self._breakdown_key(item) == "attention"
            ),
            collectives=_collectives(priced.items),
            compile_seconds=program.seconds,
            doubts=[*program.rejected_options]
            + [f"the kernel {name} has no price and counts as free" for name in priced.unpriced_kernels]
            + [f"the loop {name} counts once, because its trip count is unknown" for name in priced.unknown_loops],
            kernels=count_kernels(program, priced) if on_card else {},
        )

    def _breakdown_key(self, item: PricedOperation) -> str:
        """Return the part of the price to which an operation belongs.

        Kernels and products in the scope of attention belong to "attention". Kernels in the scope of products belong to
        "matmuls". Other kernels belong to "elementwise".
        """
        if item.kind in ("kernels", "matmuls") and f"/{self.attention}/" in item.scope:
            return "attention"
        if item.kind == "kernels" and f"/{self.matmul_scope}/" in item.scope:
            return "matmuls"
        return BREAKDOWN_KEY_BY_KIND[item.kind]


class _UncachedProgram(NamedTuple):
    """A program without a cached price, and its kernels."""

    job: CompileJob
    kernels: Mapping[KernelCall, AbstractCall]


def _sharding_on(mesh: AbstractMesh, x: Any) -> NamedSharding:
    """Return the sharding of a shape on a mesh."""
    sharding = getattr(x, "_sharding", None)  # `sharding` fails for a PartitionSpec without a concrete mesh
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    return NamedSharding(mesh, spec if isinstance(spec, PartitionSpec) else PartitionSpec())


def _export_kernels(program: _UncachedProgram) -> dict[KernelCall, CompileJob]:
    """Export a program's kernels. A kernel that cannot be lowered on its own is left out and gets no price."""
    jobs: dict[KernelCall, CompileJob] = {}
    for call, kernel in program.kernels.items():
        with suppress(CompilerError):
            jobs[call] = export(kernel, program.job.slice)
    return jobs


def _job_name(job: CompileJob) -> str:
    return json.dumps(job.key)


def _kernel_times(program: Compiled, prices: Mapping[KernelCall, KernelSeconds | None]) -> dict[str, KernelSeconds]:
    """Return the seconds of a compiled program's kernels by their names in the program.

    Kernels without a price are left out.
    """
    seconds_by_name: dict[str, KernelSeconds] = {}
    for name, call in kernel_calls(program).items():
        kernel = find_kernel_of_call(call, prices)
        seconds = None if kernel is None else prices[kernel]
        if seconds is not None:
            seconds_by_name[name] = seconds
    return seconds_by_name


def _price_if_too_large(error: CompilerError) -> Price:
    """Return the price of a program that does not fit in memory; raise any error that is not about memory."""
    if (needed := needed_bytes(str(error))) is None:
        raise error
    return Price(argument_bytes=0, peak_bytes=needed)


def _collectives(items: Sequence[PricedOperation]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for item in items:
        if item.kind != "collectives":
            continue
        name = re.sub(r"(-start)?(\.\d+)*$", "", item.name)
        row = rows.setdefault(
            (name, item.group), {"operation": name, "devices": item.group, "times": 0, "bytes": 0, "seconds": 0.0}
        )
        row["times"] += item.num_executions
        row["bytes"] += item.bytes
        row["seconds"] += item.cost.mid
    return [rows[key] for key in sorted(rows)]


def needed_bytes(message: str) -> int | None:
    """Return the bytes that a program needs, from the compiler's out-of-memory message; None for other messages.

    If the temporaries alone exceed the memory, the message gives only their bytes.
    """
    match = re.search(r"Used ([\d.]+)([BKMGT]?) of [\d.]+[BKMGT]? hbm", message)
    match = match or re.search(r"temporaries \(([\d.]+)([BKMGT]?)\) exceeds available HBM", message)
    return round(float(match[1]) * UNITS[match[2] or "B"]) if match else None
