# SPDX-License-Identifier: Apache-2.0
"""Expected seconds on the devices of this process: the compiler's prices for TPUs, a stated model for others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from wanjax.errors import WanjaxError
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.plan.hardware import Hardware, mesh_on, priced_on
from wanjax.pricing.chips import KINDS, SLICES
from wanjax.pricing.exporting import CompilerError
from wanjax.pricing.lowering import Lowering
from wanjax.pricing.roofline import Machine, machines

COMPILER, MODEL = "the chip's compiler", "a stated model"
Build = Callable[[Mesh | AbstractMesh, AttentionConfig], Lowering]  # of a mesh and the attention


@dataclass(frozen=True)
class LocalDevices:
    """The devices of this process: the hardware that a plan prices, if it knows theirs, and how it prices them."""

    hardware: Hardware | None
    source: str

    @property
    def name(self) -> str:
        return self.hardware.name if self.hardware is not None else ""

    def price(self, build: Build, axes: Mapping[str, int]) -> tuple[float | None, str]:
        """Return the seconds of a program on a mesh of these axes by the plan, or None and why there are none.

        The model counts the operations of attention's plain formula.
        """
        if self.hardware is None:
            return None, "no model of these devices is stated"
        modelled = isinstance(self.hardware, Machine)
        if modelled and prod(axes.values()) > 1:
            return None, "the model is of one device"
        try:
            lowering = build(mesh_on(self.hardware, axes), AttentionConfig("reference") if modelled else AUTO)
            [priced] = priced_on(self.hardware, [("", lowering)])
        except (WanjaxError, CompilerError) as error:
            return None, str(error).splitlines()[0][:200]
        return priced.seconds, "" if priced.seconds is not None else "by the compiler it does not fit"


def local_devices(devices: Sequence[Any]) -> LocalDevices:
    """Return the hardware that a plan prices for these devices."""
    kind, platform = devices[0].device_kind, devices[0].platform
    if kind in KINDS:
        slices = [each for each in SLICES.values() if each.chip == KINDS[kind] and each.devices == len(devices)]
        return LocalDevices(slices[0] if slices else None, COMPILER)
    matches = [x for x in machines().values() if kind.startswith(x.kind) or x.kind == platform == "cpu"]
    return LocalDevices(matches[0] if matches else None, MODEL)
