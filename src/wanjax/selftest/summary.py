# SPDX-License-Identifier: Apache-2.0
"""The results of a self-test, as JSON for programs and as Markdown for an issue."""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from wanjax.bench.suite import Measurement
from wanjax.figures import format_duration, format_number, pluralize
from wanjax.pricing.digests import versions
from wanjax.selftest.checks import Check

CHECK_HEADINGS = ("check", "outcome", "distance", "at most", "time")
TIMING_HEADINGS = ("what", "measured", "modelled", "measured / modelled")


@dataclass(frozen=True)
class Summary:
    """The outcomes and timings of a self-test, with the devices and versions."""

    devices: str
    versions: dict[str, str]
    checks: list[Check]
    timings: list[Measurement]

    @property
    def slug(self) -> str:
        """The kind of the devices, with only characters that are safe in a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.devices.partition(" x ")[2].lower()).strip("-")

    @property
    def faults(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @property
    def sentence(self) -> str:
        """One sentence with the outcome of all checks."""
        skipped = sum(check.outcome == "left out" for check in self.checks)
        completed = len(self.checks) - skipped
        if self.faults:
            names = ", ".join(check.name for check in self.faults)
            return f"{len(self.faults)} of {pluralize(completed, 'check')} failed: {names}"
        return f"all {pluralize(completed, 'check')} passed" + (f", {skipped} left out" if skipped else "")

    def check_rows(self) -> list[list[str]]:
        """Format each check as a row, with the columns of `CHECK_HEADINGS`."""
        return [
            [
                check.name,
                check.fault or (check.note if check.outcome == "left out" else check.outcome),
                "" if check.relative_error is None else f"{check.relative_error:.1e}",
                "" if check.bound is None else f"{check.bound:g}",
                format_duration(check.seconds),
            ]
            for check in self.checks
        ]

    def timing_rows(self) -> list[list[str]]:
        """Format each timing as a row, with the columns of `TIMING_HEADINGS`."""
        return [
            [
                f"{row.name}: {row.what}",
                row.note if row.seconds is None else format_duration(row.seconds),
                "" if row.modelled is None else format_duration(row.modelled),
                "" if row.ratio is None else format_number(row.ratio),
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
        """Format the summary as Markdown for an issue."""
        version_list = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        tables = [_table(CHECK_HEADINGS, self.check_rows())]
        if self.timings:
            tables.append(_table(TIMING_HEADINGS, self.timing_rows()))
        return "\n\n".join([f"`wanjax selftest` on {self.devices}: {self.sentence}.", version_list, *tables]) + "\n"


def summarize(checks: Sequence[Check], timings: Sequence[Measurement]) -> Summary:
    """Summarize checks and timings, with the devices and versions of this process."""
    devices = jax.devices()
    environment = {"python": platform.python_version(), **versions("wanjax", "jax", "jaxlib", "libtpu")}
    environment |= {"system": platform.platform(terse=True), "cores": str(os.cpu_count())}
    return Summary(f"{len(devices)} x {devices[0].device_kind}", environment, list(checks), list(timings))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
