# SPDX-License-Identifier: Apache-2.0
"""What a price depends on beside the program: the code that makes it, and versions."""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MODULES = (
    *("chips", "compile", "costs", "exporting", "hlo", "kernels", "lowering", "priced", "scalar", "schedule"),
    *("work", "worker"),
)
"""Files of this folder on which a price depends."""


def pricing_digest() -> str:
    """Return one digest of the files that make a price of a program; no other edit forgets prices."""
    return digest(Path(__file__).with_name(f"{name}.py") for name in MODULES)


def digest(paths: Iterable[Path]) -> str:
    """Return one digest of files, by their names and contents."""
    made = hashlib.sha256()
    for path in paths:
        made.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return made.hexdigest()


def versions(*names: str) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
