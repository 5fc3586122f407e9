# SPDX-License-Identifier: Apache-2.0
"""The solvers of discrete diffusions against those of diffusers, float32, at every step through a nonlinear field."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)

from tests.parity.references import relative_l2
from tests.support.types import unchecked
from tests.support.words import line_with_words
from wanjax import schedulers
from wanjax.errors import WanjaxError
from wanjax.pipelines.guidance import dynamic_scales
from wanjax.schedulers import DDIM, DPM, UniPC, one_step
from wanjax.schedulers.noise import DrawnNoise

TOLERANCE = 1e-6
SHAPE = (2, 3, 4, 5, 4)
PUBLISHED = {"rescale_betas_zero_snr": True, "clip_sample": False, "prediction_type": "v_prediction"}
CASES = [(DDIM, CogVideoXDDIMScheduler), (DPM, CogVideoXDPMScheduler)]
both = pytest.mark.parametrize(("solver", "theirs"), CASES, ids=["ddim", "dpm"])


def reference(theirs, steps, snr_shift=1.0, spacing="trailing"):
    result = theirs(**PUBLISHED, snr_shift_scale=snr_shift, timestep_spacing=spacing)
    result.set_timesteps(steps)
    return result


def field(x: torch.Tensor, timestep: float) -> torch.Tensor:
    """Return v for both, from one library, so that only the schedulers' roundings differ."""
    return torch.sin(x) + 0.5 * x * (timestep / 1000)


class Draws:
    """Gives the reference noise of ours: in a step of second order its second draw is the one that it uses."""

    def __init__(self, monkeypatch, noise):
        self.noise, self.step = noise, 0
        monkeypatch.setattr(
            "diffusers.schedulers.scheduling_dpm_cogvideox.randn_tensor", lambda *args, **kwargs: self.noise[self.step]
        )


def compare(solver, theirs, steps, monkeypatch, skip=0, **levels):
    """Run both along their own samples, compare them at every step, and return the largest error."""
    expected_scheduler, scheduler = (
        reference(theirs, steps, **levels),
        solver(snr_shift=levels.get("snr_shift", 1.0), spacing=levels.get("spacing", "trailing")),
    )
    schedule = scheduler.schedule(steps, follow="diffusers", skip=skip)
    timesteps = expected_scheduler.timesteps[skip:]
    np.testing.assert_array_equal(schedule.timesteps, timesteps)
    generator = torch.Generator().manual_seed(steps)
    expected, noise = torch.randn(SHAPE, generator=generator), torch.randn(steps - skip, *SHAPE, generator=generator)
    draws = Draws(monkeypatch, noise)
    x, old, worst = jnp.asarray(expected.numpy()), None, 0.0
    options = {"noise": jnp.asarray(noise.numpy())} if solver is DPM else {}
    state = scheduler.init(schedule, x, jax.random.split(jax.random.key(0), SHAPE[0]), **options)
    step = jax.jit(scheduler.step)
    for index, t in enumerate(timesteps):
        draws.step = index
        v = field(expected, t.item())
        if solver is DPM:
            expected, old = expected_scheduler.step(v, old, t, timesteps[index - 1] if index else None, expected)
        else:
            expected = expected_scheduler.step(v, t, expected).prev_sample
        v = jnp.asarray(field(torch.from_numpy(np.array(x)), float(schedule.timesteps[index])).numpy())
        row = one_step(schedule, index)
        x0 = scheduler.x0(row, 0, v, x)
        x, state = step(row, 0, v, x, state)
        if solver is DPM:
            worst = max(worst, relative_l2(x0, old))
        worst = max(worst, relative_l2(x, expected))
    assert np.isfinite(x).all()
    print(f"{worst:.1e}")
    return worst


@both
@pytest.mark.parametrize("snr_shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 5, 7, 30, 49, 50])
def test_every_step(solver, theirs, steps, snr_shift, monkeypatch):
    assert compare(solver, theirs, steps, monkeypatch, snr_shift=snr_shift) <= TOLERANCE


@both
@pytest.mark.parametrize("spacing", ["linspace", "leading"])
@pytest.mark.parametrize("steps", [1, 7, 50])
def test_other_spacings(solver, theirs, steps, spacing, monkeypatch):
    assert compare(solver, theirs, steps, monkeypatch, spacing=spacing) <= TOLERANCE


@both
@pytest.mark.parametrize("skip", [1, 10, 19])
def test_the_first_steps_are_left_out(solver, theirs, skip, monkeypatch):
    assert compare(solver, theirs, 20, monkeypatch, skip=skip) <= TOLERANCE
    x0, noise = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    output = reference(theirs, 20)
    result = solver().add_noise(solver().schedule(20, skip=skip), jnp.asarray(x0.numpy()), jnp.asarray(noise.numpy()))
    assert relative_l2(result, output.add_noise(x0, noise, output.timesteps[skip : skip + 1])) <= TOLERANCE


@pytest.mark.parametrize("snr_shift", [1.0, 3.0])
def test_the_levels_of_training(snr_shift):
    """The last level is pure noise, exactly."""
    result = CogVideoXDDIMScheduler(**PUBLISHED, snr_shift_scale=snr_shift)
    levels = schedulers.diffusion.noise_levels(snr_shift)
    np.testing.assert_allclose(levels, result.alphas_cumprod.numpy(), rtol=1e-9)
    assert levels[-1] == 0
    schedule = DDIM(snr_shift=snr_shift).schedule(50)
    assert (schedule.alphas[0], schedule.sigmas[0]) == (0, 1)
    assert (schedule.alphas[-1], schedule.sigmas[-1]) == (1, 0)


@both
def test_configs_that_diffusers_writes_are_read(solver, theirs):
    config = theirs(**PUBLISHED, snr_shift_scale=1.0, timestep_spacing="trailing").config
    config = dict(config) | {"_class_name": theirs.__name__}
    assert schedulers.from_config(config) == solver()
    bare = PUBLISHED | {"_class_name": theirs.__name__}
    assert schedulers.from_config(bare) == solver(snr_shift=3.0, spacing="leading")  # the reference's defaults


def test_a_number_of_steps_where_the_reference_adds_one():
    """By a rounding error the reference's 61 steps are 62, the last at timestep -1; here they are 61."""
    theirs = reference(CogVideoXDDIMScheduler, 61).timesteps
    assert (len(theirs), theirs[-1]) == (62, -1)
    np.testing.assert_array_equal(DDIM().schedule(61).timesteps, theirs[:-1])


def test_drawn_noise_is_normal_and_new_in_each_step_and_sample():
    """From zeros, with a prediction of zeros, the noise alone is left."""
    scheduler, nothing = DPM(), jnp.zeros((2, 64, 64))
    schedule = scheduler.schedule(4)
    state = scheduler.init(schedule, nothing, jax.random.split(jax.random.key(1), 2))
    assert isinstance(state.source, DrawnNoise)
    drawn, step = [], jax.jit(scheduler.step)
    for index in range(3):
        x, state = step(schedule, index, nothing, nothing, state)
        drawn.append(np.asarray(x / schedule.coefficients[index][3]).reshape(2, -1))
    np.testing.assert_allclose(np.std(drawn, axis=-1), 1, atol=0.03)
    np.testing.assert_allclose(np.mean(drawn, axis=-1), 0, atol=0.05)
    between = np.corrcoef(np.concatenate(drawn))
    np.testing.assert_allclose(between, np.eye(6), atol=0.06)
    again = scheduler.init(schedule, nothing, jax.random.split(jax.random.key(1), 2))
    x, _ = step(schedule, 0, nothing, nothing, again)
    np.testing.assert_array_equal(np.asarray(x / schedule.coefficients[0][3]).reshape(2, -1), drawn[0])


def configured(of, **entries):
    complete = PUBLISHED | {"snr_shift_scale": 1.0, "timestep_spacing": "trailing", "_class_name": of.__name__}
    return lambda: schedulers.from_config(complete | entries)


def with_noise(steps):
    x, keys = jnp.zeros((1, 2, 3)), jax.random.split(jax.random.key(0), 1)
    return DPM().init(DPM().schedule(5), x, keys, jnp.zeros((steps, 1, 2, 3)))


REFUSED = [  # calls, and what their sentences name
    *((configured(of, prediction_type="epsilon"), "prediction_type 'epsilon'") for _, of in CASES),
    *((configured(of, rescale_betas_zero_snr=False), "rescale_betas_zero_snr False") for _, of in CASES),
    *((configured(of, beta_end=0.02), "beta_end 0.02") for _, of in CASES),
    *((configured(of, timestep_spacing="even"), "'even'") for _, of in CASES),
    *((configured(of, snr_shift_scale=0), "0") for _, of in CASES),
    (lambda: DDIM().schedule(1001), "1001 steps 1000 timesteps"),
    (lambda: DDIM().schedule(4, follow="other"), "other official diffusers"),
    (lambda: with_noise(4), "[4, 1, 2, 3] [5, 1, 2, 3]"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_unsupported_settings_of_these_solvers_are_refused(call, words):
    with unchecked(), pytest.raises(WanjaxError, match=line_with_words(words)):
        call()


def test_a_solver_chosen_by_name_keeps_the_noise_levels():
    assert schedulers.resolve("dpm", DDIM(snr_shift=3.0, spacing="linspace")) == DPM(snr_shift=3.0, spacing="linspace")
    assert schedulers.name_of(DPM(snr_shift=3.0)) == "dpm"
    assert schedulers.resolve(DDIM(), DPM(snr_shift=3.0)) == DDIM()
    with pytest.raises(WanjaxError, match=line_with_words("velocity model v ddim")):
        schedulers.resolve("unipc", DDIM())
    with pytest.raises(WanjaxError, match=line_with_words("v model velocity unipc")):
        schedulers.resolve("dpm", UniPC())


@torch.no_grad()
@pytest.mark.parametrize("steps", [50, 7])
def test_dynamic_guidance(steps):
    """Take the reference's own scales from its pipeline, run with networks that only count."""
    actual = []

    class Recorder(CogVideoXPipeline):
        @property
        def guidance_scale(self):
            actual.append(self._guidance_scale)
            return self._guidance_scale

    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=1, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=4, num_layers=1,
        text_embed_dim=4, sample_width=2, sample_height=2, sample_frames=1, max_text_seq_length=1,
    )  # fmt: skip
    vae = AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2, latent_channels=4, sample_height=16,
        sample_width=16,
    )  # fmt: skip
    scheduler = CogVideoXDDIMScheduler(**PUBLISHED, timestep_spacing="trailing")
    pipe = Recorder(None, None, vae, transformer, scheduler)
    pipe.set_progress_bar_config(disable=True)
    embeds = {"prompt_embeds": torch.zeros(1, 1, 4), "negative_prompt_embeds": torch.zeros(1, 1, 4)}
    size = {"height": 16, "width": 16, "num_frames": 1, "output_type": "latent"}
    pipe(**embeds, **size, num_inference_steps=steps, guidance_scale=6.0, use_dynamic_cfg=True)
    result = dynamic_scales(6.0, DDIM().schedule(steps).timesteps, steps)
    np.testing.assert_allclose(result, actual, rtol=1e-12)
    assert len(result) == steps
    assert 1 <= min(result) < max(result) <= 7
