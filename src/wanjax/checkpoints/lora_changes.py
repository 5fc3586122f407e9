# SPDX-License-Identifier: Apache-2.0
"""The changes that a LoRA file makes, by the names of the tensors that they change."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from wanjax.checkpoints.files import MappedFile
from wanjax.checkpoints.lora_keys import HIGH, LOW, OF_ROWS, Part, check_kind, expert_of, experts_of, part_of, unwrapped
from wanjax.checkpoints.lora_products import DIFF, FORMULAS, Formula
from wanjax.checkpoints.lora_scales import Scales
from wanjax.errors import WanjaxError

WEIGHT = ".weight"
ALPHA = ("alpha", WEIGHT)
Module = dict[tuple[str, str], Part]  # what a file holds of a module, by role and the end of the changed tensor's name


class Change(NamedTuple):
    """The change of a tensor: a formula of tensors of the file, by their roles, times `scale`.

    `magnitude` is the tensor of DoRA's norms, which are `of_rows`, or are those of columns by its shape. Where it
    `replaces`, it is the tensor in place of a change.
    """

    formula: Formula
    factors: Mapping[str, str]
    scale: float = 1.0
    magnitude: str | None = None
    of_rows: bool = False
    replaces: bool = False

    @property
    def key(self) -> str:
        """The key of its first factor, by which messages name it."""
        return next(iter(self.factors.values()))


def duplicate_error(path: object, *keys: str) -> WanjaxError:
    """Return the error for two keys of a file that change the same tensor."""
    return WanjaxError(f"{path} holds both {' and '.join(keys)}, for the same weights: keep one of them")


def changes_in(
    reader: MappedFile, tensors: Mapping[str, Any], expert: str | None
) -> tuple[dict[str, Change], list[str], list[str]]:
    """Return the changes by the names of the changed tensors, in the network's names where they are known.

    Returns also the keys of no change, and the patterns of alphas and ranks that fit no module.
    """
    names = tensors.keys() | {name.rpartition(".")[0] for name in tensors} - {""}
    scales, changes = Scales(reader), dict[str, Change]()
    parts, others = _parts(reader, names, expert)
    unknown: list[str] = []
    for name, module in parts.items():
        for tensor, change in _of_module(reader, name, module, scales, tensors):
            if changes.setdefault(tensor, change) is not change:
                raise duplicate_error(reader.path, changes[tensor].key, change.key)
        if module.keys() == {ALPHA}:
            unknown.append(module[ALPHA].key)
    for key in others:
        name = unwrapped(key, names)
        if scales.of_values and name in tensors and name not in changes:
            changes[name] = Change(DIFF, {"diff": key}, replaces=True)
        else:
            unknown.append(key)
    return changes, unknown, scales.idle


def _of_module(
    reader: MappedFile, name: str, module: Module, scales: Scales, tensors: Mapping[str, Any]
) -> Iterator[tuple[str, Change]]:
    """Yield the changes of a module's tensors, by the tensors' names."""
    weight = {role: part.key for (role, leaf), part in module.items() if leaf == WEIGHT}
    magnitudes = [weight[role] for role in (OF_ROWS, "magnitude") if role in weight]
    if len(magnitudes) > 1:
        raise duplicate_error(reader.path, *magnitudes)
    magnitude, scale = next(iter(magnitudes), None), 1.0
    for formula in FORMULAS:
        factors = {role: weight[role] for role in formula.roles if role in weight}
        if not factors:
            continue
        first = next(iter(factors.values()))
        if not formula.is_complete(factors.keys()):
            problem = f"{reader.path} holds {' and '.join(factors.values())}"
            raise WanjaxError(f"{problem}, which do not make a {formula.name} of one module: give a complete file")
        if formula is DIFF:
            yield next(filter(tensors.__contains__, (name + WEIGHT, name)), name + WEIGHT), Change(DIFF, factors)
            continue
        rank = formula.rank({role: reader.specs[key].shape for role, key in factors.items()})
        peft = next(part.peft for part in module.values() if part.key == first)
        if diagonal := factors.get("diagonal"):
            scale = scales.adaptive_scale(diagonal)
        else:
            scale = scales.scale(peft, rank, weight.get("alpha"))
        if magnitude is None:
            scales.check_plain(first)
        yield name + WEIGHT, Change(formula, factors, scale, magnitude, of_rows=OF_ROWS in weight)
        magnitude = None
    if magnitude is not None:
        raise WanjaxError(f"{reader.path} holds {magnitude} without the factors that it belongs to")
    for (role, leaf), part in module.items():
        if role == "scaled diff":
            yield name + leaf, Change(DIFF, {"diff": part.key}, scale)
        elif role == "value" or (role == "diff" and leaf != WEIGHT):
            yield name + leaf, Change(DIFF, {"diff": part.key}, replaces=role == "value")


def _parts(reader: MappedFile, names: Collection[str], expert: str | None) -> tuple[dict[str, Module], list[str]]:
    """Return the parts of the file's changes of an expert by module and role, and the keys of no role."""
    modules: defaultdict[str, Module] = defaultdict(dict)
    path, unknown, experts = reader.path, [], experts_of(reader.specs)
    if experts and expert is None:
        key = next(filter(expert_of, reader.specs))
        raise WanjaxError(f"{path} holds {key}, of one of two experts, which this model has not: give a LoRA for it")
    for key, spec in reader.specs.items():
        check_kind(key, path)
        part = part_of(key, names)
        if (part is None or part.role != "alpha") and not jnp.issubdtype(spec.dtype, jnp.floating):
            raise WanjaxError(f"{path} holds {key} as {spec.dtype}, not a floating dtype: get a file of floats")
        if expert and (expert_of(key) or (HIGH if LOW in experts else expert)) != expert:
            continue
        if part is None:
            unknown.append(key)
        elif (role := (part.role, part.leaf)) in modules[part.module]:
            raise duplicate_error(path, modules[part.module][role].key, key)
        else:
            modules[part.module][role] = part
    return modules, unknown
