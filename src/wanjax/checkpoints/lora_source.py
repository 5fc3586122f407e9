# SPDX-License-Identifier: Apache-2.0
"""A LoRA in a request: its file, here or on the hub, its strength, and the expert that it changes.

JAX is not imported here, so that a wrong name is reported quickly.
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

PEFT_FILE, PEFT_CONFIG = "adapter_model", "adapter_config.json"  # PEFT stores it in a file of its own
NOISE_LEVELS = (HIGH, LOW)  # the names of a model's two experts


@dataclass(frozen=True)
class Lora:
    """A LoRA file, its strength, and the expert of a model that it changes: "high", "low" or None for all."""

    file: str
    strength: float = 1.0
    expert: str | None = None

    def __post_init__(self):
        if not abs(self.strength) <= MAX_STRENGTH:  # nor is a NaN
            bounds = f"from {-MAX_STRENGTH} to {MAX_STRENGTH}"
            raise WanjaxError(f"the strength {self.strength:g} of {self.file} is not {bounds}: 1 is usual")
        if self.expert not in (None, *NOISE_LEVELS):
            raise WanjaxError(f"no expert is named {self.expert!r}: there are {' and '.join(NOISE_LEVELS)}")

    @cached_property
    def path(self) -> Path:
        """The file, downloaded if it is on the hub. Raises WanjaxError where there is none."""
        return locate_file(self.file, companions=(PEFT_CONFIG,))

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
        """Return the LoRA with the file of weights that its folder holds, where its file is a folder.

        Raises WanjaxError where the folder holds none, or several.
        """
        folder = Path(self.file).expanduser()
        if not os.path.isdir(folder):  # which raises nothing for names that are none
            return self
        held = sorted(path.name for path in folder.iterdir() if path.suffix in SUFFIXES)
        if len(held) != 1:
            problem = f"{len(held)} files of weights, {', '.join(held[:4])}" if held else "no file of weights"
            raise WanjaxError(f"the folder {folder} holds {problem}: give the name of one LoRA")
        return replace(self, file=str(folder / held[0]))

    @classmethod
    def parse(cls, text: str) -> "Lora":
        """Parse `FILE` or `FILE:STRENGTH`, optionally after `high=` or `low=`. Raises WanjaxError without a FILE, and
        for a STRENGTH that is none."""
        expert, equals, rest = text.partition("=")
        if not equals or expert not in NOISE_LEVELS:
            expert, rest = None, text
        file, colon, number = rest.rpartition(":")
        try:
            strength = float(number) if colon else 1.0
        except ValueError as error:
            is_whole_name = os.path.exists(Path(rest).expanduser())  # then the colon belongs to it
            if not is_whole_name and (Path(file).suffix in SUFFIXES or os.path.exists(Path(file).expanduser())):
                message = f"the strength of the LoRA {file} is given as {repr_short(number)}"
                raise WanjaxError(f"{message}: write a number behind the colon, as in {file}:0.8") from error
            file, strength = rest, 1.0
        file = file if colon else rest
        if not file:
            raise WanjaxError(f"the LoRA {text!r} names no file: write FILE or FILE:STRENGTH")
        return cls(file, strength, expert)

    def __str__(self) -> str:
        expert = f"{self.expert}=" if self.expert else ""
        plain = self.strength == 1 and ":" not in self.file
        return f"{expert}{self.file}" + ("" if plain else f":{float(self.strength)!r}")
