# SPDX-License-Identifier: Apache-2.0
"""The mutations of benchmarks/mutations.py apply to the current code, and the tests that they name exist."""

import ast
from collections import Counter

import pytest

from benchmarks import mutations
from benchmarks.mutations import MUTATIONS, ROOT, Mutation, main

HARMLESS = Mutation(
    "harmless",
    "src/wanjax/stores/paths.py",
    '"""Tells whether a name stays in its folder, on every system, and can be printed."""',
    '"""Tells whether a name is plain."""',
    "nothing",
    ("stores/test_paths.py::test_names_outside_the_folder_are_ignored",),
)


def test_the_mutations_cover_the_whole_package():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 48
    folders = Counter(mutation.file.removeprefix("src/wanjax/").split("/")[0] for mutation in MUTATIONS)
    assert len(folders) >= 14
    assert max(folders.values()) <= len(MUTATIONS) // 4


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_mutation_changes_the_code_and_names_existing_tests(mutation):
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    changed = mutation.apply(text)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    compile(changed, mutation.file, "exec")
    for test in mutation.tests:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert not name or name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("old", ["no such text", "import"])
def test_a_text_that_does_not_occur_once_is_refused(old):
    with pytest.raises(ValueError, match=HARMLESS.name):
        HARMLESS._replace(old=old).apply((ROOT / HARMLESS.file).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_caught_and_surviving_mutations_are_reported(monkeypatch, capsys):
    (caught,) = (mutation for mutation in MUTATIONS if mutation.name == "path-escape")
    before = (ROOT / caught.file).read_text(encoding="utf-8")
    monkeypatch.setattr(mutations, "MUTATIONS", (caught, HARMLESS))
    monkeypatch.setattr("sys.argv", ["mutations", "--jobs", "1"])
    with pytest.raises(SystemExit) as end:
        main()
    output = capsys.readouterr().out
    assert end.value.code
    assert "1 of 2" in output
    assert [line.split()[:2] for line in output.splitlines()[1:3]] == [
        ["caught", "path-escape"],
        ["SURVIVED", "harmless"],
    ]
    assert (ROOT / caught.file).read_text(encoding="utf-8") == before
