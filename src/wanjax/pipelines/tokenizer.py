# SPDX-License-Identifier: Apache-2.0
"""From a prompt to what the video model attends to: clean, cut into tokens, encode, and zero what is padding."""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ftfy
import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Array, Bool, Float, Int

from wanjax.errors import WanjaxError
from wanjax.models.t5 import T5Encoder

TEXT_LENGTH = 512
"""The tokens that Wan reads of a prompt, padding included."""


def clean_prompt(prompt: str) -> str:
    """The prompt as Wan was trained to read it: mojibake mended, HTML entities resolved, whitespace collapsed."""
    text = html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()  # twice, for entities that were escaped twice
    return re.sub(r"\s+", " ", text).strip()


@dataclass(frozen=True)
class Truncation:
    """What a prompt lost: it has `tokens` tokens, the model reads `length`, and `cut` is the text left out."""

    tokens: int
    length: int
    cut: str

    def __str__(self) -> str:
        end = self.cut if len(self.cut) <= 60 else f"{self.cut[:57]}..."
        return f'the prompt has {self.tokens} tokens, the model reads {self.length}: the end "{end}" was cut'


@dataclass(frozen=True)
class TokenBatch:
    """Prompts of one length: the ids, the mask that is true where a token is real, and what each prompt lost."""

    ids: Int[np.ndarray, "B S"]
    mask: Bool[np.ndarray, "B S"]
    truncated: tuple[Truncation | None, ...]


class Tokenizer:
    """The tokenizer of a checkpoint, read from the `tokenizer.json` of its folder."""

    def __init__(self, backend: tokenizers.Tokenizer, *, pad: str, max_length: float):
        """`pad`: the token that fills up; `max_length`: the most tokens that the tokenizer's own settings allow."""
        pad_id = backend.token_to_id(pad)
        if pad_id is None:
            raise WanjaxError(f"the tokenizer has no token {pad!r}, which its settings name as the padding")
        backend.no_padding()  # a file may have stored a padding of its own
        self.backend = backend
        self.pad_id = pad_id
        self.text_length = int(min(TEXT_LENGTH, max_length))

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads a `tokenizer` folder in the layout of transformers.

        Raises WanjaxError where `tokenizer.json` is missing or a file cannot be read.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            has = ", only spiece.model" if (folder / "spiece.model").is_file() else ""
            raise WanjaxError(
                f"{folder} has no tokenizer.json{has}: download that file too, the checkpoint's repository holds it, "
                "or write it with transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower type
            raise WanjaxError(f"{file} is not a readable tokenizer: {error}") from error
        settings = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        pad = settings.get("pad_token") or "<pad>"
        return cls(
            backend,
            pad=pad["content"] if isinstance(pad, dict) else pad,
            max_length=settings.get("model_max_length") or TEXT_LENGTH,
        )

    @property
    def vocab_size(self) -> int:
        """The number of ids, which the text encoder's table of embeddings must not fall short of."""
        return self.backend.get_vocab_size()

    def tokenize(self, prompts: Sequence[str], length: int | None = None) -> TokenBatch:
        """The prompts' ids, cut and padded to `length` (`text_length` if None); the end token is always kept."""
        length = self.text_length if length is None else length
        self.backend.enable_truncation(length)
        ids = np.full((len(prompts), length), self.pad_id, np.int32)
        mask = np.zeros((len(prompts), length), bool)
        truncated = []
        for row, prompt in enumerate(prompts):
            encoding = self.backend.encode(prompt)
            ids[row, : len(encoding.ids)] = encoding.ids
            mask[row, : len(encoding.ids)] = True
            truncated.append(_truncation(prompt, encoding, length))
        return TokenBatch(ids, mask, tuple(truncated))


def _truncation(prompt: str, encoding: tokenizers.Encoding, length: int) -> Truncation | None:
    if not encoding.overflowing:
        return None
    specials = sum(encoding.special_tokens_mask)  # each part that overflowed has these again
    tokens = len(encoding.ids) + sum(len(part.ids) - specials for part in encoding.overflowing)
    start, _ = encoding.overflowing[0].offsets[0]
    return Truncation(tokens, length, prompt[start:].strip())


def _read_json(file: Path) -> dict[str, Any]:
    """The file's settings; none where it does not exist."""
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WanjaxError(f"{file} is not readable JSON: {error}") from error


def encode_text(encoder: T5Encoder, tokens: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Float[Array, "B S E"]:
    """The features of the real tokens, and exact zeros after them, which is what Wan's transformer expects."""
    features = encoder(tokens, mask)
    return jnp.where(mask[:, :, None], features, jnp.zeros((), features.dtype))
