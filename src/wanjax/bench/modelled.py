# SPDX-License-Identifier: Apache-2.0
"""What `wanjax.plan` says of the devices that are here: the compiler's prices for TPUs, a stated model for others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from wanjax.errors import WanjaxError
from wanjax.kernels.attention import AUTO, AttentionConfig
from wanjax.plan.places import Place, mesh_on, priced_on
from wanjax.pricing.chips import KINDS, SLICES
from wanjax.pricing.exporting import CompilerError
from wanjax.pricing.lowering import Lowering
from wanjax.pricing.roofline import Machine, machines

COMPILER, MODEL = "the chip's compiler", "a stated model"
Build = Callable[[Mesh | AbstractMesh, AttentionConfig], Lowering]  # of a mesh and the attention


@dataclass(frozen=True)
class Known:
    """The devices here as a plan knows them: their place, if it is known, and where its seconds come from."""

    place: Place | None
    source: str

    @property
    def name(self) -> str:
        return self.place.name if self.place is not None else ""

    def price(self, build: Build, axes: Mapping[str, int]) -> tuple[float | None, str]:
        """Returns the seconds of a program on a mesh of these axes by the plan, or None and why there are none.

        The model counts the operations of attention's plain formula.
        """
        if self.place is None:
            return None, "no model of these devices is stated"
        modelled = isinstance(self.place, Machine)
        if modelled and prod(axes.values()) > 1:
            return None, "the model is of one device"
        try:
            lowering = build(mesh_on(self.place, axes), AttentionConfig("reference") if modelled else AUTO)
            [priced] = priced_on(self.place, [("", lowering)])
        except (WanjaxError, CompilerError) as error:
            return None, str(error).splitlines()[0][:200]
        return priced.seconds, "" if priced.seconds is not None else "by the compiler it does not fit"


def known(devices: Sequence[Any]) -> Known:
    """Returns what a plan knows of devices."""
    kind, platform = devices[0].device_kind, devices[0].platform
    if kind in KINDS:
        slices = [place for place in SLICES.values() if place.chip == KINDS[kind] and place.devices == len(devices)]
        return Known(slices[0] if slices else None, COMPILER)
    found = [x for x in machines().values() if kind.startswith(x.kind) or x.kind == platform == "cpu"]
    return Known(found[0] if found else None, MODEL)
