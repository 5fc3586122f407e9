# SPDX-License-Identifier: Apache-2.0
"""Results that a plan keeps between runs, in the user's cache folder, by all that they depend on."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from wanjax.stores.user import user_cache
from wanjax.stores.writing import write_whole

PRICING = (
    *("chips", "compile", "exporting", "hlo", "kernels", "lowering", "priced", "pricing", "scalar", "schedule"),
    *("work", "worker"),
)
"""Modules of this folder on which a price depends."""
MESHES = "sharding.py"  # which arranges a program's devices


def recall(kind: str, key: Mapping[str, Any]) -> Any:
    """Returns what was kept for this key, or None if nothing readable is there."""
    with suppress(OSError, ValueError):
        return json.loads(_file(kind, key).read_text(encoding="utf-8"))
    return None


def keep(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Keeps a value that JSON can hold. Does nothing if the cache folder cannot be written."""
    file = _file(kind, key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(value).encode())


def is_any_kept(kind: str) -> bool:
    """Tell whether anything of a kind is kept."""
    return any((user_cache() / kind).glob("*.json"))


def _file(kind: str, key: Mapping[str, Any]) -> Path:
    text = json.dumps(key, sort_keys=True)
    return user_cache() / kind / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


@cache
def pricing_digest() -> str:
    """Returns one digest of the files that make a price of a program; no other edit forgets prices."""
    folder = Path(__file__).parent
    return digest([*(folder / f"{name}.py" for name in PRICING), folder.parent / MESHES])


def digest(paths: Iterable[Path]) -> str:
    """Returns one digest of files, by their names and contents."""
    made = hashlib.sha256()
    for path in paths:
        made.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return made.hexdigest()


def versions(*names: str) -> dict[str, str]:
    """Returns the versions of those distributions that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
