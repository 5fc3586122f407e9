# SPDX-License-Identifier: Apache-2.0
"""T5's tokenizer from a SentencePiece model, `spiece.model`, for checkpoints without a tokenizer.json.

The file is a protocol buffer that sentencepiece describes. The tokenizer is put together as in transformers'
models/t5/tokenization_t5.py: the model's own normaliser, words apart at whitespace, the likeliest pieces of each word,
and the end token. Sentencepiece's own processor knows no tokens beside the model's.
"""

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram

from wanjax.errors import WanjaxError

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
