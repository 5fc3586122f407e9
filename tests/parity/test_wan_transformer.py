# SPDX-License-Identifier: Apache-2.0
"""The diffusion transformer against diffusers' WanTransformer3DModel, float32, on the same small random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from flax import nnx

from tests.parity.references import (
    NAG_NUMBERS,
    NAGHook,
    add_hook,
    channels_last,
    compare_with_nag,
    randomise,
    relative_l2,
    wan_transformer,
)
from wanjax.layers.patch import patchify
from wanjax.layers.stack import block_at
from wanjax.models.wan.transformer import WanTransformer

SIZES = [(1, 3, 16, 8), (2, 5, 8, 12)]  # batch, latent frames, height, width


@pytest.fixture(scope="module")
def models():
    return make_models()


def make_models():
    torch.manual_seed(0)
    reference = WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=48, freq_dim=64,
        ffn_dim=160, num_layers=3,
    ).eval()  # fmt: skip
    randomise(reference, seed=1)
    return reference, wan_transformer(reference)


def inputs(batch, frames, height, width):
    generator = torch.Generator().manual_seed(height)
    latents = torch.randn(batch, 4, frames, height, width, generator=generator)
    text = torch.randn(batch, 20, 48, generator=generator)
    text[:, 13:] = 0  # padding
    return latents, torch.tensor([999, 137])[:batch], text


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.numpy()


@torch.no_grad()
def reference_velocity(reference: WanTransformer3DModel, latents, t, text) -> np.ndarray:
    return channels_last(reference(latents.to(reference.dtype), t, text.to(reference.dtype)).sample)


def predict_velocity(model: WanTransformer, latents, t, text, **options) -> jax.Array:
    graphdef, weights = nnx.split(model)

    @jax.jit
    def run(weights, latents, t, text):
        model = nnx.merge(graphdef, weights)
        return model(latents, t, model.context(text), model.rope(model.grid(latents)), **options)

    return run(weights, channels_last(latents), to_numpy(t.float()), to_numpy(text))


@pytest.mark.parametrize("size", SIZES)
def test_the_velocity_equals_that_of_diffusers(models, size):
    reference, model = models
    assert relative_l2(predict_velocity(model, *inputs(*size)), reference_velocity(reference, *inputs(*size))) <= 1e-5


@pytest.mark.parametrize("clean_frames", [1, 2])
def test_clean_frames_are_at_timestep_0(models, clean_frames):
    """Compare with the reference, whose input is a timestep for every token."""
    reference, model = models
    latents, t, text = inputs(*SIZES[1])
    tokens = t[:, None].repeat(1, 5 * 4 * 6)
    tokens[:, : clean_frames * 4 * 6] = 0
    result = predict_velocity(model, latents, t, text, clean_frames=clean_frames)
    assert relative_l2(result, reference_velocity(reference, latents, tokens, text)) <= 1e-5


def test_bfloat16_is_no_further_from_float32_than_in_the_reference(models, tmp_path):
    reference, _ = models
    reference.save_pretrained(tmp_path)
    # some weights stay in float32
    reference_bfloat16 = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert reference_bfloat16.dtype == torch.bfloat16
    model = wan_transformer(reference_bfloat16, jnp.bfloat16, jnp.bfloat16)
    exact = reference_velocity(reference, *inputs(*SIZES[1]))
    result = predict_velocity(model, *inputs(*SIZES[1]))
    assert result.dtype == jnp.bfloat16
    assert relative_l2(result, exact) <= 1.1 * relative_l2(
        reference_velocity(reference_bfloat16, *inputs(*SIZES[1])), exact
    )


def test_every_embedding_equals_that_of_diffusers(models):
    reference, model = models
    latents, t, text = inputs(2, 5, 8, 12)
    with torch.no_grad():
        patches = reference.patch_embedding(latents).flatten(2).transpose(1, 2)
        time, mod, context, _ = reference.condition_embedder(t, text)

    @nnx.jit
    def embed(model, latents, t, text):
        time = model.time_embed(t)
        return (
            model.patch_embed(patchify(latents, (1, 2, 2))),
            time,
            model.time_proj(jax.nn.silu(time)),
            model.text_embed(text),
        )

    results = embed(model, channels_last(latents), to_numpy(t.float()), to_numpy(text))
    for result, expected in zip(results, (patches, time, mod, context), strict=True):
        assert relative_l2(result, expected) <= 1e-5


def test_a_block_and_its_attention_equal_those_of_diffusers(models):
    reference, model = models
    generator = torch.Generator().manual_seed(3)
    x, context = torch.randn(1, 24, 96, generator=generator), torch.randn(1, 20, 96, generator=generator)
    mod = torch.randn(1, 6, 96, generator=generator) * 0.3
    rotary = reference.rope(torch.zeros(1, 4, 2, 6, 8))
    with torch.no_grad():
        self_attn = reference.blocks[1].attn1(x, None, None, rotary)
        cross_attn = reference.blocks[1].attn2(x, context, None, None)
        mlp = reference.blocks[1].ffn(x)
        block_output = reference.blocks[1](x, context, mod, rotary)

    @nnx.jit
    def parts(model, x, context, mod):
        block, rope = block_at(model.blocks, 1), model.rope((2, 3, 4))
        text_context = block.cross_attn.context(context)
        (attended, _), (block_output, _) = block.self_attn(x, rope), block(x, text_context, mod[:, None], rope)
        return attended, block.cross_attn(x, text_context), block.mlp(x), block_output

    results = parts(model, to_numpy(x), to_numpy(context), to_numpy(mod))
    for result, expected in zip(results, (self_attn, cross_attn, mlp, block_output), strict=True):
        assert relative_l2(result, expected) <= 1e-5


def test_nag_equals_its_formula_in_diffusers():
    reference, model = make_models()
    latents, t, text = inputs(*SIZES[1])
    unguided = reference_velocity(reference, latents, t, text)
    negative = torch.randn(text.shape, generator=torch.Generator().manual_seed(9))
    add_hook(reference, "attn2.to_out.0", NAGHook(NAG_NUMBERS))
    expected = reference_velocity(reference, *map(torch.cat, ([latents] * 2, [t] * 2, [text, negative])))

    @nnx.jit
    def run(model, latents, t, text, negative):
        return model(latents, t, model.context(text).with_nag(model.context(negative), jnp.array(NAG_NUMBERS)))

    result = run(model, channels_last(latents), to_numpy(t.float()), to_numpy(text), to_numpy(negative))
    compare_with_nag(result, expected, unguided)
