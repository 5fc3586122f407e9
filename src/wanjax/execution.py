# SPDX-License-Identifier: Apache-2.0
"""Programs, and what can be done with one: execute it, trace it, or make it a part of another.

A program is a function that is compiled as a whole. Whoever drives a run calls its programs through a strategy, and
computes no array between two calls:

    state, x0, finite = strategy.call(take_step, site, denoiser, state, inputs, guidance, schedule)

`Execute` compiles the program once for each shape of its arguments, and runs it. `Trace` notes the program and returns
shapes, so that a run that is traced makes the same calls as one that is executed, with nothing loaded and nothing
computed. `Inline` traces the program into the one that is being traced, as training does.
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

AT_ONCE = 2  # programs that are compiled: most of a compiler's passes use one core
Result = TypeVar("Result")
Options = Callable[[Target | None], Mapping[str, Any]]
Cache = Callable[[], AbstractContextManager[Any]]  # a context in which JAX's own cache is asked, or is not
Shapes = Any  # a tree of jax.ShapeDtypeStruct
Value = jax.Array | jax.ShapeDtypeStruct  # a program's result: its shape where a run is traced


class Site(NamedTuple):
    """The mesh, the sharding rules and the set of compiler options that a program is compiled for."""

    partitioner: Partitioner
    compiler: str = SAFE


@dataclass(frozen=True)
class Program:
    """A function that is compiled as a whole, and its compiler options.

    The first argument of `function` is static: it is hashable, and each value of it is a separate program. Each result
    has the sharding that the function states for it last, by `constrain` or `replicate`, and is replicated where it
    states none. Results reuse the buffers of the arguments named in `donated`. `options` returns the compiler's options
    for a device, and `fast` those that the set of this name adds.
    """

    function: Callable[..., Any]
    options: Options
    donated: tuple[str, ...] = ()
    fast: Options | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    def options_of(self, site: Site) -> dict[str, Any]:
        """Return the compiler's options at a site."""
        on = target_of(site.partitioner.device)
        return {**self.options(on), **(self.fast(on) if self.fast is not None and site.compiler == FAST else {})}


def program(
    options: Options, *, donated: tuple[str, ...] = (), fast: Options | None = None
) -> Callable[[Callable[..., Any]], Program]:
    """Decorate a function: make it a `Program`."""
    return lambda function: Program(function, options, donated, fast)


class Instance:
    """A program for arguments of some shapes at a site; `results` are its results as shapes with shardings."""

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
        """Run the function under its partitioner; each result that states no sharding is replicated."""
        with use(self.site.partitioner), collect_constraints() as constraints:
            leaves, tree = jax.tree.flatten(self.program.function(self.static, *arguments))
            leaves = [x if constraints.spec_of(x) is not None else constrain_to(x, PartitionSpec()) for x in leaves]
            self._specs = [_trimmed(constraints.spec_of(x) or PartitionSpec()) for x in leaves]
            return jax.tree.unflatten(tree, leaves)

    @property
    def lowering(self) -> Lowering:
        """The program as a function of its arguments alone, which is not traced again."""
        traced, tree = jaxpr_as_fun(self.traced.jaxpr), jax.tree.structure(self.results)

        def run(*arguments: Any) -> Any:
            return jax.tree.unflatten(tree, traced(*jax.tree.leaves(arguments)))

        return Lowering(self._named(run), self.shapes, self.donate, self.program.options_of(self.site))

    def compiled(self, options: dict[str, Any], cache: Cache) -> Callable[..., Any]:
        """Return the executable with these options of the compiler, for devices that are here."""
        with partitionable_prng(), cache():
            with gc_paused():
                lowered = self.traced.lower()
            return lowered.compile(compiler_options=options)


def _trimmed(spec: PartitionSpec) -> PartitionSpec:
    """Return a sharding as one value for all equal ones: without whole axes at its end, and tuples of one axis."""
    axes = [axis[0] if isinstance(axis, tuple) and len(axis) == 1 else axis or None for axis in spec]
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def partitionable_prng() -> AbstractContextManager[Any]:
    """Draw in threefry's partitionable mode, JAX's default, within the block."""
    return jax.threefry_partitionable(True)


def on_mesh(partitioner: Partitioner) -> AbstractContextManager[Any]:
    """Set the chip that an abstract mesh stands for, for code that is traced within the block."""
    mesh = partitioner.mesh
    return jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else nullcontext()


class Strategy(ABC):
    """A way to handle the programs of a run: execute, trace or inline them."""

    executes: bool = False
    """True where results have values."""
    _stage: str = ""

    @abstractmethod
    def call(self, program: Program, site: Site, static: Any, *arguments: Any) -> Any:
        """Call a program; return its results."""

    def read(self, x: Any, otherwise: Result) -> Any | Result:
        """Return the values of a result on the host, or `otherwise` if results have no values."""
        return otherwise

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count calls within the block to the stage of this name."""
        before, self._stage = self._stage, name
        try:
            yield
        finally:
            self._stage = before


def _key(arguments: Any, site: Site) -> tuple[Any, Any]:
    """Return the shapes of arguments, and the part of a program's key that follows from them."""
    leaves, tree = jax.tree.flatten(arguments)
    shapes = [_shape(x, site.partitioner) for x in leaves]
    return jax.tree.unflatten(tree, shapes), (tree, tuple((x.shape, x.dtype, x.sharding) for x in shapes))


def _shape(x: Any, partitioner: Partitioner) -> jax.ShapeDtypeStruct:
    """Return the shape of an argument, with its sharding on the mesh; one of the host has none."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        x = np.asarray(x)
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
    if (sharding := x.sharding) is None:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    spec = sharding.spec if isinstance(sharding, NamedSharding) and not partitioner.single_device else PartitionSpec()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(partitioner.mesh, _trimmed(spec)))


class Execute(Strategy):
    """Compile each program at the first call with arguments of some shapes, and run it.

    Sets of compiler options that are the same for a program share its executable. Options that the compiler refuses are
    left out of the program from then on, with a warning. Under `jax.disable_jit` a program's function runs operation by
    operation.

    `executables` are kept on disk for other processes too; None leaves this to JAX's own cache.
    """

    executes = True

    def __init__(self, executables: Executables | None = None) -> None:
        self.executables = executables
        self._compiled: dict[Any, Future[Callable[..., Any]]] = {}
        self._left: dict[Any, dict[str, Any]] = {}
        self._lock = Lock()
        self._ahead: Callable[[], Mapping[Any, Instance]] | None = None

    def call(self, program: Program, site: Site, static: Any, *arguments: Any) -> Any:
        arguments = jax.tree.map(lambda x: _on(x, site.partitioner), arguments)
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            with partitionable_prng(), use(site.partitioner):
                return program.function(static, *jax.tree.map(jnp.asarray, arguments))
        shapes, key = _key(arguments, site)
        key = (*_options_key(program, site), static, key)
        return self._get(key, program, site, lambda: Instance(program, site, static, shapes))(*arguments)

    def compile(self, *instances: Instance, on_start: Callable[[int, int], Any] = lambda number, total: None) -> None:
        """Compile traced programs ahead, a few at a time, so that calls of them compile nothing.

        Args:
            instances: The traced programs; those that are compiled already are left out.
            on_start: Receives the number of each before it is compiled, from 1 on, and their total; may raise to stop.
        """
        wanted = {self.key_of(instance): instance for instance in instances}
        missing = {key: instance for key, instance in wanted.items() if key not in self._compiled}
        with ThreadPoolExecutor(AT_ONCE, "compiling") as pool:
            running: set[Future[Any]] = set()
            for number, (key, instance) in enumerate(missing.items(), 1):
                if len(running) == AT_ONCE:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    _results(done)
                on_start(number, len(missing))
                site = instance.site
                running.add(pool.submit(self._get, key, instance.program, site, lambda traced=instance: traced))
            _results(running)

    @contextmanager
    def ahead(self, trace: Callable[[], Iterable[Instance]]) -> Iterator[None]:
        """Compile the rest of a run on a thread, from the first program on that has to be compiled within the block.

        Several processes of one run do not, since some compilers have to meet.

        Args:
            trace: Traces the run, and returns its programs.
        """
        ended = Event()

        def begin() -> Mapping[Any, Instance]:
            instances = {self.key_of(instance): instance for instance in trace()}

            def compile_all() -> None:
                with suppress(Exception):  # is raised where the program is called
                    self.compile(*instances.values(), on_start=lambda number, total: _raise_if(ended))

            Thread(target=compile_all, name="compiling ahead").start()
            return instances

        self._ahead = begin if jax.process_count() == 1 else None
        try:
            yield
        finally:
            self._ahead = None
            ended.set()

    def key_of(self, instance: Instance) -> Any:
        """Return the key of a program among all others."""
        _, key = _key(instance.shapes, instance.site)
        return *_options_key(instance.program, instance.site), instance.static, key

    def _get(self, key: Any, program: Program, site: Site, trace: Callable[[], Instance]) -> Callable[..., Any]:
        """Return the executable of a key. One thread makes it; others wait for that."""
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
        """Return the executable of a key: from disk, else compiled and saved for other processes."""
        name = self._name(key, site)
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
        executable = self._compile(self._start_ahead(key) or trace(), without_cache)  # what JAX's holds cannot be kept
        if self.options_of(program, site) == program.options_of(site):  # else the next process is to be warned too
            self.executables.store(name, executable)
        return executable

    def _start_ahead(self, key: Any) -> Instance | None:
        """Start to compile the run ahead, if that is wanted; return the trace of this program, if it has one."""
        with self._lock:
            begin, self._ahead = self._ahead, None
        return begin().get(key) if begin else None

    def _name(self, key: Any, site: Site) -> str | None:
        """Return the file name of a key's executable; None if it is left to JAX's cache."""
        if self.executables is None or site.partitioner.device.platform != "cpu" or jax.process_count() > 1:
            return None
        try:
            return key_of(key)
        except NoFingerprint:
            return None

    def _compile(self, instance: Instance, cache: Cache) -> Callable[..., Any]:
        def attempt(options: dict[str, Any]) -> Callable[..., Any]:
            executable = instance.compiled(options, cache)
            self._left[_options_key(instance.program, instance.site)] = options
            return executable

        return retry_without_rejected_options(self.options_of(instance.program, instance.site), attempt, warn_refused)

    def options_of(self, program: Program, site: Site) -> dict[str, Any]:
        """Return the options with which a program is compiled, without those that the compiler refused."""
        key = _options_key(program, site)
        return self._left[key] if key in self._left else program.options_of(site)

    def read(self, x: Any, otherwise: Any) -> Any:
        return jax.tree.map(np.asarray, x)

    def forget(self) -> None:
        """Drop all compiled programs, and the memory that they hold."""
        self._compiled.clear()
        jax.clear_caches()


def _results(done: Iterable[Future[Any]]) -> None:
    for future in done:
        future.result()


def _raise_if(ended: Event) -> None:
    if ended.is_set():
        raise InterruptedError


def _options_key(program: Program, site: Site) -> tuple[Any, ...]:
    return program, site.partitioner, tuple(program.options_of(site).items()), *rejected_kernels()


def warn_refused(message: str) -> None:
    """Warn that the compiler refused an option, which is left out."""
    warnings.warn(message, WanjaxWarning, stacklevel=2)


EXECUTE = Execute()
"""The strategy of pipelines that are loaded: programs are compiled once in a process."""


def refuse_traced(x: Any) -> None:
    """Raise WanjaxError for an array that `jax.jit`, `jax.grad` or `jax.vmap` is tracing."""
    if isinstance(x, Tracer):
        raise WanjaxError(
            "a stage of a pipeline was given a traced array, and runs compiled programs that cannot be traced: call it "
            "outside jax.jit, jax.grad and jax.vmap, and trace the networks, such as pipe.transformer and pipe.vae"
        )


def _on(x: Any, partitioner: Partitioner) -> Any:
    """Return an argument on the devices of a mesh: an array from elsewhere is copied to each."""
    refuse_traced(x)
    if not isinstance(x, jax.Array) or x.sharding.device_set == partitioner.replicated.device_set:
        return x
    if not x.committed and x.is_fully_addressable:
        return np.asarray(x) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.device_put(x, partitioner.replicated)


@dataclass
class TracedProgram:
    """A program that a run calls, in one stage.

    Attributes:
        instance: The program for arguments of some shapes.
        stage: The stage.
        times: The number of calls in it.
        beside: The most bytes on one device that are held beside the arguments of a call.
    """

    instance: Instance
    stage: str
    times: int = 0
    beside: int = 0

    @property
    def name(self) -> str:
        return self.instance.program.name


class Trace(Strategy):
    """Trace each distinct program of a run once, and count its calls; results are shapes with shardings.

    `beside(arguments)`, if given, returns the bytes on one device that are held beside the arguments of a call; the
    most for each program is noted.
    """

    def __init__(self, beside: Callable[[Any], int] | None = None) -> None:
        self._recorded: dict[Any, TracedProgram] = {}
        self._beside = beside

    @property
    def programs(self) -> list[TracedProgram]:
        """The programs in the order of their first calls."""
        return list(self._recorded.values())

    def call(self, program: Program, site: Site, static: Any, *arguments: Any) -> Any:
        shapes, key = _key(arguments, site)
        key = (program, site, static, key, self._stage)
        if key not in self._recorded:
            self._recorded[key] = TracedProgram(Instance(program, site, static, shapes), self._stage)
        entry = self._recorded[key]
        entry.times += 1
        if self._beside is not None:
            entry.beside = max(entry.beside, self._beside(arguments))
        return entry.instance.results


class Inline(Strategy):
    """Inline each program into the function that is being traced."""

    def call(self, program: Program, site: Site, static: Any, *arguments: Any) -> Any:
        with use(site.partitioner):
            return program.function(static, *arguments)
