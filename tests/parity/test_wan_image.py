# SPDX-License-Identifier: Apache-2.0
"""The transformers with images against diffusers' WanTransformer3DModel, float32, on small random weights."""

import jax
import jax.numpy as jnp
import pytest
import torch
from diffusers import WanTransformer3DModel
from flax import nnx

from tests.parity.references import channels_last, randomise, relative_l2, wan_transformer
from wanjax.models.wan.image import ImageContext, WanImageTransformer

TEXT = 512  # in the reference, the last TEXT tokens are those of the prompt
IMAGE_TOKENS, IMAGE_WIDTH = 5, 40


@pytest.fixture(scope="module", params=[None, 2 * IMAGE_TOKENS], ids=["image", "first and last"])
def models(request):
    torch.manual_seed(0)
    reference = WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=32, in_channels=12, out_channels=4, text_dim=48, freq_dim=64,
        ffn_dim=160, num_layers=3, image_dim=IMAGE_WIDTH, added_kv_proj_dim=96, pos_embed_seq_len=request.param,
    ).eval()  # fmt: skip
    randomise(reference, seed=1)
    return reference, wan_transformer(reference)


def from_torch(x: torch.Tensor) -> jax.Array:
    return jnp.asarray(x.numpy())


def test_the_velocity_with_an_image_equals_that_of_diffusers(models):
    reference, model = models
    assert isinstance(model, WanImageTransformer)
    images = 1 if model.config.image_positions is None else 2
    generator = torch.Generator().manual_seed(4)
    latents = torch.randn(1, 12, 3, 8, 12, generator=generator)
    text = torch.randn(1, TEXT, 48, generator=generator)
    image = torch.randn(images, IMAGE_TOKENS, IMAGE_WIDTH, generator=generator)
    t = torch.tensor([137])
    with torch.no_grad():
        velocity = channels_last(reference(latents, t, text, image).sample)
    graphdef, weights = nnx.split(model)

    @jax.jit
    def run(weights, latents, t, text, image):
        model = nnx.merge(graphdef, weights)
        return model(latents, t, model.context(text, image), model.rope(model.grid(latents)))

    result = run(
        weights,
        jnp.asarray(channels_last(latents)),
        from_torch(t.float()),
        from_torch(text),
        from_torch(image).reshape(1, -1, 40),
    )
    assert relative_l2(result, velocity) <= 1e-5


def test_attention_to_an_image_equals_that_of_diffusers(models):
    reference, model = models
    images = 1 if model.config.image_positions is None else 2
    generator = torch.Generator().manual_seed(5)
    x, text = torch.randn(1, 24, 96, generator=generator), torch.randn(1, TEXT, 96, generator=generator)
    image = torch.randn(images, IMAGE_TOKENS, IMAGE_WIDTH, generator=generator)
    graphdef, weights = nnx.split(model.blocks)
    block = nnx.merge(graphdef, jax.tree.map(lambda w: w[1], weights))
    with torch.no_grad():
        embedded = reference.condition_embedder.image_embedder(image)
        expected = reference.blocks[1].attn2(x, torch.cat([embedded, text], dim=1), None, None)
        prompt_only = reference.blocks[0].attn2(x, torch.cat([embedded * 0, text], dim=1), None, None)
    embed = jax.jit(lambda image: model.image_embed(image))(from_torch(image).reshape(1, -1, IMAGE_WIDTH))
    assert relative_l2(embed, embedded) <= 1e-5
    attention = block.cross_attn
    context = ImageContext(attention.context(from_torch(text)), attention.image_context(embed))
    result = jax.jit(lambda *args: attention(*args))(from_torch(x), context)
    assert relative_l2(result, expected) <= 1e-5
    assert relative_l2(expected, prompt_only) > 1e-2  # the image matters
