# SPDX-License-Identifier: Apache-2.0
"""The results of a self-test, as JSON for programs and as Markdown for an issue."""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from wanjax.bench.suite import Row
from wanjax.figures import digits, duration, quantity
from wanjax.pricing.digests import versions
from wanjax.selftest.checks import Check

CHECKED = ("check", "outcome", "distance", "at most", "time")
TIMED = ("what", "measured", "modelled", "measured / modelled")


@dataclass(frozen=True)
class Summary:
    """The outcomes and times of a self-test, and where it ran."""

    devices: str
    versions: dict[str, str]
    checks: list[Check]
    timings: list[Row]

    @property
    def slug(self) -> str:
        """The kind of the devices, as a part of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.devices.partition(" x ")[2].lower()).strip("-")

    @property
    def faults(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def sentence(self) -> str:
        """The whole outcome in a sentence."""
        left = sum(check.outcome == "left out" for check in self.checks)
        done = len(self.checks) - left
        if self.faults:
            names = ", ".join(check.name for check in self.faults)
            return f"{len(self.faults)} of {quantity(done, 'check')} found something wrong: {names}"
        return f"all {quantity(done, 'check')} are right" + (f", {left} left out" if left else "")

    def check_rows(self) -> list[list[str]]:
        """Return a row of `CHECKED` for each check."""
        return [
            [
                check.name,
                check.fault or (check.note if check.outcome == "left out" else check.outcome),
                "" if check.distance is None else f"{check.distance:.1e}",
                "" if check.bound is None else f"{check.bound:g}",
                duration(check.seconds),
            ]
            for check in self.checks
        ]

    def timing_rows(self) -> list[list[str]]:
        """Return a row of `TIMED` for each time."""
        return [
            [
                f"{row.name}: {row.what}",
                row.note if row.seconds is None else duration(row.seconds),
                "" if row.modelled is None else duration(row.modelled),
                "" if row.ratio is None else digits(row.ratio),
            ]
            for row in self.timings
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "versions": self.versions,
            "passed": not self.faults,
            "checks": [asdict(check) | {"outcome": check.outcome} for check in self.checks],
            "timings": [asdict(row) | {"ratio": row.ratio} for row in self.timings],
        }

    def to_markdown(self) -> str:
        """Return all of it as text that an issue can hold."""
        facts = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        tables = [_table(CHECKED, self.check_rows())]
        if self.timings:
            tables.append(_table(TIMED, self.timing_rows()))
        return "\n\n".join([f"`wanjax selftest` on {self.devices}: {self.sentence}.", facts, *tables]) + "\n"


def summary_of(checks: Sequence[Check], timings: Sequence[Row]) -> Summary:
    """Return a summary with the devices and versions of this process."""
    devices = jax.devices()
    facts = {"python": platform.python_version(), **versions("wanjax", "jax", "jaxlib", "libtpu")}
    facts |= {"system": platform.platform(terse=True), "cores": str(os.cpu_count())}
    return Summary(f"{len(devices)} x {devices[0].device_kind}", facts, list(checks), list(timings))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
