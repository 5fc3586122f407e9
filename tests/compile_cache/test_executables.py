# SPDX-License-Identifier: Apache-2.0
"""Executables are cached between processes, and only a matching executable runs."""

import hashlib
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.compilations import compilations
from tests.support.disks import limit_file_size
from wanjax.compile_cache import executables
from wanjax.compile_cache.cache import without_cache
from wanjax.compile_cache.compilations import Compilation
from wanjax.compile_cache.executables import Executables, compile_environment
from wanjax.compile_cache.fingerprint import NoFingerprint, fingerprint
from wanjax.execution import CompileContext, Execute, program
from wanjax.kernels.compiler_options import scan_options
from wanjax.layers.tiling import Tiling
from wanjax.pipelines.denoiser import join
from wanjax.sharding import SHARDING_RULES, Partitioner, make_mesh, one_device_partitioner

KEY = "a" * 64
SMALL = ("--size", "32x32", "--frames", "5", "--steps", "2", "--seed", "1", "--force")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3) | st.binary(),
    lambda x: (
        st.lists(x, max_size=3)
        | st.lists(x, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), x, max_size=3)
        | st.builds(Tiling, x, x)
    ),
    max_leaves=8,
)


@program(scan_options)
def concatenate_along(axis: int, parts: Any) -> Any:
    return jnp.concatenate(parts, axis)


@pytest.fixture
def cache(tmp_path) -> Executables:
    return Executables(tmp_path / "cache" / "executables")


@pytest.fixture
def compiled() -> Any:
    with without_cache():
        return jax.jit(lambda x: 2 * x).lower(jnp.ones(3)).compile()


def call_in_new_process(
    cache: Executables, program: Any = join, static: Any = 0, partitioner: Partitioner | None = None
) -> tuple[list[float], list[Compilation]]:
    """Call a program in a new `Execute`, as another process does; return its result and the compilations."""
    execute = Execute(cache)
    compile_context = CompileContext(partitioner or one_device_partitioner())
    with compilations() as events:
        result = execute.call(program, compile_context, static, (np.zeros(2, np.float32), np.ones(1, np.float32)))
    return np.asarray(result).tolist(), events


def only_file(cache: Executables) -> Path:
    (file,) = cache.folder.glob("[!.]*")
    return file


def test_an_executable_is_compiled_once(cache):
    first, first_events = call_in_new_process(cache)
    second, second_events = call_in_new_process(cache)
    assert first == second == [0.0, 0.0, 1.0]
    assert [x.cached for x in first_events] == [False]
    assert [(x.name, x.cached) for x in second_events] == [("join", True)]


@pytest.mark.parametrize("axes", [{"dp": 2, "sp": 2, "tp": 2}, {"sp": 8}])
def test_an_executable_of_a_mesh_is_reused_if_all_arguments_are_on_the_host(cache, axes):
    partitioner = Partitioner(make_mesh(**axes), SHARDING_RULES["fsdp"])
    first, _ = call_in_new_process(cache, partitioner=partitioner)
    second, second_events = call_in_new_process(cache, partitioner=partitioner)
    assert first == second == [0.0, 0.0, 1.0]
    assert [(x.name, x.cached, x.refusal_reason) for x in second_events] == [("join", True, "")]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def clear(file: Path) -> None:
    file.write_bytes(b"")


def swap_with_another(file: Path) -> None:
    another = Executables(file.parent)
    with without_cache():
        another.store(KEY, jax.jit(lambda x: 5 * x).lower(jnp.ones(3, jnp.float32)).compile())
    (file.parent / f"{KEY}.executable").replace(file)


def open_folder_to_others(file: Path) -> None:
    file.parent.chmod(0o755)


def replace_by_link(file: Path) -> None:
    target = file.parent.parent / "elsewhere"
    file.replace(target)
    file.symlink_to(target)


def replace_folder_by_link(file: Path) -> None:
    target = file.parent.parent / "elsewhere"
    file.parent.rename(target)
    file.parent.symlink_to(target)


def give_to_another_user(file: Path) -> None:
    os.chown(file, 12345, -1)


class Bomb:
    """An object whose pickle runs code when it is read."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


BORROWED = b"cwanjax.media.ffmpeg\nsubprocess.Popen\n((lVtouch\naVexploded\natR."
"""A pickle that calls a function that a module of the package has imported."""


def write_crafted(body: bytes, file: Path) -> None:
    """Write a pickle with a valid digest."""
    file.write_bytes(hashlib.sha256(file.stem.encode() + body).digest() + body)


DAMAGES = {
    "half-written": truncate,
    "changed": flip_bit,
    "empty": clear,
    "swapped": swap_with_another,
    "open to others": open_folder_to_others,
    "another user's": pytest.param(
        give_to_another_user,
        marks=pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="gives a file to another user"),
    ),
    "a link": replace_by_link,
    "a linked folder": replace_folder_by_link,
    "a crafted tree": partial(write_crafted, pickle.dumps((pickle.dumps(()), Bomb(), None))),
    "a crafted executable": partial(write_crafted, pickle.dumps((pickle.dumps(Bomb()), None, None))),
    "a name that a module imports": partial(write_crafted, pickle.dumps((BORROWED, None, None))),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_an_unusable_entry_is_recompiled_and_reported(cache, damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call_in_new_process(cache)
    damage(only_file(cache))
    result, events = call_in_new_process(cache)
    assert result == [0.0, 0.0, 1.0]
    assert [x.cached for x in events] == [False]
    assert events[0].refusal_reason
    assert not (tmp_path / "exploded").exists()


OTHER_ENVIRONMENTS = {
    "code": {"code": "0"},
    "jax": {"versions": ("0.0.1",)},
    "processor": {"processor": "x86_64-0"},
    "cores": {"cores": (96, 96)},
    "flags": {"flags": ("--xla_cpu_enable_fast_math=true", None, None)},
    "settings": {"settings": (("jax_enable_x64", "True"),)},
}


@pytest.mark.parametrize("changes", OTHER_ENVIRONMENTS.values(), ids=OTHER_ENVIRONMENTS.keys())
def test_an_executable_of_another_environment_is_never_used(cache, changes, monkeypatch):
    with monkeypatch.context() as patch:
        other_environment = compile_environment()._replace(**changes)
        patch.setattr(executables, "compile_environment", lambda: other_environment)
        call_in_new_process(cache)
    result, events = call_in_new_process(cache)
    assert result == [0.0, 0.0, 1.0]
    assert [x.cached for x in events] == [False]
    assert len(list(cache.folder.iterdir())) == 2


def test_changed_code_needs_another_executable(monkeypatch, tmp_path):
    (tmp_path / "compile_cache").mkdir()
    monkeypatch.setattr(executables, "__file__", str(tmp_path / "compile_cache" / "executables.py"))
    digests = []
    for text in ("1", "2", "1"):
        (tmp_path / "layer.py").write_text(text)
        executables._code_digest.cache_clear()
        digests.append(executables._code_digest())
    executables._code_digest.cache_clear()
    assert digests[0] == digests[2] != digests[1]


def test_the_folder_is_private_to_its_owner(cache):
    call_in_new_process(cache)
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert only_file(cache).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_created_stops_nothing(tmp_path, compiled):
    (tmp_path / "cache").write_text("a file")
    cache = Executables(tmp_path / "cache" / "executables")
    assert call_in_new_process(cache)[0] == [0.0, 0.0, 1.0]


@pytest.mark.skipif(os.name != "posix", reason="sets a limit of POSIX")
def test_a_full_disk_leaves_no_partial_file(cache, compiled):
    with limit_file_size(100):
        cache.store(KEY, compiled)
    assert list(cache.folder.iterdir()) == []


def test_the_least_recently_used_is_removed_first(cache, compiled, monkeypatch):
    names = [letter * 64 for letter in "abcd"]
    for age, name in enumerate(names[:3]):
        cache.store(name, compiled)
        os.utime(cache.folder / f"{name}.executable", (1e9 + age, 1e9 + age))
    assert cache.find(names[0], jax.devices()[:1]) is not None  # this use is the most recent
    monkeypatch.setattr(executables, "MAX_TOTAL_BYTES", 3 * largest_size(cache))
    cache.store(names[3], compiled)
    assert sorted(x.stem for x in cache.folder.iterdir()) == [names[0], names[2], names[3]]


def largest_size(cache: Executables) -> int:
    return max(x.stat().st_size for x in cache.folder.iterdir())


@given(st.lists(VALUES, min_size=2, max_size=2))
def test_only_equal_values_have_equal_fingerprints(values):
    first, second = values
    texts = [repr(x) for x in values]  # the texts of 1, 1.0 and True differ, and those of -0.0 and 0.0
    assert (fingerprint(first) == fingerprint(second)) == (texts[0] == texts[1])


class Colour(Enum):
    RED = 1


class Point(NamedTuple):
    x: int


@dataclass(frozen=True)
class UnknownDataclass:
    x: int


WITHOUT_FINGERPRINT = [
    lambda x: x,
    partial(lambda x: x),
    object(),
    UnknownDataclass(1),
    Point(1),
    Colour.RED,
    UnknownDataclass,
    iter(()),
]


@pytest.mark.parametrize("value", WITHOUT_FINGERPRINT, ids=lambda x: type(x).__name__)
def test_objects_distinguished_only_by_code_have_no_fingerprint(value):
    with pytest.raises(NoFingerprint):
        fingerprint({"a": [value]})


def test_a_program_without_a_fingerprint_is_not_cached(cache):
    assert call_in_new_process(cache, concatenate_along)[0] == [0.0, 0.0, 1.0]
    assert not cache.folder.exists()


# a quick test above damages an entry
@pytest.mark.parametrize("damages", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_compiles_once_and_makes_the_same_file(tmp_path, damages):
    environment = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}

    def make(name: str) -> str:
        command = [sys.executable, "-m", "wanjax", "a red circle", *SMALL, "--out", name, "-v"]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stderr

    assert "8 programs compiled, 0 read from the cache" in make("first.mp4")
    files = list((tmp_path / "cache" / "wanjax" / "executables").rglob("*.executable"))
    assert len(files) == 8
    assert "0 programs compiled, 8 read from the cache" in make("second.mp4")
    assert (tmp_path / "first.mp4").read_bytes() == (tmp_path / "second.mp4").read_bytes()
    if damages:
        truncate(files[0])
        assert "1 program compiled, 7 read from the cache" in (message := make("third.mp4"))
        assert message.count("the cached program cannot be used") == 1
        assert (tmp_path / "third.mp4").read_bytes() == (tmp_path / "first.mp4").read_bytes()
