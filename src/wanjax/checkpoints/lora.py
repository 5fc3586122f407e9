# SPDX-License-Identifier: Apache-2.0
"""LoRA and its relatives: changes of a network's weights, merged while the weights are read.

A file names the changed modules in the layout of diffusers or of the authors, or with underscores for dots, and may
have q, k and v as one module; `lora_keys` reads its keys. All variants become changes of the tensors of one checkpoint,
by the formulas of `lora_products` and with the scales of `lora_scales`. `Merged` is that checkpoint with the changes
added in float32, in the layout of its files, so the conversion that follows needs no special case.

A merged weight is W + strength · (changed - W), where changed is W + scale · product (LoRA, LoHa, LoKr), that with the
norms of DoRA, W + difference, or the file's own tensor (PEFT's `bias` and `modules_to_save`). So a strength of 0 is W,
the changes of several files are added, and their order does not matter.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wanjax.checkpoints.files import Reader, Spec
from wanjax.checkpoints.lora_changes import Change, changes_in, duplicate_error
from wanjax.checkpoints.lora_products import magnitude_axis, set_norms
from wanjax.checkpoints.readers import View, open_tensors
from wanjax.converters.name_map import NameMap
from wanjax.converters.transforms import Shape
from wanjax.errors import WanjaxError
from wanjax.figures import quantity
from wanjax.kernels.attention import AttentionConfig

ONE_OF_THREE = re.compile(r"((?:.*_)?)[qkv]((?:_.*)?)")  # the names of a query's, a key's or a value's projection
OWN = "wanjax"  # the entry of a file's metadata that a training here writes: JSON
ENOUGH = 0.5  # fraction of a file's changes that must fit; with fewer the file is for another model


class Matches(NamedTuple):
    """The outcome of a merge: how many changes of the file fit the network, and the names of the others.

    `idle` are patterns of alphas and ranks that are in the file and decided nothing.
    """

    file: str
    matched: int
    unmatched: tuple[str, ...]
    idle: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = self.matched + len(self.unmatched)
        summary = f"{self.file}: {self.matched} of {quantity(total, 'change')} merged"
        if self.unmatched:
            summary += f"; the rest has no place in the model and was left out: {_first(self.unmatched)}"
        return f"{summary}; no module is of {_first(self.idle)}" if self.idle else summary

    @property
    def doubtful(self) -> bool:
        """Whether parts of the file have no effect."""
        return bool(self.unmatched or self.idle)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" and so on" if len(names) > 3 else "")


class Target(NamedTuple):
    """A tensor of the network that a tensor of a file is, or is a part of.

    The file's tensor has as many equal parts, one below the other, as `of` says; `parts` are this one's, in order.
    """

    key: str
    parts: tuple[int, ...] = (0,)
    of: int = 1

    def fused(self, shape: Shape) -> Shape:
        """Return the shape of the file's tensor, given that of the network's."""
        return (shape[0] // len(self.parts) * self.of, *shape[1:]) if self.of > 1 else shape

    def part(self, x: np.ndarray) -> np.ndarray:
        """Return the network's part of the file's tensor."""
        return np.concatenate([np.split(x, self.of)[part] for part in self.parts]) if self.of > 1 else x


def trained_attention(path: Path) -> AttentionConfig | None:
    """Return the attention with which a LoRA was trained, from its metadata, or None.

    Raises WanjaxError where the file cannot be read, or tells what is no attention.
    """
    text = open_tensors(path).metadata.get(OWN, "{}")
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
        raise WanjaxError(f"the metadata of {path} tell no attention: {error}") from error


class LoraFile:
    """The changes in a file, by the tensors of one network that they change.

    specs: the network's tensors by their names in diffusers; names: the translation to and from the authors' names;
    expert: which of two the network is, where the file tells them apart. Raises WanjaxError if the file cannot be read,
    is incomplete, holds changes of another kind, or too few of its changes fit the network.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec], names: NameMap, expert: str | None = None):
        self._reader = open_tensors(path)
        self._changes: dict[str, tuple[Change, Target]] = {}
        targets_by_name, matched = _targets(specs, names), 0
        changes, unmatched, idle = changes_in(self._reader, targets_by_name, expert)
        for name, change in changes.items():
            targets, shape = targets_by_name.get(name, []), self._shape(change)
            right = {target.fused(specs[target.key].shape) for target in targets}
            if not targets:
                unmatched.append(name)
            elif len(right) != 1 or not _fits(shape, *right):
                unmatched.append(f"{name} of shape {list(shape)}, not {' or '.join(map(str, map(list, right)))}")
            else:
                if change.magnitude is not None:
                    self._check_norms(name, change, next(iter(right)), targets[0])
                for target in targets:
                    if (first := self._changes.setdefault(target.key, (change, target))) != (change, target):
                        raise duplicate_error(path, first[0].key, change.key)
                matched += 1
        file = f"{path} ({expert} noise)" if expert else str(path)
        self.matches = Matches(file, matched, tuple(unmatched), tuple(idle))
        if matched < max(1, ENOUGH * (matched + len(unmatched))):
            raise WanjaxError(f"{self.matches}: give a LoRA for this model")

    def __contains__(self, target: str) -> bool:
        return target in self._changes

    def change(self, target: str, strength: float, base: np.ndarray) -> np.ndarray:
        """Return the float32 array to add to a tensor; raise WanjaxError if it is not finite.

        base: the tensor, in float32.
        """
        change, target_slice = self._changes[target]
        relative = change.magnitude is not None or change.replaces
        factors = {role: self._finite(key) for role, key in change.factors.items()}
        with np.errstate(over="ignore", invalid="ignore"):
            next(iter(factors.values()))[...] *= np.float32(change.scale * (1.0 if relative else strength))
            x = target_slice.part(change.formula.product(factors).reshape(target_slice.fused(base.shape)))
            if change.magnitude is not None:
                x += base
                self._set_norms(x, change, target_slice)
            if relative:
                x -= base
                x *= np.float32(strength)
            if not np.isfinite(x.sum()) and not np.isfinite(x).all():
                problem = (
                    f"{self._reader.path} makes of {', '.join(change.factors.values())} numbers that are not finite"
                )
                raise WanjaxError(f"{problem}, at the scale {change.scale:g}: give a smaller strength or another file")
        return x

    def _set_norms(self, x: np.ndarray, change: Change, target_slice: Target) -> None:
        """Give the changed weight, in place, the norms of DoRA."""
        norms, shape = self._finite(str(change.magnitude)).ravel(), target_slice.fused(x.shape)
        if self._norms_axis(change, shape) == 0:
            set_norms(x, target_slice.part(norms), 0)
        else:
            set_norms(x, norms, 1)

    def _norms_axis(self, change: Change, shape: Shape) -> int | None:
        magnitude = self._reader.specs[str(change.magnitude)].shape
        return magnitude_axis(magnitude, shape, of_rows=change.of_rows)

    def _check_norms(self, name: str, change: Change, shape: Shape, target_slice: Target) -> None:
        """Raise WanjaxError where DoRA's norms do not fit a weight, or are of the columns of several."""
        axis = self._norms_axis(change, shape)
        problem = f"{self._reader.path} holds {change.magnitude}"
        if axis is None:
            problem += f" of shape {list(self._reader.specs[str(change.magnitude)].shape)}"
            problem += f", not a norm for each row of {name}, {list(shape)}"
            raise WanjaxError(f"{problem}: give a LoRA for this model")
        if axis == 1 and target_slice.of > len(target_slice.parts):
            raise WanjaxError(f"{problem}, norms of the columns of q, k and v in one: give a file with each of them")

    def _finite(self, key: str) -> np.ndarray:
        """Return a tensor of the file in float32; raise WanjaxError if any of its numbers is not finite."""
        x, path = self._reader.read(key).astype(np.float32), self._reader.path
        if not np.isfinite(x).all():
            raise WanjaxError(f"{path} holds {key} with numbers that are not finite: the file is damaged, get it again")
        return x

    def _shape(self, change: Change) -> Shape:
        """Return the shape of a change; empty if the factors do not fit each other."""
        return change.formula.shape({role: self._reader.specs[key].shape for role, key in change.factors.items()})


class Merged(View):
    """A checkpoint with the changes added; a tensor without changes of non-zero strength is returned unchanged."""

    def __init__(self, reader: Reader, files: Sequence[tuple[LoraFile, float]]):
        super().__init__(reader)
        self._files = [(file, strength) for file, strength in files if strength != 0]
        wide = np.dtype(np.float32)
        self.specs = {
            key: Spec(shape, wide if self._changing(key) else dtype) for key, (shape, dtype) in reader.specs.items()
        }

    def read(self, key: str) -> np.ndarray:
        x, files = self._reader.read(key), self._changing(key)
        if not files:
            return x
        base = x.astype(np.float32)
        (first, strength), *others = files
        total = first.change(key, strength, base)
        for file, strength in others:
            total += file.change(key, strength, base)
        total += base
        return total

    def _changing(self, key: str) -> list[tuple[LoraFile, float]]:
        """Return the files that change a tensor, with their strengths."""
        return [(file, strength) for file, strength in self._files if key in file]


def _fits(shape: Shape, right: Shape) -> bool:
    """Return whether a change is of the right shape, or of that of a convolution's kernel with flat rows."""
    return bool(shape) and shape in (right, (right[0], math.prod(right[1:])))


def _targets(specs: Mapping[str, Spec], names: NameMap) -> dict[str, list[Target]]:
    """Map every name that a file may use for a tensor, or for fused q, k and v, to tensors of the network."""
    targets: dict[str, list[Target]] = {}
    for key in specs:
        places = [(key, Target(key))]
        if fused := _fused(key, specs):
            places.append((fused[0], Target(key, (fused[1],), 3)))
        for ours, target in places:
            theirs = Target(key, (1, 0), 2) if names.exchanges(ours) else target
            for name, target_slice in ((ours, target), *((name, theirs) for name in names.all_theirs(ours))):
                module, dot, leaf = name.rpartition(".")
                underscored = (f"{module.replace('.', '_')}{dot}{leaf}", name.replace(".", "_"))
                for spelling in dict.fromkeys((name, *underscored)):
                    targets.setdefault(spelling, []).append(target_slice)
    return targets


def _fused(key: str, specs: Mapping[str, Spec]) -> tuple[str, int] | None:
    """Return the name of a tensor of q, k and v together, and this one's place in it; None for other tensors.

    `attn.to_q`, `attn.to_k` and `attn.to_v` together are `attn.to_qkv`.
    """
    module, _, leaf = key.rpartition(".")
    where, dot, last = module.rpartition(".")
    if not (match := ONE_OF_THREE.fullmatch(last)):
        return None
    fused, *parts = (f"{where}{dot}{match[1]}{x}{match[2]}.{leaf}" for x in ("qkv", *"qkv"))
    return (fused, parts.index(key)) if all(name in specs for name in parts) else None
