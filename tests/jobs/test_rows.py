# SPDX-License-Identifier: Apache-2.0
"""Files of requests: every format gives the same requests, and mistakes are reported with their row."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.words import has_line_with_words, line_with_words
from wanjax.cli import many
from wanjax.errors import WanjaxError
from wanjax.jobs.rows import RowError, read_requests, with_seeds, with_shared
from wanjax.pipelines.request import VideoRequest

ROWS = [
    {"prompt": "a red circle", "seed": 3, "steps": 4, "guidance_scale": 2.5, "size": "64x32"},
    {"prompt": "a blue, square", "image": "cat.png", "dynamic_guidance": True},
]


def as_lines(rows):
    return "".join(json.dumps(row) + "\n\n" for row in rows)


def as_indented_json(rows):
    return json.dumps(rows, indent=2) + "\n"


def as_csv(rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    quoted = [[f'"{row.get(name, "")}"' for name in names] for row in rows]
    return "\n".join(map(",".join, [names, *quoted]))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        *[("r.jsonl", as_lines), ("r.txt", as_lines), ("r.json", as_lines), ("r.csv", as_csv), ("r.parquet", None)],
        *[(name, write) for name in ("r.json", "r.txt") for write in (json.dumps, as_indented_json)],
    ],
)
def test_every_file_format_gives_the_same_requests(tmp_path, name, write):
    if write is None:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(ROWS, schema=arrow.schema(
            [("prompt", arrow.string()), ("seed", arrow.int32()), ("steps", arrow.int64()), ("size", arrow.string()),
             ("guidance_scale", arrow.float64()), ("image", arrow.string()), ("dynamic_guidance", arrow.bool_())]
        )), tmp_path / name)  # fmt: skip
    else:
        (tmp_path / name).write_text(write(ROWS))
    first, second = read_requests(str(tmp_path / name))
    assert first.fields == {
        "prompt": "a red circle", "seed": 3, "steps": 4, "guidance_scale": 2.5, "height": 32, "width": 64,
    }  # fmt: skip
    assert second.fields == {"prompt": "a blue, square", "image": str(tmp_path / "cat.png"), "dynamic_guidance": True}
    assert [first.row, second.row] == ([1, 3] if write is as_lines else [1, 2])


def test_a_line_that_is_not_an_object_is_a_prompt(tmp_path):
    (tmp_path / "p.txt").write_text('a {"cat"}\n\n  "a dog"  \n')
    assert [request.fields for request in read_requests(str(tmp_path / "p.txt"))] == [
        {"prompt": 'a {"cat"}'},
        {"prompt": '"a dog"'},
    ]
    (tmp_path / "p.jsonl").write_text('"a dog"\n')
    assert read_requests(str(tmp_path / "p.jsonl")) == [VideoRequest({"prompt": "a dog"}, row=1)]


def test_a_prompt_may_begin_with_brackets_that_are_not_json(tmp_path):
    prompts = ["[close-up] a cat", "{red|blue} circles", "[1, 2, 3] in chalk"]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    assert [request.settings["prompt"] for request in read_requests(str(tmp_path / "p.txt"))] == prompts
    (tmp_path / "p.json").write_text(json.dumps(prompts))
    assert [request.settings["prompt"] for request in read_requests(str(tmp_path / "p.json"))] == prompts


def test_files_are_relative_to_the_table_unless_they_are_urls(tmp_path):
    options = {"prompt": "a", "image": f"file://{tmp_path}/a.png", "video": "s3://videos/a.mp4", "references": "b.png"}
    (tmp_path / "r.jsonl").write_text(json.dumps(options))
    [request] = read_requests(str(tmp_path / "r.jsonl"))
    result = [f"{tmp_path}/a.png", "s3://videos/a.mp4", [f"{tmp_path}/b.png"]]
    assert [request.inputs[name] for name in ("image", "video", "references")] == result


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "references": ["a.png", null]}', "line 2 references null file"),
        ('{"prompt": "a", "lora": "cat:0.5"}', "line 2 'lora'"),
        ("[1, 2]", "line 2 [1, 2]"),
        ('{"prompt": "a"', "line 2 JSON"),
        ("[" * 100_000, "line 2 brackets"),
        ('{"prompt": "a\\u0000"}', "line 2"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistakes_are_reported_with_their_row(tmp_path, line, words):
    (tmp_path / "r.jsonl").write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read_requests(str(tmp_path / "r.jsonl"))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("r.csv", b"prompt,seed\na,b,3\n", "row 1 below header quote"),
        ("r.csv", b'prompt,seed\nb,4\n"a,3\n', "row 2 below header quotes"),
        ("r.csv", b"text,seed\na,3\n", "'text' column"),
        ("r.csv", b'"text, or what is shown";prompt\na;b\n', "'text, column shown"),
        ("r.csv", b"prompt,seed\n", "r.csv rows header"),
        ("r.csv", b"Prompt,Sead\n", "'Sead' column seed"),
        ("r.parquet", b"PAR1, and no more", "r.parquet Parquet .csv"),
        ("r.csv", b"", "r.csv rows header"),
        ("r.jsonl", b"", "r.jsonl line"),
        ("r.parquet", b"", "r.parquet Parquet .csv"),
        ("r.txt", b"\xff\xfe\xff", "r.txt cannot"),
        ("r.txt", b"caf\xe9", "r.txt byte 4 UTF-8"),
        ("r.json", b'[\n  {"prompt": "a"},\n  {"prompt": "b"\n]', "r.json JSON prompt"),
        ("r.txt", b'[\n  {"prompt": "a",}\n]', "r.txt JSON prompt"),
        ("r.txt", b'{"prompt": "a"', "r.txt JSON prompt"),
        ("r.txt", b'{"prompt": "a" "seed": 3}', "line 1 JSON"),
        ("r.json", b"a cat\na dog", "r.json JSON .txt"),
        ("r.json", b"[]", "r.json array empty"),
        ("r.json", b'[{"prompt": "a"}, {"step": 2}]', "item 2 'step' steps"),
        ("requests", None, "requests folder file"),
    ],
)
def test_incomplete_files_are_refused(tmp_path, name, data, words):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).mkdir() if data is None else (tmp_path / name).write_bytes(data)
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read_requests(str(tmp_path / name))


def test_a_column_may_have_the_name_of_an_option(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,--negative-prompt\na,b\n")
    (request,) = read_requests(str(tmp_path / "a.csv"))
    assert request.settings == {"prompt": "a", "negative_prompt": "b"}


def test_a_table_without_a_header_is_told_what_the_first_row_is(tmp_path):
    (tmp_path / "a.csv").write_text("a red circle,3\na blue square,4\n")
    with pytest.raises(RowError, match=line_with_words("'a red circle' negative_prompt first row columns")):
        read_requests(str(tmp_path / "a.csv"))


def test_a_mistyped_column_is_reported_once(tmp_path):
    (tmp_path / "r.csv").write_text("prompt,sead\na,3\n")
    with pytest.raises(WanjaxError) as caught:
        read_requests(str(tmp_path / "r.csv"))
    assert str(caught.value) == "'sead' is not a column here: use seed"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.tsv",
            "prompt\tseed\na red circle\t1\n",
            "a.tsv is a table of a kind that wanjax cannot read: save it as a.csv",
        ),
        ("a.XLSX", "PK\x03\x04", "a.XLSX is a table of a kind that wanjax cannot read: save it as a.csv"),
        (
            "a.txt",
            "prompt,seed\na,1\n",
            "the first line of a.txt is the header of a table, 'prompt,seed': save the table as a.csv",
        ),
        (
            "a",
            "Prompt; Negative prompt\na;b\n",
            "the first line of a is the header of a table, 'Prompt; Negative prompt': save the table as a.csv",
        ),
        (
            "a.txt",
            "seed\tnum_frames\n1\t5\n",
            "the first line of a.txt is the header of a table, 'seed\\tnum_frames': save the table as a.csv",
        ),
    ],
)
def test_a_table_with_another_suffix_is_refused(tmp_path, monkeypatch, name, data, message):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(data)
    with pytest.raises(WanjaxError) as caught:
        read_requests(name)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "line", ["a red circle, a seed, steps", "prompt", "Image, video and text", "seed, a cat, video"]
)
def test_prompts_with_commas_are_not_a_header(tmp_path, line):
    (tmp_path / "a.txt").write_text(f"{line}\nb\n")
    assert [x.settings["prompt"] for x in read_requests(str(tmp_path / "a.txt"))] == [line, "b"]


@pytest.mark.parametrize("column", ["caption", "Text"])
def test_the_message_for_a_column_of_captions_suggests_prompt(tmp_path, column):
    (tmp_path / "a.csv").write_text(f"{column};seed\na;1\n")
    with pytest.raises(WanjaxError) as caught:
        read_requests(str(tmp_path / "a.csv"))
    assert str(caught.value) == f"'{column}' is not a column here: use prompt"


def test_the_message_for_another_separator_lists_the_valid_ones(tmp_path):
    (tmp_path / "a.csv").write_text("prompt|seed\na|1\n")
    with pytest.raises(WanjaxError) as caught:
        read_requests(str(tmp_path / "a.csv"))
    assert str(caught.value) == "the header is 'prompt|seed': separate its columns by commas, semicolons or tabs"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"caption": ["a cat"]}, "'caption' column prompt"),
        ({"prompt": ["a cat"], "sed": [1]}, "sed column seed"),
        ({"prompt": ["a cat"], "Prompt": ["a dog"]}, "column 'prompt' twice"),
    ],
)
def test_the_columns_of_a_parquet_file_are_checked_like_those_of_a_csv_file(tmp_path, columns, words):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), tmp_path / "r.parquet")
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read_requests(str(tmp_path / "r.parquet"))


def test_a_parquet_file_with_damaged_pages_is_not_readable(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "r.parquet"
    parquet.write_table(arrow.table({"prompt": [f"a cat {number}" for number in range(1000)]}), file)
    data = bytearray(file.read_bytes())
    data[4:2000] = bytes(1996)
    file.write_bytes(data)
    with pytest.raises(WanjaxError, match=line_with_words("r.parquet Parquet .csv")):
        read_requests(str(file))


def test_headings_may_have_capitals_and_spaces(tmp_path):
    (tmp_path / "r.csv").write_text("Prompt; Negative prompt;SEED\na cat;blurred;3\n")
    [request] = read_requests(str(tmp_path / "r.csv"))
    assert request.settings == {"prompt": "a cat", "negative_prompt": "blurred", "seed": 3}


@pytest.mark.parametrize(
    ("value", "words"),
    [("true", "steps true whole"), ("1e400", "steps Infinity whole"), ("NaN", "steps NaN"), ("[true]", "steps [true]")],
)
def test_messages_show_values_as_json(tmp_path, value, words):
    (tmp_path / "r.jsonl").write_text(f'{{"prompt": "a", "steps": {value}}}\n')
    with pytest.raises(WanjaxError, match=line_with_words(words)):
        read_requests(str(tmp_path / "r.jsonl"))


def test_a_request_overrides_the_options():
    options = VideoRequest.parse({"steps": 4, "size": (32, 64), "seed": 1}, complete=False)
    assert VideoRequest({"prompt": "a", "steps": 2, "height": 16}, row=1).with_defaults(options).fields == {
        "prompt": "a", "steps": 2, "height": 16, "width": 64, "seed": 1,
    }  # fmt: skip
    assert VideoRequest({"prompt": "a"}, row=1).with_defaults(options).fields == {"prompt": "a", **options.fields}


def test_shared_settings_without_effect_on_a_row_are_left_out():
    """A strength applies to rows with a video, and settings of seams to rows with several windows."""
    shared = VideoRequest({"strength": 0.5, "overlap": 3, "match": "colour", "steps": 2})
    texts = {"prompt": "a"}
    seams = {"overlap": 3, "match": "colour", "steps": 2}
    for row, expected in [
        (VideoRequest(texts), {"steps": 2}),
        (VideoRequest(texts | {"windows": 2}), seams),
        (VideoRequest(texts | {"then": "b"}), seams),
        (VideoRequest(texts, {"video": "b.mp4"}), seams | {"strength": 0.5}),
        (VideoRequest(texts | {"overlap": 2}), {"overlap": 2, "steps": 2}),
    ]:
        assert with_shared(row, shared).settings == {**expected, **row.settings}


def test_seeds_apply_only_to_requests_without_a_seed():
    requests = [VideoRequest({"prompt": "a"}, row=1), VideoRequest({"prompt": "b", "seed": 0}, row=2)]
    result = [(request.row, request.settings["seed"]) for request in with_seeds(requests, [7, 8])]
    assert result == [(1, 7), (1, 8), (2, 0)]


WRONG_LINES = ['{"prompt": "a"}', '{"prompt": "b", "steps": 0}', '{"prompt": "c" "seed": 3}', "{}"]
WRONG_FILES = {  # the lines of a file, and the words of each line of the message
    "several": (
        [*WRONG_LINES, '{"seed": 1' + "0" * 5000 + "}"],
        ["4 lines", "line 2 steps 0", "line 3 JSON", "line 4 prompt", "line 5 number"],
    ),
    "many": (
        [f'{{"prompt": "a", "steps": {-number}}}' for number in range(5000)],
        ["5000 lines", *(f"line {number} steps {1 - number}" for number in range(1, 11)), "4990 more"],
    ),
    "equal mistakes": (
        ["{}" if row in {2, 5, *range(9, 41)} else '{"prompt": "a"}' for row in range(1, 50)],
        ["lines 2, 5, 9 40 prompt"],
    ),
    "many equal mistakes": (["{}", '{"prompt": "a"}'] * 5000, ["lines 1, 3, 19, 4990 more"]),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_all_wrong_rows_are_reported_at_once(tmp_path, name):
    lines, words = WRONG_FILES[name]
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    with pytest.raises(WanjaxError) as caught:
        read_requests(str(tmp_path / "r.jsonl"))
    for line, words_of_line in zip(str(caught.value).splitlines(), words, strict=True):
        assert has_line_with_words(line, words_of_line), line
    assert len(str(caught.value)) < 3000
    assert str(caught.value).count("prompt is") <= 1  # a mistake of many rows is reported once


@pytest.mark.parametrize("delimiter", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
@pytest.mark.parametrize("prompt", ["prompt", '"prompt"', '"prompt "'])
def test_a_table_may_be_separated_by_commas_semicolons_or_tabs(delimiter, prompt, tmp_path):
    rows = [[prompt, "seed", "steps"], ['"a cat, asleep; purring"', "1", "4"], ["b", "2", ""]]
    (tmp_path / "r.csv").write_text("\n".join(delimiter.join(row) for row in rows))
    first, second = read_requests(str(tmp_path / "r.csv"))
    assert first.fields == {"prompt": "a cat, asleep; purring", "seed": 1, "steps": 4}
    assert second.fields == {"prompt": "b", "seed": 2}


def test_the_message_for_a_missing_parquet_library_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "r.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(WanjaxError, match=line_with_words("r.parquet pip install '.[parquet]'")):
        read_requests(str(tmp_path / "r.parquet"))


def test_a_column_of_integers_may_have_empty_cells(tmp_path):
    """Pandas writes 4 as 4.0, and an empty cell as NaN."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"prompt": ["a", "b", "c"], "steps": [4.0, float("nan"), 6.0], "negative_prompt": [None, "x", None]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "r.parquet")
    (tmp_path / "r.csv").write_text("prompt,steps,negative_prompt\na,4.0,\nb,,x\nc,6.0,\n")
    for name in ("r.parquet", "r.csv"):
        options = [request.fields for request in read_requests(str(tmp_path / name))]
        expected = [{"prompt": "a", "steps": 4}, {"prompt": "b", "negative_prompt": "x"}, {"prompt": "c", "steps": 6}]
        assert options == expected
        assert all(type(row.get("steps", 0)) is int for row in options)
    (tmp_path / "r.csv").write_text("prompt,steps\na,4.5\n")
    with pytest.raises(WanjaxError) as caught:
        read_requests(str(tmp_path / "r.csv"))
    assert has_line_with_words(str(caught.value), "row 1 steps 4.5 whole")


def test_a_number_of_seeds_is_noted_for_rows_with_their_own(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,seed\na,1\nb,\n")
    notes: list[str] = []
    many._note_rows_with_seeds(read_requests(str(tmp_path / "a.csv")), "--count", notes.append)
    (note,) = notes
    assert has_line_with_words(note, "1 of 2 --count one video")
    many._note_rows_with_seeds([], "--count", notes.append)
    assert len(notes) == 1
