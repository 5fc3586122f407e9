# SPDX-License-Identifier: Apache-2.0
"""Guidance rules equal their published formulas in torch, and two rules equal diffusers' guiders."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AdaptiveProjectedGuidance, ClassifierFreeZeroStarGuidance

from tests.parity.references import nag
from tests.support.compare import error
from wanjax.layers.guided_attention import apply_nag
from wanjax.pipelines.guidance import CLASSIFIER_FREE, GuidanceRule, guidance_rule
from wanjax.schedulers import DDIM, FlowEuler, one_step

BOUND = 1e-6
SHAPE = (2, 3, 8, 6, 4)  # [B T H W C]
SCALE, STEPS = 4.0, 5
FLOW = {"shift": 3.0, "sigma_schedule": "official"}


def predictions(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return similar predictions for the prompt and the negative prompt, and the latents of a step."""
    random = torch.Generator().manual_seed(step)
    prompt, difference, x = torch.randn(3, *SHAPE, generator=random)
    return prompt, 0.8 * prompt + 0.3 * difference + 0.1, x


def combine(rule: GuidanceRule, step: int, average: Any = None, clean: Any = lambda p, x: p) -> tuple[np.ndarray, Any]:
    prompt, negative, x = predictions(step)
    batch = jnp.concatenate([prompt.numpy(), negative.numpy()])
    combine_batch = jax.jit(lambda batch, values, x, average: rule.combine(batch, len(x), values, x, clean, average))
    result, average = combine_batch(batch, rule.values(step, SCALE), jnp.asarray(x.numpy()), average)
    return np.asarray(result), average


@pytest.mark.parametrize("zero_steps", [0, 1, 3])
def test_cfg_zero_star_equals_its_formula_and_diffusers(zero_steps):
    guider = ClassifierFreeZeroStarGuidance(guidance_scale=SCALE, zero_init_steps=zero_steps)
    for step in range(STEPS):
        prompt, negative, _ = predictions(step)
        guider.set_state(step, STEPS, torch.LongTensor([0]))
        a, b = prompt.flatten(1).double(), negative.flatten(1).double()
        projection = ((a * b).sum(1) / (b * b).sum(1)).reshape(-1, 1, 1, 1, 1) * negative
        expected = torch.zeros(SHAPE) if step < zero_steps else (1 - SCALE) * projection + SCALE * prompt
        result, _ = combine(guidance_rule(f"cfg-zero:zero_steps={zero_steps}"), step)
        np.testing.assert_allclose(result, expected.numpy(), atol=10 * BOUND)
        np.testing.assert_allclose(result, guider.forward(prompt, negative).pred.numpy(), atol=10 * BOUND)
        assert step < zero_steps or error(result, expected.numpy()) <= BOUND


def apg_by_formula(
    eta: float, norm: float, momentum: float, prompt: Any, negative: Any, average: Any
) -> tuple[Any, Any]:
    """Compute APG for two clean predictions in float64; return the result and the new average."""
    change = average = prompt - negative + momentum * average
    axes = (1, 2, 3, 4)
    if norm:
        change = change * torch.clamp(norm / change.square().sum(axes, keepdim=True).sqrt(), max=1)
    parallel = (change * prompt).sum(axes, keepdim=True) / (prompt * prompt).sum(axes, keepdim=True) * prompt
    return prompt + (SCALE - 1) * (change - parallel + eta * parallel), average


@pytest.mark.parametrize(("scheduler", "options"), [(FlowEuler(), FLOW), (DDIM(), {})], ids=["velocity", "v"])
@pytest.mark.parametrize(
    ("eta", "norm", "momentum"), [(0, 0, 0), (0, 0, -0.5), (0.5, 2, -0.5), (1, 5, 0), (-0.3, 100, 0.75)]
)
def test_apg_equals_its_formula_for_clean_latents(scheduler, options, eta, norm, momentum):
    rule = guidance_rule(f"apg:eta={eta},norm={norm},momentum={momentum}")
    assert rule.uses_running_average == (momentum != 0)
    schedule = scheduler.schedule(STEPS, **options)
    average, expected_average = jnp.zeros(SHAPE) if momentum else None, torch.zeros(SHAPE, dtype=torch.float64)
    for step in range(STEPS):
        current = one_step(schedule, step)
        alpha, sigma = float(current.alphas[0]), float(current.sigmas[0])
        prompt, negative, x = (part.double() for part in predictions(step))
        x_factor = alpha if scheduler.prediction == "v" else 1.0
        clean, negative_clean = x_factor * x - sigma * prompt, x_factor * x - sigma * negative
        expected, expected_average = apg_by_formula(eta, norm, momentum, clean, negative_clean, expected_average)
        result, average = combine(rule, step, average, partial(scheduler.x0, current, 0))
        assert error(x_factor * x.numpy() - sigma * np.float64(result), expected.numpy()) <= BOUND
        assert average is None or error(average, expected_average.numpy()) <= BOUND


@pytest.mark.parametrize(("eta", "norm", "momentum"), [(0, 2, -0.5), (0.5, 100, 0.75), (1, 0, -0.5)])
def test_apg_of_predictions_equals_that_of_diffusers(eta, norm, momentum):
    """In the original formulation, which diffusers uses here, a scale of 0 means no guidance."""
    options: Any = {"eta": eta, "adaptive_projected_guidance_rescale": norm}
    guider = AdaptiveProjectedGuidance(
        SCALE - 1, adaptive_projected_guidance_momentum=momentum, use_original_formulation=True, **options
    )
    average = jnp.zeros(SHAPE)
    for step in range(STEPS):
        prompt, negative, _ = predictions(step)
        guider.set_state(step, STEPS, torch.LongTensor([0]))
        guider.prepare_inputs({"x": (prompt, negative)})
        result, average = combine(
            guidance_rule(f"apg:eta={eta},norm={norm},momentum={momentum},of=prediction"), step, average
        )
        assert error(result, guider.forward(prompt, negative).pred.numpy()) <= BOUND


@pytest.mark.parametrize("text", ["cfg-zero", "apg", "nag"])
def test_without_a_negative_prompt_a_rule_changes_nothing(text):
    rule, prompt = guidance_rule(text), jnp.asarray(predictions(0)[0].numpy())
    result, _ = rule.combine(prompt, len(prompt), jnp.asarray(rule.values(0, 1.0)), prompt, lambda p, x: p, None)
    np.testing.assert_array_equal(result, prompt)


def test_apg_without_reduction_is_classifier_free_guidance():
    clean = partial(FlowEuler().x0, FlowEuler().schedule(4, **FLOW), 2)
    result, expected = (
        combine(rule, 2, None, clean)[0] for rule in (guidance_rule("apg:eta=1,momentum=0"), CLASSIFIER_FREE)
    )
    assert error(result, np.asarray(expected)) <= BOUND


NUMBERS = [(11.0, 2.5, 0.25), (4.0, 2.5, 0.5), (1.5, 1.0, 1.0)]


@pytest.mark.parametrize("numbers", NUMBERS)
def test_nag_equals_its_formula(numbers):
    y, difference = torch.randn(2, 2, 7, 12, generator=torch.Generator().manual_seed(0))
    y[0, 0], (negative := 0.9 * y + 0.3 * difference)[0, 0] = 0, 0  # a zero token stays zero
    result = np.asarray(apply_nag(jnp.asarray(y.numpy()), jnp.asarray(negative.numpy()), jnp.array(numbers)))
    assert error(result, np.nan_to_num(nag(y.double(), negative.double(), *numbers).numpy())) <= BOUND
    assert not result[0, 0].any()
