# SPDX-License-Identifier: Apache-2.0
"""Distilled weights: how they are sampled, and how the name of a file or repository identifies them.

Weights of one shape may be trained for different resolutions, or for few steps without guidance. Only the name tells
them apart, not the tensors. Each family has a table of `Distillation`: its presets take their settings from it, and
files are recognised by it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from wanjax.checkpoints.files import SUFFIXES
from wanjax.figures import quantity
from wanjax.pipelines.settings import Settings, SomeSettings
from wanjax.schedulers import Scheduler, name_of

CACHE_PATH = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+")  # the repository in a path of the hub's cache
GENERIC_NAME = re.compile(
    r"(?:(?:high|low|noise|models?|diffusion|pytorch|loras?|weights|adapter|transformer|dit|checkpoints?|default|"
    r"original|bf16|fp16|fp8|\d+|of|v\d+)-?)*+"  # possessive: avoids exponential backtracking on long numbers
)
"""File and folder names that do not identify a model; the name of the folder above then does."""
TASK = re.compile(r"[tif]2v|\d+b\b|vace")  # a task or a size in the normalised name of a published model
STEPS = re.compile(r"\b([1-9]|1\d|20)-?steps?\b")
NOT_NEGATED = "".join(rf"(?<!\b{word}-)" for word in ("for", "not", "no", "without"))
"""Lookbehinds before the words of a distillation: weights made *for* distilled weights are not distilled."""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How a publisher samples its distilled weights: settings that replace the model's.

    Attributes:
        name: The name in messages.
        words: A regular expression that matches normalised names (see `normalized_name`).
        steps: The number of steps.
        flow_shift: The flow shift; None keeps the model's.
        scheduler: The solver; None keeps the model's.
        image_scheduler: The solver for a model that needs an image; None is `scheduler`.
        guidance_scale: The guidance scale, for both experts if there are two.
    """

    name: str
    words: str
    steps: int
    flow_shift: float | None = None
    scheduler: Scheduler | None = None
    image_scheduler: Scheduler | None = None
    guidance_scale: float = 1.0

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that it overrides, by name."""
        settings = {"steps": self.steps, "guidance_scale": self.guidance_scale, "flow_shift": self.flow_shift}
        return {name: value for name, value in settings.items() if value is not None}

    def applied(self, settings: SomeSettings) -> SomeSettings:
        """Override a model's settings, as far as the model has them."""
        names = settings.to_json()
        both_experts = {"guidance_scale_2": self.guidance_scale} if settings.boundary is not None else {}
        return settings.updated(
            {name: value for name, value in (self.settings | both_experts).items() if name in names}
        )

    def solver(self, *, needs_image: bool) -> Scheduler | None:
        """Return the solver for a model that needs an image or not; None for the model's own."""
        return self.image_scheduler if self.image_scheduler and needs_image else self.scheduler

    def sentence(self, name: str, settings: Settings, solver: Scheduler) -> str:
        """Return a note that the model or LoRA `name` is distilled, with the settings and the solver in use."""
        values = settings.to_json()
        texts = {
            "steps": quantity(settings.steps, "step"),
            "guidance_scale": f"guidance {settings.guidance_scale:g}",
            "flow_shift": f"shift {values.get('flow_shift', 0):g}",
        }
        overridden = [text for key, text in texts.items() if key in self.settings and key in values]
        values_text = f"{', '.join(overridden)}, the solver {name_of(solver)}"
        return f"{name} is distilled: {values_text} are the defaults, as for {self.name}"


def normalized_name(name: str) -> str:
    """Normalise a name: lower case, and a hyphen for everything that is neither a letter nor a digit.

    The suffix of a weights file is removed.
    """
    path = PurePath(name)
    stem = path.stem if path.suffix.lower() in SUFFIXES else path.name
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")


def model_name_in(path: str) -> str:
    """Return the part of a path or hub name that identifies the model, normalised: the last meaningful part.

    For `I2V-14B-720P/diffusion_pytorch_model.safetensors` it is `i2v-14b-720p`.
    """
    parts = [normalized_name(part) for part in reversed(PurePath(CACHE_PATH.sub(r"\1/\2", path)).parts)]
    return next((part for part in parts[:3] if part and not GENERIC_NAME.fullmatch(part)), "")


def find_distillation(name: str, distillations: Iterable[Distillation]) -> Distillation | None:
    """Return the distillation that a normalised name means, with the number of steps in it; None if none matches."""
    distillation = next(
        (candidate for candidate in distillations if re.search(f"{NOT_NEGATED}(?:{candidate.words})", name)), None
    )
    steps = STEPS.search(name)
    return replace(distillation, steps=int(steps[1])) if distillation and steps else distillation
