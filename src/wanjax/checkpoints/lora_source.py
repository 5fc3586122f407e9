# SPDX-License-Identifier: Apache-2.0
"""A LoRA in a request: its file, local or on the hub, its strength, and the expert that it changes.

This module does not import JAX: importing JAX takes seconds, and a wrong name of a LoRA should be reported at once.
"""

import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from wanjax.checkpoints.files import SUFFIXES
from wanjax.checkpoints.hub import locate_file
from wanjax.checkpoints.lora_keys import HIGH, LOW, MAX_STRENGTH
from wanjax.errors import WanjaxError, repr_short

PEFT_FILE, PEFT_CONFIG = "adapter_model", "adapter_config.json"  # the names of PEFT's files
NOISE_LEVELS = (HIGH, LOW)  # the names of a model's two experts


@dataclass(frozen=True)
class Lora:
    """A LoRA file, its strength, and the expert that the LoRA changes: "high", "low", or None for all experts."""

    file: str
    strength: float = 1.0
    expert: str | None = None

    def __post_init__(self):
        if not abs(self.strength) <= MAX_STRENGTH:  # also true for a NaN
            bounds = f"from {-MAX_STRENGTH} to {MAX_STRENGTH}"
            raise WanjaxError(f"the strength {self.strength:g} of {self.file} is not {bounds}: 1 is usual")
        if self.expert not in (None, *NOISE_LEVELS):
            raise WanjaxError(f"unknown expert {self.expert!r}: give {' or '.join(NOISE_LEVELS)}")

    @cached_property
    def path(self) -> Path:
        """The path of the local file. A file on the hub is downloaded first. Raises WanjaxError if the file is
        missing."""
        return locate_file(self.file, companions=(PEFT_CONFIG,))

    @property
    def name(self) -> str:
        """The name of the LoRA in requests: the file's stem, or `EXPERT=STEM` if the LoRA is for one expert."""
        name = re.sub(r"[^\w.-]", "_", Path(self.file).stem)
        return f"{self.expert}={name}" if self.expert else name

    @property
    def label(self) -> str:
        """The name of the LoRA in messages: the file's name, or `EXPERT=NAME` if the LoRA is for one expert."""
        return f"{self.expert}={Path(self.file).name}" if self.expert else Path(self.file).name

    def resolve_folder(self) -> "Lora":
        """Replace a folder by the one file of weights in the folder. A LoRA that names a file is returned unchanged.

        Raises WanjaxError unless the folder contains exactly one file of weights.
        """
        folder = Path(self.file).expanduser()
        if not os.path.isdir(folder):  # os.path raises no error for an invalid name
            return self
        files = sorted(path.name for path in folder.iterdir() if path.suffix in SUFFIXES)
        if len(files) != 1:
            problem = f"{len(files)} files of weights, {', '.join(files[:4])}" if files else "no file of weights"
            raise WanjaxError(f"the folder {folder} contains {problem}: give the path of one LoRA")
        return replace(self, file=str(folder / files[0]))

    @classmethod
    def parse(cls, text: str) -> "Lora":
        """Parse `FILE` or `FILE:STRENGTH`; either may follow `high=` or `low=`.

        Raises WanjaxError if FILE is missing, or if STRENGTH is not a number.
        """
        expert, equals, name = text.partition("=")
        if not equals or expert not in NOISE_LEVELS:
            expert, name = None, text
        file, colon, number = name.rpartition(":")
        try:
            strength = float(number) if colon else 1.0
        except ValueError as error:
            is_whole_name = os.path.exists(Path(name).expanduser())  # the colon is a part of the file's name
            if not is_whole_name and (Path(file).suffix in SUFFIXES or os.path.exists(Path(file).expanduser())):
                message = f"the strength of the LoRA {file} is given as {repr_short(number)}"
                raise WanjaxError(f"{message}: write a number after the colon, as in {file}:0.8") from error
            file, strength = name, 1.0
        file = file if colon else name
        if not file:
            raise WanjaxError(f"the LoRA {text!r} names no file: write FILE or FILE:STRENGTH")
        return cls(file, strength, expert)

    def __str__(self) -> str:
        expert = f"{self.expert}=" if self.expert else ""
        plain = self.strength == 1 and ":" not in self.file
        return f"{expert}{self.file}" + ("" if plain else f":{float(self.strength)!r}")
