# SPDX-License-Identifier: Apache-2.0
"""Guidance: how a step's prompts are grouped, scales that vary over the steps, and guidance rules.

The default rule is classifier-free guidance. Two other rules combine the predictions of a step differently; the third
guides attention away from the negative prompt inside the network.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from wanjax.errors import SettingError, WanjaxError, repr_short
from wanjax.figures import quantity
from wanjax.pipelines.rule_text import parse_rule
from wanjax.sharding import Partitioner

Latents = Float[Array, "B ... C"]  # of the video, [B T H W C], or of another stream, such as [B L C]


class Groups(NamedTuple):
    """The number of forwards in a step, and the number of prompts per video in each."""

    forwards: int
    batch: int


def grouping(guided: bool, batched: bool, partitioner: Partitioner) -> Groups:
    """Return how a step's prompts are grouped.

    A video's two prompts are in one batch if `batched`, or if the mesh's axis `dp` splits them.
    """
    prompts = 2 if guided else 1
    return Groups(1, prompts) if batched or partitioner.size("dp") > 1 else Groups(prompts, 1)


def group(prompts: Sequence[Any], groups: Groups) -> tuple[Any, ...]:
    """Concatenate trees of arrays [B ...], of the prompts and the negative prompts, into one tree per forward."""
    if groups.batch == 1:
        return tuple(prompts[: groups.forwards])
    return (jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *prompts[: groups.batch]),)


def dynamic_scales(scale: float, timesteps: Float[np.ndarray, " steps"], steps: int) -> list[float]:
    """Return the guidance scale of each step along a cosine, from 1 to `1 + scale`.

    Follows diffusers' `use_dynamic_cfg` (pipelines/cogvideo/pipeline_cogvideox.py), which compares timesteps, up to a
    thousand, with the number of steps: before the last `2 · steps` timesteps the scale swings between its bounds.
    """
    progress = ((steps - float(t)) / steps for t in timesteps)
    return [1 + scale * (1 - math.cos(math.pi * fraction**5)) / 2 for fraction in progress]


@dataclass(frozen=True)
class GuidanceRule:
    """Classifier-free guidance, and the base of other rules. A hashable value.

    Programs depend only on the rule's type: its numbers are inputs of each step.
    """

    name: ClassVar[str] = "none"
    scaled: ClassVar[bool] = False
    """True for a rule that needs a guidance scale above 1."""

    @property
    def keeps_average(self) -> bool:
        """True for a rule that carries an average from step to step."""
        return False

    @property
    def nag(self) -> Float32[np.ndarray, "3"] | None:
        """The numbers for normalized attention guidance, as `apply_nag` takes them; None for other rules."""
        return None

    def values(self, step: int, scale: float) -> Any:
        """Return a step's inputs from the rule and its guidance scale, as host arrays; steps count from 0."""
        return np.float32(scale)

    @classmethod
    @jax.named_scope("guidance")
    def joined(
        cls,
        predictions: Float[Array, "P ... C"],
        videos: int,
        values: Any,
        x: Latents,
        clean: Callable[[Latents, Latents], Latents],
        average: Latents | None,
    ) -> tuple[Latents, Latents | None]:
        """Combine the predictions for the prompts and the negative prompts; also return the new average.

        Predictions for the prompts come first. Without guidance there are none for negative prompts. `clean` returns
        the clean latents of a prediction at x; it is linear in both.
        """
        if len(predictions) == videos:
            return predictions, average
        return cls.guided(predictions[:videos], predictions[videos:], values, x, clean, average)

    @classmethod
    def guided(
        cls,
        prompt: Latents,
        negative: Latents,
        values: Any,
        x: Latents,
        clean: Callable[[Latents, Latents], Latents],
        average: Latents | None,
    ) -> tuple[Latents, Latents | None]:
        """Combine predictions like `joined`, given separately for the prompts and the negative prompts.

        This rule extrapolates from the negative prompt through the prompt, in float32: their difference is small.
        """
        return negative + values * (prompt - negative), average

    def __str__(self) -> str:
        values = [f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self)]
        return ":".join(filter(None, [self.name, ",".join(values)]))


@dataclass(frozen=True)
class ZeroStar(GuidanceRule):
    """CFG-Zero*: scale the negative prompt's prediction to fit the prompt's, and zero the first predictions.

    Follows Fan et al., CFG-Zero*, 2025, arXiv:2503.18886. The first `zero_steps` steps leave the video unchanged.
    """

    name = "cfg-zero"
    scaled = True
    zero_steps: int = 1

    def __post_init__(self) -> None:
        if self.zero_steps < 0:
            raise WanjaxError(f"{self} has fewer than no zero steps: 1 is usual")

    def values(self, step: int, scale: float) -> Any:
        return np.array([scale, 0 if step < self.zero_steps else 1], np.float32)

    @classmethod
    def guided(
        cls,
        prompt: Latents,
        negative: Latents,
        values: Float32[Array, "2"],
        x: Latents,
        clean: Callable[[Latents, Latents], Latents],
        average: None,
    ) -> tuple[Latents, None]:
        (scale, factor), eps = values, 1e-8  # as in the paper
        fitted = negative * (_dot(prompt, negative) / (_dot(negative, negative) + eps))
        return factor * (fitted + scale * (prompt - fitted)), None


@dataclass(frozen=True)
class Projected(GuidanceRule):
    """APG: scale the part of the guidance parallel to the prompt's prediction by `eta`; keep the rest in full.

    Follows Sadat et al., Adaptive Projected Guidance, 2024, arXiv:2410.02416. The guidance is first averaged over the
    steps with `momentum`, then clipped to the length `norm` unless that is 0. This happens on clean latents, as in the
    paper, or on the network's predictions (`of=prediction`), as in diffusers.
    """

    name = "apg"
    scaled = True
    eta: float = 0.0
    norm: float = 0.0
    momentum: float = -0.5
    of: str = "clean"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.eta) and 0 <= self.norm < math.inf and -1 < self.momentum < 1):
            raise WanjaxError(
                f"{self} is out of range: give a finite eta, a norm from 0 on and a momentum between -1 and 1"
            )
        if self.of not in ("clean", "prediction"):
            raise WanjaxError(f"{self} projects {repr_short(self.of)}: give of=clean or of=prediction")

    @property
    def keeps_average(self) -> bool:
        return self.momentum != 0

    def values(self, step: int, scale: float) -> Any:
        return np.array([scale, self.eta, self.norm, self.momentum, self.of == "clean"], np.float32)

    @classmethod
    def guided(
        cls,
        prompt: Latents,
        negative: Latents,
        values: Float32[Array, "5"],
        x: Latents,
        clean: Callable[[Latents, Latents], Latents],
        average: Latents | None,
    ) -> tuple[Latents, Latents | None]:
        scale, eta, norm, momentum, on_clean = values
        direction_of = jnp.where(on_clean, clean(prompt, x), prompt)
        slope = jnp.where(on_clean, clean(jnp.ones_like(x), jnp.zeros_like(x)), 1.0)  # of clean latents
        change = slope * (prompt - negative)
        if average is not None:
            average = change = change + momentum * average
        length = jnp.sqrt(_dot(change, change))
        change = change * jnp.where(norm > 0, jnp.minimum(1.0, norm / jnp.maximum(length, TINY)), 1.0)
        direction = direction_of / jnp.maximum(jnp.sqrt(_dot(direction_of, direction_of)), TINY)
        change = change + (eta - 1) * _dot(change, direction) * direction
        return prompt + (scale - 1) * change / slope, average


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
        if not (1 < self.scale <= MOST_SCALE and 0 < self.tau < math.inf and 0 < self.alpha <= 1):
            raise WanjaxError(
                f"{self} is out of range: give a scale above 1, at most {MOST_SCALE}, a tau above 0 and an alpha "
                "above 0, at most 1"
            )

    @property
    def nag(self) -> Float32[np.ndarray, "3"]:
        return np.array([self.scale, self.tau, self.alpha], np.float32)


TINY = 1e-12
MOST_SCALE = 100  # of NAG, far beyond use
RULES: Mapping[str, type[GuidanceRule]] = {
    rule.name: rule for rule in (ZeroStar, Projected, NormalizedAttentionGuidance, GuidanceRule)
}
CLASSIFIER_FREE = GuidanceRule()


def _dot(a: Latents, b: Latents) -> Float32[Array, "B ..."]:
    """Return the inner product of each video's two arrays, axis by axis: one long float32 sum is inexact on CPUs."""
    products = a * b
    for axis in range(products.ndim - 1, 0, -1):
        products = jax.lax.optimization_barrier(jnp.sum(products, axis, keepdims=True))
    return products


def guidance_rule(rule: Any) -> GuidanceRule:
    """Parse a text such as `nag`, `apg:eta=0,norm=15` or `none`; return a rule as it is.

    Raises WanjaxError for anything else.
    """
    return rule if isinstance(rule, GuidanceRule) else parse_rule(rule, RULES, "guidance rule", named=True)


def check_rule(rule: GuidanceRule, guided: bool, steps: int) -> None:
    """Raise SettingError for a rule that has no effect without guidance, or that zeroes all steps."""
    if rule.scaled and not guided:
        message = f"{rule} has no effect without guidance: set guidance_scale above 1"
        raise SettingError(message, "guidance_rule")
    if isinstance(rule, ZeroStar) and rule.zero_steps >= steps:
        message = f"{rule} leaves all of {quantity(steps, 'step')} out: give fewer zero steps"
        raise SettingError(message, "guidance_rule")
