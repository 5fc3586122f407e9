# SPDX-License-Identifier: Apache-2.0
"""Tokenizing of prompts: cleaning, truncation and padding to a length."""

import html
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ftfy
import numpy as np
import tokenizers
from jaxtyping import Bool, Int
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram

from wanjax.checkpoints.sources import read_json
from wanjax.errors import WanjaxError, reason

PATTERNS = (
    " {2,}",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""The regular expressions of T5 and of Qwen. A stranger's may take exponential time, and then end the process."""
T5_EXTRA_TOKENS = 100  # of a SentencePiece model whose settings do not give their number


def clean_prompt(prompt: str) -> str:
    """Return the prompt with mojibake repaired, HTML entities resolved and whitespace collapsed."""
    text = html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()  # twice: some entities are escaped twice
    return re.sub(r"\s+", " ", text).strip()


@dataclass(frozen=True)
class Truncation:
    """The truncation of a prompt of `tokens` tokens to `length` tokens; `cut` is the text left out.

    `name` says what was cut, where it is not the whole prompt.
    """

    tokens: int
    length: int
    cut: str
    name: str = "prompt"

    def __str__(self) -> str:
        end = self.cut if len(self.cut) <= 60 else f"{self.cut[:57]}..."
        return f'the {self.name} has {self.tokens} tokens, the model reads {self.length}: the end "{end}" was cut'


@dataclass(frozen=True)
class TokenBatch:
    """Prompts of one length: the ids, the mask that is True at real tokens, and the truncation of each prompt."""

    ids: Int[np.ndarray, "B S"]
    mask: Bool[np.ndarray, "B S"]
    truncated: tuple[Truncation | None, ...]


def batched(rows: Iterable[tuple[Sequence[int], Truncation | None]], length: int, pad: int) -> TokenBatch:
    """Return the ids of each prompt, padded to one length, and its truncation."""
    each = list(rows)
    ids, mask = np.full((len(each), length), pad, np.int32), np.zeros((len(each), length), bool)
    for row, (tokens, _) in enumerate(each):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
    return TokenBatch(ids, mask, tuple(cut for _, cut in each))


class Tokenizer:
    """The tokenizer of a checkpoint, read from the `tokenizer.json` or the `spiece.model` of its folder."""

    def __init__(self, backend: tokenizers.Tokenizer, *, pad: str, length: int):
        """Take the padding token `pad`, and the `length` in tokens to which prompts are cut and padded."""
        pad_id = backend.token_to_id(pad)
        if pad_id is None:
            raise WanjaxError(f"the tokenizer has no token {pad!r}, which its settings name as the padding")
        backend.no_padding()  # the file may have its own padding
        self.backend = backend
        self.pad_id = pad_id
        self.text_length = length

    @classmethod
    def load(cls, folder: Path, *, length: int) -> "Tokenizer":
        """Read a `tokenizer` folder in the layout of transformers.

        Prompts get `length` tokens, or fewer where the tokenizer's settings have a lower limit.

        Raises WanjaxError where both are missing or a file cannot be read.
        """
        files = ("special_tokens_map.json", "tokenizer_config.json")
        specials, config = (read_json(folder / name, missing={}) for name in files)
        settings = specials | config
        if (folder / "tokenizer.json").is_file():
            backend = _read_tokenizer(folder / "tokenizer.json")
        elif (folder / "spiece.model").is_file():
            backend = read_spiece(folder / "spiece.model", settings.get("extra_ids", T5_EXTRA_TOKENS))
        else:
            raise WanjaxError(
                f"{folder} has neither tokenizer.json nor spiece.model: download one from the checkpoint's repository"
            )
        pad = settings.get("pad_token") or "<pad>"
        return cls(
            backend,
            pad=pad["content"] if isinstance(pad, dict) else pad,
            length=int(min(length, settings.get("model_max_length") or length)),
        )

    @property
    def vocab_size(self) -> int:
        """The number of ids; the text encoder's table of embeddings needs at least as many rows."""
        return self.backend.get_vocab_size()

    def tokenize(self, prompts: Sequence[str], length: int | None = None) -> TokenBatch:
        """Return the prompts' ids, cut and padded to `length` (`text_length` if None). Always keeps the end token."""
        length = self.text_length if length is None else length
        self.backend.enable_truncation(length)
        encodings = [self.backend.encode(prompt) for prompt in prompts]
        cut = [_truncation(prompt, encoding, length) for prompt, encoding in zip(prompts, encodings, strict=True)]
        return batched(zip((encoding.ids for encoding in encodings), cut, strict=True), length, self.pad_id)


def _truncation(prompt: str, encoding: tokenizers.Encoding, length: int) -> Truncation | None:
    if not encoding.overflowing:
        return None
    specials = sum(encoding.special_tokens_mask)  # each overflowing part repeats these
    tokens = len(encoding.ids) + sum(len(part.ids) - specials for part in encoding.overflowing)
    start, _ = encoding.overflowing[0].offsets[0]
    return Truncation(tokens, length, prompt[start:].strip())


def _read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    try:
        text = file.read_text(encoding="utf-8")
        strange = [pattern for pattern in _patterns(json.loads(text)) if pattern not in PATTERNS]
        if strange:
            expression = repr(strange[0][:60])
            raise WanjaxError(f"{file} splits text by {expression}, as no supported model does: give its own tokenizer")
        return tokenizers.Tokenizer.from_str(text)
    except WanjaxError:
        raise
    except Exception as error:  # the library raises no narrower type
        raise WanjaxError(f"{file} is not a readable tokenizer: {reason(error)}") from error


def _patterns(json: Any) -> Iterator[str]:
    """Yield the regular expressions of a tokenizer's JSON, but for what stands in its vocabulary."""
    if isinstance(json, dict):
        for name, value in json.items():
            if name == "Regex":
                yield str(value)
            elif name not in ("vocab", "merges"):
                yield from _patterns(value)
    elif isinstance(json, list):
        for value in json:
            yield from _patterns(value)


END, SPACE = "</s>", "▁"


def read_spiece(file: Path, extra: int) -> tokenizers.Tokenizer:
    """Return the tokenizer of a SentencePiece model, with tokens <extra_id_0> to <extra_id_{extra - 1}> at the end.

    Raises WanjaxError for a file that cannot be read, and for a model of another kind.
    """
    # imported late, because few checkpoints need it; the type checker does not see what protobuf makes
    from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # pyright: ignore

    Piece = ModelProto.SentencePiece
    more = [f"<extra_id_{i}>" for i in reversed(range(extra))]
    try:
        model = ModelProto.FromString(file.read_bytes())
        names, kinds = [piece.piece for piece in model.pieces], [piece.type for piece in model.pieces]
        unknown = kinds.index(Piece.UNKNOWN) if Piece.UNKNOWN in kinds else None
        vocabulary = [(piece.piece, piece.score) for piece in model.pieces] + [(name, 0.0) for name in more]
        backend = tokenizers.Tokenizer(Unigram(vocabulary, unk_id=unknown, byte_fallback=False))
        characters = model.normalizer_spec.precompiled_charsmap
        normaliser = normalizers.Precompiled(characters) if characters else None
    except Exception as error:  # the libraries raise no narrower type
        raise WanjaxError(f"{file} is not a readable SentencePiece model: get it again") from error
    of_t5 = model.trainer_spec.model_type == TrainerSpec.UNIGRAM and END in names and Piece.BYTE not in kinds
    if not of_t5 or unknown is None:
        raise WanjaxError(
            f"{file} is not a model of T5: one of the kind unigram, with pieces {END} and <unk> and none for bytes, is "
            "needed, or a tokenizer.json"
        )
    if normaliser is not None:
        backend.normalizer = normaliser
    words = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    backend.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, names.index(END))])
    specials = [name for name, kind in zip(names, kinds, strict=True) if kind in (Piece.UNKNOWN, Piece.CONTROL)] + more
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return backend
