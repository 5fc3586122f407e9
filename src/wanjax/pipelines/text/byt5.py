# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of ByT5: the bytes of a text, and whole names of tokens that a checkpoint adds.

Follows transformers' models/byt5/tokenization_byt5.py. There is no vocabulary to read: a folder's files name the added
tokens alone.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanjax.checkpoints.sources import read_json
from wanjax.errors import WanjaxError
from wanjax.pipelines.text.tokenizer import TokenBatch, Truncation, batched

PAD, END, UNKNOWN = 0, 1, 2
NAMED = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # in the order of their ids
FIRST_BYTE = len(NAMED)
BYTES = 256
FIRST_ADDED = FIRST_BYTE + BYTES


@dataclass(frozen=True)
class AddedToken:
    """A token that is found whole in a text: its id, and whether it takes the whitespace before and after it."""

    id: int
    before: bool = False
    after: bool = False


class ByT5Tokenizer:
    """The tokenizer of a checkpoint: each byte of UTF-8 is a token, and so is each name among `added`."""

    pad_id = PAD

    def __init__(self, added: Mapping[str, AddedToken], *, length: int):
        """Take the added tokens by name, and the `length` in tokens to which texts are cut and padded."""
        self.added = dict(added)
        self.names = {token.id: name for name, token in added.items()}
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        self.pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self.text_length = length

    @classmethod
    def load(cls, folder: Path, *, length: int) -> "ByT5Tokenizer":
        """Read a `tokenizer` folder in the layout of transformers; texts get `length` tokens.

        Raises WanjaxError where a file cannot be read, or an added token is one that has to stand apart as a word.
        """
        files = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
        config, specials, added = (read_json(folder / name, missing={}) for name in files)
        if "added_tokens_decoder" in config:
            listed = {int(id): entry for id, entry in config["added_tokens_decoder"].items()}
        else:
            config |= specials
            listed = {id: {"content": name} for name, id in added.items()}
        return cls(_added_tokens(config, listed), length=length)

    def with_tokens(self, names: Sequence[str]) -> "ByT5Tokenizer":
        """Return the tokenizer with further added tokens, whose ids follow its own."""
        first = self.vocab_size
        new = [name for name in names if name not in self.added]
        further = {name: AddedToken(first + i) for i, name in enumerate(new)}
        return ByT5Tokenizer(self.added | further, length=self.text_length)

    @property
    def config(self) -> dict[str, Any]:
        """The tokenizer_config.json, from which `load` and transformers read the same tokenizer."""
        listed = {
            str(token.id): {
                "content": name, "lstrip": token.before, "normalized": False, "rstrip": token.after,
                "single_word": False, "special": True,
            }
            for name, token in sorted(self.added.items(), key=lambda entry: entry[1].id)
        }  # fmt: skip
        named = {entry: self.names[id] for id, entry in enumerate(NAMED)}
        return {
            "added_tokens_decoder": listed, "additional_special_tokens": [], "extra_ids": 0, **named,
            "tokenizer_class": "ByT5Tokenizer",
        }  # fmt: skip

    @property
    def vocab_size(self) -> int:
        """The number of ids; the text encoder's table of embeddings needs at least as many rows."""
        return max(FIRST_ADDED, *(id + 1 for id in self.names))

    def tokenize(self, texts: Sequence[str], length: int | None = None) -> TokenBatch:
        """Return the texts' ids, cut and padded to `length` (`text_length` if None). Always keeps the end token."""
        length = self.text_length if length is None else length
        return batched((self._row(text, length) for text in texts), length, PAD)

    def _row(self, text: str, length: int) -> tuple[list[int], Truncation | None]:
        """Return the ids of a text, cut to a length, and its truncation."""
        whole = list(self._ids(text))
        ids, cut = whole[: length - 1], whole[length - 1 :]
        if ids[-1:] != [END]:
            ids.append(END)
        return ids, Truncation(len(whole) + 1, length, self._text(cut).strip()) if cut else None

    def _ids(self, text: str) -> Iterator[int]:
        """Yield the ids of a text, without the end token."""
        parts = self.pattern.split(text)  # texts and added tokens in turn
        for i, part in enumerate(parts):
            if i % 2:
                yield self.added[part].id
                continue
            if i > 0 and self.added[parts[i - 1]].after:
                part = part.lstrip()
            if i + 1 < len(parts) and self.added[parts[i + 1]].before:
                part = part.rstrip()
            yield from (byte + FIRST_BYTE for byte in part.encode("utf-8", "replace"))

    def _text(self, ids: Sequence[int]) -> str:
        parts = (
            bytes([id - FIRST_BYTE]) if FIRST_BYTE <= id < FIRST_ADDED else self.names[id].encode("utf-8") for id in ids
        )
        return b"".join(parts).decode("utf-8", "ignore")


def _added_tokens(config: Mapping[str, Any], listed: Mapping[int, Mapping[str, Any]]) -> dict[str, AddedToken]:
    """Return the added tokens by name: the named ones, those `listed` by id, and further ones after them."""
    by_id: dict[int, tuple[str, AddedToken]] = {}
    for id, (name, usual) in enumerate(NAMED.items()):
        entry = config.get(name) or usual
        # a name alone takes the whitespace around it, for compatibility with the first release
        entry = entry if isinstance(entry, Mapping) else {"content": entry, "lstrip": True, "rstrip": True}
        by_id[id] = _added_token(id, entry)
    by_id |= {id: _added_token(id, entry) for id, entry in listed.items()}
    added = dict(by_id.values())
    sentinels = [f"<extra_id_{i}>" for i in range(config.get("extra_ids", 125))]
    for entry in config.get("extra_special_tokens", config.get("additional_special_tokens", sentinels)):
        entry = entry if isinstance(entry, Mapping) else {"content": entry}
        name, token = _added_token(BYTES + len(added), entry)
        added.setdefault(name, token)
    return added


def _added_token(id: int, entry: Mapping[str, Any]) -> tuple[str, AddedToken]:
    if entry.get("single_word"):
        raise WanjaxError(
            f"the tokenizer's token {entry['content']!r} has to stand apart as a word, which is not offered"
        )
    return entry["content"], AddedToken(id, bool(entry.get("lstrip")), bool(entry.get("rstrip")))
