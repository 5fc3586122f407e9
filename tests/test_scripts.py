# SPDX-License-Identifier: Apache-2.0
"""The README's two commands: CI runs both, and a message names a missing tool."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.documents import ROOT, blocks, commands
from tests.support.words import has_line_with_words


def readme_commands() -> list[list[str]]:
    """Return the words of each command in the README's section."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## Two commands\n.*?(?=^## )", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    (block,) = (block for block in blocks(ROOT / "README.md") if block.text in section[0])
    return [shlex.split(line, comments=True) for line in commands(block.text)]


def lines_of(name: str) -> list[str]:
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


def test_the_readme_has_two_commands_and_ci_runs_both():
    video, tests = readme_commands()
    assert [Path(words[0]).parent.name for words in (video, tests)] == ["scripts", "scripts"]
    assert all(os.access(ROOT / words[0], os.X_OK) for words in (video, tests))
    run = "\n".join(lines_of(".ci/run"))
    assert re.search(rf"^{shlex.join(tests)}( |$)", run, re.MULTILINE)
    (copied,) = (line for line in lines_of(".ci/first-video") if f" {video[0]} " in line)
    assert shlex.split(copied)[-len(video) :] == video
    assert ".ci/first-video" in run


def test_the_script_runs_the_full_suite():
    """A script that left out a part would leave it untested."""
    text = (ROOT / "scripts/test").read_text(encoding="utf-8")
    for part in (
        "ruff check .",
        "ruff format --check .",
        "pyright",
        "mkdocs build --strict",
        'pytest -n 2 --dist loadfile "$@"',
    ):
        assert re.search(rf"^(\w+=\w+ )?{re.escape(part)}", text, re.MULTILINE), part
    assert "set -euo pipefail" in text


def fake_python(folder: Path, name: str, *, old: bool, venv: bool) -> None:
    """Write a program that answers like a Python of an old version, or one without the module venv."""
    folder.mkdir(exist_ok=True)
    version_status, venv_status = int(old), int(not venv)
    (folder / name).write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f"  --version) echo 'Python {'3.10.12' if old else '3.11.2'}';;\n"
        f"  *version_info*) exit {version_status};;\n"
        f"  *ensurepip*) exit {venv_status};;\n"
        "  *) exit 1;;\n"
        "esac\n"
    )
    (folder / name).chmod(0o755)


def run_script(script: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script without an environment and with no Python but those in `tmp_path/bin`."""
    for tool in ("bash", "dirname", "basename"):
        path = subprocess.run(["which", tool], check=True, capture_output=True, text=True).stdout.strip()
        (tmp_path / "bin" / tool).symlink_to(path)
    environment = {"PATH": str(tmp_path / "bin"), "VENV": str(tmp_path / "venv"), **variables}
    return subprocess.run([ROOT / script], cwd=tmp_path, env=environment, capture_output=True, text=True)


OLD, NO_VENV = {"old": True, "venv": True}, {"old": False, "venv": False}
MACHINES = {  # the installed Pythons, the variables of the call, and the message
    "an old Python": ({"python3": OLD}, {}, "3.11 3.10.12 PYTHON="),
    "no venv": ({"python3": NO_VENV}, {}, "venv python3-venv apt-get"),
    "a newer Python without venv": ({"python3": OLD, "python3.12": NO_VENV}, {}, "python3.12-venv"),
    "a variable that names a missing Python": (
        {"python3.12": {"old": False, "venv": True}},
        {"PYTHON": "python3.9"},
        "3.11 python3.9 there",
    ),
}


@pytest.mark.parametrize("script", ["scripts/first-video", "scripts/test"])
@pytest.mark.parametrize("machine", MACHINES)
def test_missing_tools_are_reported(script, machine, tmp_path):
    pythons, variables, words = MACHINES[machine]
    for name, kind in pythons.items():
        fake_python(tmp_path / "bin", name, **kind)
    run = run_script(script, tmp_path, **variables)
    assert run.returncode == 2
    assert has_line_with_words(run.stderr, words)
    assert not (tmp_path / "venv").exists()


def stub(file: Path, body: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def fake_clone(tmp_path: Path) -> dict[str, str]:
    """Write a clone with the scripts and with stubs that log their calls. Return the variables to run a script."""
    for name in ("scripts/environment.sh", "scripts/set-up", "scripts/test", ".ci/run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "pyproject.toml").touch()
    tools = tmp_path / ".venv/bin"
    for tool in ("python", "ruff", "pyright", "mkdocs", "pytest"):
        stub(tools / tool, f'echo "{tool} $1" >> "{tmp_path}/calls"')
    (tools / "activate").write_text(f'PATH="{tools}:$PATH"\n')
    (tmp_path / ".venv/set-up").touch()
    for name in ("first-video", "release", "newest"):
        stub(tmp_path / ".ci" / name, f'echo "{name} " >> "{tmp_path}/calls"')
    return {name: value for name, value in os.environ.items() if name not in ("VENV", "PYTHON")}


def test_the_tests_stop_at_the_first_failure_with_its_status(tmp_path):
    variables = fake_clone(tmp_path)
    stub(tmp_path / ".venv/bin/pyright", "exit 3")
    assert subprocess.run([tmp_path / "scripts/test"], env=variables).returncode == 3
    parts = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert [part for part in parts if part != "python"] == ["ruff", "ruff"]
    stub(tmp_path / ".venv/bin/pyright", "exit 0")
    assert subprocess.run([tmp_path / "scripts/test"], env=variables).returncode == 0


@pytest.mark.parametrize("failing", [".venv/bin/pytest", ".ci/first-video", ".ci/newest", ""])
def test_ci_fails_if_one_of_its_parts_does(failing, tmp_path):
    variables = fake_clone(tmp_path)
    if failing:
        stub(tmp_path / failing, "exit 3")
    assert subprocess.run([tmp_path / ".ci/run"], env=variables).returncode == (3 if failing else 0)
    parts = {line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()}
    assert failing or {"ruff", "mkdocs", "pytest", "first-video", "release", "newest"} < parts
