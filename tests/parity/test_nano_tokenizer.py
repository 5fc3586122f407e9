# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of the bundled model against transformers, which reads its folder."""

import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "nano"))

import captions
import tokenizer
from clips import sample_specs

AWKWARD = [
    "",
    "A RED circle",
    "a weird (cat), 3 dogs & <unk>",
    "é 猫 🎈",
    "  two   spaces ",
    "red,green;blue",
    "<pad></s>",
]


@pytest.mark.parametrize("reader", [transformers.AutoTokenizer, transformers.T5TokenizerFast])
def test_transformers_gives_the_same_ids(reader, tmp_path):
    tokenizer.write(tmp_path)
    tokenizer_of_nano, of_transformers = tokenizer.build(), reader.from_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    texts = [captions.caption(spec, rng) for spec in sample_specs(rng, 200)] + AWKWARD
    assert of_transformers(texts)["input_ids"] == [encoding.ids for encoding in tokenizer_of_nano.encode_batch(texts)]
    assert len(of_transformers) == tokenizer_of_nano.get_vocab_size()
    assert (of_transformers.pad_token_id, of_transformers.eos_token_id, of_transformers.unk_token_id) == (0, 1, 2)
    assert of_transformers.model_max_length == tokenizer.MAX_LENGTH
