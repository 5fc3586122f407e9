# SPDX-License-Identifier: Apache-2.0
"""CogVideoX's transformer equals diffusers' CogVideoXTransformer3DModel, with small random weights in float32."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
from flax import nnx

from tests.parity.references import NAG_NUMBERS, NAGHook, StateDict, add_hook, compare_with_nag, randomise, relative_l2
from tests.support.quick import quick
from tests.support.words import line_with_words
from wanjax.checkpoints import modules
from wanjax.checkpoints.files import load_safetensors
from wanjax.converters.cogvideox.diffusers import transformer_config, transformer_weight_rules
from wanjax.errors import WanjaxError
from wanjax.layers.modulation import modulate
from wanjax.layers.patch import patchify
from wanjax.layers.placement import as_shapes
from wanjax.layers.stack import block_at
from wanjax.models.cogvideox.transformer import CogVideoXTransformer, split_by_token_kind

TEXT = 7  # tokens of a prompt
SIZES = {
    **{"num_attention_heads": 3, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 3},
    **{"time_embed_dim": 24, "text_embed_dim": 20, "max_text_seq_length": TEXT},
    **{"sample_frames": 9, "sample_height": 8, "sample_width": 12},
}
VERSION_1_5 = {
    **{"patch_size_t": 2, "patch_bias": False, "use_rotary_positional_embeddings": True},
    **{"sample_height": 40, "sample_width": 40},  # the largest positions of the reference
}
VARIANTS = {
    "1.5": VERSION_1_5,
    "1.5 i2v": VERSION_1_5 | {"in_channels": 8, "ofs_embed_dim": 24},
    "2b": {},
    "5b": {"use_rotary_positional_embeddings": True},
    "5b i2v": {
        **{"use_rotary_positional_embeddings": True, "use_learned_positional_embeddings": True},
        "in_channels": 8,
    },
}
# batch, latent frames, height, width; the first is the trained size
ANY_SIZE = [(1, 3, 8, 12), (2, 5, 10, 6), (1, 2, 6, 14)]
INPUTS = {
    **{name: [(1, 2, 8, 12), (2, 6, 10, 6)] for name in ("1.5", "1.5 i2v")},
    **{name: ANY_SIZE for name in ("2b", "5b")},
    "5b i2v": [(1, 3, 8, 12), (2, 5, 8, 12)],  # for five frames the reference uses sines instead of learned positions
}


@torch.no_grad()
def make(name):
    """Return a reference in which every weight affects the result, and a transformer of wanjax with its weights."""
    torch.manual_seed(0)
    reference = CogVideoXTransformer3DModel(**SIZES | VARIANTS[name]).eval()
    randomise(reference, seed=1)
    generator = torch.Generator().manual_seed(2)
    for key, weight in reference.state_dict().items():
        if "norm1.linear" in key or "norm2.linear" in key or "norm_out.linear" in key:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
        elif "norm_q" in key or "norm_k" in key:
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.5)
        elif key.endswith("pos_embedding"):
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return reference, convert_transformer(reference)


def convert_transformer(reference, dtype=jnp.float32):
    config = transformer_config(reference.config)
    abstract = as_shapes(lambda rngs: CogVideoXTransformer(config, dtype=dtype, param_dtype=dtype, rngs=rngs))
    return modules.load(abstract, transformer_weight_rules(config), StateDict(reference))


@pytest.fixture(scope="module", params=quick(["1.5 i2v", "2b", "5b", "5b i2v"], VARIANTS))
def models(request):
    return request.param, *make(request.param)


def inputs(reference, batch, frames, height, width):
    generator = torch.Generator().manual_seed(height + frames)
    latents = torch.randn(batch, frames, reference.config.in_channels, height, width, generator=generator)
    text = torch.randn(batch, TEXT, SIZES["text_embed_dim"], generator=generator)
    return latents, torch.tensor([999, 137])[:batch], text


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().numpy()


def channels_last(x: torch.Tensor) -> np.ndarray:
    """Convert [B T C H W], CogVideoX's order, to [B T H W C]."""
    return np.moveaxis(to_numpy(x), 2, -1)


def rotary(reference, latents):
    """Return the reference's rotary tables, computed as in its pipeline."""
    if not reference.config.use_rotary_positional_embeddings:
        return None
    _, frames, _, height, width = latents.shape
    pipeline = SimpleNamespace(transformer=reference, vae_scale_factor_spatial=8)
    make = CogVideoXPipeline._prepare_rotary_positional_embeddings
    return make(pipeline, 8 * height, 8 * width, frames, torch.device("cpu"))


@torch.no_grad()
def reference_prediction(reference, latents, t, text) -> np.ndarray:
    rope, dtype = rotary(reference, latents), reference.dtype
    ofs = torch.full((1,), 2.0, dtype=dtype) if reference.config.ofs_embed_dim else None
    out = reference(latents.to(dtype), text.to(dtype), t, ofs=ofs, image_rotary_emb=rope).sample
    return np.moveaxis(out.float().numpy(), 2, -1)


def predict(model, latents, t, text) -> jax.Array:
    return prediction(model, channels_last(latents), to_numpy(t), to_numpy(text))


@nnx.jit
def prediction(model, latents, t, text):
    context = model.context(text)
    return model(latents, t, context, model.positions(model.grid(latents), context.text.shape[1]))


def compare(result, reference) -> None:
    error = relative_l2(result, reference)
    print(f"{error:.1e}")
    assert error <= 1e-5


def test_predictions_equal_those_of_diffusers(models):
    name, reference, model = models
    for size in INPUTS[name]:
        options = inputs(reference, *size)
        compare(predict(model, *options), reference_prediction(reference, *options))


def test_tokens_and_timesteps_equal_those_of_diffusers(models):
    name, reference, model = models
    for size in INPUTS[name]:
        latents, t, text = inputs(reference, *size)
        with torch.no_grad():
            joint = reference.patch_embed(text, latents)
            time = reference.time_embedding(reference.time_proj(t))
            if reference.ofs_embedding is not None:
                time = time + reference.ofs_embedding(reference.ofs_proj(torch.full((1,), 2.0)))
        tokens, added, time_of_model = embed(model, channels_last(latents), to_numpy(t), to_numpy(text))
        assert (added is None) == (name in ("1.5", "1.5 i2v", "5b"))
        compare(tokens if added is None else tokens + added, torch.cat([joint[:, TEXT:], joint[:, :TEXT]], dim=1))
        compare(time_of_model, time)


@nnx.jit
def embed(model, latents, t, text):
    """Return the tokens of video and text, the positions to add (or None), and the embedded timesteps."""
    video = model.patch_embed(patchify(latents, model.config.patch))
    added = model.positions(model.grid(latents), TEXT).added
    return jnp.concatenate([video, model.context(text).text], axis=1), added, model.time_embed(t)


@torch.no_grad()
def test_every_part_of_a_block_equals_that_of_diffusers(models):
    name, reference, model = models
    latents, _, _ = inputs(reference, *INPUTS[name][1])
    reference_block = reference.transformer_blocks[1]
    grid, rope = model.grid(jnp.asarray(channels_last(latents))), rotary(reference, latents)
    tokens, generator = int(np.prod(grid)), torch.Generator().manual_seed(3)
    video, text = (torch.randn(2, length, 48, generator=generator) for length in (tokens, TEXT))
    time = torch.randn(2, 24, generator=generator)
    is_text = np.arange(tokens + TEXT) >= tokens

    @nnx.jit
    def outputs_of_block(model, x, time, is_text):
        block, rope = block_at(model.blocks, 1), model.positions(grid, TEXT).rope
        mod = split_by_token_kind(block.attn_mod(jax.nn.silu(time)))
        normed = modulate(block.norm1(x), mod.shift, mod.scale, is_text)
        output = block(x, jax.nn.silu(time), rope, is_text)
        return normed, mod.gate, block.attn(x, rope, is_text, None), block.mlp(x), output

    *normed, gate, text_gate = reference_block.norm1(video, text, time)
    expected = [
        torch.cat(normed, dim=1),
        torch.cat([gate, text_gate], dim=1),
        torch.cat(reference_block.attn1(video, encoder_hidden_states=text, image_rotary_emb=rope), dim=1),
        reference_block.ff(torch.cat([video, text], dim=1)),
        torch.cat(reference_block(video, text, time, rope), dim=1),
    ]
    results = outputs_of_block(model, to_numpy(torch.cat([video, text], dim=1)), to_numpy(time), is_text)
    for result, part in zip(results, expected, strict=True):
        compare(result, part)


@pytest.mark.parametrize("name", quick(["1.5 i2v", "5b i2v"], VARIANTS))
def test_bfloat16_is_as_near_to_float32_as_in_diffusers(name):
    reference, _ = make(name)
    options = inputs(reference, *INPUTS[name][1])
    exact = reference_prediction(reference, *options)
    model = convert_transformer(reference.to(torch.bfloat16), jnp.bfloat16)
    result = predict(model, *options)
    assert result.dtype == jnp.bfloat16
    error, reference_error = (
        relative_l2(x, exact) for x in (result.astype(jnp.float32), reference_prediction(reference, *options))
    )
    print(f"{error:.2e}, and the reference {reference_error:.2e}")
    assert error <= 1.1 * reference_error


def test_a_size_without_learned_positions_is_refused():
    _, model = make("5b i2v")
    with pytest.raises(WanjaxError, match=line_with_words("4 rows 6 columns patches 5")):
        model.positions((3, 5, 6), TEXT)


def test_exported_weights_have_the_names_of_diffusers(models, tmp_path):
    _, reference, model = models
    modules.export(model, transformer_weight_rules(model.config), tmp_path / "model.safetensors")
    exported = load_safetensors(tmp_path / "model.safetensors")
    expected = {key: weight.float().numpy() for key, weight in reference.state_dict().items()}
    assert exported.keys() == expected.keys()
    for key, weight in expected.items():
        np.testing.assert_array_equal(exported[key], weight)


@pytest.mark.parametrize("name", quick(["1.5"], ["1.5", "2b"]))
def test_nag_equals_its_formula_in_the_reference(name):
    reference, model = make(name)
    latents, t, text = inputs(reference, *INPUTS[name][1])
    unguided = reference_prediction(reference, latents, t, text)
    negative = torch.randn(text.shape, generator=torch.Generator().manual_seed(9))
    add_hook(reference, "attn1.to_out.0", NAGHook(NAG_NUMBERS, TEXT))
    expected = reference_prediction(reference, *map(torch.cat, ([latents] * 2, [t] * 2, [text, negative])))

    @nnx.jit
    def run(model, latents, t, texts):
        return model(latents, t, model.context(texts)._replace(nag=jnp.array(NAG_NUMBERS)))

    result = run(model, channels_last(latents), to_numpy(t), to_numpy(torch.cat([text, negative])))
    compare_with_nag(result, expected, unguided)
