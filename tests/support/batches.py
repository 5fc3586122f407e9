# SPDX-License-Identifier: Apache-2.0
"""Read the manifest of a batch."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from wanjax.jobs.batch import MANIFEST


def read_manifest(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a folder's manifest, without incomplete lines; none if there is no manifest yet."""
    entries, file = [], folder / MANIFEST
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with suppress(ValueError):
            entries.append(json.loads(line))
    return entries
