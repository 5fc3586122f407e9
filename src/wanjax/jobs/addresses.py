# SPDX-License-Identifier: Apache-2.0
"""Check the addresses of processes and clusters.

This module does not import JAX, so that a mistyped address is reported at once.
"""

import re

from wanjax.errors import WanjaxError

HOST_AND_PORT = re.compile(r"(?:[^\s:/,\[\]@]+|\[[0-9A-Fa-f:.]+(?:%\w+)?\]):(\d{1,5})", re.ASCII)
MAX_PORT = 65535
PORTS_ADVICE = f"with a port from 1 to {MAX_PORT}"
AUTO = "auto"  # the value of --processes that lets JAX find the other processes


def is_port(text: str) -> bool:
    """Return True for a port from 1 to 65535.

    Args:
        text: The text of the port.
    """
    return re.fullmatch(r"\d{1,5}", text, re.ASCII) is not None and 0 < int(text) <= MAX_PORT


def is_host_and_port(text: str) -> bool:
    """Return True for HOST:PORT, with an IPv6 address in brackets.

    Args:
        text: The address.
    """
    match = HOST_AND_PORT.fullmatch(text)
    return match is not None and is_port(match[1])


def check_coordinator(name: str, address: str) -> None:
    """Raise WanjaxError unless an address of the first process is HOST:PORT.

    Args:
        name: The option or the variable that gives the address.
        address: The address.
    """
    if not is_host_and_port(address):
        raise WanjaxError(f"{name} has the address {address!r}: give HOST:PORT {PORTS_ADVICE}, such as 10.0.0.1:8476")


def parse_processes(processes: str, name: str = "--processes") -> tuple[str | None, int | None, int | None]:
    """Parse the address of the first process, the number of processes, and the index of this process. Each is None for
    "auto".

    Args:
        processes: "HOST:PORT,COUNT,INDEX" or "auto".
        name: The option or the variable that gives the address.

    Raises:
        WanjaxError: The text is malformed.
    """
    if processes == AUTO:
        return None, None, None
    address, *numbers = processes.split(",")
    if ":" not in address or len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise WanjaxError(
            f"{name} {processes!r} is malformed: give ADDRESS,COUNT,INDEX such as 10.0.0.1:8476,2,0, or auto"
        )
    check_coordinator(name, address)
    count, index = map(int, numbers)
    if not index < count:
        raise WanjaxError(f"the process index {index} must be below the count {count}: the first index is 0")
    return address, count, index
