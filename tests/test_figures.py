# SPDX-License-Identifier: Apache-2.0
"""Durations, sizes and numbers, formatted for people."""

import math

import pytest

from wanjax.figures import format_bytes, format_duration, format_number, format_range, format_with_prefix, join_with_and


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (0, "0 s"),
        (3.25e-5, "32.5 µs"),
        (0.4, "400 ms"),
        (0.9996, "1 s"),
        (1.0249, "1.02 s"),
        (59.96, "1 min 0 s"),
        (150, "2 min 30 s"),
        (1120.0, "18 min 40 s"),
        (7290, "2 h 1 min"),
        (math.nan, "nan s"),
    ],
)
def test_durations_have_readable_units(seconds, message):
    assert format_duration(seconds) == message


@pytest.mark.parametrize(
    ("number", "base", "message"),
    [
        (0, 1000, "0 B"),
        (999.6, 1000, "1 kB"),
        (1_420_000_000, 1000, "1.42 GB"),
        (1023, 1024, "1020 B"),
        (2**34, 1024, "16 GiB"),
        (-(2**31), 1024, "-2 GiB"),
    ],
)
def test_sizes_have_readable_units(number, base, message):
    assert format_bytes(number, base) == message


def test_a_range_of_equal_texts_is_written_as_one_number():
    assert format_range(format_duration(1.021), format_duration(1.019)) == "1.02 s"
    assert format_range(format_duration(0.98), format_duration(1.02)) == "980 ms to 1.02 s"


def test_numbers_have_three_digits():
    assert [format_number(x) for x in (0.123456, 12.3456, 123456)] == ["0.123", "12.3", "123000"]
    assert format_with_prefix(14_300_000_000) == "14.3 G"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], ""),
        (["size"], "size"),
        (["size", "seed"], "size and seed"),
        (["size", "steps", "seed"], "size, steps and seed"),
    ],
)
def test_words_are_listed_with_commas_and_one_and(words, text):
    assert join_with_and(words) == text
