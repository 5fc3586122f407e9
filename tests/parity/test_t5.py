# SPDX-License-Identifier: Apache-2.0
"""The text encoder against transformers' UMT5EncoderModel and T5EncoderModel, on the same small random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from tests.parity.references import T5_FAMILIES, T5_SIZES, convert_t5, relative_l2, run, t5_reference
from tests.support.quick import quick
from wanjax.checkpoints.files import load_safetensors
from wanjax.checkpoints.modules import export
from wanjax.converters.configs import read_config
from wanjax.converters.t5 import t5_config, t5_weight_rules
from wanjax.converters.weight_rules import assign
from wanjax.errors import WanjaxError
from wanjax.layers.placement import as_shapes
from wanjax.layers.stack import block_at
from wanjax.models.t5 import UMT5_XXL, T5Encoder, distance_buckets

LENGTHS = [1, 7, 64, 512]
MASKED, UNMASKED = ([(length, masked) for length in LENGTHS] for masked in (True, False))


@pytest.fixture(scope="module", params=T5_FAMILIES)
def models(request, tmp_path_factory):
    reference = t5_reference(request.param)
    return reference, convert_t5(reference, tmp_path_factory.mktemp("text_encoder"))


def prompt(length: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens, and masks with fewer real tokens in each row."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, T5_SIZES["vocab_size"], (batch, length), generator=generator)
    real = torch.tensor([max(1, length - row * length // 2) for row in range(batch)])
    return tokens, (torch.arange(length)[None, :] < real[:, None]).long()


def random_features(length: int) -> torch.Tensor:
    return torch.randn(2, length, T5_SIZES["d_model"], generator=torch.Generator().manual_seed(length)) * 2


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.numpy()


def additive_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return the mask in the additive form of the reference's blocks."""
    return (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 40), (8, 20), (32, 256), (64, 512), (32, 64)])
def test_the_buckets_of_distances_equal_those_of_transformers(buckets, max_distance):
    config = transformers.UMT5Config(
        **T5_SIZES | {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": max_distance}
    )
    distance = np.arange(-2000, 2001)
    expected = UMT5Attention(config)._relative_position_bucket(torch.from_numpy(distance)).numpy()
    np.testing.assert_array_equal(distance_buckets(distance, buckets, max_distance), expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_position_biases_equal_those_of_transformers(models, length):
    reference, model = models
    biases = nnx.jit(lambda model: [position_bias_of(model, layer)(length) for layer in range(model.config.layers)])
    for bias, block in zip(biases(model), reference.encoder.block, strict=True):
        attention = block.layer[0].SelfAttention
        if attention.has_relative_attention_bias:  # T5 v1.1 uses the biases of its first layer in all layers
            np.testing.assert_array_equal(bias, attention.compute_bias(length, length).detach().numpy())


def position_bias_of(model: T5Encoder, layer: int):
    return model.position_bias or block_at(model.blocks, layer).position_bias


@torch.no_grad()
@pytest.mark.parametrize("length", quick([7, 512], LENGTHS))
def test_attention_equals_that_of_transformers(models, length):
    reference, model = models
    x, (_, mask) = random_features(length), prompt(length)
    attention = reference.encoder.block[0].layer[0].SelfAttention
    name = "attention_mask" if isinstance(attention, UMT5Attention) else "mask"
    expected = attention(x, **{name: additive_mask(mask)})[0]
    attend = nnx.jit(lambda model, x, mask: block_at(model.blocks, 0).attn(x, mask, position_bias_of(model, 0)(length)))
    assert relative_l2(attend(model, to_numpy(x), to_numpy(mask).astype(bool)), expected) <= 1e-5


@torch.no_grad()
def test_the_mlp_equals_that_of_transformers(models):
    reference, model = models
    expected = reference.encoder.block[1].layer[1].DenseReluDense(random_features(7))
    assert relative_l2(run(block_at(model.blocks, 1).mlp, to_numpy(random_features(7))), expected) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("length", quick([7, 512], LENGTHS))
def test_a_block_equals_that_of_transformers(models, length):
    reference, model = models
    x, (_, mask) = random_features(length), prompt(length)
    expected = reference.encoder.block[0](x, additive_mask(mask))
    expected = expected[0] if isinstance(expected, tuple) else expected

    @nnx.jit
    def block(model, x, mask):
        bias = None if model.position_bias is None else model.position_bias(length)
        return block_at(model.blocks, 0)(x, mask, bias)

    assert relative_l2(block(model, to_numpy(x), to_numpy(mask).astype(bool)), expected) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize(("length", "masked"), quick([*MASKED, (7, False)], [*MASKED, *UNMASKED]))
def test_the_features_equal_those_of_transformers(models, length, masked):
    reference, model = models
    tokens, mask = prompt(length)
    expected = reference(tokens, mask if masked else None).last_hidden_state
    result = run(model, to_numpy(tokens), to_numpy(mask) if masked else None)
    assert relative_l2(result, expected) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("family", T5_FAMILIES)
def test_bfloat16_is_as_accurate_as_in_torch(family, tmp_path):
    reference = t5_reference(family)
    tokens, mask = prompt(64, batch=4)
    exact = reference(tokens, mask).last_hidden_state
    reference_bfloat16 = reference.to(torch.bfloat16)
    reference_error = relative_l2(reference_bfloat16(tokens, mask).last_hidden_state.float(), exact)
    result = run(convert_t5(reference_bfloat16, tmp_path, jnp.bfloat16), to_numpy(tokens), to_numpy(mask))
    assert result.dtype == jnp.bfloat16
    assert relative_l2(result, exact) <= 1.1 * reference_error


def test_umt5_xxl_has_the_parameters_of_transformers():
    sizes = {
        "vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
    }  # fmt: skip
    with torch.device("meta"):
        reference = transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes))
    assert t5_config(reference.config.to_dict()) == UMT5_XXL
    abstract = as_shapes(lambda rngs: T5Encoder(UMT5_XXL, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs))
    parameters = {
        ".".join(map(str, path)): weight.get_value() for path, weight in nnx.to_flat_state(nnx.state(abstract))
    }
    specs = {
        key: jax.ShapeDtypeStruct(tuple(weight.shape), jnp.bfloat16) for key, weight in reference.state_dict().items()
    }
    assert "encoder.embed_tokens.weight" in specs  # tied: some files contain it twice
    assignments = assign(t5_weight_rules(UMT5_XXL), specs, parameters)
    assert {key for assignment in assignments for key in assignment.sources} == set(specs) - {
        "encoder.embed_tokens.weight"
    }
    assert sum(w.size for w in parameters.values()) == sum(weight.numel() for weight in reference.parameters())


def test_exported_weights_equal_those_of_transformers(models, tmp_path):
    reference, model = models
    export(model, t5_weight_rules(model.config), tmp_path / "model.safetensors")
    exported = load_safetensors(tmp_path / "model.safetensors")
    expected = {key: weight.numpy() for key, weight in reference.state_dict().items()}
    del expected["encoder.embed_tokens.weight"]
    assert exported.keys() == expected.keys()
    for key, weight in expected.items():
        np.testing.assert_array_equal(exported[key], weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bert"}, "model_type 'bert'"),
        ({"feed_forward_proj": "relu"}, "feed_forward_proj 'relu'"),
        ({"d_kv": None}, "no d_kv"),
    ],
)
def test_unsupported_configs_are_refused(change, words):
    config = transformers.UMT5Config(**T5_SIZES).to_dict() | change
    with pytest.raises(WanjaxError, match=words):
        read_config("config.json", {key: value for key, value in config.items() if value is not None}, t5_config)
