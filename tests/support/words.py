# SPDX-License-Identifier: Apache-2.0
"""Checks that a message names what its reader needs: the wrong value and the right choice, in any sentence."""

import re


def line_with_words(words: str) -> str:
    """Return a pattern of the lines that name each of the words, in any order. What brackets enclose is one word."""
    patterns = [
        (r"(?<!\w)" if word[0].isalnum() else "") + re.escape(word) + (r"(?!\w)" if word[-1].isalnum() else "")
        for word in re.findall(r"(?:\[[^]]*\]|\([^)]*\)|\{[^}]*\}|\S)+", words)
    ]
    return "(?m)^" + "".join(f"(?=.*?{pattern})" for pattern in patterns)


def has_line_with(output: str, words: str) -> bool:
    """Return whether one line names each of the words."""
    return re.search(line_with_words(words), output) is not None
