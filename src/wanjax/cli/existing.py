# SPDX-License-Identifier: Apache-2.0
"""The rule for files that are there already: the same one is left as it is, another one is replaced only with --force.

Neither JAX nor NumPy is imported here before a file is there, so that `generate --at` does not wait for them.
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from wanjax.errors import WanjaxError
from wanjax.stores.paths import parse_path

AT_ONCE = ("model", "prompt", "seed")
"""Settings that a model takes as they are given, so that another one is known before anything is loaded."""
NOT_COMPARED = {"devices", "version"}


@dataclass(frozen=True)
class Existing:
    """A file that a command would write and that is there already.

    `metadata` is what it tells of itself, None where wanjax did not write it. `other` says how to keep it.
    """

    file: str
    metadata: Mapping[str, Any] | None
    other: str

    @classmethod
    def find(cls, file: str | Path, other: str, **more: Any) -> "Existing | None":
        """Return a video, or the file of a stage, that is there; None if none is. `more` is metadata kept elsewhere."""
        path = parse_path(file)
        if not (os.path.exists(path) if isinstance(path, Path) else path.exists()):
            return None  # os.path raises nothing for names that are none
        from wanjax.media.metadata import find_metadata  # imported late, as said above
        from wanjax.media.video import FRAME

        if isinstance(path, Path) and path.is_dir() and not (path / FRAME.format(0)).exists():
            return None  # a folder without frames
        try:
            metadata = more | find_metadata(path)
        except WanjaxError:
            metadata = None
        return cls(str(file), metadata, other)

    def check_request(self, requested: Mapping[str, Any]) -> None:
        """Raise WanjaxError where the file is another one than is requested, as far as known before all is loaded."""
        recorded = self.metadata or {}
        self.check(requested, [name for name in AT_ONCE if name in requested and name in recorded])

    def check(self, metadata: Mapping[str, Any], names: Collection[str] | None = None) -> None:
        """Raise WanjaxError unless the file has this metadata, or these entries of it."""
        if self.metadata is None:
            self.refuse("and wanjax did not write it")
        expected = json.loads(json.dumps(dict(metadata)))
        compared = [*expected, *self.metadata] if names is None else names
        for name in compared:
            if name not in NOT_COMPARED and (self.metadata.get(name) or None) != (expected.get(name) or None):
                words = "contents of files" if name == "digests" else name.replace("_", " ")
                self.refuse(f"with {'' if words.endswith('s') else 'a '}different {words}")

    def refuse(self, why: str) -> NoReturn:
        """Raise WanjaxError with the reason why the file is not what is requested."""
        raise WanjaxError(f"{self.file} is there already, {why}: {self.other} keeps it, --force replaces it")
