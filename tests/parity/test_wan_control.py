# SPDX-License-Identifier: Apache-2.0
"""The transformer with control clips against diffusers' WanVACETransformer3DModel, float32, small random weights."""

import jax
import jax.numpy as jnp
import torch
from diffusers import WanVACETransformer3DModel
from flax import nnx

from tests.parity.references import channels_last, randomise, relative_l2, wan_transformer
from wanjax.models.wan.control import WanControlTransformer


def test_the_velocity_with_control_equals_that_of_diffusers():
    torch.manual_seed(0)
    reference = WanVACETransformer3DModel(
        num_attention_heads=3, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=48, freq_dim=64,
        ffn_dim=160, num_layers=4, vace_layers=[0, 2], vace_in_channels=24,
    ).eval()  # fmt: skip
    randomise(reference, seed=1)
    model = wan_transformer(reference)
    assert isinstance(model, WanControlTransformer)
    generator = torch.Generator().manual_seed(4)
    latents = torch.randn(2, 4, 3, 8, 12, generator=generator)
    control = torch.randn(2, 24, 3, 8, 12, generator=generator)
    text = torch.randn(2, 20, 48, generator=generator)
    t = torch.tensor([999, 137])
    with torch.no_grad():
        exact = channels_last(reference(latents, t, text, control_hidden_states=control).sample)
        uncontrolled = channels_last(reference(latents, t, text, control_hidden_states=control * 0).sample)
    graphdef, weights = nnx.split(model)

    @jax.jit
    def run(weights, latents, t, text, control):
        model = nnx.merge(graphdef, weights)
        return model(latents, t, model.context(text), model.rope(model.grid(latents)), control=control)

    inputs = (channels_last(latents), t.float().numpy(), text.numpy(), channels_last(control))
    assert relative_l2(run(weights, *map(jnp.asarray, inputs)), exact) <= 1e-5
    assert relative_l2(uncontrolled, exact) > 1e-2
