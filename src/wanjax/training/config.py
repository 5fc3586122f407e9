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
from wanjax.training.saving import LoraFormat

Expert = Literal["both", "high", "low"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a training.

    Args:
        steps: Steps of training.
        batch_size: Clips in a step.
        grad_accum_steps: Parts in which a step's clips are computed one after another, a divisor of `batch_size`.
        seed: Seed of all that is random.
        lora: The LoRA to train; None trains all weights.
        optimizer: The optimiser and its schedule.
        size: (height, width) of the clips, in pixels. None is the model's.
        frames: Frames of the longest clips. None is the model's.
        fps: Frames a second of the clips. None is the model's.
        cut: The frames of a long file: the first (`head`), frames from all of it (`uniform`), or all of it in pieces
            (`windows`).
        resize: How pictures are brought to the size: `crop`, `pad` or `stretch`.
        buckets: Whether clips keep their proportions, in a few sizes of the same area.
        min_frames: Frames of the shortest clips. None is any.
        timesteps: The distribution of the noise levels: `uniform`, `logit-normal` or `shift`. None is `shift` for a
            model with a flow shift, else `uniform`.
        shift: The shift of the noise levels. None is the model's.
        logit_mean: Mean of logit-normal noise levels.
        logit_std: Standard deviation of logit-normal noise levels.
        caption_dropout: Share of the clips that are shown without a caption, for guidance.
        uncaptioned_preservation: Beside clips that are preserved: how far a clip without a caption is preserved too,
            from 0 to 1.
        ema_decay: Decay of the exponential moving average of the weights, which is then the result. None keeps none.
        expert: Which of two networks to train.
        holdout_every: Hold out one clip in so many for the validation loss; 0 holds out none.
        validation_every: Steps between validation losses.
        sample_every: Steps between sample videos.
        save_every: Steps between checkpoints.
        sample_prompts: Prompts of sample videos.
        lora_format: Names in the LoRA file: those of diffusers, or the authors' as ComfyUI reads them (`comfy`).
        latent_cache: Folder of encoded clips and captions. None is `.wanjax` beside the data.

    Raises:
        WanjaxError: A value is out of its range.
    """

    steps: int = 1000
    batch_size: int = 1
    grad_accum_steps: int = 1
    seed: int = 0
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    size: tuple[int, int] | None = None
    frames: int | None = None
    fps: int | None = None
    cut: Cut = "head"
    resize: str = "crop"
    buckets: bool = True
    min_frames: int | None = None
    timesteps: Timesteps | None = None
    shift: float | None = None
    logit_mean: float = 0.0
    logit_std: float = 1.0
    caption_dropout: float = 0.05
    uncaptioned_preservation: float = 1.0
    ema_decay: float | None = None
    expert: Expert = "both"
    holdout_every: int = 0
    validation_every: int = 250
    sample_every: int = 250
    save_every: int = 250
    sample_prompts: tuple[str, ...] = ()
    lora_format: LoraFormat = "diffusers"
    latent_cache: Path | None = None

    def __post_init__(self):
        for name in ("steps", "batch_size", "grad_accum_steps", "validation_every", "sample_every", "save_every"):
            if getattr(self, name) < 1:
                raise WanjaxError(f"{name} is {getattr(self, name)}: give 1 or more")
        if self.batch_size % self.grad_accum_steps:
            raise WanjaxError(
                f"a batch of {self.batch_size} cannot be split in {self.grad_accum_steps}: give a divisor"
            )
        for name in ("caption_dropout", "uncaptioned_preservation"):
            if not 0 <= getattr(self, name) <= 1:
                raise WanjaxError(f"{name} is {getattr(self, name)}: give a number from 0 to 1")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise WanjaxError(f"ema_decay is {self.ema_decay}: give a number from 0 to below 1, such as 0.999")
        if self.seed < 0:
            raise WanjaxError(f"the seed {self.seed} of the training is not a whole number from 0 on")
        if self.holdout_every < 0 or self.holdout_every == 1:
            raise WanjaxError(
                f"every clip in {self.holdout_every} cannot be held out: give 0 for none, or a number from 2 on"
            )

    def to_json(self) -> dict[str, Any]:
        """Return what the trained weights depend on."""
        others = (
            "validation_every",
            "sample_every",
            "save_every",
            "sample_prompts",
            "lora_format",
            "latent_cache",
            "expert",
        )
        return {name: value for name, value in asdict(self).items() if name not in others}
