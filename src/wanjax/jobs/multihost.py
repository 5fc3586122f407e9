# SPDX-License-Identifier: Apache-2.0
"""Connection and messages of several processes that compute together, each with its own devices.

JAX detects a process that dies and terminates the others, so none waits forever.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from wanjax.errors import WanjaxError

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
HEARTBEAT_TIMEOUT = 10  # seconds without a heartbeat after which a process counts as dead
PAGE = 4096  # bytes; messages are padded to multiples of it, since each length compiles a program


def join(processes: str | None, environment: Mapping[str, str] = os.environ) -> None:
    """Join the other processes if the options or the environment ask for it; call before JAX looks for devices.

    Args:
        processes: "auto", with which JAX finds the others (on TPU pods, under Slurm, Kubernetes or MPI), or
            "HOST:PORT,COUNT,INDEX"; None to use the environment.
        environment: The variables, by default those of this process. They ask with a coordinator's address (and the
            count and index, if JAX cannot find them) or with the names of several workers of a pod.

    Raises:
        WanjaxError: `processes` cannot be parsed, or they do not connect.
    """
    if processes is None and ADDRESS in environment:
        parts = [environment[name] for name in (ADDRESS, COUNT, INDEX) if name in environment]
        processes = "auto" if len(parts) == 1 else ",".join(parts)
    elif processes is None and "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        processes = "auto"
    if processes is None or jax.distributed.is_initialized():
        return
    address, count, index = (None, None, None) if processes == "auto" else _parse_processes(processes)
    try:
        connect(address, count, index)
    except (RuntimeError, ValueError) as error:
        if address is None and isinstance(error, ValueError):
            raise WanjaxError(
                "--processes auto found no other processes; it supports TPU pods, Slurm, Kubernetes and MPI: "
                "give HOST:PORT,COUNT,INDEX to each process, or leave --processes out for a single one"
            ) from error
        raise WanjaxError(
            f"the processes of {processes} did not connect ({error}): start each with the same address and count"
        ) from error


def connect(address: str | None, count: int | None, index: int | None, **more: Any) -> None:
    """Connect to the other processes; the first one is the coordinator.

    Args:
        address: HOST:PORT; None for what JAX finds.
        count: How many processes there are; None for what JAX finds.
        index: The number of this one, from 0; None for what JAX finds.
        more: Further keywords of `jax.distributed.initialize`.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM, which has to end the process
    jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT, **more)


def _parse_processes(processes: str) -> tuple[str, int, int]:
    address, *numbers = processes.split(",")
    if ":" not in address or len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise WanjaxError(
            f"the processes {processes!r} cannot be read: give ADDRESS,COUNT,INDEX such as 10.0.0.1:8476,2,0, or auto"
        )
    count, index = map(int, numbers)
    if not index < count:
        raise WanjaxError(f"the process index {index} is not below the count {count}: the first index is 0")
    return address, count, index


def is_first() -> bool:
    """Return True in the process that writes files and reports."""
    return jax.process_index() == 0


class PeerGroup:
    """The processes of one computation. Every call is collective: all processes make it and wait for each other."""

    def broadcast(self, message: Any = None) -> Any:
        """Return the message of the first process in all processes.

        Args:
            message: A JSON value; only that of the first process is sent.
        """
        text = json.dumps(message).encode()
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
        return json.loads(multihost_utils.broadcast_one_to_all(_page(text, size)).tobytes()[:size])

    def gather(self, text: str) -> list[str]:
        """Return the texts of all processes, in their order.

        Args:
            text: This process's text, of which PAGE bytes are kept.
        """
        pages = multihost_utils.process_allgather(_page(text.encode(), PAGE))
        return [page.tobytes().rstrip(b"\0").decode(errors="replace") for page in np.reshape(pages, (-1, PAGE))]


def _page(text: bytes, size: int) -> np.ndarray:
    """Return a text cut or zero-padded to the whole pages that hold `size` bytes."""
    length = PAGE * max(1, -(-size // PAGE))
    return np.frombuffer(text[:length].ljust(length, b"\0"), np.uint8)
