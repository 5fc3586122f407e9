# SPDX-License-Identifier: Apache-2.0
"""Programs, and three strategies for calling them: execute a program, trace it, or inline it into another program.

A program is a function that is compiled as a whole. The code of a run calls programs through a strategy, and computes
no array outside of programs:

    state, x0, finite = strategy.call(take_step, compile_context, denoiser, state, inputs, guidance, schedule)

`Execute` compiles the program once for each set of argument shapes, and runs it. `Trace` records the program and
returns shapes. A traced run makes the same calls as an executed run, but loads and computes nothing. `Inline` traces
the program into the function that is being traced, as training does.
"""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from wanjax.compile_cache.cache import compile_cache, without_cache
from wanjax.compile_cache.compilations import report_loaded, report_refused, report_waiting
from wanjax.compile_cache.executables import Executables, UnusableExecutable, key_of
from wanjax.compile_cache.fingerprint import NoFingerprint
from wanjax.errors import WanjaxError, WanjaxWarning
from wanjax.kernels.admitted import rejected_kernels
from wanjax.kernels.compiler_options import FAST_SET, SAFE_SET, offload_options
from wanjax.kernels.target import Target, target_of
from wanjax.pricing.lowering import AbstractCall, gc_paused, retry_without_rejected_options
from wanjax.sharding import (
    HOST_MEMORY_KIND,
    Partitioner,
    collect_constraints,
    constrain_to,
    is_in_host_memory,
    use_partitioner,
)

# the number of programs that are compiled at the same time; most compiler passes use one core
MAX_PARALLEL_COMPILES = 2
MAX_TRACED_PROGRAMS = 64  # the number of traced programs that are kept
Result = TypeVar("Result")
Options = Callable[[Target | None], Mapping[str, Any]]
CacheContext = Callable[[], AbstractContextManager[Any]]  # a context that turns JAX's own compilation cache on or off
Shapes = Any  # a tree of jax.ShapeDtypeStruct
# The result of a program; if the run is traced, the shape of the result
ArrayOrShape = jax.Array | jax.ShapeDtypeStruct


class CompileContext(NamedTuple):
    """Where and how a program is compiled: the mesh, the sharding rules, and the name of a set of compiler options."""

    partitioner: Partitioner
    compiler: str = SAFE_SET


@dataclass(frozen=True)
class Program:
    """A function that is compiled as a whole, and its compiler options.

    Attributes:
        function: The function. Its first argument is static: it is hashable, and each value needs a separate program.
            The last `constrain` or `replicate` of a result determines its sharding. Without them, the result is
            replicated.
        options: Returns the compiler options for a target.
        donated: Names of donated arguments: results may reuse their buffers.
        fast_options: Returns the options that the set `fast` adds for a target.
    """

    function: Callable[..., Any]
    options: Options
    donated: tuple[str, ...] = ()
    fast_options: Options | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    def compiler_options(self, compile_context: CompileContext) -> dict[str, Any]:
        """Return the compiler options for a compile context."""
        target = target_of(compile_context.partitioner.device)
        options = {
            **self.options(target),
            **(self.fast_options(target) if self.fast_options and compile_context.compiler == FAST_SET else {}),
        }
        return options | (offload_options(target) if compile_context.partitioner.num_device_blocks else {})


def program(
    options: Options, *, donated: tuple[str, ...] = (), fast_options: Options | None = None
) -> Callable[[Callable[..., Any]], Program]:
    """Turn the decorated function into a `Program`."""
    return lambda function: Program(function, options, donated, fast_options)


class TracedProgram:
    """A program that was traced with a `CompileContext` and the shapes of its arguments. `results` has the shapes of
    its results."""

    def __init__(self, program: Program, compile_context: CompileContext, static: Any, shapes: tuple[Shapes, ...]):
        self.program, self.compile_context, self.static, self.shapes = program, compile_context, static, shapes
        names = tuple(inspect.signature(program.function).parameters)[1:]
        self.donate = tuple(names.index(name) for name in program.donated)
        self._specs: list[PartitionSpec] = []
        jitted = jax.jit(self._named(self._run), donate_argnums=self.donate)
        with gc_paused(), partitionable_prng(), on_mesh(compile_context.partitioner):
            self.traced = jitted.trace(*shapes)
        outputs, tree = jax.tree.flatten(self.traced.out_info)
        mesh = compile_context.partitioner.mesh
        leaves = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(outputs, self._specs, strict=True)
        ]
        self.results = jax.tree.unflatten(tree, leaves)

    def _named(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            return function(*arguments)

        run.__name__ = run.__qualname__ = self.program.name
        return run

    def _run(self, *arguments: Any) -> Any:
        """Call the function with the mesh and the sharding rules. Replicate each result whose sharding is not set."""
        with use_partitioner(self.compile_context.partitioner), collect_constraints() as constraints:
            leaves, tree = jax.tree.flatten(self.program.function(self.static, *arguments))
            leaves = [x if constraints.spec_of(x) is not None else constrain_to(x, PartitionSpec()) for x in leaves]
            self._specs = [_normalize(constraints.spec_of(x) or PartitionSpec()) for x in leaves]
            return jax.tree.unflatten(tree, leaves)

    @property
    def abstract_call(self) -> AbstractCall:
        """The traced program as a function. A call of the function does not trace the Python code again."""
        traced, tree = jaxpr_as_fun(self.traced.jaxpr), jax.tree.structure(self.results)

        def run(*arguments: Any) -> Any:
            return jax.tree.unflatten(tree, traced(*jax.tree.leaves(arguments)))

        return AbstractCall(
            self._named(run), self.shapes, self.donate, self.program.compiler_options(self.compile_context)
        )

    def compile(self, options: dict[str, Any], cache: CacheContext) -> Callable[..., Any]:
        """Compile the program for the devices of its mesh with these compiler options."""
        with partitionable_prng(), cache():
            with gc_paused():
                lowered = self.traced.lower()
            return lowered.compile(compiler_options=options)


def _normalize(spec: PartitionSpec) -> PartitionSpec:
    """Normalize a partition spec, so that equal shardings compare equal: drop unsharded axes at the end, and unpack
    tuples of one axis."""
    axes = [axis[0] if isinstance(axis, tuple) and len(axis) == 1 else axis or None for axis in spec]
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def partitionable_prng() -> AbstractContextManager[Any]:
    """Within the block, draw random numbers in the partitionable mode of threefry, which is also JAX's default."""
    return jax.threefry_partitionable(True)


def on_mesh(partitioner: Partitioner) -> AbstractContextManager[Any]:
    """Within the block, set the mesh if it is abstract, so that traced code can read the kind of chip from it."""
    mesh = partitioner.mesh
    return jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else nullcontext()


class Strategy(ABC):
    """How the programs of a run are called: they are executed, traced or inlined."""

    executes: bool = False
    """Whether results have values, not only shapes."""
    _stage: str = ""

    @abstractmethod
    def call(self, program: Program, compile_context: CompileContext, static: Any, *arguments: Any) -> Any:
        """Call a program and return its results."""

    def to_host(self, x: Any, placeholder: Result) -> Any | Result:
        """Copy a result to the host. If the strategy computes no values, return `placeholder`."""
        return placeholder

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Assign the calls within the block to a stage."""
        previous, self._stage = self._stage, name
        try:
            yield
        finally:
            self._stage = previous


class ShapesKey(NamedTuple):
    """The shapes, types and shardings of a program's arguments, as a hashable key."""

    tree: Any  # a PyTreeDef
    leaves: tuple[tuple[tuple[int, ...], Any, NamedSharding | None], ...]

    @property
    def shapes(self) -> Shapes:
        shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in self.leaves]
        return jax.tree.unflatten(self.tree, shapes)


def _shapes_key(arguments: Any, compile_context: CompileContext) -> ShapesKey:
    """Return the key for the shapes of arguments."""
    leaves, tree = jax.tree.flatten(arguments)
    shapes = [_shape(x, compile_context.partitioner) for x in leaves]
    return ShapesKey(tree, tuple((x.shape, x.dtype, x.sharding) for x in shapes))


def _shape(x: Any, partitioner: Partitioner) -> jax.ShapeDtypeStruct:
    """Convert an argument to a shape, with its sharding on the mesh. NumPy arrays have no sharding."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        x = np.asarray(x)
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
    if (sharding := x.sharding) is None:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    spec = (
        sharding.spec if isinstance(sharding, NamedSharding) and not partitioner.is_single_device else PartitionSpec()
    )
    memory_kind = HOST_MEMORY_KIND if is_in_host_memory(x) else None
    sharding = NamedSharding(partitioner.mesh, _normalize(spec), memory_kind=memory_kind)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _trace_program(
    program: Program, compile_context: CompileContext, static: Any, shapes_key: ShapesKey, rejected: tuple[str, ...]
) -> TracedProgram:
    """Trace a program. Tracing selects kernels, so the rejected kernels are part of a key."""
    return TracedProgram(program, compile_context, static, shapes_key.shapes)


class Execute(Strategy):
    """Run each program. If its arguments have new shapes, compile it first.

    If a program has the same options in two sets of compiler options, both sets use the same executable. If the
    compiler rejects an option, there is a warning, and the program is compiled without the option from then on. Under
    `jax.disable_jit`, functions are run operation by operation.

    Args:
        executables: A store of executables on disk, shared with other processes. None uses JAX's own cache instead.
    """

    executes = True

    def __init__(self, executables: Executables | None = None) -> None:
        self.executables = executables
        self._compiled: dict[Any, Future[Callable[..., Any]]] = {}
        self._accepted_options: dict[Any, dict[str, Any]] = {}
        self._trace_program = lru_cache(MAX_TRACED_PROGRAMS)(_trace_program)
        self._lock = Lock()
        self._begin_ahead: Callable[[], Mapping[Any, TracedProgram]] | None = None

    def call(self, program: Program, compile_context: CompileContext, static: Any, *arguments: Any) -> Any:
        arguments = jax.tree.map(lambda x: _to_mesh(x, compile_context.partitioner), arguments)
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            with partitionable_prng(), use_partitioner(compile_context.partitioner):
                return program.function(static, *jax.tree.map(jnp.asarray, arguments))
        shapes_key = _shapes_key(arguments, compile_context)
        key = (*_options_key(program, compile_context), static, shapes_key)
        return self._get_or_compile(
            key, program, compile_context, lambda: self.trace(program, compile_context, static, shapes_key)
        )(*arguments)

    def trace(
        self, program: Program, compile_context: CompileContext, static: Any, shapes_key: ShapesKey
    ) -> TracedProgram:
        """Trace a program. The last programs are kept, so that a plan, compiling ahead and the run itself trace each
        program only once."""
        return self._trace_program(program, compile_context, static, shapes_key, tuple(rejected_kernels()))

    def compile(
        self, *traced_programs: TracedProgram, on_start: Callable[[int, int], Any] = lambda number, total: None
    ) -> None:
        """Compile traced programs before they are called, a few at a time.

        Args:
            traced_programs: The traced programs. Programs that are already compiled are skipped.
            on_start: Called before each compilation with the number of the program, from 1, and the total. If it raises
                an error, no more compilations start.
        """
        by_key = {self.key_of(traced_program): traced_program for traced_program in traced_programs}
        missing = {key: traced_program for key, traced_program in by_key.items() if key not in self._compiled}
        with ThreadPoolExecutor(MAX_PARALLEL_COMPILES, "compiling") as pool:
            running: set[Future[Any]] = set()
            for number, (key, traced_program) in enumerate(missing.items(), 1):
                if len(running) == MAX_PARALLEL_COMPILES:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    _raise_errors(done)
                on_start(number, len(missing))
                compile_context = traced_program.compile_context
                running.add(
                    pool.submit(
                        self._get_or_compile,
                        key,
                        traced_program.program,
                        compile_context,
                        lambda traced=traced_program: traced,
                    )
                )
            _raise_errors(running)

    @contextmanager
    def compile_ahead(self, trace: Callable[[], Iterable[TracedProgram]]) -> Iterator[None]:
        """Within the block, when the first program has to be compiled, start a thread that compiles all programs of the
        run.

        If the run has several processes, no thread is started, because some compilers must compile a program in all
        processes at the same time.

        Args:
            trace: Traces the run and returns its programs.
        """
        block_ended = Event()

        def begin_ahead() -> Mapping[Any, TracedProgram]:
            traced_programs = {self.key_of(traced_program): traced_program for traced_program in trace()}

            def compile_all() -> None:
                with suppress(Exception):  # ignored here, because a later call of the program raises the error again
                    self.compile(*traced_programs.values(), on_start=lambda number, total: _raise_if_set(block_ended))

            Thread(target=compile_all, name="compiling ahead").start()
            return traced_programs

        self._begin_ahead = begin_ahead if jax.process_count() == 1 else None
        try:
            yield
        finally:
            self._begin_ahead = None
            block_ended.set()

    def key_of(self, traced_program: TracedProgram) -> Any:
        """Return the key of a traced program's executable."""
        shapes_key = _shapes_key(traced_program.shapes, traced_program.compile_context)
        return *_options_key(traced_program.program, traced_program.compile_context), traced_program.static, shapes_key

    def _get_or_compile(
        self, key: Any, program: Program, compile_context: CompileContext, trace: Callable[[], TracedProgram]
    ) -> Callable[..., Any]:
        """Return the executable of a key. If several threads need it, one thread loads or compiles it, and the others
        wait."""
        with self._lock:
            existing_future = self._compiled.get(key)
            future = existing_future or self._compiled.setdefault(key, Future())
        if existing_future is None:
            try:
                future.set_result(self._load_or_compile(key, program, compile_context, trace))
            except BaseException as error:
                self._compiled.pop(key, None)
                future.set_exception(error)
                raise
        elif not future.done():
            with report_waiting(program.name):
                wait([future])
        return future.result()

    def _load_or_compile(
        self, key: Any, program: Program, compile_context: CompileContext, trace: Callable[[], TracedProgram]
    ) -> Callable[..., Any]:
        """Load the executable of a key from disk, or compile it and save it for other processes."""
        name = self._file_name(key, compile_context)
        if self.executables is None or name is None:
            return self._compile(self._start_ahead(key) or trace(), compile_cache)
        start = perf_counter()
        try:
            executable = self.executables.find(name, list(np.asarray(compile_context.partitioner.mesh.devices).flat))
        except UnusableExecutable as error:
            report_refused(str(error))
            executable = None
        if executable is not None:
            report_loaded(program.name, start)
            return executable
        # without JAX's cache, because executables from that cache cannot be serialized
        executable = self._compile(self._start_ahead(key) or trace(), without_cache)
        # if an option was rejected, the executable is not stored: otherwise the next process would not warn
        if self.compiler_options(program, compile_context) == program.compiler_options(compile_context):
            self.executables.store(name, executable)
        return executable

    def _start_ahead(self, key: Any) -> TracedProgram | None:
        """Within `compile_ahead`, start compiling the other programs of the run. Return the traced program of the key,
        or None if it was not traced."""
        with self._lock:
            begin_ahead, self._begin_ahead = self._begin_ahead, None
        return begin_ahead().get(key) if begin_ahead else None

    def _file_name(self, key: Any, compile_context: CompileContext) -> str | None:
        """Return the file name of a key's executable, or None if JAX's own cache stores it."""
        if self.executables is None or compile_context.partitioner.device.platform != "cpu" or jax.process_count() > 1:
            return None
        try:
            return key_of(key)
        except NoFingerprint:
            return None

    def _compile(self, traced_program: TracedProgram, cache: CacheContext) -> Callable[..., Any]:
        def attempt(options: dict[str, Any]) -> Callable[..., Any]:
            executable = traced_program.compile(options, cache)
            self._accepted_options[_options_key(traced_program.program, traced_program.compile_context)] = options
            return executable

        return retry_without_rejected_options(
            self.compiler_options(traced_program.program, traced_program.compile_context), attempt, warn_rejected_option
        )

    def compiler_options(self, program: Program, compile_context: CompileContext) -> dict[str, Any]:
        """Return the compiler options for a program, without the options that the compiler rejected."""
        key = _options_key(program, compile_context)
        return (
            self._accepted_options[key] if key in self._accepted_options else program.compiler_options(compile_context)
        )

    def to_host(self, x: Any, placeholder: Any) -> Any:
        return jax.tree.map(np.asarray, x)

    def clear_programs(self) -> None:
        """Drop all compiled and traced programs and free their memory."""
        self._compiled.clear()
        self._trace_program.cache_clear()
        jax.clear_caches()


def _raise_errors(done: Iterable[Future[Any]]) -> None:
    for future in done:
        future.result()


def _raise_if_set(event: Event) -> None:
    if event.is_set():
        raise InterruptedError


def _options_key(program: Program, compile_context: CompileContext) -> tuple[Any, ...]:
    return (
        program,
        compile_context.partitioner,
        tuple(program.compiler_options(compile_context).items()),
        *rejected_kernels(),
    )


def warn_rejected_option(message: str) -> None:
    """Warn that the compiler rejected an option, and that the program is compiled without it."""
    warnings.warn(message, WanjaxWarning, stacklevel=2)


EXECUTE = Execute()
"""The strategy that all loaded pipelines of a process share, so that each program is compiled only once."""


def reject_tracer(x: Any) -> None:
    """Raise WanjaxError for an array that is traced by `jax.jit`, `jax.grad` or `jax.vmap`."""
    if isinstance(x, Tracer):
        raise WanjaxError(
            "a stage of a pipeline got a traced array, but it runs compiled programs, which JAX cannot trace: call it "
            "outside of jax.jit, jax.grad and jax.vmap, or trace the networks, such as pipe.transformer and pipe.vae"
        )


def _to_mesh(x: Any, partitioner: Partitioner) -> Any:
    """Move an argument to the devices of a mesh. If an array is on other devices, copy it to each device of the
    mesh."""
    reject_tracer(x)
    if not isinstance(x, jax.Array) or x.sharding.device_set == partitioner.replicated.device_set:
        return x
    if not x.committed and x.is_fully_addressable:
        return np.asarray(x) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.device_put(x, partitioner.replicated)


@dataclass
class StageProgram:
    """A program that a run calls in one stage.

    Attributes:
        traced_program: The traced program.
        stage: The name of the stage.
        calls: The number of calls in the stage.
        resident_bytes: The maximum bytes on a device during a call, in addition to the arguments.
    """

    traced_program: TracedProgram
    stage: str
    calls: int = 0
    resident_bytes: int = 0

    @property
    def name(self) -> str:
        return self.traced_program.program.name


class Trace(Strategy):
    """Trace each distinct program of a run once, and count its calls. Results are shapes with shardings.

    Args:
        resident_bytes: Called with the arguments of each call. Returns the bytes that a device needs during the call in
            addition to the arguments. The maximum is recorded for each program.
    """

    def __init__(self, resident_bytes: Callable[[Any], int] | None = None) -> None:
        self._stage_programs: dict[Any, StageProgram] = {}
        self._resident_bytes = resident_bytes

    @property
    def programs(self) -> list[StageProgram]:
        """The programs in the order of their first calls."""
        return list(self._stage_programs.values())

    def call(self, program: Program, compile_context: CompileContext, static: Any, *arguments: Any) -> Any:
        shapes_key = _shapes_key(arguments, compile_context)
        key = (program, compile_context, static, shapes_key, self._stage)
        if key not in self._stage_programs:
            traced_program = EXECUTE.trace(program, compile_context, static, shapes_key)
            self._stage_programs[key] = StageProgram(traced_program, self._stage)
        entry = self._stage_programs[key]
        entry.calls += 1
        if self._resident_bytes is not None:
            entry.resident_bytes = max(entry.resident_bytes, self._resident_bytes(arguments))
        return entry.traced_program.results


class Inline(Strategy):
    """Inline each program into the function that is being traced."""

    def call(self, program: Program, compile_context: CompileContext, static: Any, *arguments: Any) -> Any:
        with use_partitioner(compile_context.partitioner):
            return program.function(static, *arguments)
