# SPDX-License-Identifier: Apache-2.0
"""Tables on a narrow terminal keep each column and each figure."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.cells import cell_len

from tests.support.commands import succeeded
from wanjax.cli import main
from wanjax.cli.listing import listed_models
from wanjax.cli.measuring import COLUMNS
from wanjax.cli.planning import STAGE_COLUMNS
from wanjax.cli.tables import fold_text, table

NARROW = 60
STAGES = [
    ("encode", "10.8 GiB", "1.02 GiB", "0 B", "11.9 GiB", "19.4 GiB", "85 ms"),
    ("denoise", "14.3 GiB", "21.5 GiB", "507 MiB", "36.3 GiB", "-5.02 GiB", "does not fit"),
]
MEASURED = [
    ("a step, fast: self-attention of 1 x 32760 x 12 x 128", "1 min 30 s", "1.25 s", "1.02 s", "5", "12%", "", ""),
    ("later frames: 480x832, bfloat16", "12.5 s", "85 ms", "2 min 5 s", "3", "1%", "1 min 55 s", "1.09"),
]


@pytest.mark.parametrize(("headings", "rows"), [(STAGE_COLUMNS, STAGES), (COLUMNS, MEASURED)], ids=["plan", "bench"])
@pytest.mark.parametrize("width", [40, NARROW, 79, 80, 100, 140])
def test_a_table_fits_its_terminal_and_loses_nothing(headings, rows, width):
    result = table(headings, rows, width)
    lines = [*result.headings, *result.rows]
    assert max(map(len, lines)) <= width
    words = " ".join(lines).replace(",", " ").split()
    assert {word for text in headings[1:] for word in text.split()} <= {*words}
    assert all(word in words for name, *_ in rows for word in name.replace(",", " ").split())
    for cell in (cell for row in rows for cell in row[1:]):
        assert any(cell in line for line in result.rows)


def test_columns_are_side_by_side_if_they_fit():
    result = table(("stage", "to spare", "time"), [("encode", "19.4 GiB", "85 ms")], 30)
    assert result.headings == ["stage  to spare  time"]
    assert result.rows == ["encode 19.4 GiB 85 ms"]


def printed_lines(*arguments: str | Path) -> list[str]:
    """Return the lines that a command prints on a narrow terminal."""
    result = succeeded(CliRunner(env={"COLUMNS": str(NARROW)}).invoke(main, list(map(str, arguments))))
    return result.stdout.splitlines()


def test_the_list_of_models_fits_a_narrow_terminal():
    lines = printed_lines("models")
    assert max(map(len, lines)) <= NARROW
    output = " ".join(" ".join(lines).split())
    for model in listed_models().values():
        defaults = model["defaults"]
        text = " ".join(lines[lines.index(model["name"]) + 1 :][:5])
        for part in (
            f"size {defaults['width']}x{defaults['height']}",
            f"frames {defaults['frames']}",
            f"steps {defaults['steps']}",
        ):
            assert part in text
        assert model["about"] in output


def test_the_settings_of_a_video_fit_a_narrow_terminal(tmp_path):
    prompt = "a red circle that moves to the right, and then to the left, and never comes to rest at any of the sides"
    (tmp_path / "generation_config.json").write_text(json.dumps({"model": "nano", "prompt": prompt, "steps": 2}))
    lines = printed_lines("info", tmp_path / "generation_config.json")
    assert max(map(len, lines)) <= NARROW
    assert " ".join(" ".join(lines).split()) == f"model nano prompt {prompt} steps 2"


def test_a_pipe_has_a_line_for_each_row():
    lines = succeeded(CliRunner(env={"COLUMNS": ""}).invoke(main, ["models"])).stdout.splitlines()
    assert len(lines) == 1 + 2 * len(listed_models())


def test_wide_characters_count_as_two_columns():
    """A Chinese text has no spaces; a comma begins no line."""
    text = "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，a cat plays, 画面，静止，整体发灰"
    lines = fold_text(text, 20)
    assert max(map(cell_len, lines)) <= 22  # a punctuation mark may exceed the width
    assert len(lines) <= 6
    assert not any(line[0] in "，, " for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert fold_text("a few words here", 7) == ["a few", "words", "here"]
