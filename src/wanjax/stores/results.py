# SPDX-License-Identifier: Apache-2.0
"""A cache of results for later runs, in the user's cache folder.

A key contains everything that determines the result.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from wanjax.stores.user_folders import user_cache
from wanjax.stores.writing import write_atomically


class ResultCache:
    """Cached values by kind and key. Values and keys are JSON."""

    def get(self, kind: str, key: Mapping[str, Any]) -> Any:
        """Return the value of a key, or None if it is missing or unreadable."""
        with suppress(OSError, ValueError):
            return json.loads(self._file(kind, key).read_text(encoding="utf-8"))
        return None

    def put(self, kind: str, key: Mapping[str, Any], value: Any) -> None:
        """Store a value; do nothing if the cache folder cannot be written."""
        file = self._file(kind, key)
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(value).encode())

    def has(self, kind: str) -> bool:
        """Return True if there is any value of a kind."""
        return any((user_cache() / kind).glob("*.json"))

    def _file(self, kind: str, key: Mapping[str, Any]) -> Path:
        text = json.dumps(key, sort_keys=True)
        return user_cache() / kind / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
