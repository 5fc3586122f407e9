# SPDX-License-Identifier: Apache-2.0
"""Compare each hand-written kernel with its reference on the user's chip, before the kernel is used.

A trial runs a kernel at a small shape. The modules named `trials`, beside the kernels, list the kernels and their
trials. Trials run in a child process, because a kernel that hangs also blocks its process. The child must open its chip
before this process opens any chip. The result of a kernel is saved: "" for a pass, otherwise the reason for the
failure. A saved result is valid for the same kind of chip, the same versions of jax, jaxlib and libtpu, and the same
code of the kernel.
"""

import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from wanjax.errors import WanjaxWarning
from wanjax.stores.results import ResultCache

KERNELS = "wanjax.kernels.trials:KERNELS"
START_SECONDS = 120.0  # time limit for the child to open its chip
KERNEL_SECONDS = 30.0  # time limit for all trials of a kernel
ONE_CHIP_ENVIRONMENT = {
    "TPU_VISIBLE_CHIPS": "0",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
READY_LINE = "ready"
REJECTED_ELSEWHERE = "it was refused in another process of this run"
HUNG_REASON = "it did not return"
NOT_TRIED_REASON = "it was not tried, because a kernel before it did not return"
FAILURES_KIND = "kernels"  # the kind under which `ResultCache` saves failure reasons

_has_hung_kernel = False  # whether a kernel did not return in this process


class Trial(NamedTuple):
    """A test of a kernel at one small shape.

    Attributes:
        name: What the shape tests, such as "a ragged tail".
        run: Runs the kernel and returns a tree of arrays; its argument is `interpret`.
        reference: Computes the same result in float32, in plain JAX.
        tolerance: The largest allowed distance between the two results, in relative L2.
    """

    name: str
    run: Callable[[bool], Any]
    reference: Callable[[], Any]
    tolerance: float


class Kernel(NamedTuple):
    """A kernel with its trials.

    Attributes:
        name: The name of the kernel in `admitted.is_admitted`.
        modules: The modules with the kernel's code. A change of their code makes a saved result invalid.
        trials: Returns the kernel's trials.
    """

    name: str
    modules: tuple[str, ...]
    trials: Callable[[], Iterable[Trial]]


def admit(device_kind: str, is_needed: Callable[[str], bool]) -> dict[str, str]:
    """Return the kernels that fail on a kind of chip, with the reasons. If there are such kernels, warn once.

    Args:
        device_kind: The kind of the chip.
        is_needed: Returns whether to try the kernel with a name.
    """
    reasons = failure_reasons(device_kind, KERNELS, is_needed)
    if jax.distributed.is_initialized():
        reasons = combine_failure_reasons(reasons)
    rejected = {name: reason for name, reason in reasons.items() if reason}
    if rejected:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
        warnings.warn(
            f"kernels that fail on this {device_kind} (jax {jax.__version__}, libtpu {_version('libtpu')}) are not "
            f"used; slower code replaces them ({reasons}): please report this line as an issue of wanjax",
            WanjaxWarning,
            stacklevel=2,
        )
    return rejected


def failure_reasons(
    device_kind: str, kernels: str, is_needed: Callable[[str], bool] = lambda name: True
) -> dict[str, str]:
    """Return why each kernel failed, or "" for a kernel that passed. Saved results are reused, and new results are
    saved.

    If a kernel hangs, the kernels after it are not tried. This process rejects these kernels, but saves no result for
    them.

    Args:
        device_kind: The kind of the chip.
        kernels: MODULE:NAME of a sequence of `Kernel`.
        is_needed: Returns whether to try the kernel with a name.
    """
    global _has_hung_kernel
    needed_kernels = [kernel for kernel in _load_kernels(kernels) if is_needed(kernel.name)]
    keys, results = {kernel.name: _cache_key(device_kind, kernel) for kernel in needed_kernels}, ResultCache()
    saved = {name: results.get(FAILURES_KIND, key) for name, key in keys.items()}
    reasons = {name: reason for name, reason in saved.items() if isinstance(reason, str)}
    for name, reason in _try_in_child(
        kernels, [] if _has_hung_kernel else [name for name in keys if name not in reasons]
    ):
        reasons[name] = reason
        results.put(FAILURES_KIND, keys[name], reason)
        if reason.startswith(HUNG_REASON):
            _has_hung_kernel = True
            break
    return {name: reasons.get(name, NOT_TRIED_REASON) for name in keys}


def combine_failure_reasons(reasons: dict[str, str]) -> dict[str, str]:
    """Combine the failure reasons of all processes of a run. If one process rejects a kernel, all processes reject
    it."""
    rejected_here = np.array([bool(reason) for reason in reasons.values()], np.int32)
    rejected_anywhere = np.reshape(multihost_utils.process_allgather(rejected_here), (-1, len(rejected_here))).any(
        axis=0
    )
    flagged_reasons = zip(reasons.items(), np.atleast_1d(rejected_anywhere).tolist(), strict=True)
    return {name: reason or (REJECTED_ELSEWHERE if rejected else "") for (name, reason), rejected in flagged_reasons}


def _try_in_child(kernels: str, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the failure reasons from a child process. If a kernel ends the child process, start another one."""
    while names:
        child = _TrialProcess(kernels, names)
        try:
            if child.read_line(START_SECONDS) != READY_LINE:
                yield from _try_in_this_process(kernels, names)
                return
            while names:
                line = child.read_line(KERNEL_SECONDS)
                name, *names = names
                yield name, _failure_reason(line)
                if not line:
                    break
        finally:
            child.end()


def _failure_reason(line: str | None) -> str:
    if line is None:
        return f"{HUNG_REASON} within {KERNEL_SECONDS:g} s"
    return json.loads(line)["reason"] if line else "it ended its process"


class _TrialProcess:
    """A child process that tries kernels on one chip, and writes a line for each kernel."""

    def __init__(self, kernels: str, names: list[str]) -> None:
        code = "from wanjax.kernels.admission import try_kernels; try_kernels()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, kernels, *names],
            env=os.environ | ONE_CHIP_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, lines: Any) -> None:
        with lines:
            for line in lines:
                self._lines.put(line.strip())
        self._lines.put("")

    def read_line(self, seconds: float) -> str | None:
        """Return the next line of the process, "" at the end of its output, or None after a timeout."""
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join()


def _try_in_this_process(kernels: str, names: list[str]) -> Iterator[tuple[str, str]]:
    """Try kernels in this process, and yield the failure reasons. This is needed if this process has already opened the
    devices, because a child process can then not open them."""
    by_name = {kernel.name: kernel for kernel in _load_kernels(kernels)}
    for name in names:
        reasons: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_put_reason, args=(by_name[name], reasons), daemon=True).start()
        try:
            yield name, reasons.get(timeout=KERNEL_SECONDS)
        except queue.Empty:
            yield name, _failure_reason(None)


def _put_reason(kernel: Kernel, reasons: queue.Queue[str]) -> None:
    reasons.put(failure_reason(kernel))


def try_kernels() -> None:
    """Run the child process: try the kernels that are named on the command line, and write a line for each kernel."""
    kernels, *names = sys.argv[1:]
    by_name = {kernel.name: kernel for kernel in _load_kernels(kernels)}
    jax.local_devices()
    print(READY_LINE, flush=True)
    for name in names:
        print(json.dumps({"reason": failure_reason(by_name[name])}), flush=True)


def failure_reason(kernel: Kernel) -> str:
    """Run a kernel's trials. Return why the kernel fails, or "" if all trials pass."""
    interpret = jax.default_backend() == "cpu"
    try:
        for trial in kernel.trials():
            error_norm = _relative_l2(trial.run(interpret), trial.reference())
            if not error_norm <= trial.tolerance:  # also true if the distance is NaN
                error_text = f"{error_norm:.2g}, where {trial.tolerance:g} is the most"
                return f"{trial.name} differs from the reference by {error_text}"
    except Exception as error:  # a compiler may raise any error
        first_line = (str(error).strip().splitlines() or [""])[0][:200]
        return f"it raises {type(error).__name__}: {first_line}"
    return ""


def _relative_l2(values: Any, expected: Any) -> float:
    """Return the largest relative L2 error of the arrays of two trees."""
    distances = []
    for x, y in zip(jax.tree.leaves(values), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        distances.append(float(np.linalg.norm(x - y) / max(float(np.linalg.norm(y)), 1e-30)))
    return float(np.max(distances))  # the maximum is NaN if one error is NaN


def _load_kernels(kernels: str) -> tuple[Kernel, ...]:
    module, _, name = kernels.partition(":")
    return tuple(vars(import_module(module))[name])


def _cache_key(device_kind: str, kernel: Kernel) -> dict[str, str]:
    """Return the key of a kernel's saved result: its name and code, the kind of chip, and the versions of packages."""
    digest = hashlib.sha256()
    for module in (*kernel.modules, __name__):
        spec = find_spec(module)
        assert spec is not None, module
        assert spec.origin is not None, module
        digest.update(Path(spec.origin).read_bytes())
    versions = {package: _version(package) for package in ("jax", "jaxlib", "libtpu")}
    return {"kernel": kernel.name, "kind": device_kind, "code": digest.hexdigest(), **versions}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
