# SPDX-License-Identifier: Apache-2.0
"""Distilled weights: how their publishers sample them, and what the name of a file or a repository tells of them.

Weights of one shape differ in what they were trained for: a resolution, or few steps without guidance. No tensor tells
that, so names do. Each family has a table of `Distillation`, from which its presets take their settings, and by which
files are recognised.
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

BLOBS = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+")  # of the hub's client, in the path of a file
UNTELLING = re.compile(
    r"(?:(?:high|low|noise|models?|diffusion|pytorch|loras?|weights|adapter|transformer|dit|checkpoints?|default|"
    r"original|bf16|fp16|fp8|\d+|of|v\d+)-?)*+"  # possessive: a long number would be split in all ways
)
"""What the name of a file or a folder may consist of where it tells nothing of the model: its folder's then does."""
TASK = re.compile(r"[tif]2v|\d+b\b|vace")  # or a size, in the `plain` names of published models
STEPS = re.compile(r"\b([1-9]|1\d|20)-?steps?\b")
AFFIRMED = "".join(rf"(?<!\b{word}-)" for word in ("for", "not", "no", "without"))
"""Before the words of a distillation: what is made for distilled weights is none of them."""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """A publisher's way to sample the weights that it distilled: settings that take the place of the model's own.

    Attributes:
        name: What messages call it.
        words: A regular expression that finds it in a `plain` name.
        steps: The number of steps.
        flow_shift: The flow shift; None keeps the model's.
        scheduler: The solver; None keeps the model's.
        pictured: The solver where the video begins with a picture; None is `scheduler`.
        guidance_scale: The guidance scale, of both experts where there are two.
    """

    name: str
    words: str
    steps: int
    flow_shift: float | None = None
    scheduler: Scheduler | None = None
    pictured: Scheduler | None = None
    guidance_scale: float = 1.0

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that it brings, by name."""
        settings = {"steps": self.steps, "guidance_scale": self.guidance_scale, "flow_shift": self.flow_shift}
        return {name: value for name, value in settings.items() if value is not None}

    def applied(self, settings: SomeSettings) -> SomeSettings:
        """Return a model's settings with those that it brings, as far as the model has them."""
        names = settings.to_json()
        both = {"guidance_scale_2": self.guidance_scale} if settings.boundary is not None else {}
        return settings.updated({name: value for name, value in (self.settings | both).items() if name in names})

    def solver(self, *, pictured: bool) -> Scheduler | None:
        """Return the solver for a model, which needs a picture or does not; None for the model's own."""
        return self.pictured if self.pictured and pictured else self.scheduler

    def sentence(self, name: str, settings: Settings, solver: Scheduler) -> str:
        """Return a sentence on what it brings to the model or LoRA `name`: these settings, and this solver."""
        values = settings.to_json()
        texts = {
            "steps": quantity(settings.steps, "step"),
            "guidance_scale": f"guidance {settings.guidance_scale:g}",
            "flow_shift": f"shift {values.get('flow_shift', 0):g}",
        }
        brought = [text for key, text in texts.items() if key in self.settings and key in values]
        what = f"{', '.join(brought)}, the solver {name_of(solver)}"
        return f"{name} is distilled: {what}, as for {self.name}, where you give no others"


def plain(name: str) -> str:
    """Return a name in lower case, with a hyphen for all that is neither a letter nor a digit.

    The suffix of a file of weights is left out.
    """
    path = PurePath(name)
    stem = path.stem if path.suffix.lower() in SUFFIXES else path.name
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")


def telling(path: str) -> str:
    """Return the part of a path or of a hub's name that tells the model, `plain`: the last that is not untelling.

    That of `I2V-14B-720P/diffusion_pytorch_model.safetensors` is `i2v-14b-720p`.
    """
    parts = [plain(part) for part in reversed(PurePath(BLOBS.sub(r"\1/\2", path)).parts)]
    return next((part for part in parts[:3] if part and not UNTELLING.fullmatch(part)), "")


def distilled_by(name: str, distillations: Iterable[Distillation]) -> Distillation | None:
    """Return the distillation that a `plain` name tells, with the number of steps in it; None where it tells none."""
    distillation = next((each for each in distillations if re.search(f"{AFFIRMED}(?:{each.words})", name)), None)
    steps = STEPS.search(name)
    return replace(distillation, steps=int(steps[1])) if distillation and steps else distillation
