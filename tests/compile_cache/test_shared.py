# SPDX-License-Identifier: Apache-2.0
"""Workers share a compile cache: each program is compiled once, and a dead worker does not block the others."""

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.support.commands import refused
from tests.support.compilations import compilations
from tests.support.stores import BUCKET, clear_memory_store, failing, running_s3
from tests.support.words import has_line_with_words, line_with_words
from wanjax.compile_cache import shared
from wanjax.compile_cache.cache import SHARED_CACHE_VARIABLE, TRUST_CACHE_VARIABLE, compile_cache, set_cache_folder
from wanjax.compile_cache.shared import SharedCache, share_cache
from wanjax.errors import WanjaxError, WanjaxWarning
from wanjax.pricing.chips import find_slice, topology_devices
from wanjax.pricing.compile import ENVIRONMENT
from wanjax.stores.paths import AnyPath, file_names_in, parse_path
from wanjax.stores.results import ResultCache
from wanjax.stores.user_folders import user_cache

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches", "jax_raise_persistent_cache_errors")


@pytest.fixture(params=["a folder", "a store"])
def folder(request, tmp_path):
    clear_memory_store()
    yield tmp_path if request.param == "a folder" else parse_path("memory://cache/programs")
    clear_memory_store()


@pytest.fixture
def jax_cache_settings(monkeypatch, tmp_path):
    """Start a test without a cache of JAX, and restore the settings afterwards."""
    monkeypatch.chdir(tmp_path)
    saved = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setattr("jax._src.compilation_cache.get_file_cache", compilation_cache_of_jax)
    monkeypatch.setattr(shared, "_shared_caches", {})
    monkeypatch.delenv(SHARED_CACHE_VARIABLE, raising=False)
    monkeypatch.delenv(TRUST_CACHE_VARIABLE, raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in saved.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compilation_cache_of_jax(path: str):
    from jax._src.lru_cache import LRUCache

    return LRUCache(path, max_size=-1), path


@pytest.fixture
def short_leases(monkeypatch):
    for name, seconds in {"LEASE_TIMEOUT": 0.5, "HEARTBEAT_INTERVAL": 0.05, "POLL_INTERVALS": (0.01, 0.05)}.items():
        monkeypatch.setattr(shared, name, seconds)


def get_or_compile(folder: AnyPath, pause: float = 0.2) -> str:
    """Get an entry, or compile it and put it into the cache; return where the entry comes from."""
    cache = SharedCache(folder)
    with cache.leasing():
        if (content := cache.get("program")) is not None:
            return content.decode()
        time.sleep(pause)
        cache.put("program", b"read from cache")
    return "compiled here"


def test_one_process_compiles_and_the_others_read(folder, short_leases):
    with ThreadPoolExecutor(8) as workers:
        # compiling takes longer than a lease is valid without a heartbeat
        sources = list(workers.map(lambda _: get_or_compile(folder, 0.8), range(8)))
    assert sorted(sources) == ["compiled here", *["read from cache"] * 7]
    assert file_names_in(folder) == {"program-cache"}


def test_one_process_takes_over_from_a_dead_owner(folder, short_leases):
    shared._write(folder / "program-lease-0", b"of a process that was killed")
    with ThreadPoolExecutor(4) as workers:
        sources = list(workers.map(lambda _: get_or_compile(folder), range(4)))
    assert sorted(sources) == ["compiled here", *["read from cache"] * 3]
    assert file_names_in(folder) == {"program-cache"}


def test_a_failing_owner_blocks_no_other(folder, short_leases):
    with ExitStack() as stack:
        first = SharedCache(folder)
        stack.enter_context(first.leasing())
        assert first.get("program") is None
        with ThreadPoolExecutor(1) as workers:
            second = workers.submit(get_or_compile, folder)
            time.sleep(0.1)
            stack.close()
            assert second.result(9) == "compiled here"


def test_reading_without_leasing_writes_no_lease(folder):
    assert SharedCache(folder).get("program") is None
    assert file_names_in(folder) == set()


def test_a_lost_store_is_reported_once_and_stops_nothing():
    clear_memory_store()
    cache = SharedCache(parse_path("memory://cache/programs"))
    error = ConnectionError("lost")
    with failing("cat_file", error), failing("pipe_file", error), cache.leasing():
        with pytest.warns(WanjaxWarning, match=line_with_words("memory://cache/programs lost")):
            assert cache.get("program") is None
        cache.put("program", b"compiled")  # a second warning would be an error


def test_jax_compiles_a_program_once_and_then_reads_it(folder, jax_cache_settings):
    share_cache(folder)

    def double_plus_one(x):
        return 2 * x + 1

    for cached in (False, True):
        jax.clear_caches()
        compilation_cache.reset_cache()
        with compilations() as events, compile_cache():
            assert jax.jit(double_plus_one)(jnp.float32(3)) == 7
        assert [x.cached for x in events if x.name == "double_plus_one"] == [cached]
    assert [name for name in file_names_in(folder) if name.startswith("jit_double_plus_one-")]


def test_a_cache_that_cannot_be_created_gives_a_warning(jax_cache_settings, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.warns(WanjaxWarning, match=r"nothing is cached, because \S+/file/wanjax/xla/\S+ cannot be created"):
        set_cache_folder()


def test_a_path_is_used_after_it_is_declared_trusted(jax_cache_settings, monkeypatch, tmp_path):
    output = refused("warmup", "--compile-cache", tmp_path / "cache")
    assert has_line_with_words(output, f"{tmp_path}/cache --trust-compile-cache {TRUST_CACHE_VARIABLE}=1")
    monkeypatch.setenv(SHARED_CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(WanjaxError, match=line_with_words(TRUST_CACHE_VARIABLE)):
        set_cache_folder()
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(TRUST_CACHE_VARIABLE, "1")
    set_cache_folder()
    assert shared.current_shared_cache() is not None
    assert len(list((tmp_path / "cache").iterdir())) == 1  # the folder of this kind of processor


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--chip h9", "h9 v6e-8"),
        ("--chip v6e-1", "--compile-cache"),
        ("--compile-cache file --trust-compile-cache", "/file"),
        ("--compile-cache az://a/b --trust-compile-cache", "az:// s3://"),
    ],
)
def test_unsupported_targets_are_reported_before_anything_is_compiled(jax_cache_settings, options, words):
    Path("file").write_text("")
    assert has_line_with_words(refused("warmup", *options.split()), words)


SMALL = ("--size", "32x32", "--frames", "5", "--steps", "2", "--seed", "1", "-v")


def start(folder: Path, cache: str, *command: str) -> subprocess.Popen:
    environment = {name: x for name, x in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
    environment |= {SHARED_CACHE_VARIABLE: cache, TRUST_CACHE_VARIABLE: "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "wanjax", *command], env=environment, cwd=folder, stderr=subprocess.PIPE, text=True
    )


def program_counts(process: subprocess.Popen) -> tuple[int, int]:
    """Return the number of programs that a process compiled, and the number that it read."""
    output = process.communicate()[1]
    assert process.returncode == 0, output
    match = re.search(r"(\d+) programs compiled, (\d+) read from the cache", output)
    assert match, output
    return int(match[1]), int(match[2])


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["uninterrupted", "killed"])
@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_workers_share_what_they_compile(tmp_path, kind, killed):
    with running_s3() if kind == "s3" else ExitStack():
        cache = f"{BUCKET}/programs" if kind == "s3" else str(tmp_path / "programs")
        workers = [start(tmp_path, cache, "a red circle", *SMALL, "--out", f"{i}.mp4") for i in range(3)]
        if killed:
            end = time.monotonic() + 300
            while not [name for name in entries(cache) if "-lease-" in name]:
                assert time.monotonic() < end
                time.sleep(0.05)
            workers[0].send_signal(signal.SIGKILL)
            workers.pop(0).communicate()
        counts = [program_counts(worker) for worker in workers]
        assert sum(compiled for compiled, _ in counts) <= 8
        assert all(compiled + read == 8 for compiled, read in counts)
        assert program_counts(start(tmp_path, cache, "a red circle", *SMALL, "--out", "last.mp4")) == (0, 8)
        assert len([name for name in entries(cache) if name.endswith("-cache")]) == 8
    videos = {(tmp_path / f"{i}.mp4").read_bytes() for i in (1, 2, "last")}
    assert len(videos) == 1


def entries(cache: str) -> list[str]:
    folder = parse_path(cache)
    return [path.name for path in folder.rglob("*")] if isinstance(folder, Path) else list(folder.files())


@pytest.mark.slow  # loads libtpu
def test_one_chip_of_eight_has_the_key_of_all_eight(monkeypatch):
    """The devices in JAX's key are the same, so that a worker with one chip of eight finds the programs of one chip."""
    pytest.importorskip("libtpu")
    from jax._src.lib import xla_client  # JAX's key uses this client

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def key(devices):
        return xla_client.get_topology_for_devices(devices).fingerprint()

    single, eight = (topology_devices(x.topology, one_host=True) for x in map(find_slice, ("v6e-1", "v6e-8")))
    assert {key([device]) for device in eight} == {key(eight)} != {key(single)}


@pytest.mark.slow
def test_a_cache_is_filled_for_absent_chips(tmp_path):
    pytest.importorskip("libtpu")
    command = ("warmup", "--chip", "v6e-1", *SMALL[:6])
    for compiled, existing in ((8, 0), (0, 8)):
        process = start(tmp_path, str(tmp_path / "programs"), *command)
        output = process.communicate()[1]
        assert process.returncode == 0, output
        assert re.search(rf"compiled for v6e-1: {compiled} programs?, there before: {existing}", output), output
    assert len(list((tmp_path / "programs/tpu").iterdir())) == 8


def test_another_user_reads_shared_entries(tmp_path):
    umask = os.umask(0o022)
    try:
        SharedCache(tmp_path).put("program", b"compiled")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "program-cache").stat().st_mode) == 0o644


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def write_half(file, content):
        with file.open("wb") as opened:
            opened.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ResultCache().put("prices", {"a": 1}, 2.0)
    with pytest.warns(WanjaxWarning, match=line_with_words("cannot be written")):
        SharedCache(tmp_path).put("program", b"compiled")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", ["", "cache", "./cache", "~/cache"])
def test_an_empty_or_relative_cache_folder_is_ignored(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", name)
    folder = user_cache()
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder == user_cache()
    assert folder.is_absolute()
