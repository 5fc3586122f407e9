# SPDX-License-Identifier: Apache-2.0
"""How the code is laid out, read from its text: who imports whom, what shapes are spelled with, how long files are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from wanjax.dims import ALPHABET

ROOT = Path(__file__).parents[1]
PACKAGES = {"wanjax": ROOT / "src/wanjax", "wanjax.converters": ROOT / "converters"}
LAYERS = [  # imports run downwards, or stay in one layer
    ["wanjax.cli", "wanjax.__main__"],
    ["wanjax", "wanjax.registry", "wanjax.adapters", "wanjax.convert", "wanjax.networks"],
    [
        "wanjax.abstract",
        "wanjax.pipelines",
        "wanjax.plan",
        "wanjax.converters",
        "wanjax.io",
        "wanjax.pictures",
        "wanjax.ffmpeg",
        "wanjax.hub",
        "wanjax.download",
        "wanjax.cache",
        "wanjax.sources",
        "wanjax.layouts",
        "wanjax.manifest",
    ],
    ["wanjax.models", "wanjax.schedulers"],
    ["wanjax.layers", "wanjax.checkpoint", "wanjax.store", "wanjax.torch_file"],
    ["wanjax.kernels"],
    ["wanjax.dims", "wanjax.sharding", "wanjax.errors"],
]
STRANGERS = {"torch", "transformers", "diffusers", "tensorflow"}
LONGEST = 450


def modules() -> dict[str, Path]:
    """The library's modules by their dotted names."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


MODULES = modules()
OTHERS = sorted(path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    """The dotted names of all that a file imports, at its top or later."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in full}
    return names


def layer(module: str) -> int:
    """How far up a module stands; its own layer if it has one, else that of its package."""
    name = module
    while not (found := [height for height, layer in enumerate(reversed(LAYERS)) if name in layer]):
        name = name.rpartition(".")[0]
        assert name != "wanjax", f"{module} stands in no layer"
    return found[0]


def parts(module: str, below: str) -> str:
    """The part of a package that a module belongs to: `parts("wanjax.models.wan.vae", "wanjax.models")` is "wan"."""
    return module.removeprefix(below).lstrip(".").partition(".")[0] if module.startswith(below) else ""


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downwards(module):
    known = {name for name in imports(MODULES[module]) if name.partition(".")[0] == "wanjax"}
    assert module == "wanjax" or all(layer(name) <= layer(module) for name in known), known


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("wanjax.models.")])
def test_families_do_not_know_each_other_nor_what_runs_them(module):
    for name in imports(MODULES[module]):
        family = parts(name, "wanjax.models")
        assert family in ("", parts(module, "wanjax.models")), name
        assert not name.startswith("wanjax.schedulers"), name
    assert "PartitionSpec" not in MODULES[module].read_text(), "models name logical axes, sharding.py maps them"


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("wanjax.schedulers")])
def test_schedulers_know_no_model(module):
    assert not [name for name in imports(MODULES[module]) if name.startswith(("wanjax.models", "flax"))]


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("wanjax.kernels")])
def test_kernels_take_arrays_and_give_arrays(module):
    assert not [name for name in imports(MODULES[module]) if name.startswith("flax")]


@pytest.mark.parametrize("path", [*MODULES.values(), *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_other_frameworks_are_for_comparisons_only(path):
    if not path.is_relative_to(ROOT / "tests/parity") and not path.is_relative_to(ROOT / "benchmarks"):
        assert not STRANGERS & {name.partition(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", [*MODULES.values(), *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_names_its_licence(path):
    text = path.read_text(encoding="utf-8")
    assert not text or text.startswith("# SPDX-License-Identifier: Apache-2.0\n")


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_two_ideas_long(module):
    assert len(MODULES[module].read_text(encoding="utf-8").splitlines()) <= LONGEST


def spellings(path: Path) -> Iterator[str]:
    """The shapes of a file's annotations, and its einsum strings."""
    code = tree(path)
    kinds = {
        alias.asname or alias.name
        for node in ast.walk(code)
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping"
        for alias in node.names
    }
    for node in ast.walk(code):
        match node:
            case ast.Subscript(value=ast.Name(id=kind), slice=ast.Tuple(elts=[_, ast.Constant(value=str(shape))])):
                if kind in kinds:
                    yield shape
            case ast.Call(func=ast.Attribute(attr="einsum"), args=[ast.Constant(value=str(formula)), *_]):
                yield " ".join(re.sub(r"->|,", "", formula))


@pytest.mark.parametrize("module", MODULES)
def test_shapes_are_spelled_with_one_alphabet(module):
    """Letters may be joined into sums and products; a leading underscore says that the size is another one."""
    for shape in spellings(MODULES[module]):
        for axis in shape.replace("...", "").split():
            letters = re.split(r"[-+*·()]", axis.lstrip("*#_"))
            assert all(letter == "" or letter.isdigit() or letter in ALPHABET for letter in letters), shape


def test_shapes_are_found():
    shapes = [shape for path in MODULES.values() for shape in spellings(path)]
    assert {"B L N D", "B N L S B S N D B L N D"} <= set(shapes)
