# SPDX-License-Identifier: Apache-2.0
"""The structure of the code, read from its text: imports, names, shapes and docstrings."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import wanjax
from wanjax.dims import ALPHABET

ROOT = Path(__file__).parents[1]
PACKAGES = {"wanjax": ROOT / "src/wanjax", "wanjax.converters": ROOT / "converters"}
LAYERS = [  # a module imports from its own layer and those below
    ["wanjax.cli", "wanjax.__main__"],
    ["wanjax.serve", "wanjax.selftest"],
    ["wanjax.bench"],
    ["wanjax.jobs"],
    ["wanjax.plan"],
    ["wanjax", "wanjax.loading", "wanjax.registry"],
    ["wanjax.training"],
    ["wanjax.workflows"],
    ["wanjax.pipelines"],
    ["wanjax.media"],
    ["wanjax.checkpoints"],
    ["wanjax.converters"],
    ["wanjax.models", "wanjax.schedulers", "wanjax.execution"],
    ["wanjax.compile_cache", "wanjax.pricing"],
    ["wanjax.layers"],
    ["wanjax.kernels"],
    [
        "wanjax.dims",
        "wanjax.sharding",
        "wanjax.errors",
        "wanjax.figures",
        "wanjax.signals",
        "wanjax.stores",
    ],
]
FAMILIES = ["wan", "cogvideox", "hunyuanvideo"]  # folders of models, converters and pipelines
DISTRIBUTIONS = {
    "PIL": "pillow",
    "imageio_ffmpeg": "imageio",
    "orbax": "orbax-checkpoint",
}  # distributions with another name than their import
INDIRECT = {"flatbuffers", "protobuf"}  # dependencies of features of JAX and sentencepiece that this package uses
WORKFLOW_READERS = "wanjax.workflows.families"  # lists the families whose workflows are read
UNCLEAR_NAMES = {
    *(
        "found",
        "made",
        "told",
        "kept",
        "known",
        "own",
        "given",
        "asked",
        "wanted",
        "said",
        "held",
        "taken",
        "led",
        "lent",
    ),
    *("thing", "things", "way", "better", "differ", "relatives", "frames_a_second"),
}
"""Names that do not say what a variable, a parameter or a field holds."""
FAMILY_INTERFACE = (
    *("model", "denoiser", "phases", "sampling", "observers", "runtime", "run", "request", "meshes"),
    *(f"{family}.{name}" for family in FAMILIES for name in ("model", "tasks", "denoisers", "programs")),
    "wan.causal_programs",
)
"""Modules of `pipelines` that a family implements or calls. Their docstrings document every argument."""
OTHER_FRAMEWORKS = {"torch", "transformers", "diffusers", "tensorflow"}


def modules() -> dict[str, Path]:
    """Return the library's modules by their dotted names."""
    paths = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            paths[".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return paths


MODULES = modules()
OTHER_FILES = sorted(path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


SERVERS = {name for name in MODULES if name.startswith("wanjax.serve")} | {"wanjax.cli.serving"}


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in full}
    return frozenset(names)


def layer(module: str) -> int:
    """Return the height of a module's layer, or of its package's layer if the module is in no layer."""
    name = module
    while not (heights := [height for height, layer in enumerate(reversed(LAYERS)) if name in layer]):
        name = name.rpartition(".")[0]
        assert name != "wanjax", f"{module} is in no layer"
    return heights[0]


def part_of(module: str, package: str) -> str:
    """Return the name of a module's part of a package: `part_of("wanjax.models.wan.vae", "wanjax.models")` is "wan"."""
    return module.removeprefix(package).lstrip(".").partition(".")[0] if module.startswith(package) else ""


def test_imports_run_downwards():
    for module in MODULES.keys() - {"wanjax"}:
        for name in imports(MODULES[module]):
            assert name.partition(".")[0] != "wanjax" or layer(name) <= layer(module), f"{module} imports {name}"


def test_no_files_import_each_other():
    graph = {module: imports(path) & MODULES.keys() for module, path in MODULES.items() if module != "wanjax"}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for name in graph.get(module, ()):
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def folder_of(module: str) -> str:
    """Return the folder of a module, or the module itself if it is directly in the package: `wanjax.kernels`."""
    return ".".join(module.split(".")[:2])


def test_no_folders_import_each_other():
    graph: dict[str, set[str]] = {}
    for module in MODULES.keys() - {"wanjax"}:
        graph.setdefault(folder_of(module), set()).update(
            folder_of(name) for name in imports(MODULES[module]) & MODULES.keys() - {"wanjax"}
        )

    def reachable(name: str) -> set[str]:
        visited, pending = set(), [name]
        while pending:
            new = graph[pending.pop()] - visited
            visited |= new
            pending += new
        return visited

    for name in graph:
        for imported in graph[name] - {name}:
            assert name not in reachable(imported), f"{name} and {imported} import each other"


def family(module: str) -> str | None:
    """Return the family whose folder a module is in."""
    return next(
        (name for name in FAMILIES if re.search(rf"\.(models|converters|pipelines|workflows)\.{name}\b", module)), None
    )


def test_only_the_registry_imports_a_family():
    for module, path in MODULES.items():
        families = {family(name) for name in imports(path)} - {None, family(module)}
        is_registry = module == "wanjax.registry" and families == set(FAMILIES)
        assert not families or is_registry or module == WORKFLOW_READERS, f"{module} imports {families}"


def test_shared_files_name_no_family():
    """Allowed are the package's name, examples, files and schedulers of a reference, and lines of the registry."""
    allowed = {"wanjax.registry": 2 * len(FAMILIES), WORKFLOW_READERS: 3 * 2}
    for module in (module for module in MODULES if family(module) is None):
        text = re.sub(r"wanjax|wanted|wants?\b", "", text_of(MODULES[module]), flags=re.IGNORECASE)
        lines = [line for line in text.splitlines() if re.search("|".join(FAMILIES), line, re.IGNORECASE)]
        examples = [
            line for line in lines if re.search(r"wan2\.1-t2v|model_description\(|[\w/]+\.py\b|\"\w+Scheduler\"", line)
        ]
        assert len(lines) - len(examples) <= allowed.get(module, 0), (module, lines)


def test_pricing_does_not_depend_on_videos():
    for name, path in MODULES.items():
        if name.startswith("wanjax.pricing"):
            wanjax_imports = {imported for imported in imports(path) if imported.startswith("wanjax")}
            assert all(
                imported == "wanjax.errors" or imported.startswith("wanjax.pricing") for imported in wanjax_imports
            ), name


def test_few_modules_are_at_the_top():
    assert len([path for path in PACKAGES["wanjax"].glob("*.py")]) <= 10


def test_imported_and_declared_distributions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[\[<>=]", text)[0] for text in project["dependencies"]}
    extra = set(project["optional-dependencies"]["serve"])
    cluster = {re.split(r"[\[<>=]", text)[0] for text in project["optional-dependencies"]["cluster"]}
    imported = {module: distributions(path) for module, path in MODULES.items()}
    imported["wanjax.training.step_metrics"].remove("tensorboard")  # which is used where it is installed
    imported["wanjax.jobs.rows"].remove("pyarrow")
    assert project["optional-dependencies"]["parquet"] == ["pyarrow"]
    assert project["optional-dependencies"]["cluster"][0] == "wanjax[parquet,serve]"
    cluster_modules = ("jobs.ray_cluster", "jobs.ray_workers", "jobs.ray_placement")
    imported_by_cluster = set().union(*(imported.pop(f"wanjax.{name}") for name in cluster_modules))
    assert imported_by_cluster - declared == cluster - {"wanjax"}  # with the extras `parquet` and `serve`
    imported["wanjax.jobs.databases"].remove("psycopg")
    assert project["optional-dependencies"]["postgres"] == ["psycopg[binary]"]
    imported["wanjax.checkpoints.gguf_file"].remove("gguf")
    assert project["optional-dependencies"]["gguf"] == ["gguf"]
    assert set().union(*(imported[module] for module in imported.keys() - SERVERS)) | INDIRECT == declared
    assert set().union(*(imported[module] for module in SERVERS)) - declared == extra - {"python-multipart"}


def test_messages_name_existing_extras_and_only_by_install_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    extras_in_messages = [
        name for path in MODULES.values() for name in re.findall(r"install_extra\('([\w-]+)'\)", text_of(path))
    ]
    assert extras_in_messages
    assert set(extras_in_messages) <= extras.keys()
    assert [path for path in MODULES.values() if "wanjax[" in text_of(path)] == []


def test_an_installed_package_has_every_module():
    """A folder that is not listed is missing in a wheel, but not in an editable install."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in MODULES.items()}
    assert sorted(folders) == listed


def distributions(path: Path) -> set[str]:
    """Return the distributions outside the standard library that a file imports from."""
    names = {name.partition(".")[0] for name in imports(path)} - {"wanjax"}
    return {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in names if name not in sys.stdlib_module_names}


def test_only_its_command_imports_the_server():
    for module in MODULES.keys() - SERVERS - {"wanjax.cli.checks"}:  # it checks the access settings of `wanjax serve`
        assert not [name for name in imports(MODULES[module]) if name.startswith("wanjax.serve")], module


def test_tests_import_no_test():
    for path in (path for path in OTHER_FILES if path.is_relative_to(ROOT / "tests")):
        assert not [name for name in imports(path) if name.startswith("tests.") and ".test_" in name], path


def modules_of(package: str) -> dict[str, Path]:
    """Return the modules of a package by their names."""
    package_modules = {module: path for module, path in MODULES.items() if module.startswith(package)}
    assert package_modules
    return package_modules


def test_families_import_neither_each_other_nor_schedulers():
    for module, path in modules_of("wanjax.models.").items():
        for name in imports(path):
            family = part_of(name, "wanjax.models")
            assert family in ("", part_of(module, "wanjax.models")), f"{module} imports {name}"
            assert not name.startswith("wanjax.schedulers"), f"{module} imports {name}"
        assert "PartitionSpec" not in text_of(path), f"{module}: models name logical axes, sharding.py maps them"


def test_schedulers_import_no_model():
    for module, path in modules_of("wanjax.schedulers").items():
        assert not [name for name in imports(path) if name.startswith(("wanjax.models", "flax"))], module


def test_kernels_do_not_import_flax():
    for module, path in modules_of("wanjax.kernels").items():
        assert not [name for name in imports(path) if name.startswith("flax")], module


def test_other_frameworks_are_for_comparisons_only():
    for path in (*MODULES.values(), *OTHER_FILES):
        if not path.is_relative_to(ROOT / "tests/parity") and not path.is_relative_to(ROOT / "benchmarks"):
            assert not OTHER_FRAMEWORKS & {name.partition(".")[0] for name in imports(path)}, path


def test_every_file_names_its_licence():
    for path in (*MODULES.values(), *OTHER_FILES):
        assert not text_of(path) or text_of(path).startswith("# SPDX-License-Identifier: Apache-2.0\n"), path


def shape_strings(path: Path) -> Iterator[str]:
    """Yield the shapes in a file's annotations, and its einsum strings."""
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


def test_shapes_are_spelled_with_one_alphabet():
    """Letters may form sums and products; a leading underscore marks another size."""
    for module, path in MODULES.items():
        for shape in shape_strings(path):
            for axis in shape.replace("...", "").split():
                letters = [x for x in re.split(r"[-+*·()]", axis.lstrip("*#_")) if x and not x.isdigit()]
                assert set(letters) <= set(ALPHABET), f"{module}: {shape}"


def test_shapes_are_parsed():
    shapes = [shape for path in MODULES.values() for shape in shape_strings(path)]
    assert {"B L N D", "B N L S B S N D B L N D"} <= set(shapes)


def names_set(path: Path) -> Iterator[str]:
    """Yield the names of variables, parameters and fields that a file sets."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


def test_names_say_what_they_hold():
    for path in (*MODULES.values(), *(path for path in OTHER_FILES if not path.is_relative_to(ROOT / "tests"))):
        assert not UNCLEAR_NAMES & {*names_set(path)}, path


def documented(node: ast.AST, sections: str = "Args|Attributes") -> set[str]:
    """Return the arguments that a docstring documents. For a class, include the docstring of its `__init__`."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    section = re.search(rf"^(?:{sections}):\n((?: +.*\n?|\n(?= ))*)", ast.get_docstring(node) or "", re.MULTILINE)
    rows = re.findall(r"^    ([*\w, ]+):", section[1] if section else "", re.MULTILINE)
    names = {name.strip(" *") for row in rows for name in row.split(",")}
    return names.union(*(documented(x, sections) for x in inits(node)))


def inits(node: ast.AST) -> list[ast.FunctionDef]:
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [x for x in body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]


def arguments(node: ast.AST) -> set[str]:
    """Return the arguments of a function, or those with which a class is called."""
    if isinstance(node, ast.ClassDef):
        if not inits(node):
            is_dataclass = any("dataclass" in ast.unparse(x) for x in node.decorator_list)
            is_dataclass |= any(ast.unparse(base).startswith("NamedTuple") for base in node.bases)
            fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
            fields = [x for x in fields if "ClassVar" not in ast.unparse(x) and "init=False" not in ast.unparse(x)]
            return {ast.unparse(x.target) for x in fields} if is_dataclass else set()
        [node] = inits(node)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    args = node.args
    parameters = (*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg)))
    return {x.arg for x in parameters} - {"self", "cls"}


Definitions = Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]


def public(path: Path) -> Definitions:
    """Yield the classes and functions of a file, and the methods of these classes, but for overloads and setters."""
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
            methods = node.body if isinstance(node, ast.ClassDef) else []
            for method in (x for x in methods if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)):
                if not any(ast.unparse(x).endswith(("overload", ".setter")) for x in method.decorator_list):
                    yield f"{node.name}.{method.name}", method


def family_interface() -> dict[str, Path]:
    paths = {f"wanjax.pipelines.{name}": MODULES.get(f"wanjax.pipelines.{name}") for name in FAMILY_INTERFACE}
    return {name: path for name, path in paths.items() if path is not None} | {
        "wanjax.media.inputs": MODULES["wanjax.media.inputs"]
    }


def test_docstrings_of_the_family_interface_name_every_argument():
    """A method with the name of a documented method of the bases has the arguments of that method."""
    modules = family_interface()
    bases = [
        node
        for name in ("model", "denoiser", "observers", "runtime")
        for node in public(modules[f"wanjax.pipelines.{name}"])
    ]
    inherited = {name.rpartition(".")[2] for name, node in bases if "." in name and documented(node)}
    inherited |= {"picture_shapes", "images_to_encode", "velocity"}  # methods of Wan's classes
    for module, path in modules.items():
        for name, node in public(path):
            short = name.rpartition(".")[2]
            if short.startswith("_") or name.startswith("_"):
                continue
            missing = arguments(node) - documented(node)
            is_override = "." in name and short in inherited and (family(module) or not ast.get_docstring(node))
            assert not missing or is_override, f"{module}.{name} does not say what {sorted(missing)} are"


def test_docstrings_of_public_names_name_every_argument():
    """Checks `wanjax.__all__` and the reference, but not `Settings`: each of its fields has a help text."""
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    documented_names = {path.rpartition(".")[::2] for path in re.findall(r"^::: (wanjax[\w.]+)$", page, re.MULTILINE)}
    assert {name for _, name in documented_names} >= set(wanjax.__all__) - {"__version__"}
    for module, class_name in documented_names:
        for name, node in public(MODULES[module]):
            owner, _, short = name.partition(".")
            if owner == class_name and not short.startswith("_") and name != "Settings":
                missing = arguments(node) - documented(node)
                assert not missing, f"{module}.{name} does not say what {sorted(missing)} are"


def test_docstrings_name_no_missing_argument():
    for module, path in MODULES.items():
        for name, node in public(path):
            fields = node.body if isinstance(node, ast.ClassDef) else []
            present = {ast.unparse(x.target) for x in fields if isinstance(x, ast.AnnAssign)} | arguments(node)
            present |= {x.name for x in fields if isinstance(x, ast.FunctionDef)}  # the properties of a protocol
            gone = documented(node, "Args") - present
            assert not gone, f"{module}.{name} has no {sorted(gone)}"


def test_docstrings_of_the_jobs_name_every_argument():
    """An override, and a method of an observer or a maker, may have the docstring of its base."""
    modules = {name: path for name, path in MODULES.items() if name.startswith("wanjax.jobs.")}
    bases = [*modules.values(), MODULES["wanjax.pipelines.observers"]]
    inherited = {name.rpartition(".")[2] for path in bases for name, node in public(path) if documented(node)}
    for module, path in modules.items():
        for name, node in public(path):
            if "._" in f".{name}" or ("." in name and name.rpartition(".")[2] in inherited):
                continue
            missing = {argument for argument in arguments(node) - documented(node) if not argument.startswith("_")}
            assert not missing - {"arguments", "more"}, f"{module}.{name} does not say what {sorted(missing)} are"
