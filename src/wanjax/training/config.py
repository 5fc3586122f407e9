# SPDX-License-Identifier: Apache-2.0
"""The settings of a training."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from wanjax.errors import WanjaxError
from wanjax.training.adapters import LoraConfig
from wanjax.training.clips import Cut
from wanjax.training.objective import Timesteps
from wanjax.training.optimizers import OptimizerConfig
from wanjax.training.result import Dialect

Expert = Literal["both", "high", "low"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a training; a size, a length or a rate of None is the model's.

    `lora` None trains all weights. `batch` clips make a step, in `accumulated` parts. `timesteps` None is `shift` for a
    model with a flow shift, else `uniform`. `dropped_captions` is the share of clips that are shown without a caption;
    where some clips are to be preserved, these are too, by the part `preserved_uncaptioned` from 0 to 1.
    Every `held_out`-th clip is kept for the held-out loss; 0 keeps none. `expert` chooses one of two networks.
    """

    steps: int = 1000
    batch: int = 1
    accumulated: int = 1
    seed: int = 0
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    size: tuple[int, int] | None = None
    frames: int | None = None
    fps: int | None = None
    cut: Cut = "head"
    resize: str = "crop"
    buckets: bool = True
    shortest: int | None = None
    timesteps: Timesteps | None = None
    shift: float | None = None
    logit_mean: float = 0.0
    logit_deviation: float = 1.0
    dropped_captions: float = 0.05
    preserved_uncaptioned: float = 1.0
    average: float | None = None
    expert: Expert = "both"
    held_out: int = 0
    evaluate_every: int = 250
    sample_every: int = 250
    save_every: int = 250
    samples: tuple[str, ...] = ()
    dialect: Dialect = "diffusers"
    store: Path | None = None

    def __post_init__(self):
        for name in ("steps", "batch", "accumulated", "evaluate_every", "sample_every", "save_every"):
            if getattr(self, name) < 1:
                raise WanjaxError(f"{name} is {getattr(self, name)} in the training: at least 1 is needed")
        if self.batch % self.accumulated:
            raise WanjaxError(f"a batch of {self.batch} cannot be split in {self.accumulated}: give a divisor")
        for name in ("dropped_captions", "preserved_uncaptioned"):
            if not 0 <= getattr(self, name) <= 1:
                raise WanjaxError(f"{name} is {getattr(self, name)} in the training: give a number from 0 to 1")
        if self.average is not None and not 0 <= self.average < 1:
            raise WanjaxError(
                f"average is {self.average} in the training: give a number from 0 to below 1, such as 0.999"
            )
        if self.seed < 0:
            raise WanjaxError(f"the seed {self.seed} of the training is not a whole number from 0 on")
        if self.held_out < 0 or self.held_out == 1:
            raise WanjaxError(
                f"every clip in {self.held_out} cannot be held out: give 0 for none, or a number from 2 on"
            )

    def to_json(self) -> dict[str, Any]:
        """Return what the trained weights depend on."""
        others = ("evaluate_every", "sample_every", "save_every", "samples", "dialect", "store", "expert")
        return {name: value for name, value in asdict(self).items() if name not in others}
