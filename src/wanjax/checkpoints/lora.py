# SPDX-License-Identifier: Apache-2.0
"""LoRA: low-rank or full changes of a network's weights, merged while the weights are read.

A file names the changed modules in the layout of diffusers or of the authors, with one of several prefixes, or with
underscores for dots, and may have q, k and v as one module. It calls the two factors `lora_A` and `lora_B`, or
`lora_down` and `lora_up`. All variants become changes of the tensors of one checkpoint, whose scales are those of
`lora_scales`. `Merged` is that checkpoint with the changes added in float32, in the layout of its files, so the
conversion that follows needs no special case.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2106.09685; W + strength · alpha / rank · B A.
"""

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from wanjax.checkpoints.files import MappedFile, Reader, Spec
from wanjax.checkpoints.hub import locate_file
from wanjax.checkpoints.lora_scales import PEFT_CONFIG, PEFT_PREFIX, Scales
from wanjax.checkpoints.readers import SUFFIXES, View, open_tensors
from wanjax.converters.names import Names
from wanjax.errors import WanjaxError
from wanjax.kernels.attention import Attention

NOISE_LEVELS = ("high", "low")  # the names of a model's two experts
PREFIXES = (
    *(PEFT_PREFIX, "model.diffusion_model.", "diffusion_model.", "transformer."),
    *("lora_unet__", "lora_unet_"),  # VideoX-Fun's trainer writes two underscores, kohya's one
)
ROLES = {  # the end of a key -> its role, and the end of the name of the tensor that it changes
    ".lora_A.weight": ("down", ".weight"),
    ".lora_A.default.weight": ("down", ".weight"),
    ".lora_A": ("down", ".weight"),
    ".lora_down.weight": ("down", ".weight"),
    ".lora.down.weight": ("down", ".weight"),
    ".lora_B.weight": ("up", ".weight"),
    ".lora_B.default.weight": ("up", ".weight"),
    ".lora_B": ("up", ".weight"),
    ".lora_up.weight": ("up", ".weight"),
    ".lora.up.weight": ("up", ".weight"),
    ".alpha": ("alpha", ".weight"),
    ".diff": ("diff", ".weight"),
    ".diff_b": ("diff", ".bias"),
    ".diff_m": ("diff", ".modulation"),
    ".lora_B.bias": ("scaled diff", ".bias"),
    ".lora_B.default.bias": ("scaled diff", ".bias"),
}
OTHER_KINDS = ("dora_scale", "lora_magnitude_vector", "hada_", "lokr_", "lora_mid", "oft_", "reshape_weight")
ONE_OF_THREE = re.compile(r"((?:.*_)?)[qkv]((?:_.*)?)")  # the names of a query's, a key's or a value's projection
OWN = "wanjax"  # the entry of a file's metadata that a training here writes: JSON
ENOUGH = 0.5  # fraction of a file's changes that must fit; with fewer the file is for another model


@dataclass(frozen=True)
class Lora:
    """A LoRA file, its strength, and the expert of a model that it changes: "high", "low" or None for all."""

    file: str
    strength: float = 1.0
    expert: str | None = None

    def __post_init__(self):
        if not math.isfinite(self.strength):
            raise WanjaxError(f"the strength {self.strength} of {self.file} is not a finite number: 1 is usual")
        if self.expert not in (None, *NOISE_LEVELS):
            raise WanjaxError(f"no expert is named {self.expert!r}: there are {' and '.join(NOISE_LEVELS)}")

    @cached_property
    def path(self) -> Path:
        """The file, downloaded if it is on the hub. Raises WanjaxError where there is none."""
        return locate_file(self.file, beside=(PEFT_CONFIG,))

    @property
    def name(self) -> str:
        """The name in requests: that of the file without its suffix, and the expert's before it."""
        name = re.sub(r"[^\w.-]", "_", Path(self.file).stem)
        return f"{self.expert}={name}" if self.expert else name

    @property
    def label(self) -> str:
        """The name in messages: the file's, and the expert's before it."""
        return f"{self.expert}={Path(self.file).name}" if self.expert else Path(self.file).name

    def named(self) -> "Lora":
        """Returns the LoRA with the file of weights that its folder holds, where its file is a folder.

        Raises WanjaxError where the folder holds none, or several.
        """
        folder = Path(self.file).expanduser()
        if not os.path.isdir(folder):  # which raises nothing for names that are none
            return self
        held = sorted(path.name for path in folder.iterdir() if path.suffix in SUFFIXES)
        if len(held) != 1:
            what = f"{len(held)} files of weights, {', '.join(held[:4])}" if held else "no file of weights"
            raise WanjaxError(f"the folder {folder} holds {what}: the name of one LoRA is needed")
        return replace(self, file=str(folder / held[0]))

    @classmethod
    def parse(cls, text: str) -> "Lora":
        """Parses `FILE` or `FILE:STRENGTH`, optionally after `high=` or `low=`. Raises WanjaxError without a FILE."""
        expert, equals, rest = text.partition("=")
        if not equals or expert not in NOISE_LEVELS:
            expert, rest = None, text
        file, colon, number = rest.rpartition(":")
        try:
            strength = float(number) if colon else 1.0
        except ValueError:  # the colon belongs to the file's name
            file, strength = rest, 1.0
        file = file if colon else rest
        if not file:
            raise WanjaxError(f"the LoRA {text!r} names no file: write FILE or FILE:STRENGTH")
        return cls(file, strength, expert)

    def __str__(self) -> str:
        expert = f"{self.expert}=" if self.expert else ""
        plain = self.strength == 1 and ":" not in self.file
        return f"{expert}{self.file}" + ("" if plain else f":{float(self.strength)!r}")


class Matches(NamedTuple):
    """The outcome of a merge: how many changes of the file fit the network, and the names of those that do not.

    `idle` are patterns of alphas and ranks that are in the file and decided nothing.
    """

    file: str
    matched: int
    unmatched: tuple[str, ...]
    idle: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = self.matched + len(self.unmatched)
        summary = f"{self.file}: {self.matched} of {total} changes merged"
        if self.unmatched:
            summary += f"; the rest has no place in the model and was left out: {_first(self.unmatched)}"
        return f"{summary}; no module is of {_first(self.idle)}" if self.idle else summary

    @property
    def doubtful(self) -> bool:
        """Tells whether the file holds what has no effect."""
        return bool(self.unmatched or self.idle)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" and so on" if len(names) > 3 else "")


class Change(NamedTuple):
    """The change of a tensor: `scale` times one tensor of the file, or times the product of two."""

    factors: tuple[str, ...]
    scale: float


class Target(NamedTuple):
    """A tensor of the network that a tensor of a file is, or is a part of.

    The file's tensor has as many equal parts, one below the other, as `of` says; `parts` are this one's, in order.
    """

    key: str
    parts: tuple[int, ...] = (0,)
    of: int = 1

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the file's tensor, given that of the network's."""
        return (shape[0] // len(self.parts) * self.of, *shape[1:]) if self.of > 1 else shape

    def part(self, x: np.ndarray) -> np.ndarray:
        """Returns the network's part of the file's tensor."""
        return np.concatenate([np.split(x, self.of)[part] for part in self.parts]) if self.of > 1 else x


def trained_attention(path: Path) -> Attention | None:
    """Returns the attention that a LoRA was trained with, where its metadata tell one.

    Raises WanjaxError where the file cannot be read, or tells what is no attention.
    """
    own = open_tensors(path).metadata.get(OWN, "{}")
    try:
        told = json.loads(own)
    except (ValueError, RecursionError):
        return None
    text = told.get("attention") if isinstance(told, dict) else None
    if text is None:
        return None
    try:
        return Attention.parse(str(text))
    except WanjaxError as error:
        raise WanjaxError(f"the metadata of {path} tell no attention: {error}") from error


class LoraFile:
    """The changes in a file, by the tensors of one network that they change.

    specs: the network's tensors by their names in diffusers; names: the translation to and from the authors' names.
    Raises WanjaxError if the file cannot be read, is incomplete, holds changes of another kind, or too few of its
    changes fit the network.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec], names: Names):
        self._reader = open_tensors(path)
        self._changes: dict[str, tuple[Change, Target]] = {}
        changes, unmatched, idle = _changes(self._reader)
        known, matched = _targets(specs, names), 0
        for name, change in changes.items():
            targets, shape = known.get(name, []), self._shape(change)
            right = {target.whole(specs[target.key].shape) for target in targets}
            if not targets:
                unmatched.append(name)
            elif right != {shape}:
                unmatched.append(
                    f"{name} of shape {list(shape)}, where {' or '.join(map(str, map(list, right)))} is right"
                )
            else:
                self._changes |= {target.key: (change, target) for target in targets}
                matched += 1
        self.matches = Matches(str(path), matched, tuple(unmatched), tuple(idle))
        if matched < max(1, ENOUGH * (matched + len(unmatched))):
            raise WanjaxError(f"{self.matches}: a LoRA for this model is needed")

    def __contains__(self, target: str) -> bool:
        return target in self._changes

    def change(self, target: str, strength: float) -> np.ndarray:
        """Returns the float32 array to add to a tensor, times the strength; raises WanjaxError if it is not finite."""
        change, place = self._changes[target]
        factors = [self._finite(key) for key in change.factors]
        factors[0] = place.part(factors[0])
        factors[0] *= np.float32(strength * change.scale)
        return factors[0] if len(factors) == 1 else _product(*factors)

    def _finite(self, key: str) -> np.ndarray:
        """Returns a tensor of the file in float32; raises WanjaxError if any of its numbers is not finite."""
        x, path = self._reader.read(key).astype(np.float32), self._reader.path
        if not np.isfinite(x).all():
            raise WanjaxError(f"{path} holds {key} with numbers that are not finite: the file is damaged, get it again")
        return x

    def _shape(self, change: Change) -> tuple[int, ...]:
        """Returns the shape of a change; empty if the factors do not fit each other."""
        shapes = [self._reader.specs[key].shape for key in change.factors]
        if len(shapes) == 1:
            return shapes[0]
        up, down = shapes
        fits = len(up) > 1 and len(down) > 1 and math.prod(up[1:]) == down[0]
        return (*up[:1], *down[1:]) if fits else ()


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
        x = self._reader.read(key)
        if files := self._changing(key):
            x = x.astype(np.float32)
        for file, strength in files:
            x += file.change(key, strength)
        return x

    def _changing(self, key: str) -> list[tuple[LoraFile, float]]:
        """Returns the files that change a tensor, with their strengths."""
        return [(file, strength) for file, strength in self._files if key in file]


def _product(up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Multiplies two matrices, or composes the kernels of two convolutions, `up` of size 1."""
    return (up.reshape(len(up), -1) @ down.reshape(len(down), -1)).reshape(len(up), *down.shape[1:])


def _targets(specs: Mapping[str, Spec], names: Names) -> dict[str, list[Target]]:
    """Maps every name that a file may use for a tensor, or for q, k and v in one, to what it is in the network."""
    found: dict[str, list[Target]] = {}
    for key in specs:
        places = [(key, Target(key))]
        if fused := _fused(key, specs):
            places.append((fused[0], Target(key, (fused[1],), 3)))
        for ours, target in places:
            theirs = Target(key, (1, 0), 2) if names.exchanges(ours) else target
            for name, place in ((ours, target), *((name, theirs) for name in names.all_theirs(ours))):
                module, dot, leaf = name.rpartition(".")
                for spelling in dict.fromkeys((name, f"{module.replace('.', '_')}{dot}{leaf}")):
                    found.setdefault(spelling, []).append(place)
    return found


def _fused(key: str, specs: Mapping[str, Spec]) -> tuple[str, int] | None:
    """Returns the name of a tensor of q, k and v together, and this one's place in it; None for other tensors.

    `attn.to_q`, `attn.to_k` and `attn.to_v` together are `attn.to_qkv`.
    """
    module, _, leaf = key.rpartition(".")
    where, dot, last = module.rpartition(".")
    if not (found := ONE_OF_THREE.fullmatch(last)):
        return None
    whole, *three = (f"{where}{dot}{found[1]}{x}{found[2]}.{leaf}" for x in ("qkv", *"qkv"))
    return (whole, three.index(key)) if all(name in specs for name in three) else None


def _changes(reader: MappedFile) -> tuple[dict[str, Change], list[str], list[str]]:
    """Returns the changes by the file's names of the changed tensors, without prefixes.

    Returns also the keys of no change, and the patterns of alphas and ranks that fit no module.
    """
    found, parts, unknown = {}, *_parts(reader)
    scales = Scales(reader)
    for module, keys in parts.items():
        up, down, alpha = (keys.pop((role, ".weight"), None) for role in ("up", "down", "alpha"))
        scale = 1.0
        if up and down:
            scale = scales.scale(_as_peft(down, module), _rank(reader, down), alpha)
            found[f"{module}.weight"] = Change((up, down), scale)
        elif up or down:
            raise WanjaxError(f"{reader.path} holds {up or down} without its other factor: a complete file is needed")
        elif alpha:
            unknown.append(alpha)
        for (role, leaf), key in keys.items():
            if (there := found.get(module + leaf)) is not None:
                raise WanjaxError(f"{reader.path} holds both {there.factors[0]} and {key}: one of them is right")
            found[module + leaf] = Change((key,), scale if role == "scaled diff" else 1.0)
    return found, unknown, scales.idle


def _parts(reader: MappedFile) -> tuple[dict[str, dict[tuple[str, str], str]], list[str]]:
    """Returns the file's keys by the module that they change and their role in the change, and the keys of no role."""
    found: defaultdict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    path, unknown = reader.path, []
    for key, spec in reader.specs.items():
        if any(kind in key for kind in OTHER_KINDS):
            raise WanjaxError(f"{path} holds {key}, a change of another kind than LoRA: only LoRA and diffs are merged")
        name = key
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        ending = next((ending for ending in ROLES if name.endswith(ending)), None)
        role = ROLES.get(ending or "", ("", ""))
        if role[0] != "alpha" and not jnp.issubdtype(spec.dtype, jnp.floating):
            raise WanjaxError(f"{path} holds {key} as {spec.dtype} where a floating dtype is right")
        if ending is None:
            unknown.append(key)
            continue
        module = name.removesuffix(ending)
        if role in found[module]:
            raise WanjaxError(f"{path} holds both {found[module][role]} and {key}: one of them is right")
        found[module][role] = key
    return found, unknown


def _as_peft(down: str, module: str) -> str:
    """Returns the name by which PEFT knows a module, given a factor's key: in its own files, all after its prefix."""
    if not down.startswith(PEFT_PREFIX):
        return module
    return down.removeprefix(PEFT_PREFIX).rpartition(".lora")[0]


def _rank(reader: Reader, down: str) -> int:
    shape = reader.specs[down].shape
    return shape[0] if shape else 0
