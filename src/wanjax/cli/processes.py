# SPDX-License-Identifier: Apache-2.0
"""Several processes that make one video together, each with its own devices: on a TPU pod or on several hosts."""

import os
from collections.abc import Mapping

import click
import jax

from wanjax.cli.options import COMPILE_CACHE
from wanjax.cli.report import Report
from wanjax.compilers.cache import compile_cache_folder, use_shared
from wanjax.compilers.executables import of_this_machine
from wanjax.errors import WanjaxError
from wanjax.programs import EXECUTE
from wanjax.sharding import platform

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def join(asked: str | None, environment: Mapping[str, str] = os.environ) -> None:
    """Joins the other processes if the command line or the environment asks for it. Call before JAX looks for devices.

    `asked` is "auto", with which JAX finds the others (on TPU pods, under Slurm, Kubernetes or MPI), or
    "HOST:PORT,COUNT,INDEX". The environment asks with a coordinator's address (and the count and index, if JAX cannot
    find them) or with the names of several workers of a pod. Raises WanjaxError if `asked` cannot be parsed or the
    processes do not connect.
    """
    if asked is None and ADDRESS in environment:
        given = [environment[name] for name in (ADDRESS, COUNT, INDEX) if name in environment]
        asked = "auto" if len(given) == 1 else ",".join(given)
    elif asked is None and "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        asked = "auto"
    if asked is None or jax.distributed.is_initialized():
        return
    address, count, index = (None, None, None) if asked == "auto" else _parsed(asked)
    try:
        jax.distributed.initialize(address, count, index)
    except (RuntimeError, ValueError) as error:
        if address is None and isinstance(error, ValueError):
            raise WanjaxError(
                "no other processes were found by `auto`, which knows TPU pods, Slurm, Kubernetes and MPI: "
                "elsewhere each is told HOST:PORT,COUNT,INDEX, and one process alone needs no --processes"
            ) from error
        raise WanjaxError(
            f"the processes of {asked} did not connect ({error}): start each with the same address and count"
        ) from error


def _parsed(asked: str) -> tuple[str, int, int]:
    address, *numbers = asked.split(",")
    if ":" not in address or len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise WanjaxError(
            f"the processes {asked!r} cannot be read: give ADDRESS,COUNT,INDEX such as 10.0.0.1:8476,2,0, or auto"
        )
    count, index = map(int, numbers)
    if not index < count:
        raise WanjaxError(f"the process index {index} is not below the count {count}: the first index is 0")
    return address, count, index


def meet(report: Report, asked: str | None, *, described: str | None = None) -> None:
    """Joins the other processes, if any. Only the first process reports.

    `described` is the platform of devices that are described, if programs are compiled for such.

    Executables are kept for other processes where all code in this one is that of the installed packages, unless the
    user chose a folder for JAX's cache, or a shared place, in which all programs are then found.
    """
    join(asked)
    platform()  # a mistake in JAX_PLATFORMS is told here, before anything else asks for devices
    context = click.get_current_context(silent=True)
    use_shared(**(context.meta.get(COMPILE_CACHE, {}) if context else {}), platform=described)
    if report.owns_process and compile_cache_folder() is None:
        EXECUTE.kept = of_this_machine()
    report.mute(not is_first())


def is_first() -> bool:
    """Returns True in the process that writes files and reports."""
    return jax.process_index() == 0
