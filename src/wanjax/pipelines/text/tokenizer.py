# SPDX-License-Identifier: Apache-2.0
"""Tokenization of prompts: cleaning, truncation and padding."""

import html
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import ftfy
import numpy as np
import tokenizers
from jaxtyping import Bool, Int
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram

from wanjax.checkpoints.sources import read_json
from wanjax.errors import WanjaxError, reason

KNOWN_PATTERNS = (
    " {2,}",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""The regular expressions of T5 and Qwen. Other expressions are rejected, because they may take exponential time or
crash.
"""
T5_EXTRA_TOKENS = 100  # the number of extra tokens, unless the settings of a SentencePiece model give another number


def clean_prompt(prompt: str) -> str:
    """Repair mojibake, resolve HTML entities and collapse whitespace in a prompt."""
    text = html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()  # some entities are escaped twice
    return re.sub(r"\s+", " ", text).strip()


@dataclass(frozen=True)
class Truncation:
    """The truncation of a prompt from `tokens` to `length` tokens; `cut` is the removed text.

    `name` says which text was cut.
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
    """Tokenized prompts of one length: their ids, a mask that is True at real tokens, and their truncations."""

    ids: Int[np.ndarray, "B S"]
    mask: Bool[np.ndarray, "B S"]
    truncated: tuple[Truncation | None, ...]


def pad_batch(rows: Iterable[tuple[Sequence[int], Truncation | None]], length: int, pad: int) -> TokenBatch:
    """Pad the ids of prompts to one length, and collect the prompts' truncations."""
    rows = list(rows)
    ids, mask = np.full((len(rows), length), pad, np.int32), np.zeros((len(rows), length), bool)
    for row, (tokens, _) in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, True
    return TokenBatch(ids, mask, tuple(truncation for _, truncation in rows))


class Tokenizer:
    """A checkpoint's tokenizer, read from the `tokenizer.json` or `spiece.model` in its folder."""

    def __init__(self, backend: tokenizers.Tokenizer, *, pad: str, length: int):
        """Create a tokenizer with the padding token `pad`; prompts are cut and padded to `length` tokens."""
        pad_id = backend.token_to_id(pad)
        if pad_id is None:
            raise WanjaxError(f"the tokenizer has no token {pad!r}, but the tokenizer's settings use it for padding")
        backend.no_padding()  # the file may set other padding
        self.backend = backend
        self.pad_id = pad_id
        self.text_length = length

    @classmethod
    def load(cls, folder: Path, *, length: int) -> "Tokenizer":
        """Read a `tokenizer` folder in the layout of transformers.

        Prompts get `length` tokens, or fewer if the tokenizer's settings have a lower limit.

        Raises WanjaxError if both files are missing or one cannot be read.
        """
        files = ("special_tokens_map.json", "tokenizer_config.json")
        special_tokens, config = (read_json(folder / name, missing={}) for name in files)
        settings = special_tokens | config
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
        """The number of ids. The text encoder's embedding table needs at least as many rows."""
        return self.backend.get_vocab_size()

    def tokenize(self, prompts: Sequence[str], length: int | None = None) -> TokenBatch:
        """Return the prompts' ids, cut and padded to `length` (`text_length` if None). The end token is always kept."""
        length = self.text_length if length is None else length
        self.backend.enable_truncation(length)
        encodings = [self.backend.encode(prompt) for prompt in prompts]
        truncations = [
            _truncation(prompt, encoding, length) for prompt, encoding in zip(prompts, encodings, strict=True)
        ]
        return pad_batch(zip((encoding.ids for encoding in encodings), truncations, strict=True), length, self.pad_id)


def _truncation(prompt: str, encoding: tokenizers.Encoding, length: int) -> Truncation | None:
    if not encoding.overflowing:
        return None
    num_special_tokens = sum(encoding.special_tokens_mask)  # each part that was cut off repeats the special tokens
    tokens = len(encoding.ids) + sum(len(part.ids) - num_special_tokens for part in encoding.overflowing)
    start, _ = encoding.overflowing[0].offsets[0]
    return Truncation(tokens, length, prompt[start:].strip())


def _read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    try:
        text = file.read_text(encoding="utf-8")
        unknown_patterns = [pattern for pattern in _patterns(json.loads(text)) if pattern not in KNOWN_PATTERNS]
        if unknown_patterns:
            pattern_text = repr(unknown_patterns[0][:60])
            raise WanjaxError(f"{file} splits text by {pattern_text}, unlike any supported model: use the model's own")
        return tokenizers.Tokenizer.from_str(text)
    except WanjaxError:
        raise
    except Exception as error:  # the library raises no narrower exception type
        raise WanjaxError(f"{file} is not a readable tokenizer: {reason(error)}") from error


def _patterns(json: Any) -> Iterator[str]:
    """Yield the regular expressions in a tokenizer's JSON, ignoring its vocabulary."""
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
EXTRA_TOKEN = re.compile(r"<extra_id_\d+>")


def read_spiece(file: Path, num_extra_ids: int) -> tokenizers.Tokenizer:
    """Read a SentencePiece model as a tokenizer, and append the tokens <extra_id_0> to <extra_id_{extra - 1}>.

    Raises WanjaxError if the file cannot be read or is not a T5 model.
    """
    # imported late, because few checkpoints need it; the type checker does not see protobuf's generated classes
    from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # pyright: ignore

    try:
        model = ModelProto.FromString(file.read_bytes())
        pieces = [Piece(piece.piece, piece.score, piece.type) for piece in model.pieces]
        pieces += [Piece(f"<extra_id_{i}>", 0.0, PieceKind.NORMAL) for i in reversed(range(num_extra_ids))]
        backend = t5_tokenizer(pieces, model.normalizer_spec.precompiled_charsmap)
    except Exception as error:  # the libraries raise no narrower exception type
        raise WanjaxError(f"{file} is not a readable SentencePiece model: download it again") from error
    kinds = [piece.kind for piece in pieces]
    if backend is None or model.trainer_spec.model_type != TrainerSpec.UNIGRAM or PieceKind.BYTE in kinds:
        raise WanjaxError(
            f"{file} is not a T5 tokenizer: give a unigram model with the pieces {END} and <unk> and without byte "
            "pieces, or a tokenizer.json"
        )
    return backend


class PieceKind(IntEnum):
    """The kinds of pieces, with SentencePiece's numbers."""

    NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class Piece(NamedTuple):
    """A piece of a SentencePiece model: its text, its score, and one of `PieceKind`."""

    text: str
    score: float
    kind: int


def t5_tokenizer(pieces: Sequence[Piece], charsmap: bytes) -> tokenizers.Tokenizer | None:
    """Return the tokenizer of T5 with these pieces, in the order of their ids; None without the pieces </s> and <unk>.

    Args:
        pieces: The pieces. Those named <extra_id_N> are special tokens.
        charsmap: SentencePiece's compiled normaliser of characters; empty for none.

    Raises:
        Exception: The pieces or the normaliser are damaged.
    """
    names, kinds = [piece.text for piece in pieces], [piece.kind for piece in pieces]
    unknown = kinds.index(PieceKind.UNKNOWN) if PieceKind.UNKNOWN in kinds else None
    vocabulary = [(piece.text, piece.score) for piece in pieces]
    backend = tokenizers.Tokenizer(Unigram(vocabulary, unk_id=unknown, byte_fallback=False))
    if charsmap:
        backend.normalizer = normalizers.Precompiled(charsmap)
    if END not in names or unknown is None:
        return None
    metaspace = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    backend.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, names.index(END))])
    special_kinds = (PieceKind.UNKNOWN, PieceKind.CONTROL)
    special_names = [name for name, kind in zip(names, kinds, strict=True) if kind in special_kinds]
    special_names += [name for name in names if EXTRA_TOKEN.fullmatch(name)]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special_names])
    return backend
