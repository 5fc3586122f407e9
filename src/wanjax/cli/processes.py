# SPDX-License-Identifier: Apache-2.0
"""Connect processes that make one video together, each with its own devices, on a TPU pod or on several hosts."""

import click
import jax

from wanjax.cli.options import COMPILE_CACHE
from wanjax.cli.report import Report
from wanjax.compile_cache.cache import compile_cache_folder, use_shared
from wanjax.compile_cache.executables import user_executables
from wanjax.execution import EXECUTE
from wanjax.jobs.multihost import is_first, join_processes
from wanjax.kernels.admitted import admit_kernels
from wanjax.sharding import device_platform


def init_distributed(
    report: Report, processes: str | None, *, platform_name: str | None = None, trains: bool = False
) -> None:
    """Connect to the other processes if there are any. Only the first process reports.

    If the user chose a folder for JAX's cache or a shared cache, that cache stores all programs. Otherwise, executables
    are stored for later processes, if all code of this process belongs to installed packages.

    Args:
        report: The report of the command.
        processes: The option --processes.
        platform_name: The platform of the devices, if programs are compiled for devices that this machine does not
            have.
        trains: Whether the command trains a model. Training also needs the gradient kernel.
    """
    join_processes(processes)
    if platform_name is None:
        admit_kernels(*["flash_tpu_gradient"] * trains)  # must be called before devices are opened
    device_platform()  # reports a mistake in JAX_PLATFORMS before other code opens devices
    context = click.get_current_context(silent=True)
    use_shared(**(context.meta.get(COMPILE_CACHE, {}) if context else {}), platform=platform_name)
    if report.runs_alone and compile_cache_folder() is None:
        EXECUTE.executables = user_executables()
    report.muted = not is_first()
    report.has_peers = jax.process_count() > 1
