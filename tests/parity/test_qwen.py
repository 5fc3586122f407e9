# SPDX-License-Identifier: Apache-2.0
"""The language model of Qwen2.5-VL against transformers' Qwen2_5_VLTextModel, on the same small random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import Qwen2_5_VLTextConfig

from tests.parity.encoder_references import QWEN_SIZES, converted, qwen_reference
from tests.parity.references import relative_l2, run
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

LENGTHS = [1, 64, 1108]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    reference = qwen_reference()
    return reference, converted(reference, QWEN2_VL, tmp_path_factory.mktemp("text_encoder"))


def prompt(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens, and masks with padding at the end of the second row."""
    tokens = torch.randint(0, QWEN_SIZES["vocab_size"], (2, length), generator=torch.Generator().manual_seed(length))
    real = torch.tensor([length, max(1, length // 2)])
    return tokens, (torch.arange(length)[None, :] < real[:, None]).long()


def ours(x: torch.Tensor) -> np.ndarray:
    return x.detach().numpy()


def error(result, reference: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the relative error at the real tokens; `pytest -rP` shows it."""
    real = mask.numpy().astype(bool)
    error = relative_l2(np.asarray(result)[real], reference.detach().float().numpy()[real])
    print(f"relative error {error:.1e}")
    return error


@pytest.mark.parametrize("length", LENGTHS)
def test_angles_are_those_of_multimodal_positions(models, length):
    """Text has the same position in time, height and width, so the sections of channels do not matter."""
    reference, model = models
    angles = text_angles(length, model.config)
    positions = torch.arange(length).expand(3, 1, -1)
    cos, sin = reference.rotary_emb(torch.zeros(()), positions)
    half = model.config.head_dim // 2
    for table, expected in ((angles.cos, cos[0]), (angles.sin, sin[0])):
        np.testing.assert_allclose(table, expected[:, :half], atol=1e-4 if length > 64 else 5e-6)  # theirs are float32
        np.testing.assert_array_equal(expected[:, :half], expected[:, half:])


def test_positions_of_pictures_have_other_angles(models):
    reference, model = models
    positions = torch.arange(64).expand(3, 1, -1) * torch.tensor([1, 2, 3])[:, None, None]
    cos, _ = reference.rotary_emb(torch.zeros(()), positions)
    assert not np.allclose(text_angles(64, model.config).cos, cos[0, :, : model.config.head_dim // 2], atol=0.1)


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
def test_parts_of_a_block(models, length):
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

    for result, part in zip(parts(model, ours(x)), expected, strict=True):
        assert error(result, part, everywhere) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
def test_every_block_s_output(models, length):
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

    embedded, *answers = outputs(model, ours(tokens))
    np.testing.assert_array_equal(embedded, states[0])
    for result, expected in zip(answers, states[1 : len(answers) + 1], strict=True):
        assert error(result, expected, mask) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
def test_whole(models, length):
    reference, model = models
    tokens, mask = prompt(length)
    expected = reference(tokens, attention_mask=mask, output_hidden_states=True).hidden_states[-3]
    result = run(model, ours(tokens))
    assert error(result, expected, mask) <= 1e-5
    assert np.isfinite(result).all()


def test_padding_changes_no_real_token(models):
    _, model = models
    tokens, mask = prompt(64)
    features, padded, longer = (
        np.asarray(run(model, options))
        for options in (
            ours(tokens),
            np.where(ours(mask) == 1, ours(tokens), 5),
            np.pad(ours(tokens), ((0, 0), (0, 9))),
        )
    )
    longer, real = longer[:, :64], mask.numpy().astype(bool)
    np.testing.assert_array_equal(features[real], padded[real])
    np.testing.assert_allclose(features[real], longer[real], atol=1e-5 * float(np.abs(features).max()))
    assert not np.allclose(features[~real], padded[~real])


def test_the_last_blocks_and_the_last_norm_are_left_out_on_purpose(models):
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
def test_half_precision_is_no_worse_than_torch_s(tmp_path):
    reference = qwen_reference()
    tokens, _ = prompt(64)
    exact = reference(tokens, output_hidden_states=True).hidden_states[-3]
    half = reference.to(torch.bfloat16)
    theirs = relative_l2(half(tokens, output_hidden_states=True).hidden_states[-3].float(), exact)
    result = run(converted(half, QWEN2_VL, tmp_path, jnp.bfloat16), ours(tokens))
    assert result.dtype == jnp.bfloat16
    assert relative_l2(result, exact) <= 1.1 * theirs


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
def test_rotary_settings_of_older_files(change):
    entries = Qwen2_5_VLTextConfig(**QWEN_SIZES).to_dict() | change
    entries = {key: value for key, value in entries.items() if value is not None}
    assert (
        qwen2_vl_config(entries).theta == Qwen2_5_VLTextConfig.from_dict(entries).rope_parameters["rope_theta"] == 1e6
    )


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2' 'qwen2_5_vl_text'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"num_key_value_heads": None}, "no num_key_value_heads"),
    ],
)
def test_unsupported_configs_are_refused(change, output):
    entries = Qwen2_5_VLTextConfig(**QWEN_SIZES).to_dict() | change
    with pytest.raises(WanjaxError, match=line_with_words(output)):
        read_config("config.json", {key: value for key, value in entries.items() if value is not None}, qwen2_vl_config)
