# SPDX-License-Identifier: Apache-2.0
"""Digests of the code and versions on which a price depends beside the program."""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MODULES = (
    *("chips", "compile", "costs", "exporting", "hlo", "lowering", "pallas_kernels", "pricer", "scalar", "schedule"),
    *("work", "compiler_process"),
)
"""Files of this folder on which a price depends."""


def pricing_digest() -> str:
    """Return one digest of the files that make a price of a program; no other edit forgets prices."""
    return digest(Path(__file__).with_name(f"{name}.py") for name in MODULES)


def digest(paths: Iterable[Path]) -> str:
    """Return one digest of files, by their names and contents."""
    hashed = hashlib.sha256()
    for path in paths:
        hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()


def versions(*names: str) -> dict[str, str]:
    """Return the versions of the installed distributions among these."""
    installed = {}
    for name in names:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
