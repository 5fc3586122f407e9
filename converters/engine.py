# SPDX-License-Identifier: Apache-2.0
"""Moves weights between a Hugging Face checkpoint and an NNX module by a table of rules, in both directions.

A table is total: every parameter is filled from the checkpoint and every tensor of the checkpoint is used,
or `plan` raises one error that lists all that is wrong. What a family's table needs can be imported from here.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from wanjax.checkpoint import CACHE_LINE, Reader, Spec, aligned, write_safetensors
from wanjax.converters.transforms import CONV, IDENTITY, TRANSPOSE, Shape, Transform, patches, rope_halves, squeeze
from wanjax.errors import WanjaxError
from wanjax.store import Arrays, place

__all__ = [
    "CONV",
    "IDENTITY",
    "TRANSPOSE",
    "Rule",
    "Transform",
    "conv",
    "export",
    "linear",
    "load",
    "norm",
    "parameters",
    "patches",
    "plan",
    "restore",
    "rope_halves",
    "save",
    "squeeze",
]

Module = TypeVar("Module", bound=nnx.Module)
PIECE = 1 << 20  # bytes that one core copies at a time
CHUNK = 512  # bytes that it writes in a row when it copies rows to columns
PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Rule:
    """The tensors named `source` become the parameters named `target`.

    A placeholder such as `{i}` stands for an index. One that is in both names is substituted; one that is in `source`
    only runs along the leading axis of the target, where equal blocks are stacked. `aliases` are other names under
    which files store the same tensor (tied weights): the first that is there is read, the rest are surplus.
    """

    source: str
    target: str
    transform: Transform = IDENTITY
    aliases: tuple[str, ...] = ()


def linear(source: str, target: str, *, bias: bool = True, rows: Transform = IDENTITY) -> list[Rule]:
    """A dense layer, [out, in] -> kernel [in, out]; `rows` rearranges its outputs, of the weight and of the bias."""
    rules = [Rule(f"{source}.weight", f"{target}.kernel", rows >> TRANSPOSE)]
    return rules + [Rule(f"{source}.bias", f"{target}.bias", rows)] * bias


def conv(source: str, target: str, *, bias: bool = True) -> list[Rule]:
    """A convolution of any rank, [O, I, *kernel] -> kernel [*kernel, I, O]."""
    rules = [Rule(f"{source}.weight", f"{target}.kernel", CONV)]
    return rules + [Rule(f"{source}.bias", f"{target}.bias")] * bias


def norm(source: str, target: str, *, bias: bool = False, rows: Transform = IDENTITY) -> list[Rule]:
    """A normalisation's `weight` -> `scale`, and its `bias` if it has one."""
    rules = [Rule(f"{source}.weight", f"{target}.scale", rows)]
    return rules + [Rule(f"{source}.bias", f"{target}.bias", rows)] * bias


@dataclass(frozen=True)
class Fill:
    """One parameter: the tensors that fill it, one for each index of its stacked axis, or just one.

    `names` are what the rule calls the tensors, which `sources` has by the aliases that are in the files.
    """

    target: str
    sources: tuple[str, ...]
    names: tuple[str, ...]
    transform: Transform
    stacked: bool


Plan = list[Fill]


@runtime_checkable
class Described(Protocol):
    """Anything with a shape and a dtype: a `Spec`, an array, a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype: ...


def plan(
    rules: Iterable[Rule],
    sources: Mapping[str, Described],
    targets: Mapping[str, Described],
    *,
    ignore: Iterable[str] = (),
) -> Plan:
    """Which tensor fills which parameter.

    `ignore`: patterns with `*` of keys known to be superfluous.
    Raises WanjaxError that lists every key that is missing, left over, used twice or of the wrong shape or dtype, and
    every parameter that not exactly one rule fills.
    """
    rules, ignore = list(rules), list(ignore)
    fills: Plan = []
    missing, unfit, orphans = [], [], []
    surplus = {key for key in sources if any(fnmatchcase(key, pattern) for pattern in ignore)}
    for path, target in targets.items():
        candidates = _rules_for(path, rules)
        if len(candidates) != 1:
            orphans.append(path)
            continue
        fill, aliases = _fill(*candidates[0], path, target.shape, sources)
        fills.append(fill)
        surplus |= aliases
        for key in fill.sources:
            if key not in sources:
                missing.append(key)
            elif wrong := _misfit(sources[key], target, fill):
                unfit.append(f"{key} ({wrong})")
    uses = Counter(key for fill in fills for key in fill.sources)
    faults = {
        "missing": missing,
        "left over": [key for key in sources if key not in uses and key not in surplus],
        "unfit": unfit,
        "used twice": [key for key, count in uses.items() if count > 1],
        "parameters not filled by exactly one rule": orphans,
    }
    if any(faults.values()):
        listed = "; ".join(f"{fault}: {', '.join(_folded(names))}" for fault, names in faults.items() if names)
        raise WanjaxError(f"the checkpoint does not fit the model, every tensor must fill one parameter; {listed}")
    return fills


def _rules_for(path: str, rules: Iterable[Rule]) -> list[tuple[Rule, dict[str, str]]]:
    """The rules whose target is `path`, with the values of the placeholders that make it so."""
    matches = [(rule, _regex(rule.target).fullmatch(path)) for rule in rules]
    return [(rule, match.groupdict()) for rule, match in matches if match]


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern:
    return re.compile(PLACEHOLDER.sub(r"(?P<\1>[0-9]+)", pattern.replace(".", r"\.")))


def _fill(
    rule: Rule, indices: dict[str, str], target: str, shape: Shape, sources: Iterable[str]
) -> tuple[Fill, set[str]]:
    """How the rule fills the target, and which aliases are then surplus."""
    stacked = set(PLACEHOLDER.findall(rule.source)) - set(indices)
    if len(stacked) > 1:
        raise ValueError(f"{rule.source} -> {rule.target}: only one placeholder can be stacked, not {sorted(stacked)}")
    keys, own, surplus = [], [], set()
    for i in range(shape[0]) if stacked else [0]:
        values = indices | dict.fromkeys(stacked, str(i))
        names = [PLACEHOLDER.sub(lambda found: values[found[1]], name) for name in (rule.source, *rule.aliases)]  # noqa: B023
        own.append(names[0])
        keys.append(next((name for name in names if name in sources), names[0]))
        surplus |= set(names) - {keys[-1]}
    return Fill(target, tuple(keys), tuple(own), rule.transform, bool(stacked)), surplus


def _misfit(source: Described, target: Described, fill: Fill) -> str:
    """What of the source does not fit the target; empty if all does."""
    shape = tuple(target.shape)[fill.stacked :]
    if fill.transform.shape(tuple(source.shape)) != shape:
        return f"{list(source.shape)} where {list(fill.transform.source_shape(shape) or shape)} is right"
    floating = [jnp.issubdtype(described.dtype, jnp.floating) for described in (source, target)]
    if not all(floating) and source.dtype != target.dtype:
        return f"{source.dtype} where {target.dtype} is right"
    return ""


def _folded(names: Iterable[str]) -> list[str]:
    """The names, those that differ in their first index alone as one: `blocks.{0-3}.norm`."""
    groups = defaultdict(list)
    for name in names:
        before, index, after = (*re.split(r"(?<=\.)([0-9]{1,9})(?=\.)", name, maxsplit=1), "", "")[:3]
        groups[before, after].append(index)
    return [before + _ranges(indices) + after for (before, after), indices in groups.items()]


def _ranges(indices: list[str]) -> str:
    if len(indices) == 1:
        return indices[0]
    runs: list[list[int]] = []
    for i in sorted(map(int, indices)):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"


def load(
    abstract: Module,
    rules: Iterable[Rule],
    reader: Reader,
    *,
    ignore: Iterable[str] = (),
    progress: Callable[[int, int], object] | None = None,
) -> Module:
    """The module with the checkpoint's weights, each in the dtype and with the sharding that the abstract module has.

    abstract: the result of `nnx.eval_shape`, or `nnx.merge(*nnx.get_abstract_model(..., mesh))`, which has shardings.
    `progress(done, total)` is called with the bytes of the checkpoint read so far, after each tensor.
    One tensor at a time is on the host, beside what a CPU itself keeps as weights; a process that has a part of the
    devices reads the parts of each tensor that are theirs. Raises WanjaxError as `plan` does.
    """
    targets = parameters(abstract)
    specs = {key: reader.spec(key) for key in reader.keys()}  # noqa: SIM118
    fills = plan(rules, specs, targets, ignore=ignore)
    total, done = sum(specs[key].nbytes for fill in fills for key in fill.sources), 0

    @contextmanager
    def reading(key: str, transform: Transform) -> Iterator[np.ndarray]:
        """The tensor in our layout; it is told of when it has been used."""
        nonlocal done
        yield transform.forward(reader.read(key))
        done += specs[key].nbytes
        if progress:
            progress(done, total)

    return _filled(abstract, {fill.target: _place(fill, targets[fill.target], reading) for fill in fills})


def restore(abstract: Module, arrays: Arrays, *, progress: Callable[[int, int], object] | None = None) -> Module:
    """The module with weights that are stored under our own names, wherever it was written; as `load` otherwise."""
    targets, done = parameters(abstract), 0
    plan([Rule(name, name) for name in targets], {name: arrays.spec(name) for name in arrays.keys()}, targets)  # noqa: SIM118

    def tell(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, arrays.nbytes)

    return _filled(abstract, arrays.restore(targets, tell))


def save(module: nnx.Module, folder: Path) -> None:
    """Writes the module's weights to a new folder, from which `restore` reads them; raises as `Arrays.save` does."""
    Arrays.save(folder, parameters(module))


def _filled(abstract: Module, weights: Mapping[str, jax.Array]) -> Module:
    graphdef, state = nnx.split(abstract)
    filled = [(path, variable.replace(weights[_dotted(path)])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def parameters(module: nnx.Module) -> dict[str, Any]:
    """The module's arrays, or their shapes and dtypes where it is abstract, by dotted path: the targets of `plan`."""
    return {_dotted(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(module))}


def _dotted(path: Iterable) -> str:
    return ".".join(map(str, path))


def _place(fill: Fill, target: Any, reading: Callable[[str, Transform], AbstractContextManager]) -> jax.Array:
    """Reads one parameter's tensors onto its devices.

    A stack goes to an accelerator slice by slice, into a buffer that is updated in place, so that the host never holds
    it whole. A CPU takes over the host's own buffer without a copy.
    """
    sharding = getattr(target, "sharding", None)
    devices = sharding.device_set if sharding else jax.devices()[:1]
    if not fill.stacked:
        with reading(fill.sources[0], fill.transform) as x:
            return _put(x, target)
    if len(devices) == 1 and all(device.platform == "cpu" for device in devices):
        host = aligned(target.shape, target.dtype)
        for i, key in enumerate(fill.sources):
            with reading(key, fill.transform) as x:
                rearrange(x, host[i])
        return jax.device_put(host, sharding)
    stack = jax.jit(partial(jnp.zeros, target.shape, target.dtype), out_shardings=sharding)()
    block = jax.ShapeDtypeStruct(target.shape[1:], target.dtype, sharding=_of_block(sharding))
    for i, key in enumerate(fill.sources):
        with reading(key, fill.transform) as x:
            stack = _set_block(stack, _put(x, block), i).block_until_ready()  # or many would wait there
    return stack


@partial(jax.jit, donate_argnums=0)
def _set_block(stack: jax.Array, block: jax.Array, i: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, block, i, 0)


def _of_block(sharding: Sharding | None) -> Sharding | None:
    """The sharding of one block of a stack that has `sharding`."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def _put(x: np.ndarray, target: Any) -> jax.Array:
    """A tensor that may be a view of a file on the devices, of which each process reads its own shards."""

    def read(part: Sequence[slice], dtype: np.dtype) -> np.ndarray:
        shard = x[tuple(part)]
        values = aligned(shard.shape, dtype)
        rearrange(shard, values)
        return values

    return place(read, target)


def rearrange(x: np.ndarray, out: np.ndarray) -> None:
    """Copies `x`, a view with its axes in any order, to `out` and casts it; on all cores where that pays."""
    if x.nbytes < PIECE:
        np.copyto(out, x, casting="unsafe")  # `plan` has seen to it that both are floating, or equal
        return
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    x, out = x.transpose(order), out.transpose(order)  # the source as it lies in memory
    if order == sorted(order):
        step, copy = max(1, PIECE * len(x) // x.nbytes), _copy
    else:
        step, copy = CHUNK // out.itemsize, _copy_through_cache
    pieces = [slice(start, start + step) for start in range(0, len(x), step)]
    list(_workers().map(lambda piece: copy(x[piece], out[piece]), pieces))


def _copy(x: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, x, casting="unsafe")


def _copy_through_cache(x: np.ndarray, out: np.ndarray) -> None:
    """Copies rows to columns, two to four times as fast as NumPy alone, which strides through memory as it casts.

    The rows are first cast into a buffer, in order. The buffer's rows are a cache line longer than they need be: at a
    distance of a power of two the elements of a column would all compete for the same few lines of the cache.
    """
    row = x[0].size
    padded = np.empty((len(x), row + CACHE_LINE // out.itemsize), out.dtype)[:, :row].reshape(x.shape)
    np.copyto(padded, x, casting="unsafe")
    bits = np.dtype(f"u{out.itemsize}")  # NumPy moves these faster than bfloat16
    np.copyto(out.view(bits), padded.view(bits))


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="wanjax-load")


class Exported:
    """Weights under our names as a `Reader` of tensors with the names and in the layouts of the table's sources.

    weights: arrays, or what has a shape and a dtype and gives an array for an index, a tensor at a time.
    The inverse of `load`, bit for bit.
    """

    def __init__(self, weights: Mapping[str, Any], rules: Iterable[Rule]):
        self._weights, self._places = weights, {}
        rules = list(rules)
        for target, values in weights.items():
            ((rule, indices),) = _rules_for(target, rules)
            fill, _ = _fill(rule, indices, target, values.shape, ())
            for i, key in enumerate(fill.sources):
                self._places[key] = (target, i if fill.stacked else ..., fill.transform)

    def keys(self) -> Iterable[str]:
        return self._places.keys()

    def spec(self, key: str) -> Spec:
        target, index, transform = self._places[key]
        values = self._weights[target]
        shape = tuple(values.shape) if index is ... else tuple(values.shape)[1:]
        return Spec(transform.source_shape(shape) or shape, np.dtype(values.dtype))

    def read(self, key: str) -> np.ndarray:
        target, index, transform = self._places[key]
        return transform.inverse(self._weights[target][index])


def export(model: nnx.Module, rules: Iterable[Rule], path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes the module's weights as one safetensors file with the names and layouts of the table's sources.

    The inverse of `load`, bit for bit when the dtypes are the same. Raises WanjaxError if the file cannot be written.
    """
    weights = {target: np.asarray(value) for target, value in parameters(model).items()}
    exported = Exported(weights, rules)
    write_safetensors(path, exported, exported.keys(), metadata)
