# SPDX-License-Identifier: Apache-2.0
"""Programs, and three strategies for them: execute a program, trace it, or inline it into another.

A program is a function that is compiled as a whole. The code that drives a run calls programs through a strategy and
computes no array between two calls:

    state, x0, finite = strategy.call(take_step, site, denoiser, state, inputs, guidance, schedule)

`Execute` compiles the program once for each shape of its arguments, and runs it. `Trace` records the program and
returns shapes: a traced run makes the same calls as an executed one, but loads and computes nothing. `Inline` traces
the program into the function that is being traced, as training does.
"""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
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
from wanjax.kernels.compiler_options import FAST, SAFE
from wanjax.kernels.target import Target, target_of
from wanjax.pricing.lowering import Lowering, gc_paused, retry_without_rejected_options
from wanjax.sharding import Partitioner, collect_constraints, constrain_to, use

MAX_PARALLEL_COMPILES = 2  # most passes of a compiler use one core
Result = TypeVar("Result")
Options = Callable[[Target | None], Mapping[str, Any]]
CacheContext = Callable[[], AbstractContextManager[Any]]  # a context with or without JAX's own compilation cache
Shapes = Any  # a tree of jax.ShapeDtypeStruct
Value = jax.Array | jax.ShapeDtypeStruct  # a program's result; a shape if the run is traced


class Site(NamedTuple):
    """The mesh, the sharding rules and the set of compiler options that a program is compiled for."""

    partitioner: Partitioner
    compiler: str = SAFE


@dataclass(frozen=True)
class Program:
    """A function that is compiled as a whole, and its compiler options.

    Attributes:
        function: Its first argument is static: it is hashable, and each value gives a separate program. A result has
            the sharding of the last `constrain` or `replicate` on it, and is replicated if there is none.
        options: Returns the compiler's options for a device.
        donated: Names of arguments whose buffers the results reuse.
        fast: Returns the options that the set `fast` adds for a device.
    """

    function: Callable[..., Any]
    options: Options
    donated: tuple[str, ...] = ()
    fast: Options | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    def options_of(self, site: Site) -> dict[str, Any]:
        """Return the compiler's options for a site."""
        target = target_of(site.partitioner.device)
        return {**self.options(target), **(self.fast(target) if self.fast and site.compiler == FAST else {})}


def program(
    options: Options, *, donated: tuple[str, ...] = (), fast: Options | None = None
) -> Callable[[Callable[..., Any]], Program]:
    """Make a `Program` of the decorated function."""
    return lambda function: Program(function, options, donated, fast)


class Instance:
    """A program for a site and for arguments of certain shapes. `results` are its outputs, as shapes with shardings."""

    def __init__(self, program: Program, site: Site, static: Any, shapes: tuple[Shapes, ...]):
        self.program, self.site, self.static, self.shapes = program, site, static, shapes
        names = tuple(inspect.signature(program.function).parameters)[1:]
        self.donate = tuple(names.index(name) for name in program.donated)
        self._specs: list[PartitionSpec] = []
        jitted = jax.jit(self._named(self._run), donate_argnums=self.donate)
        with gc_paused(), partitionable_prng(), on_mesh(site.partitioner):
            self.traced = jitted.trace(*shapes)
        outputs, tree = jax.tree.flatten(self.traced.out_info)
        mesh = site.partitioner.mesh
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
        """Run the function under its partitioner; replicate each result without a sharding."""
        with use(self.site.partitioner), collect_constraints() as constraints:
            leaves, tree = jax.tree.flatten(self.program.function(self.static, *arguments))
            leaves = [x if constraints.spec_of(x) is not None else constrain_to(x, PartitionSpec()) for x in leaves]
            self._specs = [_normalize(constraints.spec_of(x) or PartitionSpec()) for x in leaves]
            return jax.tree.unflatten(tree, leaves)

    @property
    def lowering(self) -> Lowering:
        """The traced program as a function of its arguments, which does not trace the Python code again."""
        traced, tree = jaxpr_as_fun(self.traced.jaxpr), jax.tree.structure(self.results)

        def run(*arguments: Any) -> Any:
            return jax.tree.unflatten(tree, traced(*jax.tree.leaves(arguments)))

        return Lowering(self._named(run), self.shapes, self.donate, self.program.options_of(self.site))

    def compiled(self, options: dict[str, Any], cache: CacheContext) -> Callable[..., Any]:
        """Compile the program for the devices of its mesh with these compiler options."""
        with partitionable_prng(), cache():
            with gc_paused():
                lowered = self.traced.lower()
            return lowered.compile(compiler_options=options)


def _normalize(spec: PartitionSpec) -> PartitionSpec:
    """Normalize a spec so that equal shardings compare equal: drop unsharded axes at the end, unpack single axes."""
    axes = [axis[0] if isinstance(axis, tuple) and len(axis) == 1 else axis or None for axis in spec]
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def partitionable_prng() -> AbstractContextManager[Any]:
    """Within the block, draw random numbers in threefry's partitionable mode, which is JAX's default."""
    return jax.threefry_partitionable(True)


def on_mesh(partitioner: Partitioner) -> AbstractContextManager[Any]:
    """Within the block, set an abstract mesh for traced code, which reads the kind of chip from it."""
    mesh = partitioner.mesh
    return jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else nullcontext()


class Strategy(ABC):
    """How to handle the programs of a run: execute, trace or inline them."""

    executes: bool = False
    """True if results have values, not only shapes."""
    _stage: str = ""

    @abstractmethod
    def call(self, program: Program, site: Site, static: Any, *arguments: Any) -> Any:
        """Call a program and return its results."""

    def read(self, x: Any, placeholder: Result) -> Any | Result:
        """Copy a result to the host, or return `placeholder` if results have no values."""
        return placeholder

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Assign the calls within the block to a stage."""
        previous, self._stage = self._stage, name
        try:
            yield
        finally:
            self._stage = previous


def _shapes_and_key(arguments: Any, site: Site) -> tuple[Any, Any]:
    """Return the shapes of arguments, and a hashable key for them."""
    leaves, tree = jax.tree.flatten(arguments)
    shapes = [_shape(x, site.partitioner) for x in leaves]
    return jax.tree.unflatten(tree, shapes), (tree, tuple((x.shape, x.dtype, x.sharding) for x in shapes))


def _shape(x: Any, partitioner: Partitioner) -> jax.ShapeDtypeStruct:
    """Return the shape of an argument, with its sharding on the mesh. An argument on the host has no sharding."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        x = np.asarray(x)
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
    if (sharding := x.sharding) is None:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    spec = sharding.spec if isinstance(sharding, NamedSharding) and not partitioner.single_device else PartitionSpec()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(partitioner.mesh, _normalize(spec)))


class Execute(Strategy):
    """Compile each program at its first call with arguments of certain shapes, and run it.

    Two sets of compiler options that give a program the same options share one executable. If the compiler rejects an
    option, the program is compiled without it from then on, with a warning. Under `jax.disable_jit` functions run
    operation by operation.

    Args:
        executables: Store on disk that other processes share; None uses JAX's own cache instead.
    """

    executes = True

    def __init__(self, executables: Executables | None = None) -> None:
        self.executables = executables
        self._compiled: dict[Any, Future[Callable[..., Any]]] = {}
        self._accepted_options: dict[Any, dict[str, Any]] = {}
        self._lock = Lock()
        self._begin_ahead: Callable[[], Mapping[Any, Instance]] | None = None

    def call(self, program: Program, site: Site, static: Any, *arguments: Any) -> Any:
        arguments = jax.tree.map(lambda x: _to_mesh(x, site.partitioner), arguments)
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            with partitionable_prng(), use(site.partitioner):
                return program.function(static, *jax.tree.map(jnp.asarray, arguments))
        shapes, shapes_key = _shapes_and_key(arguments, site)
        key = (*_options_key(program, site), static, shapes_key)
        return self._get_or_compile(key, program, site, lambda: Instance(program, site, static, shapes))(*arguments)

    def compile(self, *instances: Instance, on_start: Callable[[int, int], Any] = lambda number, total: None) -> None:
        """Compile traced programs ahead of their calls, a few at a time.

        Args:
            instances: The traced programs; programs that are already compiled are skipped.
            on_start: Called before each compilation with its number, which starts at 1, and the total. It may raise to
                stop.
        """
        by_key = {self.key_of(instance): instance for instance in instances}
        missing = {key: instance for key, instance in by_key.items() if key not in self._compiled}
        with ThreadPoolExecutor(MAX_PARALLEL_COMPILES, "compiling") as pool:
            running: set[Future[Any]] = set()
            for number, (key, instance) in enumerate(missing.items(), 1):
                if len(running) == MAX_PARALLEL_COMPILES:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    _raise_errors(done)
                on_start(number, len(missing))
                site = instance.site
                running.add(
                    pool.submit(self._get_or_compile, key, instance.program, site, lambda traced=instance: traced)
                )
            _raise_errors(running)

    @contextmanager
    def ahead(self, trace: Callable[[], Iterable[Instance]]) -> Iterator[None]:
        """Within the block, compile the rest of a run on a thread as soon as a program has to be compiled.

        This does nothing in a run of several processes, where some compilers must compile the same program together.

        Args:
            trace: Traces the run and returns its programs.
        """
        block_ended = Event()

        def begin() -> Mapping[Any, Instance]:
            instances = {self.key_of(instance): instance for instance in trace()}

            def compile_all() -> None:
                with suppress(Exception):  # the call of the program raises it again
                    self.compile(*instances.values(), on_start=lambda number, total: _raise_if_set(block_ended))

            Thread(target=compile_all, name="compiling ahead").start()
            return instances

        self._begin_ahead = begin if jax.process_count() == 1 else None
        try:
            yield
        finally:
            self._begin_ahead = None
            block_ended.set()

    def key_of(self, instance: Instance) -> Any:
        """Return the key by which an instance's executable is stored."""
        _, shapes_key = _shapes_and_key(instance.shapes, instance.site)
        return *_options_key(instance.program, instance.site), instance.static, shapes_key

    def _get_or_compile(
        self, key: Any, program: Program, site: Site, trace: Callable[[], Instance]
    ) -> Callable[..., Any]:
        """Return the executable of a key. One thread loads or compiles it, and others wait."""
        with self._lock:
            existing = self._compiled.get(key)
            future = existing or self._compiled.setdefault(key, Future())
        if existing is None:
            try:
                future.set_result(self._load_or_compile(key, program, site, trace))
            except BaseException as error:
                self._compiled.pop(key, None)
                future.set_exception(error)
                raise
        elif not future.done():
            with report_waiting(program.name):
                wait([future])
        return future.result()

    def _load_or_compile(
        self, key: Any, program: Program, site: Site, trace: Callable[[], Instance]
    ) -> Callable[..., Any]:
        """Load the executable of a key from disk, or compile it and save it for other processes."""
        name = self._file_name(key, site)
        if self.executables is None or name is None:
            return self._compile(self._start_ahead(key) or trace(), compile_cache)
        start = perf_counter()
        try:
            executable = self.executables.find(name, list(np.asarray(site.partitioner.mesh.devices).flat))
        except UnusableExecutable as error:
            report_refused(str(error))
            executable = None
        if executable is not None:
            report_loaded(program.name, start)
            return executable
        # without JAX's cache, because an executable that was read from it cannot be serialized
        executable = self._compile(self._start_ahead(key) or trace(), without_cache)
        if self.options_of(program, site) == program.options_of(site):  # else the next process must warn too
            self.executables.store(name, executable)
        return executable

    def _start_ahead(self, key: Any) -> Instance | None:
        """Start compiling the rest of the run if `ahead` is active; return this program if that traced it."""
        with self._lock:
            begin, self._begin_ahead = self._begin_ahead, None
        return begin().get(key) if begin else None

    def _file_name(self, key: Any, site: Site) -> str | None:
        """Return the file name of a key's executable, or None if JAX's cache handles it."""
        if self.executables is None or site.partitioner.device.platform != "cpu" or jax.process_count() > 1:
            return None
        try:
            return key_of(key)
        except NoFingerprint:
            return None

    def _compile(self, instance: Instance, cache: CacheContext) -> Callable[..., Any]:
        def attempt(options: dict[str, Any]) -> Callable[..., Any]:
            executable = instance.compiled(options, cache)
            self._accepted_options[_options_key(instance.program, instance.site)] = options
            return executable

        return retry_without_rejected_options(self.options_of(instance.program, instance.site), attempt, warn_refused)

    def options_of(self, program: Program, site: Site) -> dict[str, Any]:
        """Return the options that a program is compiled with, without those that the compiler rejected."""
        key = _options_key(program, site)
        return self._accepted_options[key] if key in self._accepted_options else program.options_of(site)

    def read(self, x: Any, placeholder: Any) -> Any:
        return jax.tree.map(np.asarray, x)

    def forget(self) -> None:
        """Drop all compiled programs and free their memory."""
        self._compiled.clear()
        jax.clear_caches()


def _raise_errors(done: Iterable[Future[Any]]) -> None:
    for future in done:
        future.result()


def _raise_if_set(event: Event) -> None:
    if event.is_set():
        raise InterruptedError


def _options_key(program: Program, site: Site) -> tuple[Any, ...]:
    return program, site.partitioner, tuple(program.options_of(site).items()), *rejected_kernels()


def warn_refused(message: str) -> None:
    """Warn that the compiler rejected an option, which is dropped."""
    warnings.warn(message, WanjaxWarning, stacklevel=2)


EXECUTE = Execute()
"""The strategy of loaded pipelines, shared by a process, so that it compiles each program once."""


def refuse_traced(x: Any) -> None:
    """Raise WanjaxError for an array that `jax.jit`, `jax.grad` or `jax.vmap` is tracing."""
    if isinstance(x, Tracer):
        raise WanjaxError(
            "a stage of a pipeline got a traced array, but it runs compiled programs, which JAX cannot trace: call it "
            "outside jax.jit, jax.grad and jax.vmap, and trace the networks, such as pipe.transformer and pipe.vae"
        )


def _to_mesh(x: Any, partitioner: Partitioner) -> Any:
    """Return an argument on the devices of a mesh; copy an array on other devices to each of them."""
    refuse_traced(x)
    if not isinstance(x, jax.Array) or x.sharding.device_set == partitioner.replicated.device_set:
        return x
    if not x.committed and x.is_fully_addressable:
        return np.asarray(x) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.device_put(x, partitioner.replicated)


@dataclass
class TracedProgram:
    """A program that a run calls in one stage.

    Attributes:
        instance: The program for arguments of certain shapes.
        stage: The stage.
        calls: The number of its calls in the stage.
        resident_bytes: The most bytes that one device holds during a call in addition to the arguments.
    """

    instance: Instance
    stage: str
    calls: int = 0
    resident_bytes: int = 0

    @property
    def name(self) -> str:
        return self.instance.program.name


class Trace(Strategy):
    """Trace each distinct program of a run once, and count its calls. Results are shapes with shardings.

    Args:
        resident_bytes: Returns the bytes that one device holds in addition to the arguments of a call. The maximum is
            recorded for each program.
    """

    def __init__(self, resident_bytes: Callable[[Any], int] | None = None) -> None:
        self._recorded: dict[Any, TracedProgram] = {}
        self._resident_bytes = resident_bytes

    @property
    def programs(self) -> list[TracedProgram]:
        """The programs in the order of their first calls."""
        return list(self._recorded.values())

    def call(self, program: Program, site: Site, static: Any, *arguments: Any) -> Any:
        shapes, shapes_key = _shapes_and_key(arguments, site)
        key = (program, site, static, shapes_key, self._stage)
        if key not in self._recorded:
            self._recorded[key] = TracedProgram(Instance(program, site, static, shapes), self._stage)
        entry = self._recorded[key]
        entry.calls += 1
        if self._resident_bytes is not None:
            entry.resident_bytes = max(entry.resident_bytes, self._resident_bytes(arguments))
        return entry.instance.results


class Inline(Strategy):
    """Inline each program into the function that is being traced."""

    def call(self, program: Program, site: Site, static: Any, *arguments: Any) -> Any:
        with use(site.partitioner):
            return program.function(static, *arguments)
