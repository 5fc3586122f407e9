# SPDX-License-Identifier: Apache-2.0
"""T5's tokenizer from a SentencePiece model, `spiece.model`, for checkpoints without a tokenizer.json.

The file is a message of protocol buffers: pairs of a field's number and its value, of which a few are needed here
(sentencepiece_model.proto). The tokenizer is put together as in transformers' models/t5/tokenization_t5.py: the model's
own normaliser, words apart at whitespace, the likeliest pieces of each word, and the end token.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram

from wanjax.errors import WanjaxError

PIECES, TRAINER, NORMALISER = 1, 2, 3  # fields of the file
TEXT, SCORE, KIND = 1, 2, 3  # fields of a piece
MODEL_KIND, UNIGRAM = 3, 1  # a field of the trainer, and the only kind of model that T5 has
CHARACTER_MAP = 2  # a field of the normaliser
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # kinds of pieces
END, SPACE = "</s>", "▁"
VARINT, EIGHT_BYTES, LENGTH_AND_BYTES, FOUR_BYTES = 0, 1, 2, 5  # forms of a value


class Piece(NamedTuple):
    """A piece of text, the logarithm of its probability, and its kind."""

    text: str
    score: float
    kind: int


def read_spiece(file: Path, extra: int) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a SentencePiece model, with tokens <extra_id_0> to <extra_id_{extra - 1}> at the end.

    Raises WanjaxError for a file that cannot be read, and for a model of another kind.
    """
    try:
        pieces, characters, kind = _parse(file.read_bytes())
        normaliser = normalizers.Precompiled(characters) if characters else None
    except Exception as error:  # the library raises no narrower type
        raise WanjaxError(f"{file} is not a readable SentencePiece model: get it again") from error
    names = [piece.text for piece in pieces]
    unknown = next((i for i, piece in enumerate(pieces) if piece.kind == UNKNOWN), None)
    if kind != UNIGRAM or unknown is None or END not in names or BYTE in [piece.kind for piece in pieces]:
        raise WanjaxError(
            f"{file} is not a model of T5: one of the kind unigram, with pieces {END} and <unk> and none for bytes, is "
            "needed, or a tokenizer.json"
        )
    more = [f"<extra_id_{i}>" for i in reversed(range(extra))]
    vocabulary = [(piece.text, piece.score) for piece in pieces] + [(name, 0.0) for name in more]
    backend = tokenizers.Tokenizer(Unigram(vocabulary, unk_id=unknown, byte_fallback=False))
    if normaliser is not None:
        backend.normalizer = normaliser
    words = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    backend.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, names.index(END))])
    specials = [piece.text for piece in pieces if piece.kind in (UNKNOWN, CONTROL)] + more
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return backend


def _parse(data: bytes) -> tuple[list[Piece], bytes, int]:
    """Returns the pieces, the normaliser's map of characters, and the kind of model."""
    fields = list(_fields(data))
    pieces = [_piece(dict(_fields(value))) for number, value in fields if number == PIECES]
    trainer, normaliser = (dict(_fields(dict(fields).get(number, b""))) for number in (TRAINER, NORMALISER))
    return pieces, normaliser.get(CHARACTER_MAP, b""), trainer.get(MODEL_KIND, UNIGRAM)


def _piece(fields: dict[int, Any]) -> Piece:
    text, score = fields[TEXT], fields.get(SCORE, bytes(4))
    return Piece(str(text, "utf-8"), struct.unpack("<f", score)[0], fields.get(KIND, NORMAL))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the fields of a message; numbers of a fixed size and nested messages are bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, form = key >> 3, key & 7
        if form == VARINT:
            value, at = _varint(data, at)
        else:
            if form == LENGTH_AND_BYTES:
                size, at = _varint(data, at)
            else:
                size = {EIGHT_BYTES: 8, FOUR_BYTES: 4}[form]
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError("the message ends too early")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at an index, seven bits a byte, the lowest first, and the index after it."""
    number = shift = 0
    while data[at] >= 0x80 and shift < 63:
        number |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | data[at] << shift, at + 1
