# SPDX-License-Identifier: Apache-2.0
"""Moves weights between a Hugging Face checkpoint and an NNX module by a table of rules, in both directions.

A table is total: every parameter is filled from the checkpoint and every tensor of the checkpoint is used,
or `plan` raises one error that lists all that is wrong. Transforms only rearrange values, so each has an exact inverse.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

import jax
import numpy as np
from flax import nnx

from wanjax.checkpoint import save_safetensors
from wanjax.errors import WanjaxError

Module = TypeVar("Module", bound=nnx.Module)
Shape = tuple[int, ...]
PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Transform:
    """An exact rearrangement of a tensor's values, from the checkpoint's layout to ours (`forward`) and back."""

    name: str
    forward: Callable
    inverse: Callable

    def __rshift__(self, after: "Transform") -> "Transform":
        """This transform, then `after`."""
        return Transform(
            f"{self.name} >> {after.name}",
            lambda x: after.forward(self.forward(x)),
            lambda x: self.inverse(after.inverse(x)),
        )

    def shape(self, source: Shape) -> Shape | None:
        """The shape that a source shape becomes; None where the transform does not apply to it."""
        return _shape_through(self.forward, source)

    def source_shape(self, target: Shape) -> Shape | None:
        """The shape that the source must have to become `target`."""
        return _shape_through(self.inverse, target)


@lru_cache(maxsize=4096)
def _shape_through(rearrange: Callable, shape: Shape) -> Shape | None:
    no_memory = np.broadcast_to(np.int8(0), shape)  # all strides are 0: a rearrangement of it copies nothing
    try:
        return rearrange(no_memory).shape
    except ValueError:
        return None


def _swap_pairs(x, groups: int, inner: tuple[int, int]):
    """Rows [groups * a * b, ...] with the axes a and b, of sizes `inner` (one of them -1), exchanged."""
    rows = x.reshape(groups, *inner, *x.shape[1:])
    return rows.swapaxes(1, 2).reshape(x.shape)


def rope_halves(heads: int) -> Transform:
    """Rows of a q or k weight, bias or norm [N*D, ...]: in each head pairs (0,1),(2,3).. become (0,D/2),(1,D/2+1).."""
    return Transform(
        f"rope_halves({heads})",
        lambda x: _swap_pairs(x, heads, (-1, 2)),
        lambda x: _swap_pairs(x, heads, (2, -1)),
    )


def squeeze(*axes: int) -> Transform:
    """Drops axes of size 1."""
    return Transform(
        f"squeeze{axes}",
        lambda x: x.squeeze(axes),
        lambda x: np.expand_dims(x, axes),
    )


def patches(patch: tuple[int, ...]) -> Transform:
    """The weight of a convolution whose stride is its kernel, [E, C, *patch] -> a kernel [prod(patch) * C, E].

    The rows are ordered as our patches are flattened: offsets in the patch first, channel last.
    """
    rank = len(patch)

    def forward(x):
        if x.shape[2:] != patch:
            raise ValueError
        return x.transpose(*range(2, 2 + rank), 1, 0).reshape(-1, x.shape[0])

    def inverse(x):
        width = x.shape[1]
        return x.reshape(*patch, -1, width).transpose(rank + 1, rank, *range(rank))

    return Transform(f"patches{patch}", forward, inverse)


IDENTITY = Transform("identity", lambda x: x, lambda x: x)
TRANSPOSE = Transform("transpose", lambda x: x.transpose(1, 0), lambda x: x.transpose(1, 0))
CONV = Transform(
    "conv",
    lambda x: x.transpose(*range(2, x.ndim), 1, 0),
    lambda x: x.transpose(x.ndim - 1, x.ndim - 2, *range(x.ndim - 2)),
)
"""A convolution's weight [O, I, *kernel] -> [*kernel, I, O]."""


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
    """One parameter: the tensors that fill it, one for each index of its stacked axis, or just one."""

    target: str
    sources: tuple[str, ...]
    transform: Transform
    stacked: bool


Plan = list[Fill]


class Reader(Protocol):
    """What `load` reads from; `wanjax.checkpoint.SafetensorsFolder` is one."""

    def keys(self) -> Iterable[str]: ...

    def spec(self, key: str) -> tuple[Shape, np.dtype]: ...

    def read(self, key: str) -> np.ndarray: ...


def plan(
    rules: Iterable[Rule], sources: Mapping[str, Shape], targets: Mapping[str, Shape], *, ignore: Iterable[str] = ()
) -> Plan:
    """Which tensor fills which parameter.

    `ignore`: patterns with `*` of keys known to be superfluous.
    Raises WanjaxError that lists every key that is missing, left over, used twice or of the wrong shape, and every
    parameter that no rule or more than one fills.
    """
    rules = list(rules)
    fills, faults = [], []
    surplus = {key for key in sources if any(fnmatchcase(key, pattern) for pattern in ignore)}
    for target, shape in targets.items():
        found = [(rule, match) for rule in rules if (match := _match(rule.target, target)) is not None]
        if len(found) != 1:
            faults.append(f"{target} is filled by {len(found) or 'no'} rules{'' if found else ' of the table'}")
            continue
        rule, indices = found[0]
        fill, aliases = _fill(rule, target, shape, indices, sources)
        fills.append(fill)
        surplus |= aliases
        for key in fill.sources:
            faults += _shape_faults(key, sources, fill, shape[fill.stacked :])
    uses = Counter(key for fill in fills for key in fill.sources)
    faults += [f"{key} is used {count} times" for key, count in uses.items() if count > 1]
    faults += [f"{key} is left over" for key in sources if key not in uses and key not in surplus]
    if faults:
        raise WanjaxError(f"the checkpoint does not fit the model: {'; '.join(faults)}")
    return fills


def _match(pattern: str, path: str) -> dict[str, str] | None:
    """The values of the pattern's placeholders that make it `path`."""
    found = _regex(pattern).fullmatch(path)
    return None if found is None else found.groupdict()


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern:
    return re.compile(PLACEHOLDER.sub(r"(?P<\1>[0-9]+)", pattern.replace(".", r"\.")))


def _fill(rule: Rule, target: str, shape: Shape, indices: dict[str, str], sources) -> tuple[Fill, set[str]]:
    """How the rule fills the target, and the aliases that are then surplus."""
    stacked = set(PLACEHOLDER.findall(rule.source)) - set(indices)
    if len(stacked) > 1:
        raise ValueError(f"{rule.source} -> {rule.target}: only one placeholder can be stacked, not {sorted(stacked)}")
    keys, surplus = [], set()
    for i in range(shape[0]) if stacked else [0]:
        values = indices | dict.fromkeys(stacked, str(i))
        names = [PLACEHOLDER.sub(lambda found: values[found[1]], name) for name in (rule.source, *rule.aliases)]  # noqa: B023
        keys.append(next((name for name in names if name in sources), names[0]))
        surplus |= set(names) - {keys[-1]}
    return Fill(target, tuple(keys), rule.transform, bool(stacked)), surplus


def _shape_faults(key: str, sources: Mapping[str, Shape], fill: Fill, shape: Shape) -> list[str]:
    if key not in sources:
        return [f"{key} is missing (for {fill.target})"]
    if fill.transform.shape(tuple(sources[key])) != tuple(shape):
        wanted = fill.transform.source_shape(tuple(shape))
        return [f"{key} has shape {list(sources[key])} where {list(wanted or shape)} is right (for {fill.target})"]
    return []


def load(
    abstract: Module,
    rules: Iterable[Rule],
    reader: Reader,
    *,
    ignore: Iterable[str] = (),
    shardings: nnx.State | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Module:
    """The module with the checkpoint's weights, each in the dtype that the abstract module gives it.

    abstract: the result of `nnx.eval_shape`; `shardings`: the same tree with a sharding for each parameter;
    `progress(done, total)` is called with the bytes of the checkpoint read so far, after each tensor.
    One parameter at a time is on the host. Raises WanjaxError as `plan` does.
    """
    graphdef, state = nnx.split(abstract)
    targets = _parameters(state)
    specs = {key: reader.spec(key) for key in reader.keys()}  # noqa: SIM118
    fills = plan(
        rules,
        {key: shape for key, (shape, _) in specs.items()},
        {path: variable.get_value().shape for path, variable in targets.items()},
        ignore=ignore,
    )
    placements = {} if shardings is None else _parameters(shardings)
    sizes = {key: int(np.prod(shape)) * dtype.itemsize for key, (shape, dtype) in specs.items()}
    total, done = sum(sizes[key] for fill in fills for key in fill.sources), 0
    for fill in fills:
        variable = targets[fill.target]
        abstract_value = variable.get_value()
        host = np.empty(abstract_value.shape, abstract_value.dtype)
        for i, key in enumerate(fill.sources):
            np.copyto(host[i] if fill.stacked else host, fill.transform.forward(reader.read(key)), casting="unsafe")
            done += sizes[key]
            if progress:
                progress(done, total)
        variable.set_value(jax.device_put(host, _sharding(placements.get(fill.target))))
    return nnx.merge(graphdef, state)


def _parameters(state: nnx.State) -> dict[str, nnx.Variable]:
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def _sharding(leaf):
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def export(model: nnx.Module, rules: Iterable[Rule], path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes the module's weights as one safetensors file with the names and layouts of the table's sources."""
    weights = {target: np.asarray(v.get_value()) for target, v in _parameters(nnx.state(model)).items()}
    tensors = {}
    for target, value in weights.items():
        rule, indices = next((r, m) for r in rules if (m := _match(r.target, target)) is not None)
        fill, _ = _fill(rule, target, value.shape, indices, {})
        for i, key in enumerate(fill.sources):
            tensors[key] = fill.transform.inverse(value[i] if fill.stacked else value)
    save_safetensors(path, tensors, metadata)
