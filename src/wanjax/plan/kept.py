# SPDX-License-Identifier: Apache-2.0
"""Results that a plan keeps between runs, in the user's cache folder: prices and counts, by the code that made them."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from wanjax import converters
from wanjax.compilation import user_cache


def recall(kind: str, key: Mapping[str, Any]) -> Any:
    """Returns what the same code and versions kept for this key, or None if nothing readable is there."""
    with suppress(OSError, ValueError):
        return json.loads(_file(kind, key).read_text(encoding="utf-8"))
    return None


def keep(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Keeps a value that JSON can hold. Does nothing if the cache folder cannot be written."""
    file = _file(kind, key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8") as beside:
            json.dump(value, beside)
        os.replace(beside.name, file)


def _file(kind: str, key: Mapping[str, Any]) -> Path:
    full_key = json.dumps([key, code_digest(), versions()], sort_keys=True)
    return user_cache() / kind / f"{hashlib.sha256(full_key.encode()).hexdigest()}.json"


@cache
def code_digest() -> str:
    """Returns one digest of all Python files of this package."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parents[1], Path(converters.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that trace and compile."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "libtpu"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
