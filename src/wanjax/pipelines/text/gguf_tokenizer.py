# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of T5 and UMT5 in the header of a GGUF file, as llama.cpp writes it."""

import json
from contextlib import ExitStack
from pathlib import Path
from weakref import finalize

from wanjax.checkpoints.files import GGUF_SUFFIX
from wanjax.checkpoints.gguf_file import GgufFile
from wanjax.errors import WanjaxError
from wanjax.pipelines.text.tokenizer import Piece, t5_tokenizer
from wanjax.stores.temporary import temp_dir

FIELD_PREFIX = "tokenizer.ggml."
FIELD_NAMES = ("tokens", "scores", "token_type", "precompiled_charsmap")


def write_tokenizer(path: Path, owner: object) -> list[Path] | None:
    """Write the tokenizer of a text encoder's file into a temporary folder, in the layout of transformers.

    Args:
        path: The file of the text encoder.
        owner: When this object is garbage-collected, the folder is removed.

    Returns:
        The tokenizer's files. None if the file is no GGUF file, or has no complete tokenizer of T5. A complete
        tokenizer has the normaliser of characters.

    Raises:
        WanjaxError: The tokenizer is damaged.
    """
    if path.suffix != GGUF_SUFFIX:
        return None
    file = GgufFile(path)
    if file.value(f"{FIELD_PREFIX}model") != "t5" or any(
        f"{FIELD_PREFIX}{part}" not in file.fields for part in FIELD_NAMES
    ):
        return None
    tokens, scores, kinds, charsmap = (file.value(f"{FIELD_PREFIX}{part}") for part in FIELD_NAMES)
    padding = file.value(f"{FIELD_PREFIX}padding_token_id", 0)
    try:
        pieces = [Piece(*piece) for piece in zip(tokens, scores, kinds, strict=True)]
        backend = t5_tokenizer(pieces, bytes(value & 255 for value in charsmap))
        if backend is None:
            raise ValueError("it lacks </s> or <unk>")
        pad_token = tokens[padding]
    except Exception as error:  # the library tokenizers raises no narrower exception type
        raise WanjaxError(f"{path} has a damaged tokenizer ({error}): get the file again") from error
    folders = ExitStack()
    finalize(owner, folders.close)
    folder = folders.enter_context(temp_dir())
    config = {"pad_token": pad_token, "tokenizer_class": "T5TokenizerFast"}
    files = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]
