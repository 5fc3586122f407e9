# SPDX-License-Identifier: Apache-2.0
"""Connect processes that compute together, each with its own devices, and exchange messages between them. If one
process dies, JAX terminates the other processes. No process then waits forever.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from wanjax.errors import WanjaxError
from wanjax.jobs.addresses import AUTO, check_coordinator, parse_processes

ADDRESS_VARIABLE, COUNT_VARIABLE, INDEX_VARIABLE = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
HEARTBEAT_TIMEOUT = 10  # seconds without a heartbeat after which a process counts as dead
PAGE_BYTES = 4096  # messages are padded to multiples of this, because each new length needs a new compiled program


def join_processes(processes: str | None, environment: Mapping[str, str] = os.environ) -> None:
    """Connect to the other processes, if the option or the environment names them. Call this before JAX looks for
    devices.

    Args:
        processes: "HOST:PORT,COUNT,INDEX"; or "auto" to let JAX find the other processes, on TPU pods or under Slurm,
            Kubernetes or MPI; or None to use the environment.
        environment: The environment variables, by default those of this process. The variables can give the address of
            the coordinator, and also the count and the index if JAX cannot find them. On a TPU pod the variables give
            the host names of the workers.

    Raises:
        WanjaxError: `processes` is malformed, or the processes do not connect.
    """
    name = "--processes"
    if processes is None and ADDRESS_VARIABLE in environment:
        name, variables = ADDRESS_VARIABLE, (ADDRESS_VARIABLE, COUNT_VARIABLE, INDEX_VARIABLE)
        check_coordinator(name, environment[name])  # JAX reads the address if it finds the other numbers
        values = [environment[variable] for variable in variables if variable in environment]
        processes = AUTO if len(values) == 1 else ",".join(values)
    elif processes is None and "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        processes = AUTO
    if processes is None or jax.distributed.is_initialized():
        return
    address, count, index = parse_processes(processes, name)
    try:
        connect(address, count, index)
    except (RuntimeError, ValueError) as error:
        if address is None and isinstance(error, ValueError):
            raise WanjaxError(
                "--processes auto found no other processes; it works on TPU pods, Slurm, Kubernetes and MPI: "
                "give HOST:PORT,COUNT,INDEX to each process, or omit --processes for a single process"
            ) from error
        raise WanjaxError(
            f"the processes of {processes} did not connect ({error}): start all with the same address and count"
        ) from error


def connect(address: str | None, count: int | None, index: int | None, **keywords: Any) -> None:
    """Connect to the other processes. The first process is the coordinator.

    Args:
        address: The coordinator's HOST:PORT; None to let JAX find it.
        count: The number of processes; None to let JAX find it.
        index: The number of this process, from 0; None to let JAX find it.
        keywords: Further keywords of `jax.distributed.initialize`.
    """
    jax.config.update(
        "jax_enable_preemption_service", False
    )  # without JAX's preemption service, which would catch SIGTERM: SIGTERM must end the process
    jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT, **keywords)


def is_first() -> bool:
    """Return True in the first process. Only that process writes files and reports."""
    return jax.process_index() == 0


class PeerGroup:
    """The processes of one computation. Every method is collective: all processes must call it, and each call waits for
    all processes."""

    def broadcast(self, message: Any = None) -> Any:
        """Return the first process's message, in all processes.

        Args:
            message: A JSON value. Only the first process's value is used.
        """
        text = json.dumps(message).encode()
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
        return json.loads(multihost_utils.broadcast_one_to_all(_pad_to_pages(text, size)).tobytes()[:size])

    def gather(self, text: str) -> list[str]:
        """Collect one text from each process, and return the texts in the order of the processes' indices.

        Args:
            text: This process's text, which is cut to PAGE_BYTES.
        """
        pages = multihost_utils.process_allgather(_pad_to_pages(text.encode(), PAGE_BYTES))
        return [page.tobytes().rstrip(b"\0").decode(errors="replace") for page in np.reshape(pages, (-1, PAGE_BYTES))]


def _pad_to_pages(text: bytes, size: int) -> np.ndarray:
    """Pad a text with zeros, or cut it, to the number of whole pages that `size` bytes need."""
    length = PAGE_BYTES * max(1, -(-size // PAGE_BYTES))
    return np.frombuffer(text[:length].ljust(length, b"\0"), np.uint8)
