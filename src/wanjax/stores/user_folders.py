# SPDX-License-Identifier: Apache-2.0
"""The user's home and cache folders."""

import atexit
import os
import sys
import tempfile
from functools import cache
from pathlib import Path


def home() -> Path | None:
    """Return the user's home folder. Return None if it does not exist, or if neither the environment nor the system
    defines one."""
    try:
        folder = Path.home()
    except RuntimeError:
        return None
    return folder if folder.is_dir() else None


def xdg_folder(variable: str) -> Path | None:
    """Return the folder that a variable such as XDG_CACHE_HOME names, or None if it is unset, empty or relative.

    The XDG Base Directory Specification says to ignore a relative path.
    """
    folder = os.environ.get(variable, "")
    return Path(folder) if os.path.isabs(folder) else None


def lasting_cache() -> Path | None:
    """Return this library's folder in the user's cache, or None if the user has no home folder."""
    if (cache_home := xdg_folder("XDG_CACHE_HOME")) is not None:
        return cache_home / "wanjax"
    folder = home()
    return folder and folder / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "wanjax"


def user_cache() -> Path:
    """Return the folder for files that can be regenerated.

    The folder is wanjax's folder in the user's cache. A user without a home folder gets a temporary
    folder that is removed when the process exits.
    """
    return lasting_cache() or _process_cache()


@cache
def _process_cache() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="wanjax-cache-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
