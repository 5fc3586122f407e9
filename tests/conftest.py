# SPDX-License-Identifier: Apache-2.0
"""Every test runs offline, on a CPU as eight devices, with strict promotion, and with types and shapes checked."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XDG_DATA_HOME"] = (
    tempfile.mkdtemp()
)  # no test reads the tables that `wanjax calibrate` measured on this machine
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for torch: each process that runs tests has one core
# Most of the suite is compiling. Small programs that run once need no optimised machine code; the graphs are the same.
# XLA's older emitters compile them in half of the time. jaxlib 0.11 has none, and aborts at their flag.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    # Eight devices share two cores with other processes. By default XLA ends the process if a device is 40 s late.
    " --xla_cpu_collective_call_terminate_timeout_seconds=240"
    " --xla_cpu_parallel_codegen_split_count=1"  # parts are for compiling on many cores, and cost a tenth
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)

import jax
import pytest

from tests.support import types

types.install()  # before anything imports the library
jax.config.update("jax_traceback_in_locations_limit", 0)  # no test reads where in the code an operation is written
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
os.fsync = lambda descriptor: None  # tests need no protection against a loss of power


def pytest_unconfigure() -> None:
    """Remove the folder for the user's data."""
    shutil.rmtree(os.environ["XDG_DATA_HOME"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Exclude the objects of imports from garbage collection, because tracing triggers many collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


MAX_MEMORY_MAPS = 10_000  # XLA aborts at Linux's limit of 65,530 memory maps a process


@pytest.fixture(scope="module", autouse=True)
def _limit_memory_maps() -> Iterator[None]:
    """Free compiled programs after a module if the process has too many memory maps. Each program holds some."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MAX_MEMORY_MAPS:
        from wanjax.execution import EXECUTE

        EXECUTE.clear_programs()
        gc.collect()


@pytest.fixture(scope="module")
def cached_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cache compiled programs in a folder, so that a module that reloads a model does not recompile."""
    from tests.support.tiny import compile_cache

    with compile_cache(tmp_path_factory.getbasetemp() / "xla"):
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A PostgreSQL server; tests that use it are skipped if none is installed."""
    from tests.support.postgres import running

    with running() as server:
        yield server


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine whose memory, disk space and limits of inputs the test sets."""
    from tests.support.machine import Machine

    return Machine(monkeypatch)
