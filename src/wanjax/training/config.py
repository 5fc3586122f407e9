# SPDX-License-Identifier: Apache-2.0
"""Settings of a training run."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from wanjax.errors import WanjaxError, repr_short
from wanjax.training.adapters import LoraConfig
from wanjax.training.clips import CutMode
from wanjax.training.objective import Timesteps
from wanjax.training.optimizers import OptimizerConfig
from wanjax.training.saving import LoraFormat
from wanjax.training.settings_check import check_types

Expert = Literal["both", "high", "low"]
Resize = Literal["crop", "pad", "stretch"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run.

    Args:
        steps: Training steps.
        batch_size: Clips in a step.
        grad_accum_steps: The number of microbatches in a step, a divisor of `batch_size`.
        seed: The seed of all random numbers.
        lora: The LoRA to train; None trains all weights.
        optimizer: The optimiser and its schedule.
        size: (height, width) of the clips, in pixels. None is the model's default size.
        frames: Frames of the longest clips. None is the model's default.
        fps: Frames per second of the clips. None is the model's default.
        cut: Which frames of a long file are used: the first frames (`head`), frames at equal distances (`uniform`), or
            all frames, as consecutive clips (`windows`).
        resize: How frames are resized: `crop`, `pad` or `stretch`.
        buckets: Whether clips roughly keep their aspect ratio. Clips then have one of a few sizes with about the same
            area.
        min_frames: Frames of the shortest clips. None sets no minimum.
        timesteps: The distribution of the noise levels: `uniform`, `logit-normal` or `shift`. None is `shift` for a
            model with a flow shift, else `uniform`.
        shift: The flow shift of the noise levels. None is the model's flow shift.
        logit_mean: Mean of logit-normal noise levels.
        logit_std: Standard deviation of logit-normal noise levels.
        caption_dropout: Fraction of the clips whose caption is dropped, for classifier-free guidance.
        uncaptioned_preservation: Weight of prior preservation, from 0 to 1, for clips whose caption is dropped. It
            applies if the data set has preserved clips.
        ema_decay: Decay of the exponential moving average of the weights. The result of training is then the average.
            None computes no average.
        expert: Which network to train, if the model has two.
        holdout_every: Every n-th clip is held out for the validation loss, where n is this number. 0 holds out no clip.
        validation_every: Steps between validation losses.
        sample_every: Steps between sample videos.
        save_every: Steps between checkpoints.
        sample_prompts: Prompts of sample videos.
        lora_format: The names of the keys in the LoRA file: diffusers' names (`diffusers`), or the model authors' names
            as in ComfyUI (`comfy`).
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
    cut: CutMode = "head"
    resize: Resize = "crop"
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
        check_types(self)
        for name, kind, example in (
            ("lora", LoraConfig | None, "LoraConfig(rank=8)"),
            ("optimizer", OptimizerConfig, "OptimizerConfig(learning_rate=1e-4)"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise WanjaxError(f"{name} must be an object such as {example}, got {repr_short(value)}")
        for name in ("steps", "batch_size", "grad_accum_steps", "validation_every", "sample_every", "save_every"):
            if getattr(self, name) < 1:
                raise WanjaxError(f"{name} is {getattr(self, name)}: give 1 or more")
        if self.min_frames is not None and self.min_frames < 1:
            raise WanjaxError(f"min_frames is {self.min_frames}: give 1 or more")
        if self.batch_size % self.grad_accum_steps:
            raise WanjaxError(
                f"grad_accum_steps {self.grad_accum_steps} does not divide batch_size {self.batch_size}: give a divisor"
            )
        for name in ("caption_dropout", "uncaptioned_preservation"):
            if not 0 <= getattr(self, name) <= 1:
                raise WanjaxError(f"{name} is {getattr(self, name)}: give a number from 0 to 1")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise WanjaxError(f"ema_decay is {self.ema_decay}: give a number from 0 to below 1, such as 0.999")
        if self.seed < 0:
            raise WanjaxError(f"the seed of the training is {self.seed}: give 0 or more")
        if self.holdout_every < 0 or self.holdout_every == 1:
            raise WanjaxError(f"holdout_every is {self.holdout_every}: give 0 to hold out none, or 2 or more")

    def to_json(self) -> dict[str, Any]:
        """Return the settings that determine the trained weights."""
        excluded = (
            "validation_every",
            "sample_every",
            "save_every",
            "sample_prompts",
            "lora_format",
            "latent_cache",
            "expert",
        )
        return {name: value for name, value in asdict(self).items() if name not in excluded}
