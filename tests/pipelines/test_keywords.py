# SPDX-License-Identifier: Apache-2.0
"""Editors, `help` and notebooks show the keywords of calls; keywords of other libraries are explained."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_type_hints

import pytest

import wanjax
from tests.support import typed_settings
from wanjax.media.inputs import INPUT_SPECS
from wanjax.pipelines.keywords import InputKeywords
from wanjax.pipelines.other_names import ATTRIBUTE_ADVICE, KEYWORD_ADVICE, RENAMED
from wanjax.pipelines.settings import Settings, schema
from wanjax.pipelines.typed_settings import SettingsKeywords

ROOT = Path(__file__).parents[2]
LOADING_SETTINGS = {
    "model",
    "dtype",
    "vae_dtype",
    "precision",
    "prompt",
    "negative_prompt",
    "original_prompt",
}  # as parameters, or not at all
PRINT_HELP = """
import inspect, json
import wanjax
pipe = wanjax.load("nano")
"""
VALID_PROGRAM = """
import wanjax
pipe = wanjax.load("nano")
video: wanjax.Video = pipe("a", steps=2, size=(64, 64), guidance_scale=3, seed=1, image="a.png", flow_shift=3.0)
latents = pipe.denoise(pipe.encode("a", resize="pad"), frames=17, sigmas=None, callback=lambda step: None)
pipe.scheduler = "euler"
two: list[wanjax.Video] = pipe(["a", "b"], seeds=[1, 2], frames=17)
more: list[wanjax.Video] = pipe("a", seeds=range(3))
print(video[0].shape, len(video), [image.size for image in video.to_pil()], wanjax.__version__, wanjax.Tiling(64, 48))
"""
WRONG_CALLS = [
    'pipe("a", steps="2")',
    'pipe("a", num_inference_steps=2)',
    "pipe.denoise(None, size=64)",
    'pipe.encode("a", picture="a.png")',
    "pipe.enable_vae_tiling()",
    'pipe(["a"], seeds=[1], stepz=2)',
    'wanjax.load("nano", torch_dtype="bfloat16")',
]


@pytest.fixture(scope="module")
def pipe():
    return wanjax.load("nano")


def test_every_setting_is_a_typed_keyword():
    """Editors read the types from a module that is generated from the settings."""
    assert typed_settings.FILE.read_text() == typed_settings.source()
    types = get_type_hints(InputKeywords)
    assert types["size"] == tuple[int, int] | str | None
    assert types["steps"] == int | None
    assert types.keys() == (schema(Settings).keys() - LOADING_SETTINGS) | {*INPUT_SPECS, "size"}
    assert types.keys() - get_type_hints(SettingsKeywords).keys() == {*INPUT_SPECS, "resize", "outpaint"}


def run_and_read_json(code: str):
    """Run code in a new process, where annotations are not checked, and return its output, read as JSON."""
    with TemporaryDirectory() as cache:  # jedi completes nothing after a damaged entry of the user's cache
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": cache}
        run = subprocess.run([sys.executable, "-c", PRINT_HELP + code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def signatures_and_completions():
    """Return the parameters of calls, and IPython's completions of texts, from one process."""
    return run_and_read_json("""
from IPython.core.completer import IPCompleter, provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell(user_ns={"pipe": pipe, "wanjax": wanjax})
completer = IPCompleter(shell=shell, namespace=shell.user_ns)

def complete(text):
    with provisionalcompleter():
        return [completion.text for completion in completer.completions(text, len(text))]

def parameters(call):
    parameters = inspect.signature(call).parameters.values()
    return {p.name: [str(p.annotation), p.kind.name, repr(p.default)] for p in parameters}

calls = [pipe, pipe.encode, pipe.prepare, pipe.denoise, pipe.settings]
texts = ['pipe("a", st', "pipe.denoise(1, guidance", 'pipe.encode("a", la', 'wanjax.load("nano", off', "wanjax."]
print(json.dumps([[parameters(call) for call in calls], [complete(text) for text in texts]]))""")


def test_help_shows_names_and_types(signatures_and_completions):
    signatures, _ = signatures_and_completions
    for parameters in signatures:
        assert parameters["steps"] == ["int | None", "KEYWORD_ONLY", "None"]
        assert parameters["guidance_scale"][0] == "float | None"
        assert "VAR_KEYWORD" not in {kind for _, kind, _ in parameters.values()}
    assert ["image" in parameters for parameters in signatures] == [True, True, True, False, False]


def test_a_notebook_completes_keywords(signatures_and_completions):
    """IPython completes the names of a call's keywords."""
    _, completions = signatures_and_completions
    assert {"steps=", "strength="} <= set(completions[0])
    assert "guidance_scale=" in completions[1]
    assert "last_image=" in completions[2]
    assert "offload=" in completions[3]
    assert set(wanjax.__all__) - {"__version__"} == {name for name in completions[4] if not name.startswith("_")}


def test_an_editor_shows_names_and_types(tmp_path):
    """Pyright accepts the correct calls of a program, and reports each wrong call."""
    (tmp_path / "valid.py").write_text(VALID_PROGRAM)
    wrong = ["import wanjax", 'pipe = wanjax.load("nano")', *WRONG_CALLS]
    (tmp_path / "wrong.py").write_text("\n".join(wrong))
    config = {"include": ["."], "extraPaths": [str(ROOT / "src")], "reportMissingImports": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    errors = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["generalDiagnostics"]
    wrong_lines = {error["range"]["start"]["line"] for error in errors if "wrong" in error["file"]}
    assert [error for error in errors if "valid" in error["file"]] == []
    assert wrong_lines == set(range(2, len(wrong)))


def test_dir_lists_the_public_names():
    assert dir(wanjax) == sorted(wanjax.__all__)
    assert len(dir(wanjax)) <= 15
    assert all(getattr(wanjax, name) is not None for name in dir(wanjax))
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", wanjax.__version__)  # .ci/release compares it with pyproject.toml
    assert not hasattr(wanjax, "nothing")


def test_an_error_inside_an_attribute_is_not_hidden(pipe, monkeypatch):
    def broken(name):
        raise AttributeError("this is broken inside")

    monkeypatch.setattr(pipe.components, "get", broken)
    with pytest.raises(AttributeError, match="this is broken inside"):
        _ = pipe.vae
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = pipe.nothing


def test_names_of_other_libraries_are_explained(pipe):
    """The table of wrong names contains no valid name, and the names that it suggests exist."""
    valid_names = set(get_type_hints(InputKeywords)) | set(pipe.defaults.to_json())
    assert not valid_names & {*RENAMED, *KEYWORD_ADVICE}
    assert not set(ATTRIBUTE_ADVICE) & (set(dir(pipe)) | set(dir(wanjax)))
    parameters = {*inspect.signature(wanjax.load).parameters, *inspect.signature(pipe).parameters}
    assert set(RENAMED.values()) <= valid_names | parameters
