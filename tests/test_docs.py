# SPDX-License-Identifier: Apache-2.0
"""The documentation: its commands and examples run, or are parsed if they cannot run here; its links exist.

A block after `<!-- run -->` runs with `nano`, in the order of its page. A block after `<!-- run: server -->` runs
against a server, in tests/serve/test_real_server.py. `mkdocs build --strict`, in CI, checks the links of the pages.
"""

import ast
import inspect
import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import click
import pytest
from PIL import Image

import wanjax as library
from tests.support.commands import succeeded, wanjax
from tests.support.documents import PAGES, ROOT, Block, blocks, calls, check_call, commands
from tests.support.workflows import template_text
from wanjax.cli import DEFAULT_COMMAND, main
from wanjax.loading import load
from wanjax.pipelines.pipeline import Pipeline
from wanjax.registry import presets

BLOCKS = [(page, number, block) for page in PAGES for number, block in enumerate(blocks(page))]
RUNNABLE_PAGES = sorted({page for page, _, block in BLOCKS if block.run == "run"})
COMMANDS = main.commands.items()
ATTRIBUTES = {"model", "components", "defaults", "partitioner", "compiler", "progress", "strategy"}
BENCHMARK_OPTIONS = {"--caches", "--levels", "--limit", "--repeats", "--stage"}
SLOW_PAGES = {  # the tests of the pipelines and of the commands have quick tests of what these pages call
    f"{name}.md"
    for name in (
        *("text", "picture", "clip", "long", "fast", "run", "batch", "precision"),
        *("library", "from-diffusers", "memory"),
    )
}
FILE_SUFFIXES = ("py", "md", "yaml", "json", "jsonl", "safetensors", "html", "ipynb")
FOLDERS = ("src", "converters", "tests", "benchmarks", "examples")
PARSED_BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}") for page, number, block in BLOCKS if block.run != "run"
]


FILES = [file for top in FOLDERS for file in ROOT.glob(f"{top}/**/*.py")]
TEXTS = {file: file.read_text(encoding="utf-8") for file in FILES}
SOURCES = [file for file in FILES if {"src", "converters"} & set(file.relative_to(ROOT).parts)]
CLASSES = {file: re.findall(r"^class (\w+)", TEXTS[file], re.MULTILINE) for file in SOURCES}
PAGES_ABOUT_CODE = {"design.md", "code-paths.md", "families.md"}  # pages that name modules without their folders


WORKFLOWS = {name: "video_wan2_2_14B_t2v" for name in ("workflow.json", "video_wan2_2_14B_t2v.json")}
"""Workflows of ComfyUI that pages name."""


def test_code_blocks_are_parsed():
    assert len(RUNNABLE_PAGES) >= 5
    assert len([block for block in BLOCKS if block[2].run == "run"]) >= 15
    languages = {block.language for _, _, block in BLOCKS}
    assert {"sh", "python", "toml", "mermaid"} <= languages


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.name in SLOW_PAGES)) for page in RUNNABLE_PAGES],
)
def test_runnable_blocks_run(page: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.run == "run" and block.language == "python":
            exec(compile(block.text, str(page), "exec"), names)
        elif block.run == "run":
            for line in commands(block.text):
                run_command(line)


def run_command(line: str) -> None:
    """Run a line of a block: `wanjax` in this process, anything else in a shell."""
    words = shlex.split(line)
    if words[0] == "wanjax":
        succeeded(wanjax(*words[1:]))
    else:
        subprocess.run(["bash", "-ec", line], check=True)


def test_the_family_in_the_docs_is_the_toy_of_the_tests():
    def lines(text: str) -> str:
        return re.sub(r"\n{3,}", "\n\n", text)

    code = lines((ROOT / "tests/support/toy/__init__.py").read_text(encoding="utf-8"))
    shown_blocks = [lines(block.text) for block in blocks(ROOT / "docs/families.md") if block.language == "python"]
    assert len(shown_blocks) == 6
    for text in shown_blocks:
        assert text in code or indent(text, "    ") in code, text


@pytest.mark.parametrize("block", PARSED_BLOCKS)
def test_other_blocks_are_parsed(block: Block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, workflow in WORKFLOWS.items():
        Path(name).write_text(template_text(workflow), encoding="utf-8")
    for name in ("models", "input"):
        Path("ComfyUI", name).mkdir(parents=True)
    if block.language == "python":
        check_names(ast.parse(block.text))
    elif block.language == "toml":
        Path("my.toml").write_text(block.text)
        check_call(["a circle", "--config", "my.toml"])
    elif block.language == "":  # what a command prints, or a command as it is typed
        for line in commands(block.text):
            if line.startswith("wanjax "):
                check_call(shlex.split(line, comments=True)[1:])
    elif block.language in ("sh", "bash"):
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        for line in commands(block.text):
            for words in calls(line):
                check_call(words)


def check_names(tree: ast.Module) -> None:
    """Look up the names of wanjax and of a pipeline that a block of Python uses, and their keywords."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "wanjax":
            for name in node.names:
                attribute_of(import_module(node.module), name.name)
        elif isinstance(node, ast.Attribute):
            resolve(node)
        elif isinstance(node, ast.Call) and callable(function := resolve(node.func)):
            parameters = inspect.signature(Pipeline.__call__ if function is Pipeline else function).parameters
            options = {keyword.arg for keyword in node.keywords if keyword.arg}
            assert options <= parameters.keys() or any(p.kind is p.VAR_KEYWORD for p in parameters.values()), (
                ast.unparse(node),
            )


def resolve(node: ast.expr) -> Any:
    """Return what a name or an attribute is, if it is one of `wanjax` or of the pipeline `pipe`, else None."""
    if isinstance(node, ast.Name):
        return {"wanjax": library, "pipe": Pipeline}.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = resolve(node.value)
    if not (isinstance(owner, ModuleType) or owner is Pipeline):
        return None
    if owner is Pipeline and node.attr in ATTRIBUTES:
        return None
    return attribute_of(owner, node.attr)


def attribute_of(owner: Any, name: str) -> Any:
    """Return an attribute, or a module of a package."""
    if isinstance(owner, ModuleType) and not hasattr(owner, name):
        return import_module(f"{owner.__name__}.{name}")
    return getattr(owner, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_in_a_text_exist(page: Path):
    """Any command may have `--option`; in `wanjax COMMAND --option` that command has it."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    options_of = {
        name: {
            option
            for p in x.get_params(click.Context(x))
            if not getattr(p, "hidden", False)
            for option in (*p.opts, *p.secondary_opts)
        }
        for name, x in COMMANDS
    }
    all_options = {"--version"}.union(*options_of.values())
    for code in re.findall(r"`([^`\n]+)`", text):
        program, *rest = code.split()
        options = {word for word in re.split(r"[\s=/]", code) if re.match(r"--[a-z]", word)}
        if program == "wanjax" and options:
            options -= {"--version"} | (
                all_options if rest[0] == "COMMAND" else options_of.get(rest[0], options_of[DEFAULT_COMMAND])
            )
        elif program.startswith("--"):
            options -= all_options
        else:
            continue
        assert not options - BENCHMARK_OPTIONS, code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_to_existing_files(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?://|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


def occurs_in(name: str, file: Path) -> bool:
    return re.search(rf"\b{name}\b", TEXTS[file]) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_functions_in_a_text_exist(page: Path):
    """`store.py` and `jobs/store.py`, by the end of a path, `jobs/store.JobStore` and `JobStore.add`."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path, name in re.findall(r"`((?:\w+/)*\w+)\.py(?:::(\w+))?`", text) + re.findall(
        r"`((?:\w+/)+\w+)\.(\w+)", text
    ):
        if name not in FILE_SUFFIXES and not path.endswith("NAME"):
            files = [file for file in FILES if str(file).endswith(f"/{path}.py".replace("FAMILY", "wan"))]
            assert any(occurs_in(name, file) for file in files), (path, name)
    for owner, name in re.findall(r"`(\w+)\.(_?[A-Za-z]\w+)[`(]", text):
        files = [
            file for file in SOURCES if owner in (file.stem if page.name in PAGES_ABOUT_CODE else "", *CLASSES[file])
        ]
        assert name in FILE_SUFFIXES or not files or any(occurs_in(name, file) for file in files), (owner, name)


def test_the_page_of_models_lists_all_presets_with_their_settings():
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    tables = text[text.index("## Sizes and settings") : text.index("## Parity")]
    rows = {name: cells.split(" | ") for name, cells in re.findall(r"^\| `(.+?)` \| (.+) \|$", tables, re.MULTILINE)}
    assert rows.keys() == presets().keys()
    for name, preset in presets().items():
        chosen = load(name).defaults if preset.bundled else preset.defaults
        shift = getattr(chosen, "flow_shift", None)
        size, frames = f"{chosen.width}×{chosen.height}", f"{chosen.frames} at {chosen.fps}"
        guidance = " and ".join(f"{scale:g}" for scale in chosen.guidance_scales)
        cells = [size, frames, str(chosen.steps), guidance, "" if shift is None else f"{shift:g}"]
        assert rows[name][3:8] == cells, name
        assert preset.licence.removesuffix(" licence") == rows[name][8], name


def test_the_reference_lists_every_public_name():
    text = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    for name in set(library.__all__) - {"__version__"}:
        value = getattr(library, name)
        assert f"::: {value.__module__}.{name}\n" in text, name


def test_pictures_are_small():
    files = sorted((ROOT / "docs/pictures").iterdir())
    assert len(files) < 12
    for file in files:
        assert file.stat().st_size < 100_000, file
        with Image.open(file) as image:
            assert image.width > 100
