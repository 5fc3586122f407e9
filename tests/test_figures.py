# SPDX-License-Identifier: Apache-2.0
"""Figures as people read them."""

import math

import pytest

from wanjax.figures import between, digits, duration, in_bytes, joined_by_and, scaled


@pytest.mark.parametrize(
    ("seconds", "told"),
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
def test_durations(seconds, told):
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("number", "base", "told"),
    [
        (0, 1000, "0 B"),
        (999.6, 1000, "1 kB"),
        (1_420_000_000, 1000, "1.42 GB"),
        (1023, 1024, "1020 B"),
        (2**34, 1024, "16 GiB"),
        (-(2**31), 1024, "-2 GiB"),
    ],
)
def test_sizes(number, base, told):
    assert in_bytes(number, base) == told


def test_a_range_that_reads_as_one_figure_is_one():
    assert between(duration(1.021), duration(1.019)) == "1.02 s"
    assert between(duration(0.98), duration(1.02)) == "980 ms to 1.02 s"


def test_numbers_have_three_digits():
    assert [digits(x) for x in (0.123456, 12.3456, 123456)] == ["0.123", "12.3", "123000"]
    assert scaled(14_300_000_000) == "14.3 G"


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
    assert joined_by_and(words) == text
