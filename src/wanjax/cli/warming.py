# SPDX-License-Identifier: Apache-2.0
"""The command `warmup`: records a run, and compiles its programs into the cache."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from wanjax.cli.processes import meet
from wanjax.cli.report import Report
from wanjax.cli.stages import Rendering
from wanjax.compilers.cache import compile_cache_folder
from wanjax.pipelines.recording import record
from wanjax.programs import EXECUTE


def warmup(report: Report, **given: Any) -> None:
    """Compiles all programs that `generate` runs with these options; no weights are loaded."""
    meet(report, given.get("processes"))
    with TemporaryDirectory(prefix="wanjax-warmup-") as folder:
        made = Rendering(report, Path(folder), given | {"prompt": given["prompt"] or ""})
        with report.stage("record"):
            told = {"tiling": made.tiling, "batch_guidance": made.batch_guidance}
            programs = record(made.pipe, made.settings, made.pictures, **told).programs
        with report.stage("compile"):
            for done, recorded in enumerate(programs):
                report.count("program", done, len(programs))
                EXECUTE.compile(recorded.instance)
            report.count("program", len(programs), len(programs))
    report.table()
    report.note(f"what was compiled is in {compile_cache_folder()}")
