# SPDX-License-Identifier: Apache-2.0
"""The user's home and cache folders."""

import atexit
import os
import sys
import tempfile
from functools import cache
from pathlib import Path


def home() -> Path | None:
    """Return the user's home folder, or None if neither the environment nor the system defines one."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def lasting_cache() -> Path | None:
    """Return this library's folder in the user's cache, or None if the user has no home folder."""
    if cache_home := os.environ.get("XDG_CACHE_HOME"):  # by its specification, empty means unset
        return Path(cache_home) / "wanjax"
    folder = home()
    return folder and folder / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "wanjax"


def user_cache() -> Path:
    """Return the folder for files that can be regenerated.

    It is this library's folder in the user's cache. If the user has no home folder, it is temporary and removed when
    the process exits.
    """
    return lasting_cache() or _process_cache()


@cache
def _process_cache() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="wanjax-cache-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
