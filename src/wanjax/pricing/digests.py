# SPDX-License-Identifier: Apache-2.0
"""Digests of the code and versions that a price depends on, in addition to the program."""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MODULES = (
    *("card_costs", "chips", "compile", "costs", "exporting", "hlo", "lowering", "pallas_kernels", "pricer", "scalar"),
    *("schedule", "work", "compiler_process"),
)
"""Files of this folder on which a price depends."""


def pricing_digest() -> str:
    """Return one digest of the files that determine prices; edits to other files keep cached prices valid."""
    return digest(Path(__file__).with_name(f"{name}.py") for name in MODULES)


def digest(paths: Iterable[Path]) -> str:
    """Return one digest of files, by their names and contents."""
    hashed = hashlib.sha256()
    for path in paths:
        hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()


def versions(*names: str) -> dict[str, str]:
    """Return the versions of those of these distributions that are installed."""
    installed = {}
    for name in names:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
