# SPDX-License-Identifier: Apache-2.0
"""Rules that map the tensors of a Hugging Face checkpoint to the parameters of a module, and back.

A list of rules is total: it fills every parameter and uses every tensor of the checkpoint. Otherwise `assign` raises
one error with all problems. A family's converter imports everything from this module.
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
    "Transform",
    "WeightRule",
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
class WeightRule:
    """The name of a checkpoint's tensors and the name of the parameter that these tensors fill.

    A placeholder such as `{i}` stands for an index. If both names have the placeholder, it has the same value in both.
    If only `source` has it, the tensors are stacked along the leading axis of the target.

    Args:
        source: The name of the tensors.
        target: The name of the parameter.
        transform: The rearrangement of the values.
        aliases: Other names under which files store the same tensor (tied weights). The first existing name is read,
            and all other names are ignored.
    """

    source: str
    target: str
    transform: Transform = IDENTITY
    aliases: tuple[str, ...] = ()


def layer(
    source: str, target: str, weight: Transform, *, bias: bool = True, rows: Transform = IDENTITY
) -> list[WeightRule]:
    """Return a layer's rules: `weight` transforms the weight, which becomes `kernel`; `rows` transforms the bias."""
    rules = [WeightRule(f"{source}.weight", f"{target}.kernel", weight)]
    return rules + [WeightRule(f"{source}.bias", f"{target}.bias", rows)] * bias


def linear(source: str, target: str, *, bias: bool = True, rows: Transform = IDENTITY) -> list[WeightRule]:
    """Return a dense layer's rules, [out, in] -> kernel [in, out]; `rows` rearranges the outputs of weight and bias."""
    return layer(source, target, rows >> TRANSPOSE, bias=bias, rows=rows)


def conv(source: str, target: str, *, bias: bool = True) -> list[WeightRule]:
    """Return the rules of a convolution of any rank, [out, in, *kernel] -> kernel [*kernel, in, out]."""
    return layer(source, target, CONV, bias=bias)


def pointwise(source: str, target: str, axes: tuple[int, ...] = (2, 3, 4)) -> list[WeightRule]:
    """Return the rules that turn a convolution, whose kernel has size 1 along `axes`, into a dense layer."""
    return layer(source, target, squeeze(*axes) >> TRANSPOSE)


def embedder(source: str, target: str) -> list[WeightRule]:
    """Return the rules of two dense layers, `linear_1` and `linear_2` in diffusers."""
    return [*linear(f"{source}.linear_1", f"{target}.up"), *linear(f"{source}.linear_2", f"{target}.down")]


def feed_forward(source: str, target: str) -> list[WeightRule]:
    """Return the rules of an MLP, `net.0.proj` and `net.2` in diffusers."""
    return [*linear(f"{source}.net.0.proj", f"{target}.up"), *linear(f"{source}.net.2", f"{target}.down")]


def projections(source: str, target: str, rows: Transform = IDENTITY) -> list[WeightRule]:
    """Return the rules of attention's four projections in diffusers; `rows` rearranges the outputs of q and k."""
    return [
        *linear(f"{source}.to_q", f"{target}.q", rows=rows),
        *linear(f"{source}.to_k", f"{target}.k", rows=rows),
        *linear(f"{source}.to_v", f"{target}.v"),
        *linear(f"{source}.to_out.0", f"{target}.out"),
    ]


def norm(source: str, target: str, *, bias: bool = False, rows: Transform = IDENTITY) -> list[WeightRule]:
    """Return the rules of a norm, `weight` -> `scale`, and `bias` if it has one."""
    rules = [WeightRule(f"{source}.weight", f"{target}.scale", rows)]
    return rules + [WeightRule(f"{source}.bias", f"{target}.bias", rows)] * bias


def gamma(source: str, target: str, axes: tuple[int, ...] = (1, 2, 3)) -> WeightRule:
    """Return the rule of a norm; remove the `axes` of size 1 from its `gamma`."""
    return WeightRule(f"{source}.gamma", f"{target}.gamma", squeeze(*axes))


@dataclass(frozen=True)
class Assignment:
    """The tensors that fill one parameter: a tensor for each index of its stacked axis, or a single tensor.

    Args:
        target: The parameter's name.
        sources: The tensors' names in the files, which may be aliases.
        names: The tensors' names according to the rule.
        transform: The rearrangement of the values.
        stacked: Whether the tensors are stacked along the parameter's first axis.
    """

    target: str
    sources: tuple[str, ...]
    names: tuple[str, ...]
    transform: Transform
    stacked: bool


@runtime_checkable
class ArraySpec(Protocol):
    """Any object with a shape and a dtype: a `Spec`, an array, a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype: ...


def assign(
    rules: Iterable[WeightRule],
    sources: Mapping[str, ArraySpec],
    targets: Mapping[str, ArraySpec],
    *,
    ignore: Iterable[str] = (),
) -> list[Assignment]:
    """Find the tensors that fill each parameter in `targets`.

    Args:
        rules: The rules.
        sources: Shapes and dtypes of the checkpoint's tensors.
        targets: Shapes and dtypes of the parameters.
        ignore: Patterns with `*` for the names of unused tensors.

    Raises:
        WanjaxError: A tensor is missing, unused, used twice or of the wrong shape or dtype, or a parameter is not
            filled by exactly one rule. The message lists all problems.
    """
    rules, ignore = list(rules), list(ignore)
    assignments: list[Assignment] = []
    missing, mismatched, unmatched = [], [], []
    ignored = {key for key in sources if any(fnmatchcase(key, pattern) for pattern in ignore)}
    for path, target in targets.items():
        candidates = rules_for(path, rules)
        if len(candidates) != 1:
            unmatched.append(path)
            continue
        assignment, aliases = expand_rule(*candidates[0], path, target.shape, sources)
        assignments.append(assignment)
        ignored |= aliases
        for key in assignment.sources:
            if key not in sources:
                missing.append(key)
            elif problem := _mismatch(sources[key], target, assignment):
                mismatched.append(f"{key} ({problem})")
    uses = Counter(key for assignment in assignments for key in assignment.sources)
    problems = {
        "missing": missing,
        "unused": [key for key in sources if key not in uses and key not in ignored],
        "of the wrong shape or dtype": mismatched,
        "used twice": [key for key, count in uses.items() if count > 1],
        "parameters not filled by exactly one rule": unmatched,
    }
    if any(problems.values()):
        problem_text = "; ".join(
            f"{problem}: {', '.join(_fold_indices(names))}" for problem, names in problems.items() if names
        )
        raise WanjaxError(
            f"the checkpoint does not fit the model: every tensor must fill one parameter; {problem_text}"
        )
    return assignments


def rules_for(path: str, rules: Iterable[WeightRule]) -> list[tuple[WeightRule, dict[str, str]]]:
    """Return the rules whose target matches `path`, with the values of their placeholders."""
    matches = [(rule, _regex(rule.target).fullmatch(path)) for rule in rules]
    return [(rule, match.groupdict()) for rule, match in matches if match]


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern:
    return re.compile(PLACEHOLDER.sub(r"(?P<\1>[0-9]+)", pattern.replace(".", r"\.")))


def expand_rule(
    rule: WeightRule, indices: dict[str, str], target: str, shape: Shape, sources: Iterable[str]
) -> tuple[Assignment, set[str]]:
    """Return the tensors that fill the target by this rule, and the aliases to ignore."""
    stacked = set(PLACEHOLDER.findall(rule.source)) - set(indices)
    if len(stacked) > 1:
        raise ValueError(f"{rule.source} -> {rule.target}: only one placeholder can be stacked, not {sorted(stacked)}")
    keys, rule_names, ignored = [], [], set()
    for i in range(shape[0]) if stacked else [0]:
        values = indices | dict.fromkeys(stacked, str(i))
        names = [PLACEHOLDER.sub(lambda match: values[match[1]], name) for name in (rule.source, *rule.aliases)]  # noqa: B023
        rule_names.append(names[0])
        keys.append(next((name for name in names if name in sources), names[0]))
        ignored |= set(names) - {keys[-1]}
    return Assignment(target, tuple(keys), tuple(rule_names), rule.transform, bool(stacked)), ignored


def _mismatch(source: ArraySpec, target: ArraySpec, assignment: Assignment) -> str:
    """Describe how the source differs from what the target needs; return an empty string if the source fits."""
    shape = tuple(target.shape)[assignment.stacked :]
    transform = assignment.transform
    if transform.shape(tuple(source.shape)) != shape:
        return f"{list(source.shape)} instead of {list(transform.source_shape(shape) or shape)}"
    floating = [jnp.issubdtype(array.dtype, jnp.floating) for array in (source, target)]
    if not all(floating) and source.dtype != target.dtype:
        return f"{source.dtype} instead of {target.dtype}"
    return ""


def _fold_indices(names: Iterable[str]) -> list[str]:
    """Join names that differ only in their first index: `blocks.{0-3}.norm`."""
    groups = defaultdict(list)
    for name in names:
        prefix, index, suffix = (*re.split(r"(?<=\.)([0-9]{1,9})(?=\.)", name, maxsplit=1), "", "")[:3]
        groups[prefix, suffix].append(index)
    return [prefix + _format_ranges(indices) + suffix for (prefix, suffix), indices in groups.items()]


def _format_ranges(indices: list[str]) -> str:
    if len(indices) == 1:
        return indices[0]
    ranges: list[list[int]] = []
    for i in sorted(map(int, indices)):
        if ranges and i == ranges[-1][1] + 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return "{" + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges) + "}"
