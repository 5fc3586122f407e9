# SPDX-License-Identifier: Apache-2.0
"""CogVideoX reads T5's tokenizer from a SentencePiece model, and encodes texts without a mask."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
import torch
from diffusers import CogVideoXPipeline
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import T5Tokenizer

import wanjax
from tests.parity.references import T5_SIZES, convert_t5, relative_l2, t5_reference
from tests.support.tiny import TEXT_WIDTH, tiny_cogvideox_checkpoint
from tests.support.toy_tokenizer import AWKWARD_PROMPTS
from tests.support.words import line_with_words
from wanjax.errors import WanjaxError
from wanjax.pipelines.text.tokenizer import Tokenizer, clean_prompt

LENGTH = 226
PROMPTS = [prompt.encode("utf-8", "replace").decode() for prompt in AWKWARD_PROMPTS]  # without lone surrogates
CHARACTERS = st.one_of(
    st.characters(exclude_categories=["Cs"]), st.sampled_from("abcdeioprstw .,'<>/▁\t\n\u00a0\u200b\u3000ﬁ™é色")
)


def train(folder: Path, size: int = 320, **options) -> Path:
    """Train a small SentencePiece model with T5's settings, and write it to the folder."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([clean_prompt(prompt) for prompt in AWKWARD_PROMPTS if prompt] * 3),
        model_writer=model, vocab_size=size, hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        minloglevel=2, num_threads=1, **options,  # several threads would sum in any order, and change ties
    )  # fmt: skip
    (folder / "spiece.model").write_bytes(model.getvalue())
    return folder


def processor_of(folder: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the folder of a tokenizer as in CogVideoX's repositories, which have no tokenizer.json."""
    folder = train(tmp_path_factory.mktemp("tokenizer"))
    extra_tokens = [f"<extra_id_{i}>" for i in range(100)]
    last_id = processor_of(folder).get_piece_size() + 99
    options = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    added_tokens = {str(i): {**options, "content": name} for i, name in enumerate(["<pad>", "</s>", "<unk>"])}
    added_tokens |= {
        str(last_id - i): {**options, "lstrip": True, "rstrip": True, "content": extra_tokens[i]} for i in range(100)
    }
    config = {"extra_ids": 100, "additional_special_tokens": extra_tokens, "legacy": True, "model_max_length": LENGTH}
    config |= {"added_tokens_decoder": added_tokens, "clean_up_tokenization_spaces": True, "sp_model_kwargs": {}}
    special_tokens = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "tokenizer_class": "T5Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | special_tokens))
    return folder


@pytest.fixture(scope="module")
def tokenizers(folder):
    return Tokenizer.load(folder, length=512), T5Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("length", [LENGTH, 16])
def test_tokens_equal_those_of_transformers(tokenizers, length):
    tokenizer, reference = tokenizers
    assert tokenizer.text_length == LENGTH  # the limit in the settings
    assert tokenizer.vocab_size == len(reference)
    expected = reference(PROMPTS, padding="max_length", max_length=length, truncation=True, return_tensors="np")
    batch = tokenizer.tokenize(PROMPTS, length)
    np.testing.assert_array_equal(batch.ids, expected["input_ids"])
    np.testing.assert_array_equal(batch.mask, expected["attention_mask"])


def tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    batch = tokenizer.tokenize([prompt], 512)
    return batch.ids[batch.mask].tolist()


@settings(derandomize=True, max_examples=500, database=None, deadline=None)
@given(prompt=st.text(CHARACTERS))
def test_any_text_has_the_tokens_of_transformers(tokenizers, prompt):
    tokenizer, reference = tokenizers
    assert tokens(tokenizer, prompt) == reference(prompt, truncation=False)["input_ids"]


@settings(derandomize=True, max_examples=500, database=None, deadline=None)
@given(
    prompt=st.text(st.sampled_from("abcdefghijklmnopqrstuvwxyzABC0123456789 .,!?'\"-()™½ﬁéÃ色调艳丽，ｆ☃\t\n\u3000"))
)
def test_any_text_has_the_tokens_of_sentencepiece(folder, tokenizers, prompt):
    """Control characters and names of special tokens are left out, because transformers handles them differently."""
    processor = processor_of(folder)
    assert tokens(tokenizers[0], prompt) == [*processor.encode(prompt), processor.eos_id()]


def test_a_checkpoint_with_only_a_sentencepiece_model_is_read(folder, tokenizers, tmp_path):
    checkpoint = tiny_cogvideox_checkpoint(tmp_path / "checkpoint", max_text_seq_length=LENGTH)
    shutil.rmtree(checkpoint / "tokenizer")
    shutil.copytree(folder, checkpoint / "tokenizer")
    pipe = wanjax.load(checkpoint)
    np.testing.assert_array_equal(pipe.tokenizer.tokenize(PROMPTS).ids, tokenizers[0].tokenize(PROMPTS).ids)
    assert pipe.encode_prompts(PROMPTS[0], "").prompt_embeds.shape == (1, 224, TEXT_WIDTH)
    as_diffusers = pipe.encode_prompts(PROMPTS[0], "", follow="diffusers")
    assert as_diffusers.prompt_embeds.shape == (1, LENGTH, TEXT_WIDTH)


def test_every_piece_is_read(folder, tokenizers):
    processor = processor_of(folder)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    model = json.loads(tokenizers[0].backend.to_str())["model"]
    assert [piece for piece, _ in model["vocab"]][: len(pieces)] == pieces
    assert [score for _, score in model["vocab"]][: len(pieces)] == [processor.get_score(i) for i in range(len(pieces))]
    assert model["unk_id"] == processor.unk_id()


def test_a_sentencepiece_model_with_byte_fallback_is_refused(tmp_path):
    """UMT5's model is an example: it needs its tokenizer.json."""
    with pytest.raises(WanjaxError, match=line_with_words("tokenizer.json")):
        Tokenizer.load(train(tmp_path, 600, byte_fallback=True), length=LENGTH)


@torch.no_grad()
def test_prompt_features_equal_those_of_diffusers(folder, tokenizers, tmp_path):
    """Padding is attended to, and its features are not removed."""
    reference = t5_reference("t5", vocab_size=500)
    unused: Any = {"vae": None, "transformer": None, "scheduler": None}
    pipeline = CogVideoXPipeline(tokenizer=tokenizers[1], text_encoder=reference, **unused)
    expected = pipeline._get_t5_prompt_embeds(
        PROMPTS, max_sequence_length=LENGTH, device=torch.device("cpu"), dtype=torch.float32
    ).numpy()
    encoder = convert_t5(reference, tmp_path)
    batch = tokenizers[0].tokenize(PROMPTS, LENGTH)
    features = encoder(jnp.asarray(batch.ids))
    largest_error = max(relative_l2(features[row], expected[row]) for row in range(len(PROMPTS)))
    print(f"{largest_error:.1e}")
    assert largest_error <= 1e-5
    assert features.shape == (len(PROMPTS), LENGTH, T5_SIZES["d_model"])
    masked_features = encoder(jnp.asarray(batch.ids), jnp.asarray(batch.mask))
    assert relative_l2(masked_features[0], expected[0]) > 1e-2
