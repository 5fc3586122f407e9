# SPDX-License-Identifier: Apache-2.0
"""The errors that wanjax raises on purpose."""


class WanjaxError(ValueError):
    """An error that the caller can correct. Its message is one sentence: what was wrong, and what would be right.

    The command line prints it without a traceback and exits with 2.
    """


class UnsupportedError(WanjaxError, NotImplementedError):
    """A request that this implementation does not support; another implementation may."""
