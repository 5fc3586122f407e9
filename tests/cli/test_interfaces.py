# SPDX-License-Identifier: Apache-2.0
"""Any value of any option starts a run or gives an error: on the command line, in TOML and in metadata.

A command stops before it loads the first network or traces the first program.
"""

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.commands import refused, wanjax
from wanjax.cli import main, many, planning, stages
from wanjax.cli.defaults import metadata_parameters
from wanjax.media.bounds import MEDIA_LIMITS
from wanjax.media.stage_files import CONFIG
from wanjax.pipelines.video_metadata import DIGESTS_KEY

ONE_STEP = "--frames", "1", "--steps", "1"
REQUEST = "a red circle", *ONE_STEP
COMMANDS = {
    "generate": REQUEST,
    "encode": (*REQUEST, "--dir", "d"),
    "plan": ("nano", "--chip", "cpu", *ONE_STEP),
    "warmup": ("nano", *ONE_STEP),
}
EXCLUDED = {"config", "from", "at"}  # options that name a file of options, or a server
NAMES = st.text(st.characters(exclude_characters="/~"), max_size=20)  # no paths outside the test's folder
SAMPLES = [
    "x",
    "0",
    "-1",
    "1",
    "1e20",
    "9" * 400,
    "nan",
    "inf",
    "auto",
    "none",
    "true",
    "32x32",
    "dp=2",
    "a\0b",
    "",
    "[1",
]
NUMBERS = [st.integers(), st.floats(), st.sampled_from([10**30, 1e20, -1, 0])]
TEXTS = st.one_of(st.sampled_from(SAMPLES), NAMES, *(x.map(str) for x in NUMBERS))
PLAIN = st.one_of(st.booleans(), TEXTS, *NUMBERS)
VALUES = st.one_of(PLAIN, st.lists(PLAIN, max_size=3), st.dictionaries(NAMES, PLAIN, max_size=2))


def examples(number: int) -> Any:
    """Return the settings of a test with a number of examples, which share one folder and its patches."""
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def _stop_before_the_first_network(monkeypatch, tmp_path):
    """End a command with status 0 before it loads the first network; use a temporary folder."""

    def started(*_: Any, **__: Any) -> None:
        raise click.exceptions.Exit(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MEDIA_LIMITS, "max_pixels", MEDIA_LIMITS.max_pixels)  # restored, because an option changes it
    for owner, name in (
        (stages.VideoCommand, "fit_previews"),
        (stages.VideoCommand, "run"),
        (planning, "estimate_video"),
        (planning, "estimate_training"),
        (stages.VideoCommand, "traced_programs"),
    ):
        monkeypatch.setattr(owner, name, started)
    for module in (stages, many, planning):
        monkeypatch.setattr(module, "init_distributed", lambda *_: None)  # do not wait for other processes


def visible(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command by their names."""
    result = [x for x in command.params if isinstance(x, click.Option)]
    return {x.opts[-1][2:]: x for x in result if x.opts[-1].startswith("--")}


GENERATE = visible(main.commands["generate"])


def check(*arguments: str) -> None:
    """Run a command, which must start, or fail with one message of moderate length."""
    result = wanjax(*arguments)
    assert result.exit_code in (0, 2), (arguments, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    if result.exit_code:
        messages = re.findall(r"^wanjax: .*$", result.stderr, re.MULTILINE)
        assert len(messages) == 1, (arguments, result.stderr)
        assert 10 < len(messages[0]) < 1200, (arguments, messages[0])
        assert "Error:" not in messages[0], (arguments, messages[0])


def draw_option(data: st.DataObject, options: dict[str, click.Option]) -> list[str]:
    """Draw an option, with a value if it takes one."""
    name = data.draw(st.sampled_from(sorted(options.keys() - EXCLUDED)))
    return [f"--{name}"] if options[name].is_flag else [f"--{name}={data.draw(TEXTS)}"]


def typed_value(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(COMMANDS)))
    check(name, *COMMANDS[name], *draw_option(data, visible(main.commands[name])))


def value_of_any_command(data: st.DataObject) -> None:
    """Only parse the options; the command does not run."""
    name = data.draw(st.sampled_from(sorted(main.commands)))
    command = main.commands[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "callback", lambda: None)
        check(name, *data.draw(st.lists(TEXTS, max_size=1)), *draw_option(data, visible(command) or {"help": HELP}))


HELP = click.Option(["--help"], is_flag=True)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(x)}" for key, x in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value) if isinstance(value, float) else json.dumps(value)


def toml_value(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from([*sorted(GENERATE.keys() - EXCLUDED), "generate", "plan", "prompt", "other"]))
    name = data.draw(st.sampled_from(sorted(COMMANDS)))
    table = data.draw(st.sampled_from(["", f"[{name}]\n"]))
    Path("my.toml").write_text(f"{table}{key} = {toml(data.draw(VALUES))}\n", encoding="utf-8", errors="replace")
    check(name, *COMMANDS[name], "--config", "my.toml")


@pytest.mark.parametrize(("value", "message"), [("a\0b", r"\\(x0)?0"), ("9" * 400, "99999"), ("file/below", "file")])
@pytest.mark.parametrize("option", ["dir", "profile", "out", "noise"])
def test_invalid_paths_are_refused_in_a_config_file_too(option, value, message):
    Path("file").touch()
    Path("my.toml").write_text(f"{option} = {json.dumps(value)}\n")
    for arguments in ((f"--{option}", value), ("--config", "my.toml")):
        assert re.search(message, refused(*REQUEST, *arguments))


def toml_text(data: st.DataObject) -> None:
    Path("my.toml").write_bytes(
        data.draw(st.one_of(st.binary(), st.text().map(lambda x: x.encode("utf-8", "replace"))))
    )
    check(*REQUEST, "--config", "my.toml")


KEYS = [
    *sorted(metadata_parameters()),
    DIGESTS_KEY,
    "prompt",
    "size",
    "tiling",
    "revision",
    "param_dtype",
    "version",
    "devices",
]


def metadata_value(data: st.DataObject) -> None:
    """Untrusted metadata: no file is written to a path that it names."""
    record = {"model": "nano", "prompt": "a red circle", "seed": 3, "frames": 1, "steps": 1}
    record |= data.draw(st.dictionaries(st.sampled_from([*KEYS, "out", "folder", "dir"]), VALUES, max_size=2))
    Path("theirs").mkdir(exist_ok=True)
    Path("theirs", CONFIG).write_text(json.dumps(record))
    check("--from", f"theirs/{CONFIG}", "--out", "mine.mp4", *(REQUEST[:1] * data.draw(st.integers(0, 1))))
    assert {path.name for path in Path().iterdir()} <= {"theirs", "mine.mp4"}


INTERFACES = {
    typed_value: (15, 400),
    value_of_any_command: (60, 3000),
    toml_value: (15, 400),
    toml_text: (10, 200),
    metadata_value: (15, 400),
}


def run_examples(interface: Any, number: int) -> None:
    examples(number)(given(st.data())(lambda data: interface(data)))()


@pytest.mark.parametrize("interface", INTERFACES)
def test_a_value_begins_a_video_or_is_refused(interface):
    run_examples(interface, INTERFACES[interface][0])


@pytest.mark.slow
@pytest.mark.parametrize("interface", INTERFACES)
def test_many_values_begin_a_video_or_are_refused(interface):
    run_examples(interface, INTERFACES[interface][1])
