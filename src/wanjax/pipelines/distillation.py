# SPDX-License-Identifier: Apache-2.0
"""Settings for sampling with distilled weights. The name of a file or repository identifies such weights.

Weights of one shape may be trained for different resolutions, or for few steps without guidance. Only the name of the
weights shows the difference; their tensors do not. Each family has a table of `Distillation`. The presets of the family
take settings from the table, and files are recognised by it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from wanjax.checkpoints.files import SUFFIXES
from wanjax.figures import pluralize
from wanjax.pipelines.settings import Settings, SomeSettings
from wanjax.schedulers import Scheduler, name_of

# Matches the repository in a path of the hub's cache
CACHE_PATH = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+")
GENERIC_NAME = re.compile(
    r"(?:(?:high|low|noise|models?|diffusion|pytorch|loras?|weights|adapter|transformer|dit|checkpoints?|default|"
    r"original|generator|bf16|fp16|fp8|\d+|of|v\d+)-?)*+"  # possessive: avoids exponential backtracking on long numbers
)
"""Names of files and folders that do not identify a model. The name of the parent folder identifies the model
instead."""
TASK = re.compile(r"[tif]2v|\d+b\b|vace")  # a task or a parameter count in the normalised name of a model
STEPS = re.compile(r"\b([1-9]|1\d|20)-?steps?\b")
NOT_NEGATED = "".join(rf"(?<!\b{word}-)" for word in ("for", "not", "no", "without"))
"""Lookbehinds before the words of a distillation. The lookbehinds exclude names such as "for distilled weights",
because such files are not distilled themselves."""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The settings with which a publisher samples its distilled weights. These settings replace the model's settings.

    Attributes:
        name: The publisher or method, for messages.
        name_pattern: A regular expression that matches normalised names (see `normalized_name`).
        steps: The number of steps. None keeps the model's number, for weights that are distilled only to need no
            guidance.
        flow_shift: The flow shift; None keeps the model's flow shift.
        scheduler: The solver; None keeps the model's solver.
        image_scheduler: The solver for a model that needs an image; None means the value of `scheduler`.
        guidance_scale: The guidance scale, for both experts if there are two.
    """

    name: str
    name_pattern: str
    steps: int | None = None
    flow_shift: float | None = None
    scheduler: Scheduler | None = None
    image_scheduler: Scheduler | None = None
    guidance_scale: float = 1.0

    @property
    def settings(self) -> dict[str, Any]:
        """The overridden settings by name."""
        settings = {"steps": self.steps, "guidance_scale": self.guidance_scale, "flow_shift": self.flow_shift}
        return {name: value for name, value in settings.items() if value is not None}

    def apply_to(self, settings: SomeSettings) -> SomeSettings:
        """Override settings of a model. Settings that the model does not have are ignored."""
        names = settings.to_json()
        both_experts = {"guidance_scale_2": self.guidance_scale} if settings.boundary is not None else {}
        return settings.updated(
            {name: value for name, value in (self.settings | both_experts).items() if name in names}
        )

    def solver(self, *, needs_image: bool) -> Scheduler | None:
        """Return the solver, depending on whether the model needs an image. Return None for the model's own solver."""
        return self.image_scheduler if self.image_scheduler and needs_image else self.scheduler

    def note(self, name: str, settings: Settings, solver: Scheduler) -> str:
        """Return a sentence: the model or LoRA `name` is distilled, and these settings and this solver are in use."""
        values = settings.to_json()
        texts = {
            "steps": pluralize(settings.steps, "step"),
            "guidance_scale": f"guidance {settings.guidance_scale:g}",
            "flow_shift": f"shift {values.get('flow_shift', 0):g}",
        }
        overridden = [text for key, text in texts.items() if key in self.settings and key in values]
        values_text = f"{', '.join(overridden)}, the solver {name_of(solver)}"
        return f"{name} is distilled: {values_text} are the defaults, as for {self.name}"


def normalized_name(name: str) -> str:
    """Normalise a name: convert it to lower case, and replace everything but letters and digits by hyphens.

    The suffix of a weights file is removed.
    """
    path = PurePath(name)
    stem = path.stem if path.suffix.lower() in SUFFIXES else path.name
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")


def model_name_in(path: str) -> str:
    """Return the last part of a path or hub name that identifies the model, normalised.

    For `I2V-14B-720P/diffusion_pytorch_model.safetensors` it is `i2v-14b-720p`.
    """
    parts = [normalized_name(part) for part in reversed(PurePath(CACHE_PATH.sub(r"\1/\2", path)).parts)]
    return next((part for part in parts[:3] if part and not GENERIC_NAME.fullmatch(part)), "")


def find_distillation(name: str, distillations: Iterable[Distillation]) -> Distillation | None:
    """Find the distillation that matches a normalised name. If the name has a number of steps, that number replaces
    `steps`."""
    distillation = next(
        (candidate for candidate in distillations if re.search(f"{NOT_NEGATED}(?:{candidate.name_pattern})", name)),
        None,
    )
    steps = STEPS.search(name)
    return replace(distillation, steps=int(steps[1])) if distillation and distillation.steps and steps else distillation
