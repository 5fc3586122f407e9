# SPDX-License-Identifier: Apache-2.0
"""ByT5's tokenizer: each byte of a text is a token. A checkpoint may add further tokens.

Follows transformers' models/byt5/tokenization_byt5.py. There is no vocabulary file: a folder's files only list the
added tokens.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanjax.checkpoints.sources import read_json
from wanjax.errors import WanjaxError
from wanjax.pipelines.text.tokenizer import TokenBatch, Truncation, pad_batch

PAD, END, UNKNOWN = 0, 1, 2
SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # in the order of the ids
FIRST_BYTE_ID = len(SPECIAL_TOKENS)
NUM_BYTES = 256
FIRST_ADDED_ID = FIRST_BYTE_ID + NUM_BYTES


@dataclass(frozen=True)
class AddedToken:
    """A token for a whole text, with its id. The token may also match the whitespace before and after the text."""

    id: int
    strips_before: bool = False
    strips_after: bool = False


class ByT5Tokenizer:
    """A checkpoint's tokenizer: each UTF-8 byte is a token, and each name in `added` is a token."""

    pad_id = PAD

    def __init__(self, added: Mapping[str, AddedToken], *, length: int):
        """Create a tokenizer from the added tokens by name; texts are cut and padded to `length` tokens."""
        self.added = dict(added)
        self.names = {token.id: name for name, token in added.items()}
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        self.pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self.text_length = length

    @classmethod
    def load(cls, folder: Path, *, length: int) -> "ByT5Tokenizer":
        """Read a `tokenizer` folder in the layout of transformers; texts get `length` tokens.

        Raises WanjaxError if a file cannot be read, or if an added token must be a single word.
        """
        files = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
        config, special_tokens, added_tokens = (read_json(folder / name, missing={}) for name in files)
        if "added_tokens_decoder" in config:
            entries_by_id = {int(id): entry for id, entry in config["added_tokens_decoder"].items()}
        else:
            config |= special_tokens
            entries_by_id = {id: {"content": name} for name, id in added_tokens.items()}
        return cls(_added_tokens(config, entries_by_id), length=length)

    def with_tokens(self, names: Sequence[str]) -> "ByT5Tokenizer":
        """Return a copy of the tokenizer with more added tokens.

        The ids of the added tokens follow the existing ids.
        """
        first_id = self.vocab_size
        new_names = [name for name in names if name not in self.added]
        new_tokens = {name: AddedToken(first_id + i) for i, name in enumerate(new_names)}
        return ByT5Tokenizer(self.added | new_tokens, length=self.text_length)

    @property
    def config(self) -> dict[str, Any]:
        """The tokenizer_config.json for this tokenizer, which `load` and transformers can read."""
        added_tokens = {
            str(token.id): {
                "content": name, "lstrip": token.strips_before, "normalized": False, "rstrip": token.strips_after,
                "single_word": False, "special": True,
            }
            for name, token in sorted(self.added.items(), key=lambda entry: entry[1].id)
        }  # fmt: skip
        special_tokens = {entry: self.names[id] for id, entry in enumerate(SPECIAL_TOKENS)}
        return {
            "added_tokens_decoder": added_tokens, "additional_special_tokens": [], "extra_ids": 0, **special_tokens,
            "tokenizer_class": "ByT5Tokenizer",
        }  # fmt: skip

    @property
    def vocab_size(self) -> int:
        """The number of ids. The text encoder's embedding table needs at least as many rows."""
        return max(FIRST_ADDED_ID, *(id + 1 for id in self.names))

    def tokenize(self, texts: Sequence[str], length: int | None = None) -> TokenBatch:
        """Return the texts' ids, cut and padded to `length` (`text_length` if None). The end token is always kept."""
        length = self.text_length if length is None else length
        return pad_batch((self._tokenize_one(text, length) for text in texts), length, PAD)

    def _tokenize_one(self, text: str, length: int) -> tuple[list[int], Truncation | None]:
        """Return the ids of a text, cut to a length, and its truncation."""
        all_ids = list(self._token_ids(text))
        ids, cut_ids = all_ids[: length - 1], all_ids[length - 1 :]
        if ids[-1:] != [END]:
            ids.append(END)
        return ids, Truncation(len(all_ids) + 1, length, self._decode(cut_ids).strip()) if cut_ids else None

    def _token_ids(self, text: str) -> Iterator[int]:
        """Yield the ids of a text, without the end token."""
        parts = self.pattern.split(text)  # texts and added tokens alternate
        for i, part in enumerate(parts):
            if i % 2:
                yield self.added[part].id
                continue
            if i > 0 and self.added[parts[i - 1]].strips_after:
                part = part.lstrip()
            if i + 1 < len(parts) and self.added[parts[i + 1]].strips_before:
                part = part.rstrip()
            yield from (byte + FIRST_BYTE_ID for byte in part.encode("utf-8", "replace"))

    def _decode(self, ids: Sequence[int]) -> str:
        parts = (
            bytes([id - FIRST_BYTE_ID]) if FIRST_BYTE_ID <= id < FIRST_ADDED_ID else self.names[id].encode("utf-8")
            for id in ids
        )
        return b"".join(parts).decode("utf-8", "ignore")


def _added_tokens(config: Mapping[str, Any], entries_by_id: Mapping[int, Mapping[str, Any]]) -> dict[str, AddedToken]:
    """Return the added tokens by name: the special tokens, the tokens with explicit ids, and then the other tokens."""
    by_id: dict[int, tuple[str, AddedToken]] = {}
    for id, (name, default) in enumerate(SPECIAL_TOKENS.items()):
        entry = config.get(name) or default
        # a token without an entry of its own strips the whitespace around it, for compatibility with the first release
        entry = entry if isinstance(entry, Mapping) else {"content": entry, "lstrip": True, "rstrip": True}
        by_id[id] = _added_token(id, entry)
    by_id |= {id: _added_token(id, entry) for id, entry in entries_by_id.items()}
    tokens = dict(by_id.values())
    sentinels = [f"<extra_id_{i}>" for i in range(config.get("extra_ids", 125))]
    for entry in config.get("extra_special_tokens", config.get("additional_special_tokens", sentinels)):
        entry = entry if isinstance(entry, Mapping) else {"content": entry}
        name, token = _added_token(NUM_BYTES + len(tokens), entry)
        tokens.setdefault(name, token)
    return tokens


def _added_token(id: int, entry: Mapping[str, Any]) -> tuple[str, AddedToken]:
    if entry.get("single_word"):
        raise WanjaxError(
            f"the tokenizer's token {entry['content']!r} must be a single word (single_word), which is not supported"
        )
    return entry["content"], AddedToken(id, bool(entry.get("lstrip")), bool(entry.get("rstrip")))
