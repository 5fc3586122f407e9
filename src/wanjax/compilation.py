# SPDX-License-Identifier: Apache-2.0
"""Programs: their functions, their compiler options and what becomes of refused ones, and the cache between runs."""

import functools
import hashlib
import inspect
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax.core import Tracer

from wanjax.errors import WanjaxWarning
from wanjax.kernels.compiler_options import FAST, SAFE, SETS
from wanjax.kernels.target import Target, target_of
from wanjax.sharding import Partitioner, use

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Options = Callable[[Target | None], Mapping[str, Any]]
KEEP_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


class Lowering(NamedTuple):
    """A function to lower, and its arguments as trees of `jax.ShapeDtypeStruct` with shardings.

    `donate` are the indices of the arguments whose buffers the results may reuse. `compiler_options` are XLA's.
    """

    function: Callable
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    compiler_options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Program:
    """A function that is compiled as a whole, and its compiler options.

    The first argument of `function` is static: it is hashable, and each value of it is a separate program. Results
    reuse the buffers of the arguments named in `donated`. `options` returns the compiler's options for a device, and
    `fast` those that the set of this name adds.
    """

    function: Callable[..., Any]
    options: Options
    donated: tuple[str, ...] = ()
    fast: Options | None = None

    def on(self, partitioner: Partitioner | None, compiler: str = SAFE) -> "Executable":
        """Returns the executable for the devices of a partitioner, or for JAX's default device if it is None.

        `compiler` names the set of the compiler's options.
        """
        return _executable(self, partitioner, tuple(self.options_of(partitioner, compiler).items()))

    def lowering(self, partitioner: Partitioner, static: Any, *shapes: Any, compiler: str = SAFE) -> Lowering:
        """Returns the program for arguments that are shapes, to be compiled for devices that need not be present."""
        names = _names(self.function)[1:]
        donate = tuple(names.index(name) for name in self.donated)
        return Lowering(self.traceable(partitioner, static), shapes, donate, self.options_of(partitioner, compiler))

    def options_of(self, partitioner: Partitioner | None, compiler: str) -> dict[str, Any]:
        """Returns the compiler's options of a set, for the devices of a partitioner or JAX's default device."""
        on = devices_of(partitioner)
        return {**self.options(on), **(self.fast(on) if self.fast is not None and compiler == FAST else {})}

    def traceable(self, partitioner: Partitioner | None, static: Any) -> Callable[..., Any]:
        """Returns the function with its static argument bound, which is traced under the partitioner."""
        return functools.partial(_partitioned(self.function, partitioner), static)


def devices_of(partitioner: Partitioner | None) -> Target | None:
    """Returns the target of a partitioner's devices, or None for JAX's default device."""
    return None if partitioner is None else target_of(partitioner.mesh.abstract_mesh.abstract_device)


Compile = Callable[[Program], Callable[..., Any]]  # returns a program's executable, as `Pipeline.compiled` does


def program(
    options: Options, *, donated: tuple[str, ...] = (), fast: Options | None = None
) -> Callable[[Callable[..., Any]], Program]:
    """Decorates a function: makes it a `Program`."""
    return lambda function: Program(function, options, donated, fast)


class Jitted:
    """A function, compiled at the first call with arguments of each shape; `how` are the keywords of `jax.jit`.

    Options that the compiler refuses are left out from then on, with a warning.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any], **how: Any):
        self._function, self._how, self.options = function, how, dict(options)
        self.jitted = self._jitted(self.options)

    def __call__(self, *arguments: Any) -> Any:
        def run(options: dict[str, Any]) -> Any:
            jitted = self.jitted if options == self.options else self._jitted(options)
            result = jitted(*arguments)
            self.options, self.jitted = options, jitted
            return result

        return without_refused(self.options, run, _warn)

    def _jitted(self, options: dict[str, Any]) -> Any:
        return jax.jit(self._function, compiler_options=options, **self._how)


class Executable(Jitted):
    """A program for some devices.

    Where another function is traced, as in training, the program becomes a part of that function.
    """

    def __init__(self, program: Program, partitioner: Partitioner | None, options: tuple[tuple[str, Any], ...]):
        donated = tuple(_names(program.function).index(name) for name in program.donated)
        function = _partitioned(program.function, partitioner)
        super().__init__(function, dict(options), static_argnums=0, donate_argnums=donated)

    def __call__(self, *arguments: Any) -> Any:
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments[1:])):
            return self._function(*arguments)
        return super().__call__(*arguments)


_executable = functools.cache(Executable)


def forget_programs() -> None:
    """Drops all compiled programs of the process, and the memory that they hold."""
    _executable.cache_clear()
    jax.clear_caches()


def without_refused(
    options: dict[str, Any], attempt: Callable[[dict[str, Any]], Result], tell: Callable[[str], Any]
) -> Result:
    """Returns `attempt(options)`, which compiles a program. If the compiler refuses options, attempts it without them.

    The refused options are those that the compiler's message names, or all of them if it names none. `tell` then
    receives one sentence. A lack of memory is not a refusal.
    """
    try:
        return attempt(options)
    except jax.errors.JaxRuntimeError as error:
        why = str(error)
        if not options or "RESOURCE_EXHAUSTED" in why:
            raise
        refused = [name for name in options if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", why)] or list(options)
        left = {name: value for name, value in options.items() if name not in refused}
        result = without_refused(left, attempt, tell)
        tell(f"compiled without {' and '.join(refused)}, which the compiler refused: {_first_line(why)}")
        return result


def _first_line(text: str, longest: int = 200) -> str:
    line, _, _ = text.partition("\n")
    return line if len(line) <= longest else f"{line[:longest]} …"


def _warn(told: str) -> None:
    warnings.warn(told, WanjaxWarning, stacklevel=2)


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _partitioned(function: Callable[..., Any], partitioner: Partitioner | None) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with use(partitioner):
            return function(*arguments)

    return run


@contextmanager
def compile_cache() -> Iterator[None]:
    """Keeps every program that XLA compiles in this context in the cache, even one that compiled quickly.

    Restores JAX's own thresholds afterwards.
    """
    before = {name: getattr(jax.config, name) for name in KEEP_ALL}
    for name, value in KEEP_ALL.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def kept_apart(made: Iterator[Result], *contexts: Callable[[], AbstractContextManager]) -> Iterator[Result]:
    """Yields what an iterator makes; each is made in these contexts, which end while the iterator waits."""
    while True:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            try:
                result = next(made)
            except StopIteration:
                return
        yield result


def keeps_programs(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorates a function: runs it under `compile_cache`."""

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with compile_cache():
            return function(*args, **kwargs)

    return run


def set_cache_folder() -> None:
    """Sets JAX's compile cache to the user's cache folder, unless the user has chosen another.

    JAX's key covers the traced program with its kernels, the versions of JAX and the compiler, the compiler's options
    and flags, the devices and the shardings. Any change that matters therefore gives another key. The key may omit the
    processor for which a CPU program was compiled, so each kind of processor has its own folder.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla" / _processor()))


def kept_set() -> str:
    """Returns the set of compiler options that `keep_set` kept for these devices and this compiler, else `safe`."""
    with suppress(OSError, ValueError, AttributeError):
        found = json.loads(_sets().read_text(encoding="utf-8")).get(_machine())
        return found if found in SETS else SAFE
    return SAFE


def keep_set(compiler: str) -> Path:
    """Keeps the set of compiler options that is better on these devices; returns the file."""
    file, known = _sets(), {}
    with suppress(OSError, ValueError):
        known = json.loads(file.read_text(encoding="utf-8"))
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{os.getpid()}.{file.name}")
    beside.write_text(json.dumps({**known, _machine(): compiler}, indent=2), encoding="utf-8")
    beside.replace(file)
    return file


def _sets() -> Path:
    return user_cache() / "compiler.json"


def _machine() -> str:
    """Returns the number and the kind of the devices, and the version of what compiles for them."""
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}, {devices[0].client.platform_version}, jax {jax.__version__}"


def compile_cache_folder() -> str:
    """Returns the folder of compiled programs."""
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def user_cache() -> Path:
    """Returns this library's folder in the user's cache, for files that can be made again."""
    if "XDG_CACHE_HOME" in os.environ:
        return Path(os.environ["XDG_CACHE_HOME"]) / "wanjax"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "wanjax"


def _processor() -> str:
    """Returns the machine's architecture, and a digest of its processor's instruction sets."""
    known = platform.processor()
    with suppress(OSError):
        found = re.search(r"^(?:flags|Features)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        known = " ".join(sorted(found[1].split())) if found else known
    return f"{platform.machine()}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"
