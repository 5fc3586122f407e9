# SPDX-License-Identifier: Apache-2.0
"""Merge LoRA and its relatives into a network's weights while they are read.

A file names the changed modules as diffusers or the authors do, or with underscores in place of dots. A file may fuse
q, k and v. `lora_keys` parses the keys of a file. All variants become changes of single tensors, by the formulas of
`lora_products` and with the scales of `lora_scales`. `Merged` reads the checkpoint and adds the changes in float32.
`Merged` keeps the names and shapes of the checkpoint, so the later conversion needs no special case.

A merged weight is W + strength · (changed - W). For LoRA, LoHa and LoKr, `changed` is W + scale · product. For DoRA,
`changed` is the same sum, scaled to DoRA's norms. For differences, `changed` is W + difference. For PEFT's `bias` and
`modules_to_save`, `changed` is the tensor in the file. A strength of 0 therefore gives W, and the order of several
files does not matter.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wanjax.checkpoints.files import Spec, TensorReader
from wanjax.checkpoints.lora_changes import LoraChange, duplicate_error, parse_changes
from wanjax.checkpoints.lora_products import magnitude_axis, set_norms
from wanjax.checkpoints.readers import TensorReaderView, open_tensors
from wanjax.converters.name_map import NameMap
from wanjax.converters.transforms import Shape
from wanjax.errors import WanjaxError
from wanjax.figures import pluralize
from wanjax.kernels.attention import AttentionConfig

QKV_NAME = re.compile(r"((?:.*_)?)[qkv]((?:_.*)?)")  # the name of a query, key or value projection
WANJAX_METADATA = "wanjax"  # the metadata entry that wanjax's training writes, as JSON
MIN_MATCHED = 0.5  # if a smaller share of the changes in a file fits the network, the file is for another model


class LoraMatches(NamedTuple):
    """How many changes of a file fit the network.

    Args:
        file: The file.
        num_matched: The number of LoRA changes that match a weight of the network.
        unmatched: The names of the changes that do not fit.
        unused_patterns: Patterns of alphas and ranks in the file that matched no module.
    """

    file: str
    num_matched: int
    unmatched: tuple[str, ...]
    unused_patterns: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = self.num_matched + len(self.unmatched)
        summary = f"{self.file}: {self.num_matched} of {pluralize(total, 'change')} merged"
        if self.unmatched:
            summary += f"; the others do not fit the model and were skipped: {_first_names(self.unmatched)}"
        return f"{summary}; no module matches {_first_names(self.unused_patterns)}" if self.unused_patterns else summary

    @property
    def is_partial(self) -> bool:
        """Whether parts of the file have no effect."""
        return bool(self.unmatched or self.unused_patterns)


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" and so on" if len(names) > 3 else "")


class LoraTarget(NamedTuple):
    """The tensor of the network that a file's tensor changes, and the part of the file's tensor that changes it.

    Args:
        key: The network's tensor.
        parts: The indices of the row blocks of the file's tensor that belong to `key`, in order.
        num_parts: The number of equal row blocks in the file's tensor.
    """

    key: str
    parts: tuple[int, ...] = (0,)
    num_parts: int = 1

    def file_shape(self, shape: Shape) -> Shape:
        """Return the shape of the file's tensor, given the shape of the network's tensor."""
        return (shape[0] // len(self.parts) * self.num_parts, *shape[1:]) if self.num_parts > 1 else shape

    def select(self, x: np.ndarray) -> np.ndarray:
        """Return the rows of the file's tensor that belong to the network's tensor."""
        return np.concatenate([np.split(x, self.num_parts)[part] for part in self.parts]) if self.num_parts > 1 else x


def trained_attention(path: Path) -> AttentionConfig | None:
    """Return the attention that a LoRA was trained with, from its metadata, or None.

    Raises WanjaxError if the file cannot be read, or if the entry is not a valid attention.
    """
    text = open_tensors(path).metadata.get(WANJAX_METADATA, "{}")
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return None
    attention = entries.get("attention") if isinstance(entries, dict) else None
    if attention is None:
        return None
    try:
        return AttentionConfig.parse(str(attention))
    except WanjaxError as error:
        raise WanjaxError(f"the metadata of {path} have an invalid attention: {error}") from error


class LoraFile:
    """The changes in a LoRA file, by the tensors of one network that they change.

    Args:
        path: The file.
        specs: Shapes and dtypes of the network's tensors, by diffusers' names.
        names: The translation between diffusers' and the authors' names.
        expert: "high" or "low" if the file distinguishes two experts, else None.

    Raises:
        WanjaxError: The file cannot be read or is incomplete, has changes of an unsupported kind, or too few of its
            changes fit the network.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec], names: NameMap, expert: str | None = None):
        self._reader = open_tensors(path)
        self._changes: dict[str, tuple[LoraChange, LoraTarget]] = {}
        targets_by_name, matched = _targets(specs, names), 0
        changes, unmatched, unused_patterns = parse_changes(self._reader, targets_by_name, expert)
        for name, change in changes.items():
            targets, shape = targets_by_name.get(name, []), self._shape(change)
            expected_shapes = {target.file_shape(specs[target.key].shape) for target in targets}
            if not targets:
                unmatched.append(name)
            elif len(expected_shapes) != 1 or not _fits(shape, *expected_shapes):
                unmatched.append(
                    f"{name} of shape {list(shape)}, not {' or '.join(map(str, map(list, expected_shapes)))}"
                )
            else:
                if change.magnitude_key is not None:
                    self._check_norms(name, change, next(iter(expected_shapes)), targets[0])
                for target in targets:
                    if (earlier_change := self._changes.setdefault(target.key, (change, target))) != (change, target):
                        raise duplicate_error(path, earlier_change[0].key, change.key)
                matched += 1
        file = f"{path} ({expert} noise)" if expert else str(path)
        self.matches = LoraMatches(file, matched, tuple(unmatched), tuple(unused_patterns))
        if matched < max(1, MIN_MATCHED * (matched + len(unmatched))):
            raise WanjaxError(f"{self.matches}: give a LoRA for this model")

    def __contains__(self, key: str) -> bool:
        return key in self._changes

    def change(self, key: str, strength: float, base: np.ndarray) -> np.ndarray:
        """Return the float32 array to add to the network's tensor `key`, whose values are `base`.

        Raises WanjaxError if the array is not finite.
        """
        change, target = self._changes[key]
        needs_base = change.magnitude_key is not None or change.replaces
        factors = {role: self._read_finite(key) for role, key in change.factors.items()}
        with np.errstate(over="ignore", invalid="ignore"):
            next(iter(factors.values()))[...] *= np.float32(change.scale * (1.0 if needs_base else strength))
            delta = target.select(change.formula.product(factors).reshape(target.file_shape(base.shape)))
            if change.magnitude_key is not None:
                delta += base
                self._set_norms(delta, change, target)
            if needs_base:
                delta -= base
                delta *= np.float32(strength)
            if not np.isfinite(delta.sum()) and not np.isfinite(delta).all():
                keys = ", ".join(change.factors.values())
                problem = f"{self._reader.path}: the product of {keys} is not finite at the scale {change.scale:g}"
                raise WanjaxError(f"{problem}: give a smaller strength, or another file")
        return delta

    def _set_norms(self, x: np.ndarray, change: LoraChange, target: LoraTarget) -> None:
        """Scale the changed weight in place to DoRA's norms."""
        norms, shape = self._read_finite(str(change.magnitude_key)).ravel(), target.file_shape(x.shape)
        if self._norms_axis(change, shape) == 0:
            set_norms(x, target.select(norms), 0)
        else:
            set_norms(x, norms, 1)

    def _norms_axis(self, change: LoraChange, shape: Shape) -> int | None:
        magnitude_shape = self._reader.specs[str(change.magnitude_key)].shape
        return magnitude_axis(magnitude_shape, shape, is_row_norm=change.is_row_norm)

    def _check_norms(self, name: str, change: LoraChange, shape: Shape, target: LoraTarget) -> None:
        """Raise WanjaxError if DoRA's norms do not fit a weight, or are norms of the columns of fused weights."""
        axis = self._norms_axis(change, shape)
        problem = f"{self._reader.path} contains {change.magnitude_key}"
        if axis is None:
            problem += f" of shape {list(self._reader.specs[str(change.magnitude_key)].shape)}"
            problem += f", not a norm for each row of {name}, {list(shape)}"
            raise WanjaxError(f"{problem}: give a LoRA for this model")
        if axis == 1 and target.num_parts > len(target.parts):
            raise WanjaxError(
                f"{problem}, which are norms of the columns of fused q, k and v: give a file with separate q, k and v"
            )

    def _read_finite(self, key: str) -> np.ndarray:
        """Return a tensor of the file in float32; raise WanjaxError if the tensor is not finite."""
        x, path = self._reader.read(key).astype(np.float32), self._reader.path
        if not np.isfinite(x).all():
            raise WanjaxError(f"{path} contains {key} with values that are not finite: get the file again")
        return x

    def _shape(self, change: LoraChange) -> Shape:
        """Return the shape of a change; empty if the factors do not fit each other."""
        return change.formula.shape({role: self._reader.specs[key].shape for role, key in change.factors.items()})


class MergedLoraReader(TensorReaderView):
    """A reader that adds the changes of LoRA files to a checkpoint's tensors.

    A change with a strength of 0 has no effect.
    """

    def __init__(self, reader: TensorReader, files: Sequence[tuple[LoraFile, float]]):
        super().__init__(reader)
        self._files = [(file, strength) for file, strength in files if strength != 0]
        float32 = np.dtype(np.float32)
        self.specs = {
            key: Spec(shape, float32 if self._files_changing(key) else dtype)
            for key, (shape, dtype) in reader.specs.items()
        }

    def changes(self, key: str) -> bool:
        """Return whether a file changes a tensor."""
        return bool(self._files_changing(key))

    def read(self, key: str) -> np.ndarray:
        x, files = self._reader.read(key), self._files_changing(key)
        if not files:
            return x
        base = x.astype(np.float32)
        (first, strength), *others = files
        total = first.change(key, strength, base)
        for file, strength in others:
            total += file.change(key, strength, base)
        total += base
        return total

    def _files_changing(self, key: str) -> list[tuple[LoraFile, float]]:
        """Return the files that change a tensor, with their strengths."""
        return [(file, strength) for file, strength in self._files if key in file]


def _fits(shape: Shape, expected: Shape) -> bool:
    """Return whether a change has the expected shape, or is a convolution's kernel with flattened rows."""
    return bool(shape) and shape in (expected, (expected[0], math.prod(expected[1:])))


def _targets(specs: Mapping[str, Spec], names: NameMap) -> dict[str, list[LoraTarget]]:
    """Map every name that a file may use for a tensor, or for fused q, k and v, to tensors of the network."""
    targets: dict[str, list[LoraTarget]] = {}
    for key in specs:
        named_targets = [(key, LoraTarget(key))]
        if fused := _fused_name(key, specs):
            fused_name, part = fused
            named_targets.append((fused_name, LoraTarget(key, (part,), 3)))
        for diffusers_name, target in named_targets:
            author_target = LoraTarget(key, (1, 0), 2) if names.swaps_halves(diffusers_name) else target
            for name, named_target in (
                (diffusers_name, target),
                *((name, author_target) for name in names.all_author_names(diffusers_name)),
            ):
                module, dot, suffix = name.rpartition(".")
                underscore_names = (f"{module.replace('.', '_')}{dot}{suffix}", name.replace(".", "_"))
                for variant in dict.fromkeys((name, *underscore_names)):
                    targets.setdefault(variant, []).append(named_target)
    return targets


def _fused_name(key: str, specs: Mapping[str, Spec]) -> tuple[str, int] | None:
    """Return the name of the fused tensor of q, k and v, and the index of the given tensor in it.

    Returns None for a tensor that is not q, k or v.

    For example, `attn.to_q`, `attn.to_k` and `attn.to_v` fuse to `attn.to_qkv`.
    """
    module, _, suffix = key.rpartition(".")
    parent, dot, module_name = module.rpartition(".")
    if not (match := QKV_NAME.fullmatch(module_name)):
        return None
    fused_name, *parts = (f"{parent}{dot}{match[1]}{x}{match[2]}.{suffix}" for x in ("qkv", *"qkv"))
    return (fused_name, parts.index(key)) if all(name in specs for name in parts) else None
