# SPDX-License-Identifier: Apache-2.0
"""Parse the changes in a LoRA file, by the names of the tensors that they change."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from wanjax.checkpoints.files import MappedFile
from wanjax.checkpoints.lora_keys import (
    HIGH,
    LOW,
    ROW_MAGNITUDE,
    ParsedKey,
    check_supported,
    file_experts,
    key_expert,
    parse_key,
    strip_wrappers,
)
from wanjax.checkpoints.lora_products import DIFF, FORMULAS, Formula
from wanjax.checkpoints.lora_scales import LoraScales
from wanjax.errors import WanjaxError

WEIGHT = ".weight"
ALPHA = ("alpha", WEIGHT)
Module = dict[
    tuple[str, str], ParsedKey
]  # the keys of a module's tensors in a file, by (role, suffix of the changed tensor)


class LoraChange(NamedTuple):
    """A change of a tensor.

    Args:
        formula: The formula of the change.
        factors: The file's tensors by their roles in the formula.
        scale: The factor of the change.
        magnitude_key: The key of the tensor of DoRA's norms, or None.
        is_row_norm: Whether DoRA's norms are norms of rows. If False, the shape of these norms decides between rows and
            columns.
        replaces: Whether the result replaces the tensor. If False, the result is added to the tensor.
    """

    formula: Formula
    factors: Mapping[str, str]
    scale: float = 1.0
    magnitude_key: str | None = None
    is_row_norm: bool = False
    replaces: bool = False

    @property
    def key(self) -> str:
        """The key of the first factor, for messages."""
        return next(iter(self.factors.values()))


def duplicate_error(path: object, *keys: str) -> WanjaxError:
    """Build the error for two keys of a file that change the same tensor."""
    return WanjaxError(f"{path} contains both {' and '.join(keys)}, which change the same weights: keep one of them")


def parse_changes(
    reader: MappedFile, tensors: Mapping[str, Any], expert: str | None
) -> tuple[dict[str, LoraChange], list[str], list[str]]:
    """Parse a file's changes.

    Args:
        reader: The file.
        tensors: The names that the file may use for the network's tensors.
        expert: The network's expert, or None.

    Returns:
        The changes by the names of the changed tensors, the keys that belong to no change, and the patterns of alphas
        and ranks that match no module.
    """
    names = tensors.keys() | {name.rpartition(".")[0] for name in tensors} - {""}
    scales, changes = LoraScales(reader), dict[str, LoraChange]()
    modules, keys_without_role = _group_by_module(reader, names, expert)
    unused_keys: list[str] = []
    for name, module in modules.items():
        for tensor, change in _module_changes(reader, name, module, scales, tensors):
            if changes.setdefault(tensor, change) is not change:
                raise duplicate_error(reader.path, changes[tensor].key, change.key)
        if module.keys() == {ALPHA}:
            unused_keys.append(module[ALPHA].key)
    for key in keys_without_role:
        name = strip_wrappers(key, names)
        if scales.has_replacements and name in tensors and name not in changes:
            changes[name] = LoraChange(DIFF, {"diff": key}, replaces=True)
        else:
            unused_keys.append(key)
    return changes, unused_keys, scales.unused_patterns


def _module_changes(
    reader: MappedFile, name: str, module: Module, scales: LoraScales, tensors: Mapping[str, Any]
) -> Iterator[tuple[str, LoraChange]]:
    """Yield (tensor's name, change) for each change of a module."""
    keys_by_role = {role: part.key for (role, suffix), part in module.items() if suffix == WEIGHT}
    magnitude_keys = [keys_by_role[role] for role in (ROW_MAGNITUDE, "magnitude") if role in keys_by_role]
    if len(magnitude_keys) > 1:
        raise duplicate_error(reader.path, *magnitude_keys)
    magnitude_key, scale = next(iter(magnitude_keys), None), 1.0
    for formula in FORMULAS:
        factors = {role: keys_by_role[role] for role in formula.roles if role in keys_by_role}
        if not factors:
            continue
        first_key = next(iter(factors.values()))
        if not formula.is_complete(factors.keys()):
            problem = f"{reader.path} contains {' and '.join(factors.values())}"
            raise WanjaxError(f"{problem}, which are not a complete {formula.name}: give a complete file")
        if formula is DIFF:
            yield next(filter(tensors.__contains__, (name + WEIGHT, name)), name + WEIGHT), LoraChange(DIFF, factors)
            continue
        rank = formula.rank({role: reader.specs[key].shape for role, key in factors.items()})
        peft_name = next(part.peft for part in module.values() if part.key == first_key)
        if diagonal := factors.get("diagonal"):
            scale = scales.adaptive_scale(diagonal)
        else:
            scale = scales.scale(peft_name, rank, keys_by_role.get("alpha"))
        if magnitude_key is None:
            scales.check_no_dora(first_key)
        yield (
            name + WEIGHT,
            LoraChange(formula, factors, scale, magnitude_key, is_row_norm=ROW_MAGNITUDE in keys_by_role),
        )
        magnitude_key = None
    if magnitude_key is not None:
        raise WanjaxError(f"{reader.path} contains {magnitude_key} without its factors: give a complete file")
    for (role, suffix), part in module.items():
        if role == "scaled diff":
            yield name + suffix, LoraChange(DIFF, {"diff": part.key}, scale)
        elif role == "value" or (role == "diff" and suffix != WEIGHT):
            yield name + suffix, LoraChange(DIFF, {"diff": part.key}, replaces=role == "value")


def _group_by_module(
    reader: MappedFile, names: Collection[str], expert: str | None
) -> tuple[dict[str, Module], list[str]]:
    """Group an expert's tensors by module and role; also return the keys without a role."""
    modules: defaultdict[str, Module] = defaultdict(dict)
    path, unknown, experts = reader.path, [], file_experts(reader.specs)
    if experts and expert is None:
        key = next(filter(key_expert, reader.specs))
        raise WanjaxError(
            f"{path} contains {key}, for one of two experts, but this model has one network: give a LoRA for this model"
        )
    for key, spec in reader.specs.items():
        check_supported(key, path)
        part = parse_key(key, names)
        if (part is None or part.role != "alpha") and not jnp.issubdtype(spec.dtype, jnp.floating):
            raise WanjaxError(f"{path} contains {key} as {spec.dtype}, not a floating dtype: get a file of floats")
        if expert and (key_expert(key) or (HIGH if LOW in experts else expert)) != expert:
            continue
        if part is None:
            unknown.append(key)
        elif (role := (part.role, part.suffix)) in modules[part.module]:
            raise duplicate_error(path, modules[part.module][role].key, key)
        else:
            modules[part.module][role] = part
    return modules, unknown
