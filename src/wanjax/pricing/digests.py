# SPDX-License-Identifier: Apache-2.0
"""Digests and package versions that determine prices. The keys of cached prices contain them."""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MODULES = (
    *("card_costs", "chips", "compile", "costs", "exporting", "hlo", "lowering", "pallas_kernels", "pricer", "scalar"),
    *("schedule", "work", "compiler_process"),
)
"""Modules of this folder on which a price depends."""


def pricing_digest() -> str:
    """Return one digest of the modules that determine prices. Cached prices stay valid when other files change."""
    return digest(Path(__file__).with_name(f"{name}.py") for name in MODULES)


def digest(paths: Iterable[Path]) -> str:
    """Return one digest of the names and contents of files."""
    hasher = hashlib.sha256()
    for path in paths:
        hasher.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()


def versions(*names: str) -> dict[str, str]:
    """Return the versions of those named distributions that are installed."""
    installed = {}
    for name in names:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
