# SPDX-License-Identifier: Apache-2.0
"""What `wanjax.plan` says of the devices that are here: the compiler's prices for TPUs, a stated model for others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wanjax.errors import WanjaxError
from wanjax.plan.chips import KINDS, SLICES
from wanjax.plan.compile import CompilerError, Job
from wanjax.plan.places import Place, priced_on
from wanjax.plan.roofline import Machine, machines

COMPILER, MODEL = "the chip's compiler", "a stated model"


@dataclass(frozen=True)
class Known:
    """The devices here as a plan knows them: their place, if it is known, and where its seconds come from."""

    place: Place | None
    source: str

    @property
    def name(self) -> str:
        return self.place.name if self.place is not None else ""

    def price(self, job: Job) -> tuple[float | None, str]:
        """Returns the seconds of a job by the plan, or None and why there are none."""
        if self.place is None:
            return None, "no model of these devices is stated"
        if isinstance(self.place, Machine):
            if (job.mesh or {}).get("tp", 1) > 1:
                return None, "the model is of one device"
            job = _by_reference(job)
        try:
            [priced] = priced_on(self.place, [job])
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


def _by_reference(job: Job) -> Job:
    """Returns the job with the plain formula of attention, whose operations the model counts."""
    settings: dict[str, Any] = dict(job.settings)
    if "arguments" in settings and "attention" in settings["arguments"]:
        settings["arguments"] = {**settings["arguments"], "attention": "reference"}
    elif "implementation" in settings:
        settings["implementation"] = "reference"
    return Job(job.slice, job.builder, settings, job.mesh)
