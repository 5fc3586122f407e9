# SPDX-License-Identifier: Apache-2.0
"""Decide what to do if an output file already exists. A file with the same content is kept. A different file is
replaced only with --force. This module imports NumPy only if the file exists, and never imports JAX, so that `generate
--at` does not wait for the imports.
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from wanjax.errors import WanjaxError
from wanjax.stores.paths import parse_path

CHECKED_EARLY = ("model", "prompt", "seed")
"""Settings that do not depend on the model. They can be compared before the model is loaded."""
IGNORED_ENTRIES = {"devices", "version"}


@dataclass(frozen=True)
class ExistingFile:
    """An existing file that a command would write. `metadata` is the metadata of the file, or None if wanjax did not
    write the file. `advice` is the part of a message that says how to keep the file. An incomplete file is one of which
    a part is missing, as after an interrupted copy.
    """

    file: str
    metadata: Mapping[str, Any] | None
    advice: str
    is_incomplete: bool = False

    @classmethod
    def find(cls, file: str | Path, advice: str, **extra_metadata: Any) -> "ExistingFile | None":
        """Return a video or a stage's file if it exists, otherwise None. `extra_metadata` is metadata of the file that
        is stored elsewhere."""
        path = parse_path(file)
        if not (os.path.exists(path) if isinstance(path, Path) else path.exists()):
            return None  # os.path raises no error for an invalid name
        from wanjax.media.metadata import find_metadata  # imported late, because this needs NumPy
        from wanjax.media.video import FRAME_FILE, is_incomplete

        if isinstance(path, Path) and path.is_dir() and not (path / FRAME_FILE.format(0)).exists():
            return None  # a folder without frames
        try:
            metadata = extra_metadata | find_metadata(path)
        except WanjaxError:
            metadata = None
        return cls(str(file), metadata, advice, is_incomplete(path))

    def check_request(self, requested_settings: Mapping[str, Any]) -> None:
        """Raise WanjaxError if the file was made from a different request. Only settings that are known before the
        model is loaded are compared.
        """
        recorded_metadata = self.metadata or {}
        self.check(
            requested_settings,
            [name for name in CHECKED_EARLY if name in requested_settings and name in recorded_metadata],
        )

    def check(self, metadata: Mapping[str, Any], names: Collection[str] | None = None) -> None:
        """Raise WanjaxError unless the file has this metadata. With `names`, only these entries are compared."""
        if self.is_incomplete:
            self.refuse("and is incomplete")
        if self.metadata is None:
            self.refuse("not written by wanjax")
        expected = json.loads(json.dumps(dict(metadata)))
        compared = [*expected, *self.metadata] if names is None else names
        for name in compared:
            if name not in IGNORED_ENTRIES and (self.metadata.get(name) or None) != (expected.get(name) or None):
                entry_name = "contents of files" if name == "digests" else name.replace("_", " ")
                self.refuse(f"with {'' if entry_name.endswith('s') else 'a '}different {entry_name}")

    def refuse(self, reason: str) -> NoReturn:
        """Raise WanjaxError, which gives the reason why the existing file is not the result of this command."""
        raise WanjaxError(
            f"{self.file} already exists, {reason}: give {self.advice} to keep it, or --force to replace it"
        )
