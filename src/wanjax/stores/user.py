# SPDX-License-Identifier: Apache-2.0
"""The user's own folders, which a user without a home folder does not have."""

import atexit
import os
import sys
import tempfile
from functools import cache
from pathlib import Path


def home() -> Path | None:
    """Returns the user's home folder, or None where neither the environment nor the system names one."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def lasting_cache() -> Path | None:
    """Returns this library's folder in the user's cache, or None for a user without a home folder."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):  # empty is unset, as its specification says
        return Path(chosen) / "wanjax"
    own = home()
    return own and own / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "wanjax"


def user_cache() -> Path:
    """Returns a folder for files that can be made again.

    It is this library's in the user's cache. For a user without a home folder it is a temporary one, which goes with
    the process.
    """
    return lasting_cache() or _of_this_process()


@cache
def _of_this_process() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="wanjax-cache-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
