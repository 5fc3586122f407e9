# SPDX-License-Identifier: Apache-2.0
"""Roofline models of devices other than TPUs. Their times are estimates. They do not come from a compiler or from
measurements.

Work takes the longer of two times: the time of its operations at a fraction of the peak, or the time of its bytes at a
fraction of the bandwidth. Peaks are the manufacturers' figures for dense bfloat16 (NVIDIA's data sheets of H100 SXM and
H200). Good kernels reach the fractions given here. A forward pass of a 14B model at 1280 x 720 on an H200 with
FlashAttention 3 is reported to take 9.8 s, which is 0.67 of the peak. XLA with cuDNN is assumed to reach 0.6. A CPU
core is assumed to reach 40 GFLOP/s in float32, as JAX did on the cores described in docs/performance.md.
"""

import os
from dataclasses import dataclass
from typing import ClassVar

import psutil

from wanjax.errors import WanjaxError
from wanjax.pricing.chips import CARD_SLICES, CARDS, CHIPS_BY_DEVICE_KIND, SLICES, Card, Chip, Slice


@dataclass(frozen=True)
class Machine:
    """One device, with the fractions of its peak and its bandwidth that programs reach."""

    name: str
    device_kind: str  # the prefix of JAX's `device_kind`
    memory: int  # bytes available to a program
    flops: float  # peak rate, in operations of `peak_dtype` per second
    bandwidth: float  # bytes of memory per second
    attention_fraction: float  # fraction of the peak
    matmul_fraction: float  # fraction of the peak
    convolution_fraction: float  # fraction of the peak
    bandwidth_fraction: float  # fraction of the bandwidth that elementwise work reaches
    link: float  # bytes per second and direction to the other devices of a host
    peak_dtype: str = "bfloat16"
    devices: ClassVar[int] = 1
    torus: ClassVar[bool] = False  # a switch connects all devices


def _card_machine(card: Card) -> Machine:
    """Return the roofline model of a card.

    The model's `device_kind` is the common prefix of the names of the card's variants.
    """
    device_kind = "NVIDIA H100" if card.name == "h100" else card.device_kind.partition("-")[0]
    figures = (card.hbm, card.flops, card.bandwidth, 0.6, 0.6, 0.25, 0.7, card.link, card.peak_dtype)
    return Machine(card.name, device_kind, *figures)


CARD_MACHINES = {name: _card_machine(card) for name, card in CARDS.items()}
H100 = CARD_MACHINES["h100"]


CORE_FLOPS = 40e9  # the assumed rate of a CPU core in float32


def cpu_machine() -> Machine:
    """Return the roofline model of this machine's CPU, with all available cores and all memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory, flops, bandwidth = psutil.virtual_memory().total, cores * CORE_FLOPS, cores * 8e9
    return Machine("cpu", "cpu", memory, flops, bandwidth, 0.9, 1.0, 0.9, 0.7, bandwidth, "float32")


def machines() -> dict[str, Machine]:
    """Return all devices that have a roofline model, by name."""
    return {machine.name: machine for machine in (*CARD_MACHINES.values(), cpu_machine())}


def find_hardware(name: str) -> Slice | Machine:
    """Return the slice or device with a name. For an unknown name, raise a WanjaxError that lists names."""
    hardware: dict[str, Slice | Machine] = {**SLICES, **CARD_SLICES, **machines()}
    if name not in hardware:
        matches = [candidate for candidate in hardware if name and candidate.startswith(name.lower())]
        advice = f"use {' or '.join(matches)}" if matches else f"use one of {', '.join((*SLICES, *machines()))}"
        raise WanjaxError(f"no chip, GPU or machine is named {name!r}: {advice}")
    return hardware[name]


def device_model(device_kind: str) -> Chip | Machine:
    """Return the roofline model of a device by JAX's `device_kind`. An unknown accelerator counts as an H100."""
    if device_kind in CHIPS_BY_DEVICE_KIND:
        return CHIPS_BY_DEVICE_KIND[device_kind]
    return next((machine for machine in machines().values() if device_kind.startswith(machine.device_kind)), H100)


def peak_flops(device_kind: str) -> float | None:
    """Return the peak FLOP/s of an accelerator by JAX's `device_kind`, or None for an unknown accelerator."""
    if device_kind in CHIPS_BY_DEVICE_KIND:
        return CHIPS_BY_DEVICE_KIND[device_kind].flops
    return next(
        (machine.flops for machine in CARD_MACHINES.values() if device_kind.startswith(machine.device_kind)), None
    )
