# SPDX-License-Identifier: Apache-2.0
"""The language model of Qwen2.5-VL against transformers' Qwen2_5_VLTextModel, on the same small random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import Qwen2_5_VLTextConfig

from tests.parity.encoder_references import QWEN_SIZES, convert_reference, qwen_reference
from tests.parity.references import relative_l2, run
from tests.support.quick import quick
from tests.support.words import line_with_words
from wanjax.checkpoints import modules
from wanjax.converters.configs import read_config
from wanjax.converters.qwen2_vl import qwen2_vl_config, qwen2_vl_unused
from wanjax.converters.weight_rules import assign
from wanjax.errors import WanjaxError
from wanjax.layers.rope import apply_rotary
from wanjax.layers.stack import block_at
from wanjax.models.qwen2_vl import text_angles
from wanjax.pipelines.text.encoders import QWEN2_VL

LENGTHS = quick([1, 1108], [1, 64, 1108])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    reference = qwen_reference()
    return reference, convert_reference(reference, QWEN2_VL, tmp_path_factory.mktemp("text_encoder"))


def prompt(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens, and a mask with padding at the end of the second row."""
    tokens = torch.randint(0, QWEN_SIZES["vocab_size"], (2, length), generator=torch.Generator().manual_seed(length))
    lengths = torch.tensor([length, max(1, length // 2)])
    return tokens, (torch.arange(length)[None, :] < lengths[:, None]).long()


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().numpy()


def relative_error(result, reference: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the relative error at the real tokens; `pytest -rP` shows it."""
    is_real = mask.numpy().astype(bool)
    error = relative_l2(np.asarray(result)[is_real], reference.detach().float().numpy()[is_real])
    print(f"relative error {error:.1e}")
    return error


@pytest.mark.parametrize("length", LENGTHS)
def test_the_angles_of_text_equal_those_of_transformers(models, length):
    """Text has the same position in time, height and width, so the sections of channels do not matter."""
    reference, model = models
    angles = text_angles(length, model.config)
    positions = torch.arange(length).expand(3, 1, -1)
    cos, sin = reference.rotary_emb(torch.zeros(()), positions)
    half = model.config.head_dim // 2
    for table, expected in ((angles.cos, cos[0]), (angles.sin, sin[0])):
        # the reference computes in float32
        np.testing.assert_allclose(table, expected[:, :half], atol=1e-4 if length > 64 else 5e-6)
        np.testing.assert_array_equal(expected[:, :half], expected[:, half:])


def test_the_angles_of_pictures_would_differ(models):
    reference, model = models
    positions = torch.arange(64).expand(3, 1, -1) * torch.tensor([1, 2, 3])[:, None, None]
    cos, _ = reference.rotary_emb(torch.zeros(()), positions)
    assert not np.allclose(text_angles(64, model.config).cos, cos[0, :, : model.config.head_dim // 2], atol=0.1)


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
def test_every_part_of_a_block_equals_that_of_transformers(models, length):
    reference, model = models
    layer = reference.layers[1]
    x = torch.randn(2, length, QWEN_SIZES["hidden_size"], generator=torch.Generator().manual_seed(length)) * 2
    everywhere = torch.ones(2, length)
    angles = reference.rotary_emb(x, torch.arange(length).expand(3, 2, -1))
    causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
    expected = [
        layer.input_layernorm(x),
        layer.mlp(x),
        layer.self_attn(x, attention_mask=causal, position_embeddings=angles)[0],
        layer(x, attention_mask=causal, position_embeddings=angles),
    ]

    @nnx.jit
    def parts(model, x):
        block, angles = block_at(model.blocks, 1), text_angles(length, model.config)
        return block.norm1(x), block.mlp(x), block.attn(x, angles), block(x, angles)

    for result, part in zip(parts(model, to_numpy(x)), expected, strict=True):
        assert relative_error(result, part, everywhere) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
def test_the_output_of_every_block_equals_that_of_transformers(models, length):
    reference, model = models
    tokens, mask = prompt(length)
    states = reference(tokens, attention_mask=mask, output_hidden_states=True).hidden_states
    assert len(states) == QWEN_SIZES["num_hidden_layers"] + 1

    @nnx.jit
    def outputs(model, tokens):
        x = [model.embed(tokens)]
        for layer in range(model.config.layers):
            x.append(block_at(model.blocks, layer)(x[-1], text_angles(length, model.config)))
        return x

    embedded, *outputs_of_blocks = outputs(model, to_numpy(tokens))
    np.testing.assert_array_equal(embedded, states[0])
    for result, expected in zip(outputs_of_blocks, states[1 : len(outputs_of_blocks) + 1], strict=True):
        assert relative_error(result, expected, mask) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
def test_the_features_equal_those_of_transformers(models, length):
    reference, model = models
    tokens, mask = prompt(length)
    expected = reference(tokens, attention_mask=mask, output_hidden_states=True).hidden_states[-3]
    result = run(model, to_numpy(tokens))
    assert relative_error(result, expected, mask) <= 1e-5
    assert np.isfinite(result).all()


def test_padding_changes_no_other_token(models):
    _, model = models
    tokens, mask = prompt(64)
    features, padded, longer = (
        np.asarray(run(model, options))
        for options in (
            to_numpy(tokens),
            np.where(to_numpy(mask) == 1, to_numpy(tokens), 5),
            np.pad(to_numpy(tokens), ((0, 0), (0, 9))),
        )
    )
    longer, is_real = longer[:, :64], mask.numpy().astype(bool)
    np.testing.assert_array_equal(features[is_real], padded[is_real])
    np.testing.assert_allclose(features[is_real], longer[is_real], atol=1e-5 * float(np.abs(features).max()))
    assert not np.allclose(features[~is_real], padded[~is_real])


def test_only_the_last_blocks_and_the_last_norm_are_left_out(models):
    reference, model = models
    assert model.config.layers == QWEN_SIZES["num_hidden_layers"] - 2
    assert model.blocks.norm1.scale.get_value().shape[0] == model.config.layers
    rules = QWEN2_VL.rules(model.config)
    specs = {key: jax.ShapeDtypeStruct(tuple(w.shape), jnp.float32) for key, w in reference.state_dict().items()}
    with pytest.raises(WanjaxError, match=line_with_words("unused layers.{4-5}.self_attn.q_proj.weight norm.weight")):
        assign(rules, specs, modules.parameters(model))
    assign(rules, specs, modules.parameters(model), ignore=qwen2_vl_unused(model.config))
    with pytest.raises(WanjaxError, match=line_with_words("unused layers.6.strange")):
        assign(
            rules,
            specs | {"layers.6.strange": specs["norm.weight"]},
            modules.parameters(model),
            ignore=qwen2_vl_unused(model.config),
        )


@torch.no_grad()
def test_bfloat16_is_as_accurate_as_in_torch(tmp_path):
    reference = qwen_reference()
    tokens, _ = prompt(64)
    exact = reference(tokens, output_hidden_states=True).hidden_states[-3]
    reference_bfloat16 = reference.to(torch.bfloat16)
    reference_error = relative_l2(
        reference_bfloat16(tokens, output_hidden_states=True).hidden_states[-3].float(), exact
    )
    result = run(convert_reference(reference_bfloat16, QWEN2_VL, tmp_path, jnp.bfloat16), to_numpy(tokens))
    assert result.dtype == jnp.bfloat16
    assert relative_l2(result, exact) <= 1.1 * reference_error


def test_rotation_keeps_lengths_and_depends_only_on_distances():
    config = qwen2_vl_config(Qwen2_5_VLTextConfig(**QWEN_SIZES).to_dict())
    angles = text_angles(40, config)
    random = np.random.default_rng(0)
    q, k = (np.broadcast_to(random.normal(size=16).astype(np.float32), (1, 40, 1, 16)) for _ in range(2))
    q, k = (np.asarray(jax.jit(lambda x: apply_rotary(x, angles))(x)) for x in (q, k))
    scores = np.einsum("BLKD,BSKD->LS", q, k)
    np.testing.assert_allclose(scores[5, 2], scores[30, 27], rtol=1e-4)
    assert not np.allclose(scores[5, 2], scores[5, 3], rtol=1e-2)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope_parameters": None, "rope_theta": 1e6},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {"rope_parameters": None},
    ],
)
def test_the_rotary_settings_of_older_files_are_read(change):
    entries = Qwen2_5_VLTextConfig(**QWEN_SIZES).to_dict() | change
    entries = {key: value for key, value in entries.items() if value is not None}
    assert (
        qwen2_vl_config(entries).theta == Qwen2_5_VLTextConfig.from_dict(entries).rope_parameters["rope_theta"] == 1e6
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2' 'qwen2_5_vl_text'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"num_key_value_heads": None}, "no num_key_value_heads"),
    ],
)
def test_unsupported_configs_are_refused(change, words):
    entries = Qwen2_5_VLTextConfig(**QWEN_SIZES).to_dict() | change
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read_config("config.json", {key: value for key, value in entries.items() if value is not None}, qwen2_vl_config)
