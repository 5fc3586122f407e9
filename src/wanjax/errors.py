# SPDX-License-Identifier: Apache-2.0
"""The one error that wanjax raises on purpose, and a kind of it."""


class WanjaxError(ValueError):
    """Something the caller can put right, in one sentence: what was wrong, with the value, and what would be right.

    The command line prints it without a traceback and exits with 2.
    """


class UnsupportedError(WanjaxError, NotImplementedError):
    """What an implementation cannot do, and another perhaps can."""
