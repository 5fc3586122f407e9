# SPDX-License-Identifier: Apache-2.0
"""The hand-written kernels that this process may use: all except the kernels that failed their trials in `admission`.

This module is small because every program imports it. Without a TPU, no kernel is tried and no kernel is rejected.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import jax

GOOGLE_VENDOR_ID = "0x1ae0"  # Google's vendor id on the PCI bus
TPU_KINDS = {
    "0x0027": "v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
}
"""Kinds of TPU by their device id on the PCI bus."""
PCI_DEVICES = Path("/sys/bus/pci/devices")

TRIED_WHEN_NEEDED = (
    *("flash_tpu_gradient", "flash_tpu_int8", "flash_tpu_joining", "flash_tpu_radial"),
    *("quantized_matmul", "sparse_linear_tpu", "splash"),
)
"""Kernels that few runs use. They are tried only in these runs, so that other runs need not wait for their trials."""
ALL_OTHER_KERNELS = ""  # in `_tried`, this entry stands for all kernels that are not in `TRIED_WHEN_NEEDED`

_rejected: dict[str, str] = {}
_tried: set[str] = set()


def is_admitted(kernel: str) -> bool:
    """Return True if a kernel may be used. If the kernel is in `TRIED_WHEN_NEEDED` and was not tried yet, try it
    first."""
    if kernel in TRIED_WHEN_NEEDED and kernel not in _tried:
        trial = Thread(target=admit_kernels, args=(kernel,))  # a new thread, because this one may be tracing a program
        trial.start()
        trial.join()
    return kernel not in _rejected


def rejected_kernels() -> dict[str, str]:
    """Return the rejected kernels with the reasons."""
    return dict(_rejected)


def set_rejected(reasons: Mapping[str, str]) -> None:
    """Reject the kernels in `reasons`, and admit all other kernels."""
    _rejected.clear()
    _rejected.update(sorted(reasons.items()))


def tpu_kind() -> str | None:
    """Return the kind of TPU that JAX will use on this machine, or None. This opens no device."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if (platforms and "tpu" not in platforms) or find_spec("libtpu") is None:
        return None
    for device in sorted(PCI_DEVICES.glob("*")):
        try:
            vendor, device_id = ((device / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if vendor == GOOGLE_VENDOR_ID and device_id in TPU_KINDS:
            return TPU_KINDS[device_id]
    return None


def admit_kernels(*needed: str) -> None:
    """If there is a TPU, try each TPU kernel once per process. Call this before the process opens its devices, if
    possible.

    Args:
        *needed: Kernels of `TRIED_WHEN_NEEDED` to try. All other kernels are always tried.
    """
    untried = {ALL_OTHER_KERNELS, *needed} - _tried
    _tried.update(untried)
    if untried and (kind := tpu_kind()) is not None:
        from wanjax.kernels import admission  # imported late, so that the start without a TPU takes no longer

        def is_needed(kernel: str) -> bool:
            return kernel in untried or (ALL_OTHER_KERNELS in untried and kernel not in TRIED_WHEN_NEEDED)

        set_rejected(_rejected | admission.admit(kind, is_needed))
