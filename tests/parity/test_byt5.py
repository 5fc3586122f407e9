# SPDX-License-Identifier: Apache-2.0
"""ByT5's tokenizer, on difficult texts, and its encoder equal those of transformers."""

import json
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import ByT5Tokenizer as Reference
from transformers import T5Config, T5EncoderModel

from tests.parity.references import convert_t5, relative_l2, t5_reference
from tests.support.toy_tokenizer import AWKWARD_PROMPTS
from tests.support.words import line_with_words
from wanjax.checkpoints.modules import parameters
from wanjax.converters.t5 import t5_config, t5_weight_rules
from wanjax.converters.weight_rules import assign
from wanjax.errors import WanjaxError
from wanjax.layers.placement import as_shapes
from wanjax.layers.stack import block_at
from wanjax.models.t5 import GLYPH_BYT5, T5Encoder
from wanjax.pipelines.text.byt5 import ByT5Tokenizer

LENGTH = 40
NAMES = [f"<color-{i}>" for i in range(12)] + [f"<{code}-font-{i}>" for code in ("en", "cn") for i in range(11)]
TEXTS = [
    *(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in AWKWARD_PROMPTS),
    'Text "hello". Text "你好". ',
    "<color-1><color-11> <cn-font-10>  <en-font-3>x<color-1",
    " </s> <pad>  <unk>\t</s>",
    "ends</s>",
    "x" * (LENGTH - 2),
    "x" * (LENGTH - 1),
    "x" * LENGTH,
    "é" * LENGTH,
    "x" * (LENGTH - 2) + "</s>",
    "x" * (LENGTH - 2) + "</s>y",
    "x" * (LENGTH - 1) + "</s>",
    "<extra_id_0> and <extra_id_124>",
]


@cache
def references() -> dict[str, Reference]:
    """Return tokenizers without added tokens, with Glyph-SDXL-v2's tokens, and with tokens that include whitespace."""
    default, glyphs, spaced, bare = Reference(), Reference(), Reference(), Reference(extra_ids=0)
    glyphs.add_tokens(NAMES, special_tokens=True)
    spaced.add_tokens([AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True), "<left><right>", "çé"])
    return {"plain": default, "glyphs": glyphs, "spaced": spaced, "bare": bare}


@pytest.fixture(scope="module", params=["plain", "glyphs", "spaced", "bare"])
def tokenizers(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    reference = references()[request.param]
    reference.save_pretrained(folder)
    return reference, ByT5Tokenizer.load(folder, length=LENGTH)


def expected_tokens(reference: Reference, texts: list[str], length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This sequence already has")
        batch = reference(texts, padding="max_length", max_length=length, truncation=True, return_tensors="np")
    return batch["input_ids"], batch["attention_mask"]


def compare_tokens(reference: Reference, tokenizer: ByT5Tokenizer, texts: list[str]) -> None:
    batch = tokenizer.tokenize(texts)
    ids, mask = expected_tokens(reference, texts)
    np.testing.assert_array_equal(batch.ids, ids)
    np.testing.assert_array_equal(batch.mask, mask)


def test_tokens_equal_those_of_transformers(tokenizers):
    compare_tokens(*tokenizers, TEXTS)


PIECES = st.sampled_from(
    [*NAMES[:3], *NAMES[-2:], "</s>", "<pad>", "<unk>", "<left>", "<right>", "çé", " ", "\n\u3000", "<"]
)


@settings(derandomize=True, max_examples=200, database=None)
@given(st.lists(st.one_of(PIECES, st.text(st.characters(codec="utf-8"), max_size=8)), max_size=12).map("".join))
def test_any_text_has_the_tokens_of_transformers(tokenizers, text):
    compare_tokens(*tokenizers, [text])


def test_the_vocabulary_has_the_size_of_transformers(tokenizers):
    reference, tokenizer = tokenizers
    assert tokenizer.vocab_size == len(reference)
    assert ByT5Tokenizer.pad_id == reference.pad_token_id


SPECIALS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
ADDED = {name: id for id, name in enumerate([*(f"<extra_id_{i}>" for i in range(125)), *NAMES], 259)}


@pytest.mark.parametrize(
    "extra_files",
    [
        {"added_tokens.json": ADDED},
        {"special_tokens_map.json": {"additional_special_tokens": list(ADDED)}},
        {"special_tokens_map.json": {"eos_token": {"content": "</s>", "lstrip": False, "rstrip": True}}},
        {"special_tokens_map.json": SPECIALS, "added_tokens.json": {"<color-5>": 384, "<color-7>": 385}},
        {"special_tokens_map.json": {"additional_special_tokens": []}},
    ],
)
def test_tokenizer_files_of_older_releases_are_read(extra_files, tmp_path):
    """Older releases list added tokens in another file, or only as additional special tokens."""
    config = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125, **SPECIALS}
    for name, entries in ({"tokenizer_config.json": config} | extra_files).items():
        (tmp_path / name).write_text(json.dumps(entries))
    compare_tokens(Reference.from_pretrained(tmp_path), ByT5Tokenizer.load(tmp_path, length=LENGTH), TEXTS)


def test_a_folder_without_files_gives_the_published_tokenizer(tmp_path):
    compare_tokens(Reference(), ByT5Tokenizer.load(tmp_path, length=LENGTH), TEXTS)


def test_truncation_is_reported(tokenizers):
    _, tokenizer = tokenizers
    fits, cut = tokenizer.tokenize(["x" * (LENGTH - 1), "é" * LENGTH + " and the end "]).truncated
    assert fits is None
    assert (cut.tokens, cut.length) == (2 * LENGTH + 14, LENGTH)
    assert cut.cut.endswith("é and the end")


def test_an_added_token_of_single_words_is_refused(tmp_path):
    reference = Reference()
    reference.add_tokens([AddedToken("word", single_word=True)])
    reference.save_pretrained(tmp_path)
    with pytest.raises(WanjaxError, match=line_with_words("'word'")):
        ByT5Tokenizer.load(tmp_path, length=LENGTH)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 64, 256])
def test_every_layer_of_the_encoder_equals_that_of_transformers(length, tmp_path):
    """As in ByT5, the heads have fewer channels than the model."""
    reference = t5_reference(
        "t5", vocab_size=384, d_model=92, d_kv=8, num_heads=3, d_ff=112, num_layers=4,
        relative_attention_num_buckets=32, relative_attention_max_distance=128,
    )  # fmt: skip
    model = convert_t5(reference, tmp_path)
    tokens = torch.randint(3, 384, (2, length), generator=torch.Generator().manual_seed(length))
    mask = (torch.arange(length)[None] < torch.tensor([[length], [max(1, length // 3)]])).float()
    real = mask.numpy().astype(bool)
    outputs = reference(tokens, attention_mask=mask, output_hidden_states=True)
    ids = jnp.asarray(tokens.numpy())
    run = nnx.jit(lambda model, *arguments: model(*arguments))
    states, bias = [model.embed(ids)], model.position_bias(length)
    for layer in range(model.config.layers):
        states.append(run(block_at(model.blocks, layer), states[-1], jnp.asarray(real), bias))
    states[-1] = model.norm(states[-1])
    states.append(run(model, ids, jnp.asarray(real)))
    for result, expected in zip(states, (*outputs.hidden_states, outputs.last_hidden_state), strict=True):
        error = relative_l2(result[real], expected.numpy()[real])
        print(f"relative error {error:.1e}")
        assert error <= 1e-5


def test_the_published_encoder_has_the_published_sizes():
    with torch.device("meta"):
        reference = T5EncoderModel(
            T5Config(vocab_size=1510, d_model=1472, d_kv=64, d_ff=3584, num_layers=12, num_heads=6,
                     feed_forward_proj="gated-gelu", relative_attention_num_buckets=32)
        )  # fmt: skip
    assert t5_config(reference.config.to_dict()) == GLYPH_BYT5
    make = as_shapes(lambda rngs: T5Encoder(GLYPH_BYT5, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs))
    parameters_of_encoder = parameters(make)
    expected = {key: jax.ShapeDtypeStruct(tuple(w.shape), jnp.bfloat16) for key, w in reference.state_dict().items()}
    assign(t5_weight_rules(GLYPH_BYT5), expected, parameters_of_encoder)
    assert sum(x.size for x in parameters_of_encoder.values()) == sum(
        weight.numel() for weight in reference.parameters()
    )
