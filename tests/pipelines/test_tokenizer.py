# SPDX-License-Identifier: Apache-2.0
"""Prompts are cleaned, tokenized and encoded; unusable tokenizers are refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from tests.support.configs import UMT5
from tests.support.toy_tokenizer import save_tokenizer
from tests.support.words import has_line_with_words, line_with_words
from wanjax.errors import WanjaxError
from wanjax.models.t5 import T5Encoder
from wanjax.pipelines.text.tokenizer import Tokenizer, clean_prompt
from wanjax.pipelines.wan.programs import TEXT_LENGTH, encode_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder, length=TEXT_LENGTH)


@pytest.mark.parametrize(
    ("prompt", "clean"),
    [
        ("a  cat\n on\ta mat ", "a cat on a mat"),
        ("fish &amp;amp; chips", "fish & chips"),
        ("&amp;lt;b&amp;gt;", "<b>"),
        ("&nbsp; x &nbsp;", "x"),
        ("schÃ¶n", "schön"),
        ("ｗｉｄｅ　ｔｅｘｔ", "wide text"),
        ("“curly”", '"curly"'),
        (" \n\t ", ""),
        ("", ""),
    ],
)
def test_prompts_are_cleaned(prompt, clean):
    assert clean_prompt(prompt) == clean


def test_tokens_are_padded_after_the_end_token(tokenizer):
    batch = tokenizer.tokenize(["the cat", ""])
    assert batch.ids.shape == batch.mask.shape == (2, 512)
    assert (batch.ids.dtype, batch.mask.dtype) == (np.int32, np.bool_)
    assert [tokenizer.backend.id_to_token(i) for i in batch.ids[0, :4]] == ["▁the", "▁cat", "</s>", "<pad>"]
    assert batch.mask.sum(axis=1).tolist() == [3, 1]  # an empty prompt consists of the end token
    assert batch.truncated == (None, None)


def test_truncation_is_reported(tokenizer):
    prompt = " ".join(["cat"] * 599 + ["piano"])
    fits, cut = tokenizer.tokenize([" ".join(["cat"] * 511), prompt]).truncated
    assert fits is None
    assert (cut.tokens, cut.length) == (601, 512)
    assert cut.cut == " ".join(["cat"] * 88 + ["piano"])
    assert has_line_with_words(str(cut), 'prompt 601 tokens model 512 "cat')
    assert len(str(cut)) < 140
    short = tokenizer.tokenize(["the cat on the piano"], length=4)
    assert has_line_with_words(str(short.truncated[0]), 'prompt 6 tokens model 4 "the piano"')
    assert tokenizer.backend.id_to_token(int(short.ids[0, -1])) == "</s>"


@pytest.mark.parametrize(("setting", "length"), [(77, 77), (4096, 512), (int(1e30), 512), (None, 512)])
def test_the_settings_may_limit_the_length(tmp_path, setting, length):
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, model_max_length=setting), length=TEXT_LENGTH)
    assert tokenizer.text_length == length
    assert tokenizer.tokenize(["cat"]).ids.shape == (1, length)


def test_padding_and_truncation_stored_in_the_file_are_ignored(folder, tokenizer, tmp_path):
    save_tokenizer(tmp_path)
    stored = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.enable_padding(length=40, pad_id=2)
    stored.enable_truncation(5)
    stored.save(str(tmp_path / "tokenizer.json"))
    prompts = ["the cat on the red piano moving left"]
    np.testing.assert_array_equal(
        Tokenizer.load(tmp_path, length=TEXT_LENGTH).tokenize(prompts).ids, tokenizer.tokenize(prompts).ids
    )


def test_the_padding_token_is_read_from_either_file(tmp_path):
    save_tokenizer(tmp_path, pad_token={"content": "<unk>", "special": True})
    assert Tokenizer.load(tmp_path, length=TEXT_LENGTH).pad_id == 2
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path, length=TEXT_LENGTH).pad_id == 0
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "</s>"}))
    assert Tokenizer.load(tmp_path, length=TEXT_LENGTH).pad_id == 1


def test_the_vocabulary_has_the_size_of_the_file(tokenizer):
    assert tokenizer.vocab_size == max(tokenizer.backend.get_vocab().values()) + 1


def test_padding_is_encoded_as_exact_zeros():
    encoder = T5Encoder(UMT5, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    tokens = jnp.array([[5, 6, 1, 0, 0], [1, 0, 0, 0, 0]])
    features = encode_text(encoder, tokens, tokens > 0)
    assert features.dtype == jnp.bfloat16
    np.testing.assert_array_equal(jnp.any(features != 0, axis=-1), tokens > 0)


def write_sentencepiece(data):
    """Return a function that writes a SentencePiece model of these bytes."""
    return lambda folder: (folder / "spiece.model").write_bytes(data)


def write_changed_file(name, change):
    """Return a function that writes a tokenizer with a change in the text of one file."""

    def write(folder):
        file = save_tokenizer(folder) / name
        file.write_text(change(file.read_text()))

    return write


def write_slow_pattern(key, **part):
    """Return a function that writes a tokenizer with a regular expression of exponential time."""
    pattern = {"pattern": {"Regex": "(a+)+$"}}
    return write_changed_file("tokenizer.json", lambda text: json.dumps(json.loads(text) | {key: part | pattern}))


UNUSABLE_TOKENIZERS = [  # a function that writes the tokenizer, and words of the message
    (lambda folder: save_tokenizer(folder, pad_token="<nothing>"), "token '<nothing>'"),
    (lambda folder: None, "tokenizer.json spiece.model"),
    *(
        (write_sentencepiece(data), words)
        for data, words in [
            (b"", "model T5"),
            (b"\x0a\x05\x0a\x03", "SentencePiece model"),  # a piece that ends too early
            (b"\x0a\x02\x0a\x09", "SentencePiece model"),
            (b"\x0a\x03\x0a\x01\xff", "SentencePiece model"),  # a piece that is not UTF-8
            (b"\x0b", "SentencePiece model"),
            (b"\xff" * 40, "SentencePiece model"),
            (b"PK\x03\x04", "SentencePiece model"),
            (b"\x0a\x08\x0a\x04</s>\x18\x03\x0a\x09\x0a\x05<unk>\x18\x02\x12\x02\x18\x02", "model T5"),  # BPE
        ]
    ),
    *(
        (write_changed_file(name, change), name)
        for name in ("tokenizer.json", "tokenizer_config.json")
        for change in (lambda text: text[:-20], lambda text: "[]")
    ),
    (write_slow_pattern("pre_tokenizer", type="Split", behavior="Isolated", invert=False), "tokenizer.json '(a+)+$'"),
    (write_slow_pattern("normalizer", type="Replace", content=" "), "tokenizer.json '(a+)+$'"),
]


@pytest.mark.parametrize(("write", "words"), UNUSABLE_TOKENIZERS)
def test_an_unusable_tokenizer_is_refused(tmp_path, write, words):
    write(tmp_path)
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        Tokenizer.load(tmp_path, length=TEXT_LENGTH)
