# SPDX-License-Identifier: Apache-2.0
"""Moves weights between a Hugging Face checkpoint and an NNX module by a table of rules, in both directions.

A table is total: every parameter is filled from the checkpoint and every tensor of the checkpoint is used, or `assign`
raises one error that lists every fault. All names that a family's table needs can be imported from here.
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

from wanjax.checkpoints.arrays import Arrays, parts, place
from wanjax.checkpoints.files import CACHE_LINE, Reader, Spec, aligned, write_safetensors
from wanjax.converters.transforms import (
    CONV,
    IDENTITY,
    TRANSPOSE,
    Shape,
    Transform,
    channels_last,
    patches,
    rope_halves,
    squeeze,
)
from wanjax.errors import WanjaxError

__all__ = [
    "CONV",
    "IDENTITY",
    "TRANSPOSE",
    "Assignment",
    "Rule",
    "Transform",
    "assign",
    "channels_last",
    "conv",
    "export",
    "linear",
    "load",
    "norm",
    "parameters",
    "patches",
    "restore",
    "rope_halves",
    "save",
    "squeeze",
]

Module = TypeVar("Module", bound=nnx.Module)
PIECE = 1 << 20  # bytes that one core copies at a time
SMALL_STACK = 64 << 20  # bytes; the largest tensor of a model that strains a host's memory has more
CHUNK = 512  # bytes that it writes in a row when it copies rows to columns
PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Rule:
    """A line of a table: the tensors named `source` become the parameters named `target`.

    A placeholder such as `{i}` stands for an index. A placeholder in both names has the same value in both; one in
    `source` alone runs along the leading axis of the target, which stacks equal blocks. `aliases` are other names under
    which files store the same tensor (tied weights): the first one found is read, the others are ignored.
    """

    source: str
    target: str
    transform: Transform = IDENTITY
    aliases: tuple[str, ...] = ()


def linear(source: str, target: str, *, bias: bool = True, rows: Transform = IDENTITY) -> list[Rule]:
    """Returns a dense layer's rules, [out, in] -> kernel [in, out]; `rows` rearranges the outputs of both."""
    rules = [Rule(f"{source}.weight", f"{target}.kernel", rows >> TRANSPOSE)]
    return rules + [Rule(f"{source}.bias", f"{target}.bias", rows)] * bias


def conv(source: str, target: str, *, bias: bool = True) -> list[Rule]:
    """Returns the rules of a convolution of any rank, [out, in, *kernel] -> kernel [*kernel, in, out]."""
    rules = [Rule(f"{source}.weight", f"{target}.kernel", CONV)]
    return rules + [Rule(f"{source}.bias", f"{target}.bias")] * bias


def pointwise(source: str, target: str, axes: tuple[int, ...] = (2, 3, 4)) -> list[Rule]:
    """Returns the rules that read a convolution with a kernel of size 1, on `axes`, as a dense layer."""
    return [
        Rule(f"{source}.weight", f"{target}.kernel", squeeze(*axes) >> TRANSPOSE),
        Rule(f"{source}.bias", f"{target}.bias"),
    ]


def norm(source: str, target: str, *, bias: bool = False, rows: Transform = IDENTITY) -> list[Rule]:
    """Returns a normalisation's rules, `weight` -> `scale`, and `bias` if it has one."""
    rules = [Rule(f"{source}.weight", f"{target}.scale", rows)]
    return rules + [Rule(f"{source}.bias", f"{target}.bias", rows)] * bias


@dataclass(frozen=True)
class Assignment:
    """The tensors that fill one parameter: one for each index of its stacked axis, or a single one.

    `sources` are the tensors' names in the files, which may be aliases; `names` are their names in the rule.
    """

    target: str
    sources: tuple[str, ...]
    names: tuple[str, ...]
    transform: Transform
    stacked: bool


@runtime_checkable
class Described(Protocol):
    """An object with a shape and a dtype: a `Spec`, an array, a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype: ...


def assign(
    rules: Iterable[Rule],
    sources: Mapping[str, Described],
    targets: Mapping[str, Described],
    *,
    ignore: Iterable[str] = (),
) -> list[Assignment]:
    """Returns the tensors that fill each of the targets, by the rules.

    ignore: patterns with `*` for the names of superfluous tensors.
    Raises WanjaxError that lists every tensor that is missing, left over, used twice or of the wrong shape or dtype,
    and every parameter that no rule fills, or more than one.
    """
    rules, ignore = list(rules), list(ignore)
    assignments: list[Assignment] = []
    missing, unfit, orphans = [], [], []
    surplus = {key for key in sources if any(fnmatchcase(key, pattern) for pattern in ignore)}
    for path, target in targets.items():
        candidates = _rules_for(path, rules)
        if len(candidates) != 1:
            orphans.append(path)
            continue
        assignment, aliases = _assignment(*candidates[0], path, target.shape, sources)
        assignments.append(assignment)
        surplus |= aliases
        for key in assignment.sources:
            if key not in sources:
                missing.append(key)
            elif wrong := _misfit(sources[key], target, assignment):
                unfit.append(f"{key} ({wrong})")
    uses = Counter(key for assignment in assignments for key in assignment.sources)
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
    return assignments


def _rules_for(path: str, rules: Iterable[Rule]) -> list[tuple[Rule, dict[str, str]]]:
    """Returns the rules whose target matches `path`, with the values of their placeholders."""
    matches = [(rule, _regex(rule.target).fullmatch(path)) for rule in rules]
    return [(rule, match.groupdict()) for rule, match in matches if match]


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern:
    return re.compile(PLACEHOLDER.sub(r"(?P<\1>[0-9]+)", pattern.replace(".", r"\.")))


def _assignment(
    rule: Rule, indices: dict[str, str], target: str, shape: Shape, sources: Iterable[str]
) -> tuple[Assignment, set[str]]:
    """Returns the tensors by which the rule fills the target, and the aliases that are then surplus."""
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
    return Assignment(target, tuple(keys), tuple(own), rule.transform, bool(stacked)), surplus


def _misfit(source: Described, target: Described, assignment: Assignment) -> str:
    """Says how the source does not fit the target; empty if it does."""
    shape = tuple(target.shape)[assignment.stacked :]
    transform = assignment.transform
    if transform.shape(tuple(source.shape)) != shape:
        return f"{list(source.shape)} where {list(transform.source_shape(shape) or shape)} is right"
    floating = [jnp.issubdtype(described.dtype, jnp.floating) for described in (source, target)]
    if not all(floating) and source.dtype != target.dtype:
        return f"{source.dtype} where {target.dtype} is right"
    return ""


def _folded(names: Iterable[str]) -> list[str]:
    """Joins names that differ only in their first index: `blocks.{0-3}.norm`."""
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
    """Returns the module with the checkpoint's weights, each in the abstract module's dtype and sharding.

    abstract: from `nnx.eval_shape`, or `nnx.merge(*nnx.get_abstract_model(..., mesh))`, which has shardings; progress:
    called after each tensor with the checkpoint's bytes read so far and in all.
    One tensor, or one stack of at most `SMALL_STACK` bytes, is in host memory at a time, beside the weights themselves
    where the devices are CPUs; each process reads only its devices' shards. Raises WanjaxError as `assign` does.
    """
    targets = parameters(abstract)
    specs = {key: reader.spec(key) for key in reader.keys()}  # noqa: SIM118
    assignments = assign(rules, specs, targets, ignore=ignore)
    total, done = sum(specs[key].nbytes for each in assignments for key in each.sources), 0

    @contextmanager
    def reading(key: str, transform: Transform) -> Iterator[np.ndarray]:
        """Yields the rearranged tensor, and reports its bytes once it has been used."""
        nonlocal done
        yield transform.forward(reader.read(key))
        done += specs[key].nbytes
        if progress:
            progress(done, total)

    return _filled(abstract, {each.target: _place(each, targets[each.target], reading) for each in assignments})


def restore(abstract: Module, arrays: Arrays, *, progress: Callable[[int, int], object] | None = None) -> Module:
    """Returns the module with weights that `save` or `wanjax convert` stored; otherwise as `load`."""
    targets, done = parameters(abstract), 0
    assign([Rule(name, name) for name in targets], {name: arrays.spec(name) for name in arrays.keys()}, targets)  # noqa: SIM118

    def tell(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, arrays.nbytes)

    return _filled(abstract, arrays.restore(targets, tell))


def save(module: nnx.Module, folder: Path) -> None:
    """Writes the module's weights to a new folder for `restore`; raises as `Arrays.save` does."""
    Arrays.save(folder, parameters(module))


def _filled(abstract: Module, weights: Mapping[str, jax.Array]) -> Module:
    graphdef, state = nnx.split(abstract)
    filled = [(path, variable.replace(weights[_dotted(path)])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def parameters(module: nnx.Module) -> dict[str, Any]:
    """Returns the module's arrays by dotted path, as shapes and dtypes if it is abstract: targets for `assign`."""
    return {_dotted(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(module))}


def _dotted(path: Iterable) -> str:
    return ".".join(map(str, path))


def _place(
    assignment: Assignment, target: Any, reading: Callable[[str, Transform], AbstractContextManager]
) -> jax.Array:
    """Reads one parameter's tensors onto its devices. Only a large stack for accelerators needs programs."""
    blocks = [reading(key, assignment.transform) for key in assignment.sources]  # each is read when it is entered
    if assignment.stacked:
        return (_assembled if _fits_host(target) else _block_by_block)(blocks, target)
    with blocks[0] as x:
        return _put(x, target)


def _fits_host(target: Any) -> bool:
    """Tells whether a stack can be put together in host memory, from which it goes to its devices without a program.

    A CPU takes over the host's own buffers. An accelerator copies them, and a large stack beside them is too much.
    """
    sharding = getattr(target, "sharding", None)
    devices = sharding.device_set if sharding else jax.devices()[:1]
    return all(device.platform == "cpu" for device in devices) or target.size * target.dtype.itemsize <= SMALL_STACK


def _assembled(blocks: Sequence[AbstractContextManager[np.ndarray]], target: Any) -> jax.Array:
    """Returns a stack whose shards on this process's devices are put together in host memory."""
    shards = {str(part): (part, aligned(shape, target.dtype)) for part, shape in parts(target)}
    for i, block in enumerate(blocks):
        with block as x:
            for (along, *within), values in shards.values():
                if i in (here := range(len(blocks))[along]):
                    rearrange(x[tuple(within)], values[here.index(i), ...])
    return place(lambda part, _: shards[str(part)][1], target).block_until_ready()  # else many would wait there


def _block_by_block(blocks: Sequence[AbstractContextManager[np.ndarray]], target: Any) -> jax.Array:
    """Returns a stack that is updated in place on its devices, so that host memory holds one block at a time."""
    sharding = getattr(target, "sharding", None)
    stack = _zeros(tuple(target.shape), target.dtype, sharding)()
    shape = jax.ShapeDtypeStruct(target.shape[1:], target.dtype, sharding=_block_sharding(sharding))
    for i, block in enumerate(blocks):
        with block as x:
            stack = _set_block(stack, _put(x, shape), i).block_until_ready()  # else many would wait there
    return stack


@cache
def _zeros(shape: Shape, dtype: np.dtype, sharding: Sharding | None) -> Callable[[], jax.Array]:
    """Returns a program that many stacks share, which makes an empty one."""
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)


@partial(jax.jit, donate_argnums=0)
def _set_block(stack: jax.Array, block: jax.Array, i: int | jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, block, i, 0)


def _block_sharding(sharding: Sharding | None) -> Sharding | None:
    """Returns the sharding of one block, given its stack's."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def _put(x: np.ndarray, target: Any) -> jax.Array:
    """Puts a tensor, which may be a view of a file, on the devices; each process reads its own shards."""
    return place(partial(_part, x), target)


def _part(x: np.ndarray, part: Sequence[slice], dtype: np.dtype) -> np.ndarray:
    """Returns a part of a tensor in this dtype, in memory of its own."""
    shard = x[tuple(part)]
    values = aligned(shard.shape, dtype)
    rearrange(shard, values)
    return values


def rearrange(x: np.ndarray, out: np.ndarray) -> None:
    """Copies `x`, a view with its axes in any order, to `out` and casts it; large ones on all cores."""
    if x.nbytes < PIECE:
        np.copyto(out, x, casting="unsafe")  # `assign` has checked that both are floating or equal
        return
    order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    x, out = x.transpose(order), out.transpose(order)  # the source in its order in memory
    if order == sorted(order):
        step, copy = max(1, PIECE * len(x) // x.nbytes), _copy
    else:
        step, copy = CHUNK // out.itemsize, _copy_through_cache
    pieces = [slice(start, start + step) for start in range(0, len(x), step)]
    list(_workers().map(lambda piece: copy(x[piece], out[piece]), pieces))


def _copy(x: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, x, casting="unsafe")


def _copy_through_cache(x: np.ndarray, out: np.ndarray) -> None:
    """Copies rows to columns, two to four times as fast as NumPy, which casts while it strides through memory.

    The rows are first cast into a buffer, in order. The buffer's rows are a cache line longer than needed, since the
    elements of a column, at a distance of a power of two, would compete for the same few cache lines.
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
    """A module's weights as a `Reader` of the table's source tensors, with their names, shapes and order of axes.

    weights: arrays, or objects with a shape and a dtype that return an array for an index, such as `StoredArray`.
    It inverts `load` bit for bit.
    """

    def __init__(self, weights: Mapping[str, Any], rules: Iterable[Rule]):
        self._weights, self._places = weights, {}
        rules = list(rules)
        for target, values in weights.items():
            ((rule, indices),) = _rules_for(target, rules)
            found, _ = _assignment(rule, indices, target, values.shape, ())
            for i, key in enumerate(found.sources):
                self._places[key] = (target, i if found.stacked else ..., found.transform)

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
    """Writes the module's weights as one safetensors file of the table's source tensors.

    It inverts `load`, bit for bit when the dtypes are the same. Raises WanjaxError if the file cannot be written.
    """
    weights = {target: np.asarray(value) for target, value in parameters(model).items()}
    exported = Exported(weights, rules)
    write_safetensors(path, exported, exported.keys(), metadata)
