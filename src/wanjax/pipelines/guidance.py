# SPDX-License-Identifier: Apache-2.0
"""Guidance: how a step's prompts are grouped, scales that vary over the steps, and guidance rules.

The default rule is classifier-free guidance. Two other rules combine the predictions of a step differently. A third
rule guides attention away from the negative prompt inside the network. With each rule, some steps may also be guided
away from a prediction without some of the network's blocks.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from wanjax.errors import SettingError, WanjaxError, repr_short
from wanjax.figures import pluralize
from wanjax.pipelines.rule_text import parse_rule
from wanjax.sharding import Partitioner

Latents = Float[Array, "B ... C"]  # an array of the video [B T H W C], or an array of another modality, such as [B L C]


class Groups(NamedTuple):
    """The number of forward passes in a step, and the number of prompts for each video in a forward pass."""

    num_forwards: int
    batch: int


def choose_groups(guided: bool, batched: bool, partitioner: Partitioner) -> Groups:
    """Decide how a step's prompts are grouped into forward passes.

    Both prompts of a video are in one batch if `batched` is True, or if the mesh's axis `dp` separates them.
    """
    prompts = 2 if guided else 1
    return Groups(1, prompts) if batched or partitioner.axis_size("dp") > 1 else Groups(prompts, 1)


def group_prompts(prompts: Sequence[Any], groups: Groups) -> tuple[Any, ...]:
    """Concatenate the trees of the prompts and of the negative prompts, arrays [B ...], into one tree for each
    forward pass."""
    if groups.batch == 1:
        return tuple(prompts[: groups.num_forwards])
    return (jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *prompts[: groups.batch]),)


def dynamic_scales(scale: float, timesteps: Float[np.ndarray, " steps"], steps: int) -> list[float]:
    """Return the guidance scale of each step along a cosine, from 1 to `1 + scale`.

    Follows diffusers' `use_dynamic_cfg` (pipelines/cogvideo/pipeline_cogvideox.py). diffusers compares timesteps of up
    to 1000 with the number of steps. At timesteps above `2 · steps`, the scale therefore oscillates between its bounds.
    """
    progress = ((steps - float(t)) / steps for t in timesteps)
    return [1 + scale * (1 - math.cos(math.pi * fraction**5)) / 2 for fraction in progress]


@dataclass(frozen=True)
class GuidanceRule:
    """Classifier-free guidance, and the base of other rules. A hashable value.

    Programs depend only on the type of the rule and on the blocks that a step skips, because the numbers of the rule
    are inputs of each step. Each rule has skip-layer guidance, as in ComfyUI's node SkipLayerGuidanceDiT and in Stable
    Diffusion 3.5: a further prediction for the prompt skips some blocks, and its difference is added.

    Args:
        skip: The blocks that the further prediction skips, as in "9+10"; empty for none.
        skip_scale: The factor of the difference.
        skip_start: The highest noise level of a step with this further prediction.
        skip_end: The lowest noise level of a step with this further prediction.
    """

    name: ClassVar[str] = "none"
    needs_scale: ClassVar[bool] = False
    """True for a rule that needs a guidance scale above 1."""
    skip: str = ""
    skip_scale: float = 3.0
    skip_start: float = 1.0
    skip_end: float = 0.0

    def __post_init__(self) -> None:
        if not (
            re.fullmatch(r"(\d{1,4}(\+\d{1,4})*)?", self.skip, re.ASCII)
            and 0 < self.skip_scale <= MAX_SKIP_SCALE
            and 0 <= self.skip_end <= self.skip_start <= 1
        ):
            raise WanjaxError(
                f"{self} cannot skip blocks: give their numbers as in skip=9+10, a skip_scale above 0 and at most "
                f"{MAX_SKIP_SCALE}, and noise levels from skip_start down to skip_end between 1 and 0"
            )

    @property
    def skipped_blocks(self) -> tuple[int, ...]:
        """The numbers of the blocks that a prediction skips, in order."""
        return tuple(sorted({int(number) for number in self.skip.split("+") if number}))

    def blocks_to_skip(self, sigma: float) -> tuple[int, ...]:
        """Return the blocks that a further prediction skips in a step; empty for a step without a further prediction.

        Args:
            sigma: The noise level of the step.
        """
        return self.skipped_blocks if self.skip_end <= sigma <= self.skip_start else ()

    @property
    def uses_running_average(self) -> bool:
        """True for a rule that carries an average from step to step."""
        return False

    @property
    def nag(self) -> Float32[np.ndarray, "3"] | None:
        """The parameters of normalized attention guidance, as `apply_nag` expects them; None for other rules."""
        return None

    def values(self, step: int, scale: float) -> Any:
        """Return the rule's inputs for a step (from 0) with this guidance scale, as host arrays."""
        return np.float32(scale)

    @classmethod
    @jax.named_scope("guidance")
    def combine(
        cls,
        predictions: Float[Array, "P ... C"],
        num_videos: int,
        values: Any,
        x: Latents,
        predict_x0: Callable[[Latents, Latents], Latents],
        moving_average: Latents | None,
    ) -> tuple[Latents, Latents | None]:
        """Combine the predictions for the prompts and the negative prompts. Also return the new moving average.

        Predictions for the prompts come first. Without guidance there are no predictions for negative prompts. The
        function `predict_x0` converts a prediction at x to clean latents. It is linear in the prediction and in x.
        """
        if len(predictions) == num_videos:
            return predictions, moving_average
        return cls.guide(predictions[:num_videos], predictions[num_videos:], values, x, predict_x0, moving_average)

    @classmethod
    def guide(
        cls,
        prompt: Latents,
        negative: Latents,
        values: Any,
        x: Latents,
        predict_x0: Callable[[Latents, Latents], Latents],
        moving_average: Latents | None,
    ) -> tuple[Latents, Latents | None]:
        """Combine predictions like `combine`. The predictions for the negative prompts are a separate argument.

        This rule extrapolates from the negative prompt's prediction through the prompt's prediction. The computation is
        in float32, because the difference of the two predictions is small.
        """
        return negative + values * (prompt - negative), moving_average

    def __str__(self) -> str:
        fields = dataclasses.fields(self) if self.skip else self._fields_except_skip()
        values = [f"{field.name}={getattr(self, field.name)}" for field in fields]
        return ":".join(filter(None, [self.name, ",".join(values)]))

    def _fields_except_skip(self) -> list[dataclasses.Field[Any]]:
        """List the fields without those of skipped blocks."""
        return [field for field in dataclasses.fields(self) if not field.name.startswith("skip")]


@dataclass(frozen=True)
class ZeroStar(GuidanceRule):
    """CFG-Zero*: scale the negative prompt's prediction to fit the prompt's, and zero the first predictions.

    Follows Fan et al., CFG-Zero*, 2025, arXiv:2503.18886. The first `zero_steps` steps leave the video unchanged.
    """

    name = "cfg-zero"
    needs_scale = True
    zero_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero_steps < 0:
            raise WanjaxError(f"{self} has a negative number of zero steps: 1 is usual")

    def values(self, step: int, scale: float) -> Any:
        return np.array([scale, 0 if step < self.zero_steps else 1], np.float32)

    @classmethod
    def guide(
        cls,
        prompt: Latents,
        negative: Latents,
        values: Float32[Array, "2"],
        x: Latents,
        predict_x0: Callable[[Latents, Latents], Latents],
        moving_average: None,
    ) -> tuple[Latents, None]:
        (scale, factor), eps = values, 1e-8  # epsilon, as in the paper
        scaled_negative = negative * (_dot(prompt, negative) / (_dot(negative, negative) + eps))
        return factor * (scaled_negative + scale * (prompt - scaled_negative)), None


@dataclass(frozen=True)
class ProjectedGuidance(GuidanceRule):
    """APG: multiply the part of the guidance that is parallel to the prompt's prediction by `eta`, and keep the
    orthogonal part.

    Follows Sadat et al., Adaptive Projected Guidance, 2024, arXiv:2410.02416. The guidance is first averaged over the
    steps with `momentum`. Then it is clipped to the length `norm`, unless `norm` is 0. The rule uses clean latents, as
    in the paper, or the network's predictions (`of=prediction`), as in diffusers.
    """

    name = "apg"
    needs_scale = True
    eta: float = 0.0
    norm: float = 0.0
    momentum: float = -0.5
    of: str = "clean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.eta) and 0 <= self.norm < math.inf and -1 < self.momentum < 1):
            raise WanjaxError(
                f"{self} is out of range: give a finite eta, a norm of at least 0 and a momentum between -1 and 1"
            )
        if self.of not in ("clean", "prediction"):
            raise WanjaxError(f"{self} cannot project {repr_short(self.of)}: use of=clean or of=prediction")

    @property
    def uses_running_average(self) -> bool:
        return self.momentum != 0

    def values(self, step: int, scale: float) -> Any:
        return np.array([scale, self.eta, self.norm, self.momentum, self.of == "clean"], np.float32)

    @classmethod
    def guide(
        cls,
        prompt: Latents,
        negative: Latents,
        values: Float32[Array, "5"],
        x: Latents,
        predict_x0: Callable[[Latents, Latents], Latents],
        moving_average: Latents | None,
    ) -> tuple[Latents, Latents | None]:
        scale, eta, norm, momentum, on_clean = values
        reference = jnp.where(on_clean, predict_x0(prompt, x), prompt)
        slope = jnp.where(on_clean, predict_x0(jnp.ones_like(x), jnp.zeros_like(x)), 1.0)  # d clean / d prediction
        update = slope * (prompt - negative)
        if moving_average is not None:
            moving_average = update = update + momentum * moving_average
        length = jnp.sqrt(_dot(update, update))
        update = update * jnp.where(norm > 0, jnp.minimum(1.0, norm / jnp.maximum(length, EPSILON)), 1.0)
        direction = reference / jnp.maximum(jnp.sqrt(_dot(reference, reference)), EPSILON)
        update = update + (eta - 1) * _dot(update, direction) * direction
        return prompt + (scale - 1) * update / slope, moving_average


@dataclass(frozen=True)
class NormalizedAttentionGuidance(GuidanceRule):
    """NAG: guide attention away from the negative prompt, at any guidance scale.

    Follows Chen et al., Normalized Attention Guidance, 2025, arXiv:2505.21179; see `layers.guided_attention`.
    """

    name = "nag"
    scale: float = 11.0
    tau: float = 2.5
    alpha: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (1 < self.scale <= MAX_NAG_SCALE and 0 < self.tau < math.inf and 0 < self.alpha <= 1):
            raise WanjaxError(
                f"{self} is out of range: give a scale above 1 and at most {MAX_NAG_SCALE}, a tau above 0, and an "
                "alpha above 0 and at most 1"
            )

    @property
    def nag(self) -> Float32[np.ndarray, "3"]:
        return np.array([self.scale, self.tau, self.alpha], np.float32)


EPSILON = 1e-12
MAX_SKIP_SCALE = 100  # an upper bound, far above all useful scales
MAX_NAG_SCALE = 100  # an upper bound, far above all useful scales
RULES: Mapping[str, type[GuidanceRule]] = {
    rule.name: rule for rule in (ZeroStar, ProjectedGuidance, NormalizedAttentionGuidance, GuidanceRule)
}
CLASSIFIER_FREE = GuidanceRule()


def _dot(a: Latents, b: Latents) -> Float32[Array, "B ..."]:
    """Compute the inner product of two arrays for each video. The sum runs axis by axis, because one long float32 sum
    is inexact on CPUs."""
    products = a * b
    for axis in range(products.ndim - 1, 0, -1):
        products = jax.lax.optimization_barrier(jnp.sum(products, axis, keepdims=True))
    return products


def guidance_rule(rule: Any) -> GuidanceRule:
    """Parse a text such as `nag`, `apg:eta=0,norm=15` or `none`. A `GuidanceRule` is returned unchanged.

    Raises WanjaxError for other values.
    """
    return rule if isinstance(rule, GuidanceRule) else parse_rule(rule, RULES, "guidance rule", keyword_only=True)


def check_rule(rule: GuidanceRule, guided: bool, steps: int) -> None:
    """Raise SettingError for a rule that has no effect without guidance, or that zeroes all steps."""
    if rule.needs_scale and not guided:
        message = f"{rule} has no effect without guidance: set guidance_scale above 1"
        raise SettingError(message, "guidance_rule")
    if isinstance(rule, ZeroStar) and rule.zero_steps >= steps:
        message = f"{rule} zeroes all of {pluralize(steps, 'step')}: use fewer zero steps"
        raise SettingError(message, "guidance_rule")
