# SPDX-License-Identifier: Apache-2.0
"""What devices that are no TPUs are taken to do: a stated model, not a compiler and not a measurement.

Work takes as long as its operations at the part of the peak that is reached, or as its bytes at the part of the
bandwidth that is reached, whichever is longer. The peaks are the makers' for dense bfloat16 (NVIDIA's data sheets of
H100 SXM and H200). The parts reached are those of good kernels: a forward of the 14B at 1280 x 720 on an H200 with
FlashAttention 3 is reported as 9.8 s, 0.67 of the peak throughout; XLA with cuDNN is taken to reach 0.6. A processor's
core is taken to do 40 GFLOP/s in float32, which is what JAX reached on the cores that docs/performance.md speaks of.
"""

import os
from dataclasses import dataclass
from typing import ClassVar

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """One device, and the parts of its peak and of its bandwidth that programs reach."""

    name: str
    kind: str  # how JAX's name for such devices begins
    memory: int  # bytes that a program can have
    flops: float  # operations a second in bfloat16
    bandwidth: float  # bytes a second of its memory
    attention: float
    products: float
    convolutions: float
    vectors: float  # of the bandwidth, in elementwise work
    devices: ClassVar[int] = 1


H100 = Machine("h100", "NVIDIA H100", int(79.2 * GIB), 989e12, 3.35e12, 0.6, 0.6, 0.25, 0.7)
H200 = Machine("h200", "NVIDIA H200", int(139.8 * GIB), 989e12, 4.8e12, 0.6, 0.6, 0.25, 0.7)


def processor() -> Machine:
    """This machine's processor: all its cores, and all its memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 16 * GIB
    return Machine("cpu", "cpu", memory, cores * 40e9, cores * 8e9, 0.9, 1.0, 0.9, 0.7)


def machines() -> dict[str, Machine]:
    """Those that are modelled, by their names."""
    return {machine.name: machine for machine in (H200, H100, processor())}


def peak_flops(kind: str) -> float | None:
    """Of a device by JAX's name for its kind; None where nothing is stated of it."""
    return next((machine.flops for machine in (H200, H100) if kind.startswith(machine.kind)), None)
