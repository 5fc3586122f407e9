# SPDX-License-Identifier: Apache-2.0
"""The notebooks of the examples run, and play their videos."""

import base64
import io
import re
import shlex
from collections import ChainMap
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

from tests.support.quick import quick
from wanjax.cli import main
from wanjax.media.video import read_metadata

NOTEBOOK = Path(__file__).parents[1] / "examples/notebook.ipynb"
HOSTED = [NOTEBOOK.with_name(f"{name}.ipynb") for name in ("colab", "kaggle")]
HOSTED_TAG = "machine"  # the tag of cells that only a hosted machine can run: they install, or download weights


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of each code cell, by cell id and MIME type, and the folder in which the notebook ran."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "the notebook is kept without outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    code = {cell.id: dict(ChainMap(*(x.data for x in cell.outputs[::-1] if "data" in x))) for cell in cells}
    return code, folder


@pytest.mark.parametrize(
    ("cell", "prompt"),
    [("make", "a red circle moving right"), ("stages", "what the first step"), ("by-hand", "what a step by hand")],
)
def test_a_video_plays_in_the_notebook(outputs, tmp_path, cell, prompt):
    code, _ = outputs
    html = code[cell]["text/html"]
    assert re.match(r'<video width="256" height="256" title="[^"]*" [^>]*controls', html)
    data = re.search(r'src="data:video/mp4;base64,([^"]+)"', html)[1]
    (tmp_path / "played.mp4").write_bytes(base64.b64decode(data, validate=True))
    assert read_metadata(tmp_path / "played.mp4")["prompt"].startswith(prompt)
    assert code[cell]["text/plain"].startswith("Video: 17 frames of 64x64 at 8 a second")


def test_the_notebook_loads_a_model_and_saves_a_video(outputs):
    code, folder = outputs
    assert code["load"]["text/plain"].startswith("Pipeline: nano, text and image to video, ")
    assert re.sub(r"\s+", " ", code["save"]["text/plain"]).endswith("circle.mp4'), 17, (64, 64, 3), (64, 64))")
    assert read_metadata(folder / "circle.mp4")["seed"] == 3


def test_a_step_by_hand_equals_a_step_of_a_run(outputs):
    code, _ = outputs
    assert code["same"]["text/plain"] == "True"


def test_the_notebook_shows_a_preview(outputs):
    code, _ = outputs
    with Image.open(io.BytesIO(base64.b64decode(code["preview"]["image/png"]))) as picture:
        assert picture.size == (5 * 96, 96)


def without_hosted_cells(notebook):
    notebook.cells = [cell for cell in notebook.cells if HOSTED_TAG not in cell.metadata.get("tags", ())]
    return notebook


@pytest.mark.parametrize("path", quick(HOSTED[:1], HOSTED), ids=lambda path: path.stem)
def test_a_hosted_notebook_makes_a_first_video(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "the notebook is kept without outputs"
    code = {cell.id: cell.source for cell in notebook.cells if cell.cell_type == "code"}
    assert list(code) == ["install", "check", "first", "plan", "real"]
    notebook.cells = [cell for cell in notebook.cells if cell.id == "first"]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "<video" in notebook.cells[0].outputs[-1].data["text/html"]
    for command in (code["check"], code["plan"]):
        words = shlex.split(command.removeprefix("!wanjax "))
        main.make_context("wanjax", [*words, "--help"], resilient_parsing=True)  # the options exist


@pytest.mark.slow
def test_a_hosted_notebook_checks_the_machine(tmp_path):
    notebook = without_hosted_cells(nbformat.read(HOSTED[0], as_version=4))
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "are right" in (tmp_path / "selftest-cpu.md").read_text()
