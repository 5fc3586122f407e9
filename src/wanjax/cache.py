# SPDX-License-Identifier: Apache-2.0
"""What is kept between runs: compiled programs, and prices."""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import jax

from wanjax import converters


def enable_compile_cache() -> None:
    """Keeps what XLA compiles in the user's cache folder, unless a folder was chosen already.

    JAX's key is made of the program after tracing, kernels included, of the versions of JAX and the compiler, of the
    compiler's options and flags, and of the devices and how the program lies on them: changed code or settings that
    matter make another key. What it may leave out is the processor that a program for the CPU was compiled for, so
    that each kind of processor has a folder of its own.
    """
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla" / _processor()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_cache_folder() -> str:
    """Where compiled programs are kept."""
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]


def recall(kind: str, key: Mapping[str, Any]) -> Any:
    """What was kept for this key by the same code and versions; None where there is none that can be read."""
    with suppress(OSError, ValueError):
        return json.loads(_file(kind, key).read_text(encoding="utf-8"))
    return None


def keep(kind: str, key: Mapping[str, Any], value: Any) -> None:
    """Keeps what JSON can hold, where anything can be written."""
    file = _file(kind, key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8") as beside:
            json.dump(value, beside)
        os.replace(beside.name, file)


def _file(kind: str, key: Mapping[str, Any]) -> Path:
    word = json.dumps([key, code_word(), versions()], sort_keys=True)
    return user_cache() / kind / f"{hashlib.sha256(word.encode()).hexdigest()}.json"


@cache
def code_word() -> str:
    """Stands for all code of this package."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(converters.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Of what compiles and traces."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "libtpu"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def user_cache() -> Path:
    """The folder of what can be made again."""
    if "XDG_CACHE_HOME" in os.environ:
        return Path(os.environ["XDG_CACHE_HOME"]) / "wanjax"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "wanjax"


def _processor() -> str:
    """The machine's architecture, and a word that stands for the instructions that its processor knows."""
    known = platform.processor()
    with suppress(OSError):
        found = re.search(r"^(?:flags|Features)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        known = " ".join(sorted(found[1].split())) if found else known
    return f"{platform.machine()}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"
