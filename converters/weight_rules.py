# SPDX-License-Identifier: Apache-2.0
"""Tables of rules that map the tensors of a Hugging Face checkpoint to the parameters of a module, and back.

A table is total: every parameter is filled from the checkpoint and every tensor of the checkpoint is used, or `assign`
raises one error that lists every fault. All names that a family's table needs can be imported from here.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

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
    "embedder",
    "feed_forward",
    "gamma",
    "layer",
    "linear",
    "norm",
    "patches",
    "pointwise",
    "projections",
    "rope_halves",
    "squeeze",
]

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


def layer(source: str, target: str, weight: Transform, *, bias: bool = True, rows: Transform = IDENTITY) -> list[Rule]:
    """Return a layer's rules: `weight` to `kernel`, rearranged, and `bias` if it has one, rearranged by `rows`."""
    rules = [Rule(f"{source}.weight", f"{target}.kernel", weight)]
    return rules + [Rule(f"{source}.bias", f"{target}.bias", rows)] * bias


def linear(source: str, target: str, *, bias: bool = True, rows: Transform = IDENTITY) -> list[Rule]:
    """Return a dense layer's rules, [out, in] -> kernel [in, out]; `rows` rearranges the outputs of both."""
    return layer(source, target, rows >> TRANSPOSE, bias=bias, rows=rows)


def conv(source: str, target: str, *, bias: bool = True) -> list[Rule]:
    """Return the rules of a convolution of any rank, [out, in, *kernel] -> kernel [*kernel, in, out]."""
    return layer(source, target, CONV, bias=bias)


def pointwise(source: str, target: str, axes: tuple[int, ...] = (2, 3, 4)) -> list[Rule]:
    """Return the rules that read a convolution with a kernel of size 1, on `axes`, as a dense layer."""
    return layer(source, target, squeeze(*axes) >> TRANSPOSE)


def embedder(source: str, target: str) -> list[Rule]:
    """Return the rules of two dense layers that diffusers calls `linear_1` and `linear_2`."""
    return [*linear(f"{source}.linear_1", f"{target}.up"), *linear(f"{source}.linear_2", f"{target}.down")]


def feed_forward(source: str, target: str) -> list[Rule]:
    """Return the rules of an MLP as diffusers names its two layers, `net.0.proj` and `net.2`."""
    return [*linear(f"{source}.net.0.proj", f"{target}.up"), *linear(f"{source}.net.2", f"{target}.down")]


def projections(source: str, target: str, rows: Transform = IDENTITY) -> list[Rule]:
    """Return the rules of the four projections of attention in diffusers; `rows` rearranges the outputs of q and k."""
    return [
        *linear(f"{source}.to_q", f"{target}.q", rows=rows),
        *linear(f"{source}.to_k", f"{target}.k", rows=rows),
        *linear(f"{source}.to_v", f"{target}.v"),
        *linear(f"{source}.to_out.0", f"{target}.out"),
    ]


def norm(source: str, target: str, *, bias: bool = False, rows: Transform = IDENTITY) -> list[Rule]:
    """Return a normalisation's rules, `weight` -> `scale`, and `bias` if it has one."""
    rules = [Rule(f"{source}.weight", f"{target}.scale", rows)]
    return rules + [Rule(f"{source}.bias", f"{target}.bias", rows)] * bias


def gamma(source: str, target: str, axes: tuple[int, ...] = (1, 2, 3)) -> Rule:
    """Return the rule of a normalisation whose `gamma` has `axes` of size 1."""
    return Rule(f"{source}.gamma", f"{target}.gamma", squeeze(*axes))


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
    """Return the tensors that fill each of the targets, by the rules.

    ignore: patterns with `*` for the names of superfluous tensors.
    Raises WanjaxError that lists every tensor that is missing, left over, used twice or of the wrong shape or dtype,
    and every parameter that no rule fills, or more than one.
    """
    rules, ignore = list(rules), list(ignore)
    assignments: list[Assignment] = []
    missing, unfit, orphans = [], [], []
    surplus = {key for key in sources if any(fnmatchcase(key, pattern) for pattern in ignore)}
    for path, target in targets.items():
        candidates = rules_for(path, rules)
        if len(candidates) != 1:
            orphans.append(path)
            continue
        assignment, aliases = expanded(*candidates[0], path, target.shape, sources)
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


def rules_for(path: str, rules: Iterable[Rule]) -> list[tuple[Rule, dict[str, str]]]:
    """Return the rules whose target matches `path`, with the values of their placeholders."""
    matches = [(rule, _regex(rule.target).fullmatch(path)) for rule in rules]
    return [(rule, match.groupdict()) for rule, match in matches if match]


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern:
    return re.compile(PLACEHOLDER.sub(r"(?P<\1>[0-9]+)", pattern.replace(".", r"\.")))


def expanded(
    rule: Rule, indices: dict[str, str], target: str, shape: Shape, sources: Iterable[str]
) -> tuple[Assignment, set[str]]:
    """Return the tensors with which a rule fills the target, and the surplus aliases."""
    stacked = set(PLACEHOLDER.findall(rule.source)) - set(indices)
    if len(stacked) > 1:
        raise ValueError(f"{rule.source} -> {rule.target}: only one placeholder can be stacked, not {sorted(stacked)}")
    keys, primary, surplus = [], [], set()
    for i in range(shape[0]) if stacked else [0]:
        values = indices | dict.fromkeys(stacked, str(i))
        names = [PLACEHOLDER.sub(lambda match: values[match[1]], name) for name in (rule.source, *rule.aliases)]  # noqa: B023
        primary.append(names[0])
        keys.append(next((name for name in names if name in sources), names[0]))
        surplus |= set(names) - {keys[-1]}
    return Assignment(target, tuple(keys), tuple(primary), rule.transform, bool(stacked)), surplus


def _misfit(source: Described, target: Described, assignment: Assignment) -> str:
    """Says how the source does not fit the target; empty if it does."""
    shape = tuple(target.shape)[assignment.stacked :]
    transform = assignment.transform
    if transform.shape(tuple(source.shape)) != shape:
        return f"{list(source.shape)} instead of {list(transform.source_shape(shape) or shape)}"
    floating = [jnp.issubdtype(described.dtype, jnp.floating) for described in (source, target)]
    if not all(floating) and source.dtype != target.dtype:
        return f"{source.dtype} instead of {target.dtype}"
    return ""


def _folded(names: Iterable[str]) -> list[str]:
    """Join names that differ only in their first index: `blocks.{0-3}.norm`."""
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
