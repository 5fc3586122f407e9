# SPDX-License-Identifier: Apache-2.0
"""The small tokenizer: a unigram model like UMT5's, in which every word of the captions is one token.

It has no normaliser and no byte fallback, because transformers' T5Tokenizer rebuilds neither from a vocabulary. Both
libraries therefore read its folder in the same way. Without a normaliser, the vocabulary contains each word in three
cases. Other words are split into ASCII characters, and other characters become <unk>.
"""

import argparse
import json
import math
from pathlib import Path

from captions import vocabulary
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

VOCABULARY_SIZE = 512
MAX_LENGTH = 32
_SPACE = "▁"  # SentencePiece's mark for the start of a word


def build() -> Tokenizer:
    """Build the tokenizer. The result is the same at every call."""
    words = vocabulary()
    cased = [*words, *map(str.title, words), *map(str.upper, words)]
    whole = list(dict.fromkeys(_SPACE + word for word in cased))
    characters = [_SPACE, *(chr(code) for code in range(ord("!"), ord("~") + 1))]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(piece, -math.log(len(whole))) for piece in whole]
    pieces += [(piece, -12.0) for piece in characters if piece not in whole]  # less likely than any whole word
    if len(pieces) > VOCABULARY_SIZE:
        raise ValueError(f"the captions need {len(pieces)} tokens, but the model has {VOCABULARY_SIZE}")
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    metaspace = {"replacement": _SPACE, "prepend_scheme": "always", "split": True}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**metaspace)]
    )
    tokenizer.decoder = decoders.Metaspace(**metaspace)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return tokenizer


def write(folder: Path) -> None:
    """Write the `tokenizer` folder of a checkpoint in the format that transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    settings = {
        "tokenizer_class": "T5TokenizerFast",
        "model_max_length": MAX_LENGTH,
        "extra_ids": 0,
        "additional_special_tokens": [],
        **special,
    }
    for name, value in (("tokenizer_config.json", settings), ("special_tokens_map.json", special)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder for tokenizer.json and its two settings files")
    write(parser.parse_args().folder)
