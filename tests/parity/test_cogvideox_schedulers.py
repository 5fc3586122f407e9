# SPDX-License-Identifier: Apache-2.0
"""Each step of the solvers of discrete diffusion equals that of diffusers, in float32, for a nonlinear prediction."""

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
each_solver = pytest.mark.parametrize(("solver", "reference_class"), CASES, ids=["ddim", "dpm"])


def reference(reference_class, steps, snr_shift=1.0, spacing="trailing"):
    scheduler = reference_class(**PUBLISHED, snr_shift_scale=snr_shift, timestep_spacing=spacing)
    scheduler.set_timesteps(steps)
    return scheduler


def predict_v(x: torch.Tensor, timestep: float) -> torch.Tensor:
    """Return the prediction v, computed by torch for both schedulers, so that only the schedulers round differently."""
    return torch.sin(x) + 0.5 * x * (timestep / 1000)


class ReferenceNoise:
    """Replace the reference's random draws by given noise. In a step of second order, it uses only its second draw."""

    def __init__(self, monkeypatch, noise):
        self.noise, self.step = noise, 0
        monkeypatch.setattr(
            "diffusers.schedulers.scheduling_dpm_cogvideox.randn_tensor", lambda *args, **kwargs: self.noise[self.step]
        )


def compare(solver, reference_class, steps, monkeypatch, skip=0, **reference_options):
    """Run both schedulers, compare their samples at every step, and return the largest error."""
    expected_scheduler, scheduler = (
        reference(reference_class, steps, **reference_options),
        solver(snr_shift=reference_options.get("snr_shift", 1.0), spacing=reference_options.get("spacing", "trailing")),
    )
    schedule = scheduler.schedule(steps, follow="diffusers", skip=skip)
    timesteps = expected_scheduler.timesteps[skip:]
    np.testing.assert_array_equal(schedule.timesteps, timesteps)
    generator = torch.Generator().manual_seed(steps)
    expected, noise = torch.randn(SHAPE, generator=generator), torch.randn(steps - skip, *SHAPE, generator=generator)
    draws = ReferenceNoise(monkeypatch, noise)
    x, old, largest_error = jnp.asarray(expected.numpy()), None, 0.0
    init_options = {"noise": jnp.asarray(noise.numpy())} if solver is DPM else {}
    state = scheduler.init(schedule, x, jax.random.split(jax.random.key(0), SHAPE[0]), **init_options)
    step = jax.jit(scheduler.step)
    for index, t in enumerate(timesteps):
        draws.step = index
        v = predict_v(expected, t.item())
        if solver is DPM:
            expected, old = expected_scheduler.step(v, old, t, timesteps[index - 1] if index else None, expected)
        else:
            expected = expected_scheduler.step(v, t, expected).prev_sample
        v = jnp.asarray(predict_v(torch.from_numpy(np.array(x)), float(schedule.timesteps[index])).numpy())
        row = one_step(schedule, index)
        x0 = scheduler.x0(row, 0, v, x)
        x, state = step(row, 0, v, x, state)
        if solver is DPM:
            largest_error = max(largest_error, relative_l2(x0, old))
        largest_error = max(largest_error, relative_l2(x, expected))
    assert np.isfinite(x).all()
    print(f"{largest_error:.1e}")
    return largest_error


@each_solver
@pytest.mark.parametrize("snr_shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 5, 7, 30, 49, 50])
def test_every_step_equals_that_of_diffusers(solver, reference_class, steps, snr_shift, monkeypatch):
    assert compare(solver, reference_class, steps, monkeypatch, snr_shift=snr_shift) <= TOLERANCE


@each_solver
@pytest.mark.parametrize("spacing", ["linspace", "leading"])
@pytest.mark.parametrize("steps", [1, 7, 50])
def test_other_spacings_equal_those_of_diffusers(solver, reference_class, steps, spacing, monkeypatch):
    assert compare(solver, reference_class, steps, monkeypatch, spacing=spacing) <= TOLERANCE


@each_solver
@pytest.mark.parametrize("skip", [1, 10, 19])
def test_a_run_may_skip_the_first_steps(solver, reference_class, skip, monkeypatch):
    assert compare(solver, reference_class, 20, monkeypatch, skip=skip) <= TOLERANCE
    x0, noise = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    reference_scheduler = reference(reference_class, 20)
    noisy = solver().add_noise(solver().schedule(20, skip=skip), jnp.asarray(x0.numpy()), jnp.asarray(noise.numpy()))
    assert (
        relative_l2(noisy, reference_scheduler.add_noise(x0, noise, reference_scheduler.timesteps[skip : skip + 1]))
        <= TOLERANCE
    )


@pytest.mark.parametrize("snr_shift", [1.0, 3.0])
def test_training_noise_levels_equal_those_of_diffusers(snr_shift):
    """The last sample is exactly noise."""
    reference_scheduler = CogVideoXDDIMScheduler(**PUBLISHED, snr_shift_scale=snr_shift)
    levels = schedulers.diffusion.noise_levels(snr_shift)
    np.testing.assert_allclose(levels, reference_scheduler.alphas_cumprod.numpy(), rtol=1e-9)
    assert levels[-1] == 0
    schedule = DDIM(snr_shift=snr_shift).schedule(50)
    assert (schedule.alphas[0], schedule.sigmas[0]) == (0, 1)
    assert (schedule.alphas[-1], schedule.sigmas[-1]) == (1, 0)


@each_solver
def test_configs_that_diffusers_writes_are_read(solver, reference_class):
    config = reference_class(**PUBLISHED, snr_shift_scale=1.0, timestep_spacing="trailing").config
    config = dict(config) | {"_class_name": reference_class.__name__}
    assert schedulers.from_config(config) == solver()
    short_config = PUBLISHED | {"_class_name": reference_class.__name__}
    assert schedulers.from_config(short_config) == solver(snr_shift=3.0, spacing="leading")  # the reference's defaults


def test_61_steps_are_61_steps():
    """Because of a rounding error, the reference takes 62 steps, the last at timestep -1; wanjax takes 61."""
    timesteps = reference(CogVideoXDDIMScheduler, 61).timesteps
    assert (len(timesteps), timesteps[-1]) == (62, -1)
    np.testing.assert_array_equal(DDIM().schedule(61).timesteps, timesteps[:-1])


def test_drawn_noise_is_normal_and_new_in_each_step_and_sample():
    """If the samples and the predictions are zero, the result is only noise."""
    scheduler, zeros = DPM(), jnp.zeros((2, 64, 64))
    schedule = scheduler.schedule(4)
    state = scheduler.init(schedule, zeros, jax.random.split(jax.random.key(1), 2))
    assert isinstance(state.source, DrawnNoise)
    noises, step = [], jax.jit(scheduler.step)
    for index in range(3):
        x, state = step(schedule, index, zeros, zeros, state)
        noises.append(np.asarray(x / schedule.coefficients[index][3]).reshape(2, -1))
    np.testing.assert_allclose(np.std(noises, axis=-1), 1, atol=0.03)
    np.testing.assert_allclose(np.mean(noises, axis=-1), 0, atol=0.05)
    correlations = np.corrcoef(np.concatenate(noises))
    np.testing.assert_allclose(correlations, np.eye(6), atol=0.06)
    same_state = scheduler.init(schedule, zeros, jax.random.split(jax.random.key(1), 2))
    x, _ = step(schedule, 0, zeros, zeros, same_state)
    np.testing.assert_array_equal(np.asarray(x / schedule.coefficients[0][3]).reshape(2, -1), noises[0])


def from_config(reference_class, **entries):
    complete = PUBLISHED | {
        "snr_shift_scale": 1.0,
        "timestep_spacing": "trailing",
        "_class_name": reference_class.__name__,
    }
    return lambda: schedulers.from_config(complete | entries)


def with_noise(steps):
    x, keys = jnp.zeros((1, 2, 3)), jax.random.split(jax.random.key(0), 1)
    return DPM().init(DPM().schedule(5), x, keys, jnp.zeros((steps, 1, 2, 3)))


REFUSED = [  # calls, and words of the messages
    *(
        (from_config(reference_class, prediction_type="epsilon"), "prediction_type 'epsilon'")
        for _, reference_class in CASES
    ),
    *(
        (from_config(reference_class, rescale_betas_zero_snr=False), "rescale_betas_zero_snr False")
        for _, reference_class in CASES
    ),
    *((from_config(reference_class, beta_end=0.02), "beta_end 0.02") for _, reference_class in CASES),
    *((from_config(reference_class, timestep_spacing="even"), "'even'") for _, reference_class in CASES),
    *((from_config(reference_class, snr_shift_scale=0), "0") for _, reference_class in CASES),
    (lambda: DDIM().schedule(1001), "1001 steps 1000 timesteps"),
    (lambda: DDIM().schedule(4, follow="other"), "other official diffusers"),
    (lambda: with_noise(4), "[4, 1, 2, 3] [5, 1, 2, 3]"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_unsupported_settings_are_refused(call, words):
    with unchecked(), pytest.raises(WanjaxError, match=line_with_words(words)):
        call()


def test_a_solver_chosen_by_name_keeps_the_noise_levels():
    assert schedulers.resolve("dpm", DDIM(snr_shift=3.0, spacing="linspace")) == DPM(snr_shift=3.0, spacing="linspace")
    assert schedulers.name_of(DPM(snr_shift=3.0)) == "dpm"
    assert schedulers.resolve(DDIM(), DPM(snr_shift=3.0)) == DDIM()
    with pytest.raises(WanjaxError, match=line_with_words("unipc model v ddim")):
        schedulers.resolve("unipc", DDIM())
    with pytest.raises(WanjaxError, match=line_with_words("dpm model velocity unipc")):
        schedulers.resolve("dpm", UniPC())


@torch.no_grad()
@pytest.mark.parametrize("steps", [50, 7])
def test_dynamic_guidance_has_the_scales_of_diffusers(steps):
    """The expected scales are those of the reference's pipeline, run with tiny networks."""
    expected = []

    class Recorder(CogVideoXPipeline):
        @property
        def guidance_scale(self):
            expected.append(self._guidance_scale)
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
    scales = dynamic_scales(6.0, DDIM().schedule(steps).timesteps, steps)
    np.testing.assert_allclose(scales, expected, rtol=1e-12)
    assert len(scales) == steps
    assert 1 <= min(scales) < max(scales) <= 7
