# SPDX-License-Identifier: Apache-2.0
"""Moves weights between a Hugging Face checkpoint and an NNX module by a table of rules, in both directions.

A table is total: every parameter is filled from the checkpoint and every tensor of the checkpoint is used, or `assign`
raises one error that lists every fault. All names that a family's table needs can be imported from here.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wanjax.checkpoints.arrays import Arrays
from wanjax.checkpoints.files import Reader, Spec, write_safetensors
from wanjax.checkpoints.placing import on_devices
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
    One tensor, or one stack of at most `placing.SMALL_STACK` bytes, is in host memory at a time, beside the weights
    themselves where the devices are CPUs; each process reads only its devices' shards. Raises WanjaxError as `assign`
    does.
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

    def weights(each: Assignment) -> jax.Array:
        tensors = [reading(key, each.transform) for key in each.sources]  # each is read when it is entered
        return on_devices(tensors, targets[each.target], stacked=each.stacked)

    return _filled(abstract, {each.target: weights(each) for each in assignments})


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
