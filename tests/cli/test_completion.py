# SPDX-License-Identifier: Apache-2.0
"""Completion by the shell: commands, options, models and files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from wanjax.cli import main
from wanjax.registry import presets

COMMANDS = ["generate", "batch", "encode", "denoise", "decode", "plan", "warmup", "calibrate", "convert", "train"]
COMMANDS += ["info", "models", "bench", "selftest", "serve", "worker"]


def completions(line: str) -> list[tuple[str, str]]:
    """Return the completions of a line's last word, as (type, value)."""
    words = line.split(" ")
    variables = {"_WANJAX_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner(env=variables).invoke(main, [], prog_name="wanjax")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return [tuple(row.split(",", 1)) for row in result.stdout.splitlines() if row]


def values(line: str) -> list[str]:
    return [value for _, value in completions(line)]


def test_commands_are_completed():
    assert values("wanjax ") == COMMANDS
    assert values("wanjax de") == ["denoise", "decode"]
    assert values("wanjax help de") == ["denoise", "decode"]


def test_options_are_completed():
    assert values("wanjax generate --gui") == ["--guidance-scale", "--guidance-scale-2", "--guidance-rule"]
    assert values("wanjax plan --ch") == ["--chip"]
    assert values("wanjax --guidance-scale-") == ["--guidance-scale-2"]  # options of `generate`, which is the default
    assert {"--help", "--version", "--seed"} <= set(values("wanjax --"))
    assert values("wanjax sunset --see") == ["--seeds", "--seed"]
    assert values("wanjax decod --f") == [
        "--from",
        "--face",
        "--frames",
        "--fps",
        "--flow-shift",
        "--follow",
        "--force",
    ]  # `decod` may be a prompt
    assert values("wanjax generate --dtype ") == ["bfloat16", "float32"]
    assert "--use-dp" not in values("wanjax generate --")


@pytest.mark.parametrize(
    "line",
    ["wanjax generate --model ", "wanjax --model ", "wanjax plan ", "wanjax convert ", "wanjax a --seed 3 --model "],
)
def test_models_are_completed(line):
    assert values(line) == list(presets())
    assert values(line + "wan2.1-t2v") == [name for name in presets() if name.startswith("wan2.1-t2v")]
    assert completions(line + "./wa") == [("file", "./wa")]


@pytest.mark.parametrize(
    "option",
    ["--image", "--video", "--lora", "--prompts", "--config", "--from", "--out", "-o", "--noise", "--reference"],
)
def test_file_options_are_completed_with_files(option):
    assert completions(f"wanjax generate {option} so") == [("file", "so")]


def test_other_options_are_completed_with_files_and_folders():
    assert completions("wanjax info so") == [("file", "so")]
    assert completions("wanjax generate --dir so") == [("file", "so")]
    assert completions("wanjax generate --profile so") == [("dir", "so")]


def test_a_line_that_would_be_refused_is_completed():
    assert values("wanjax generate --config nowhere.toml --from nowhere.mp4 --see") == ["--seeds", "--seed"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_each_shell_is_printed(shell):
    result = CliRunner(env={"_WANJAX_COMPLETE": f"{shell}_source"}).invoke(main, [], prog_name="wanjax")
    assert result.exit_code == 0
    assert f"_WANJAX_COMPLETE={shell}_complete" in result.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_a_model(tmp_path):
    """Run the function of click's script on a line, as bash does when Tab is pressed."""
    program = tmp_path / "wanjax"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m wanjax "$@"\n')
    program.chmod(0o755)
    script = """
    eval "$(_WANJAX_COMPLETE=bash_source wanjax)"
    COMP_WORDS=(wanjax plan wan2.1-vace-1)
    COMP_CWORD=2
    _wanjax_completion wanjax
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, cwd=Path(tmp_path))
    assert result.stdout.split() == ["wan2.1-vace-1.3b", "wan2.1-vace-14b", "wan2.1-vace-14b-causvid"], result.stderr
