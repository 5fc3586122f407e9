# SPDX-License-Identifier: Apache-2.0
"""Any value of any option, typed, in the TOML of `--config` and in the metadata of `--from`: a start or an error.

Commands go as far as they would before the first network is loaded, or the first program is recorded.
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

ONE = "--frames", "1", "--steps", "1"
REQUEST = "a red circle", *ONE
COMMANDS = {
    "generate": REQUEST,
    "encode": (*REQUEST, "--dir", "d"),
    "plan": ("nano", "--chip", "cpu", *ONE),
    "warmup": ("nano", *ONE),
}
ELSEWHERE = {"config", "from", "at"}  # interfaces themselves, and a server
NAMES = st.text(st.characters(exclude_characters="/~"), max_size=20)  # which lead to no folder but the test's
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
    """Decorate a test with a number of examples in the folder and with the patches of one test."""
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def _stopped(monkeypatch, tmp_path):
    """End a command with 0 where it would load the first network, in a folder of its own."""

    def started(*_: Any, **__: Any) -> None:
        raise click.exceptions.Exit(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MEDIA_LIMITS, "max_pixels", MEDIA_LIMITS.max_pixels)  # which an option changes
    for owner, name in (
        (stages.VideoCommand, "fit_previews"),
        (stages.VideoCommand, "run"),
        (planning, "estimate_video"),
        (planning, "estimate_training"),
        (stages.VideoCommand, "traced_programs"),
    ):
        monkeypatch.setattr(owner, name, started)
    for module in (stages, many, planning):
        monkeypatch.setattr(module, "init_distributed", lambda *_: None)  # else it would wait for other processes


def visible(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command by their names."""
    result = [x for x in command.params if isinstance(x, click.Option)]
    return {x.opts[-1][2:]: x for x in result if x.opts[-1].startswith("--")}


GENERATE = visible(main.commands["generate"])


def check(*arguments: str) -> None:
    """Run a command, which has to begin, or to be refused with a message of moderate length."""
    result = wanjax(*arguments)
    assert result.exit_code in (0, 2), (arguments, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    if result.exit_code:
        sentences = re.findall(r"^wanjax: .*$", result.stderr, re.MULTILINE)
        assert len(sentences) == 1, (arguments, result.stderr)
        assert 10 < len(sentences[0]) < 1200, (arguments, sentences[0])
        assert "Error:" not in sentences[0], (arguments, sentences[0])


def typed(data: st.DataObject, options: dict[str, click.Option]) -> list[str]:
    """Draw an option, with a value if it takes one."""
    name = data.draw(st.sampled_from(sorted(options.keys() - ELSEWHERE)))
    return [f"--{name}"] if options[name].is_flag else [f"--{name}={data.draw(TEXTS)}"]


def typed_value(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(COMMANDS)))
    check(name, *COMMANDS[name], *typed(data, visible(main.commands[name])))


def value_of_any_command(data: st.DataObject) -> None:
    """Parse alone: what the commands do with their options is theirs."""
    name = data.draw(st.sampled_from(sorted(main.commands)))
    command = main.commands[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "callback", lambda: None)
        check(name, *data.draw(st.lists(TEXTS, max_size=1)), *typed(data, visible(command) or {"help": HELP}))


HELP = click.Option(["--help"], is_flag=True)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(x)}" for key, x in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value) if isinstance(value, float) else json.dumps(value)


def toml_value(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from([*sorted(GENERATE.keys() - ELSEWHERE), "generate", "plan", "prompt", "other"]))
    name = data.draw(st.sampled_from(sorted(COMMANDS)))
    place = data.draw(st.sampled_from(["", f"[{name}]\n"]))
    Path("my.toml").write_text(f"{place}{key} = {toml(data.draw(VALUES))}\n", encoding="utf-8", errors="replace")
    check(name, *COMMANDS[name], "--config", "my.toml")


@pytest.mark.parametrize(("value", "message"), [("a\0b", r"\\(x0)?0"), ("9" * 400, "99999"), ("file/below", "file")])
@pytest.mark.parametrize("option", ["dir", "profile", "out", "noise"])
def test_unknown_names_in_files(option, value, message):
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


def recorded_value(data: st.DataObject) -> None:
    """A stranger's record; nothing is written where it says."""
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
    recorded_value: (15, 400),
}


def through(interface: Any, number: int) -> None:
    examples(number)(given(st.data())(lambda data: interface(data)))()


@pytest.mark.parametrize("interface", INTERFACES)
def test_a_value_begins_a_video_or_is_refused(interface):
    through(interface, INTERFACES[interface][0])


@pytest.mark.slow
@pytest.mark.parametrize("interface", INTERFACES)
def test_many_values_begin_a_video_or_are_refused(interface):
    through(interface, INTERFACES[interface][1])
