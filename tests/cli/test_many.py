# SPDX-License-Identifier: Apache-2.0
"""`generate` with several prompts and seeds: file names, existing videos, and a killed run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import read_manifest
from tests.support.commands import refused
from tests.support.words import has_line_with_words, line_with_words
from wanjax.cli import main
from wanjax.cli.many import find_missing
from wanjax.cli.report import Report
from wanjax.errors import WanjaxError
from wanjax.jobs.batch import MANIFEST, Manifest
from wanjax.jobs.maker import Task
from wanjax.jobs.rows import read_requests
from wanjax.media.pictures import read_clip
from wanjax.media.video import read_metadata
from wanjax.pipelines.request import VideoRequest
from wanjax.pipelines.settings import read_seeds

pytestmark = pytest.mark.usefixtures("cached_programs")

PROMPTS = "a red circle moving right\n\n  a blue square moving left  \n"
SMALL = ("--size", "32x32", "--frames", "5", "--steps", "2")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text(PROMPTS)


def run(*arguments, status=0, **more):
    result = CliRunner().invoke(main, [*map(str, arguments)], **more)
    assert result.exit_code == status, result.output
    return result


def names(folder):
    """Return the names of a folder's videos; check that the manifest has each name once."""
    result = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    assert sorted(entry["file_name"] for entry in read_manifest(folder)) == result
    return result


def prompts_in(file):
    return [request.settings["prompt"] for request in read_requests(file)]


@pytest.mark.slow  # tests/jobs/test_maker.py has a quick test, and test_output.py one of the names
def test_each_video_equals_that_of_a_single_command(tmp_path):
    message = run("generate", "--prompts", "prompts.txt", "--seeds", "3,4", "--out", "many", *SMALL)
    paths = message.stdout.splitlines()
    assert sorted(os.path.basename(path) for path in paths) == names(tmp_path / "many")
    assert [(read_metadata(path)["prompt"], read_metadata(path)["seed"]) for path in paths] == [
        (prompt, seed) for prompt in ("a red circle moving right", "a blue square moving left") for seed in (3, 4)
    ]
    assert not (tmp_path / "stage_outputs").exists()
    for path in paths[1:3]:
        metadata = read_metadata(path)
        run("generate", metadata["prompt"], "--seed", metadata["seed"], "--out", "one.mp4", "--force", *SMALL)
        np.testing.assert_array_equal(read_clip(path, 5, 8), read_clip("one.mp4", 5, 8))


def test_only_missing_videos_are_made(tmp_path):
    prompt = "a red circle moving right\n"
    options = ("generate", "--prompts", "-", "--count", 2, "--seed", 7, "--out", "many", *SMALL)
    result = run(*options, input=prompt).stdout.splitlines()
    os.unlink(result[1])
    again = run(*options, input=prompt)
    assert again.stdout.splitlines() == [result[1]]
    assert has_line_with_words(again.stderr, "videos: 1 1 exist already")
    complete = run(*options, input=prompt)
    assert complete.stdout == ""
    assert has_line_with_words(complete.stderr, "all 2 videos exist already many")
    assert "videos: 0" not in complete.stderr
    os.truncate(result[0], 0)
    repaired = run(*options, input=prompt)
    assert repaired.stdout.splitlines() == [result[0]]
    assert has_line_with_words(repaired.stderr, "1 incomplete video again")
    assert len(run(*options, "--force", input=prompt).stdout.splitlines()) == 2
    changed = run(*options, "--guidance-scale", 2, input=prompt).stdout.splitlines()
    assert len(changed) == 2
    assert len(names(tmp_path / "many")) == 4


@pytest.mark.slow  # tests/pipelines/test_resume.py has a quick test with one video
@pytest.mark.skipif(os.name != "posix", reason="sends a signal of POSIX")
def test_a_killed_run_makes_the_rest_when_it_is_repeated(tmp_path):
    command = [sys.executable, "-m", "wanjax", "generate", "--prompts", "prompts.txt", "--count", "3", "--out", "many"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    killed = subprocess.Popen([*command, *SMALL], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.monotonic() + 300
    while not list((tmp_path / "many").glob("[!.]*.mp4")) and killed.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "many").glob("[!.]*.mp4")}
    assert 1 <= len(before) < 6
    rest = subprocess.run([*command, *SMALL], env=environment, capture_output=True, text=True, check=True)
    assert len(rest.stdout.splitlines()) == 6 - len(before)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list((tmp_path / "many").glob("[!.]*.mp4"))) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a", "--prompts", "prompts.txt"), "--prompts prompt"),
        (("--prompts", "nowhere.txt"), "nowhere.txt"),
        (("--prompts", "empty.txt"), "empty.txt prompt"),
        (("a", "--seeds", "1..x"), "seeds '1..x' list whole 1,5,8..11"),
        (("a", "--seeds", "9,4..1"), "4..1 1..4"),
        (("a", "--seeds", "0..30000000"), "0..30000000 30,000,001 100,000"),
        (("a", "--seeds", "0..99999,1..9"), "100,009 100,000"),
        (("a", "--seeds", "9" * 5000), "whole numbers"),
        (("a", "--seeds", "1", "--count", 2), "--seeds --count"),
        (("a", "--seeds", "1", "--seed", 2), "--seeds 1 --seed 2"),
        (("a", "--seeds", "0..99999999999"), "0..99999999999 100,000,000,000 100,000"),  # without creating this list
        (("a", "--count", 0), "--count 0 1"),
        (("a", "--count", 10**12), "--count 1000000000000 100000"),
        (("a", "--count", 2, "--dir", "here"), "--dir video"),
        (("a", "--count", 2, "--out", "one.mp4"), "--out one.mp4"),
        (("--prompts", "wrong.jsonl"), "line 2 steps 0"),
    ],
    ids=str,
)
def test_mistakes_in_several_prompts_and_seeds_are_refused(tmp_path, arguments, words):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "wrong.jsonl").write_text('"a"\n{"prompt": "a", "steps": 0}\n')
    assert has_line_with_words(run("generate", *arguments, *SMALL, status=2).stderr, words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl"),
        (("prompts.txt", "--workers", 0), "--workers 0 --database"),
        (("prompts.txt", "--workers", -1), "-1 0"),
        (("prompts.txt", "--database", "mysql://a@b/c"), "mysql:// postgresql://"),
        (("prompts.txt", "--resources", "cpu=1"), "--resources --ray"),
        (("prompts.txt", "--dashboard"), "--dashboard --ray"),
        (("prompts.txt", "--hosts", 2), "--hosts --ray"),
        (("prompts.txt", "--ray", "local", "--resources", "gpu"), "'gpu' cpu=1,TPU=4"),
        (("prompts.txt", "--workers", 2, "--processes", "auto"), "--processes"),
        (("promt.csv",), "'promt' column prompt"),
        (("twice.csv",), "header 'prompt' twice"),
        (("twice.jsonl",), "line 2 steps twice"),
        (("twice.json",), "steps twice"),
        (("model.jsonl",), "line 1 'wan2.1-t2v-1.3b' nano --model"),
        (("prompts.txt", "--ray", "ray://10.0.0.1:10001"), "ray://10.0.0.1:10001 auto HOST:6379"),
    ],
    ids=str,
)
def test_mistakes_of_a_batch_are_refused(arguments, words):
    if "--ray" in arguments:
        pytest.importorskip("ray")
    Path("promt.csv").write_text("promt\na cat\n")
    Path("twice.csv").write_text("prompt,steps,prompt\na cat,1,a dog\n")
    Path("twice.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a", "steps": 1, "steps": 2}\n')
    Path("twice.json").write_text('[{"prompt": "a", "steps": 1, "steps": 2}]')
    Path("model.jsonl").write_text('{"prompt": "a", "model": "wan2.1-t2v-1.3b"}')
    assert has_line_with_words(refused("batch", *map(str, arguments)), words)


def test_notes_are_printed_once_for_all_rows():
    rows = ['{"prompt": "a red circle", "steps": 1}', '{"prompt": "a cat", "size": "16x16", "guidance_scale": 1}']
    Path("rows.jsonl").write_text("\n".join(rows))
    messages = run("batch", "rows.jsonl", "--size", "32x32", "--frames", "5", "--steps", "2", "--out", "many").stderr
    [header] = [line for line in messages.splitlines() if line.startswith("nano: ")]
    assert has_line_with_words(header, "5 frames seed 42 differ in size, steps and guidance")
    assert not {"32x32", "16x16"} & {*header.replace(",", "").split()}
    for words in (
        "nano trained 64x64 32x32",
        "nano trained 64x64 16x16",
        "nano does not know 'cat'",
        "guidance is off",
    ):
        assert has_line_with_words(messages, words)


def test_earlier_failures_are_tried_last(tmp_path):
    tasks = [Task(f"{number}.mp4", VideoRequest({"prompt": "a", "seed": number}, row=number)) for number in range(3)]
    Manifest(tmp_path).add(tasks[0], error="the device is gone")
    assert find_missing(Report(), tasks, tmp_path, False)[0] == [*tasks[1:], tasks[0]]


WRONG = [
    {"prompt": "a", "steps": 0},  # refused when it is read
    {"prompt": "a", "frames": 6},  # refused by the listing of models
    {"prompt": "a", "image": "gone.png"},  # refused by the model
    {"prompt": "a", "size": "70x70"},
    {"prompt": "a", "mask": "here.png"},
    {"prompt": "a", "frames": 6},
    {"prompt": "a"},
    [1, 2],  # refused when it is read
    {"prompt": "a", "model": "nope"},  # refused by the model
    {"prompt": "a", "scheduler": "heun"},
    {"prompt": "a", "cache": "magcach"},
]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ((), ["line 1: steps 0", "lines 2, 6:", "line 3: gone.png", "line 4: 70", "line 5: mask"]),
        (  # before the download
            ("--model", "wan2.1-t2v-1.3b"),
            ["line 1: steps 0", "lines 2, 6: 4n", "line 3: image", "line 4: 70", "line 5: mask"],
        ),
    ],
)
def test_all_wrong_rows_are_reported_at_once(model, words):
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in WRONG))
    output = refused("batch", "rows.jsonl", *model, "--out", "videos")
    others = ["line 8: [1, 2] prompt", "line 9: 'nope' --model", "line 10: 'heun' unipc", "line 11: 'magcach' magcache"]
    for line, words_of_line in zip(output.splitlines(), ["10 lines", *words, *others], strict=True):
        assert has_line_with_words(line, words_of_line), line
    assert not Path("videos").exists()


def test_wrong_rows_are_reported_before_jax_is_imported():
    Path("rows.jsonl").write_text('{"prompt": "a", "frames": 6}\n{"prompt": "a", "steps": 0}\n')
    code = "import sys; sys.modules['jax'] = None; from wanjax.cli import main; main(['batch', 'rows.jsonl'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert has_line_with_words(result.stderr, "2 lines wrong")
    assert has_line_with_words(result.stderr, "line 1: frames 4n + 1")
    assert has_line_with_words(result.stderr, "line 2: steps 0")


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5), st.integers(0, 9), st.integers(0, 9))
def test_lists_and_ranges_of_seeds_are_parsed(single, first, more):
    listed = ",".join([*map(str, single), f"{first}..{first + more}"])
    assert read_seeds(listed) == list(dict.fromkeys([*single, *range(first, first + more + 1)]))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--steps", "999999999999", "1000000"), ("--size", "100000x100000", "16384"), ("--frames", "9" * 12, "100000")],
)
def test_values_that_are_too_large_are_refused_at_once(option, value, message):
    output = refused("generate", "a", option, value)
    assert has_line_with_words(output, f"{message}")
    assert "memory" not in output


def test_prompts_are_read_in_their_encoding_or_not_at_all(tmp_path):
    file = tmp_path / "prompts.txt"
    text = "\ufeffa café\r\n\r\n\ufeff\n\u200b\na cat\n"
    for data in (text.encode(), text.encode("utf-16"), text[1:].replace("\r\n", "\r").encode()):
        file.write_bytes(data)
        assert prompts_in(str(file)) == ["a café", "a cat"]
    for data in ("a café".encode("cp1252"), "一只红色的猫".encode("gbk"), "a cat".encode("utf-16-le")):
        file.write_bytes(data)
        with pytest.raises(WanjaxError, match=line_with_words("prompts.txt UTF-8")):
            read_requests(str(file))
