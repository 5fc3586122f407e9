# SPDX-License-Identifier: Apache-2.0
"""Check that a message contains certain words, such as the wrong value and a valid value, in any sentence."""

import re


def line_with_words(words: str) -> str:
    """Return a pattern for a line with all of these words in any order. Text in brackets is one word."""
    patterns = [
        (r"(?<!\w)" if word[0].isalnum() else "") + re.escape(word) + (r"(?!\w)" if word[-1].isalnum() else "")
        for word in re.findall(r"(?:\[[^]]*\]|\([^)]*\)|\{[^}]*\}|\S)+", words)
    ]
    return "(?m)^" + "".join(f"(?=.*?{pattern})" for pattern in patterns)


def has_line_with_words(output: str, words: str) -> bool:
    """Return whether one line has all of these words."""
    return re.search(line_with_words(words), output) is not None
