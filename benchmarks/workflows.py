# SPDX-License-Identifier: Apache-2.0
"""Measure how long wanjax takes to read each of ComfyUI's templates, also those that it refuses.

    python -m benchmarks.workflows

The benchmark prints the five slowest templates. It fails if one takes longer than the target of half a second.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from rich.table import Table

from tests.support.workflows import request_of, template, template_names
from wanjax.errors import WanjaxError
from wanjax.pipelines.progress import console

TARGET_SECONDS = 0.5
SHOWN = 5


def seconds_to_read(name: str) -> float:
    """Return the processor's seconds to read a template into a request or an error."""
    workflow, start = template(name), time.process_time()
    with suppress(WanjaxError):
        request_of(workflow)
    return time.process_time() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Read all templates, and print the slowest."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    times = {name: seconds_to_read(name) for name in template_names()}
    slowest = sorted(times, key=lambda name: -times[name])[:SHOWN]
    table = Table(f"slowest of {len(times)} templates", "seconds")
    for name in slowest:
        table.add_row(name, f"{times[name]:.3f}")
    console(stderr=False).print(table)
    return int(times[slowest[0]] > TARGET_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
