# SPDX-License-Identifier: Apache-2.0
"""Cleaning, tokenizing and zero-padding against diffusers and transformers, on difficult prompts."""

import io

import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, T5TokenizerFast

from tests.parity.references import T5_SIZES, convert_t5, relative_l2, t5_reference
from tests.support.toy_tokenizer import AWKWARD_PROMPTS, save_tokenizer
from wanjax.pipelines.text.tokenizer import Tokenizer, clean_prompt
from wanjax.pipelines.wan.programs import TEXT_LENGTH, encode_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory):
    """Return a folder like that of T5: a SentencePiece model with its normaliser, converted by transformers."""
    folder, model = tmp_path_factory.mktemp("sentencepiece"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([clean_prompt(prompt) for prompt in AWKWARD_PROMPTS if prompt] * 3),
        model_writer=model, vocab_size=320, hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        minloglevel=2,
    )  # fmt: skip
    (folder / "spiece.model").write_bytes(model.getvalue())
    T5TokenizerFast.from_pretrained(folder).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("prompt", AWKWARD_PROMPTS)
def test_a_cleaned_prompt_equals_that_of_diffusers(prompt):
    assert clean_prompt(prompt) == prompt_clean(prompt)


@settings(derandomize=True, max_examples=300, database=None)
@given(st.text(st.one_of(st.characters(), st.sampled_from("&;#xampltgÃâ€ \t\n\x1c\x85\u00a0\u200b\u2028\u3000"))))
def test_any_cleaned_text_equals_that_of_diffusers(prompt):
    assert clean_prompt(prompt) == prompt_clean(prompt)


@pytest.mark.parametrize("kind", ["folder", "sentencepiece_folder"])
@pytest.mark.parametrize("length", [512, 16])
def test_tokens_equal_those_of_transformers(kind, length, request):
    folder = request.getfixturevalue(kind)
    prompts = [clean_prompt(prompt) for prompt in AWKWARD_PROMPTS]
    expected = AutoTokenizer.from_pretrained(folder)(
        prompts, padding="max_length", max_length=length, truncation=True, return_tensors="np"
    )
    batch = Tokenizer.load(folder, length=TEXT_LENGTH).tokenize(prompts, length)
    np.testing.assert_array_equal(batch.ids, expected["input_ids"])
    np.testing.assert_array_equal(batch.mask, expected["attention_mask"])


@torch.no_grad()
@pytest.mark.parametrize("length", [512, 226])
def test_embeddings_equal_those_of_diffusers(folder, length, tmp_path):
    reference = t5_reference("umt5", vocab_size=400)
    pipeline = WanPipeline(AutoTokenizer.from_pretrained(folder), reference, vae=None, scheduler=None)
    expected = pipeline._get_t5_prompt_embeds(
        AWKWARD_PROMPTS, max_sequence_length=length, device=torch.device("cpu"), dtype=torch.float32
    ).numpy()
    batch = Tokenizer.load(folder, length=TEXT_LENGTH).tokenize(
        [clean_prompt(prompt) for prompt in AWKWARD_PROMPTS], length
    )
    result = encode_text(convert_t5(reference, tmp_path), jnp.asarray(batch.ids), jnp.asarray(batch.mask))
    np.testing.assert_array_equal(np.asarray(result == 0).all(axis=-1), (expected == 0).all(axis=-1))
    for row in range(len(AWKWARD_PROMPTS)):
        assert relative_l2(result[row], expected[row]) <= 1e-5, AWKWARD_PROMPTS[row]
    assert result.shape == (len(AWKWARD_PROMPTS), length, T5_SIZES["d_model"])
