# SPDX-License-Identifier: Apache-2.0
"""Several processes that make one video together, each with its own devices: on a TPU pod or on several hosts."""

import click
import jax

from wanjax.cli.options import COMPILE_CACHE
from wanjax.cli.report import Report
from wanjax.compile_cache.cache import compile_cache_folder, use_shared
from wanjax.compile_cache.executables import user_executables
from wanjax.execution import EXECUTE
from wanjax.jobs.multihost import is_first, join_processes
from wanjax.kernels.admitted import admit_kernels
from wanjax.sharding import platform


def init_distributed(
    report: Report, processes: str | None, *, platform_name: str | None = None, trains: bool = False
) -> None:
    """Join the other processes, if any. Only the first process reports.

    `platform_name` is the platform of devices that are described, if programs are compiled for such.

    Executables are kept for other processes where all code in this one is that of the installed packages, unless the
    user chose a folder for JAX's cache, or a shared place, in which all programs are then found.
    """
    join_processes(processes)
    if platform_name is None:
        admit_kernels(*["flash_tpu_gradient"] * trains)  # before devices are opened
    platform()  # a mistake in JAX_PLATFORMS is told here, before anything else asks for devices
    context = click.get_current_context(silent=True)
    use_shared(**(context.meta.get(COMPILE_CACHE, {}) if context else {}), platform=platform_name)
    if report.owns_process and compile_cache_folder() is None:
        EXECUTE.executables = user_executables()
    report.muted = not is_first()
    report.has_peers = jax.process_count() > 1
