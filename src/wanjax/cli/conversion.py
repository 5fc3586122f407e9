# SPDX-License-Identifier: Apache-2.0
"""What `convert` does: says what will be read and written, then shows how far it is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from wanjax.cli.report import Report
from wanjax.convert import Conversion, ToDiffusers, ToWanjax
from wanjax.errors import WanjaxError
from wanjax.layouts import FileSource
from wanjax.manifest import Progress, verify
from wanjax.networks import NETWORKS, components, network
from wanjax.registry import find
from wanjax.sources import Source


def convert(
    report: Report, source: str, target: Path | None, to: str, dtypes: Sequence[str], revision: str | None, check: bool
) -> None:
    """Converts SOURCE to TARGET, or checks what is there."""
    if check:
        _verify(report, source, target)
        return
    if target is None:
        raise click.UsageError(f"where to is missing: `wanjax convert {source} FOLDER` writes it there")
    found, preset = find(source, revision)
    if preset and preset.loras and source == preset.name:
        raise WanjaxError(f"{source} is {preset.source} with a LoRA, merged when it is loaded: convert the former")
    if isinstance(found, FileSource) and (lent := found.lent) and found.origin != found.name:
        report.note(f"{source} holds no {', '.join(lent)}: taken from {found.origin}")
    if to == "diffusers":
        conversion: Conversion = ToDiffusers(found, target)
    else:
        shipped = preset is not None and Path(preset.source).exists()  # then its folder is of this machine alone
        conversion = ToWanjax(
            found,
            target,
            dtypes=_dtypes(dtypes, found),
            origin=preset.name if preset and shipped else None,
            licence=preset.licence if preset else None,
        )
    _announce(report, conversion)
    with _bar(report) as progress:
        new = conversion.run(progress)
    report.note(f"{target} is complete and verified" if new else f"{target} was already there, complete")


def _verify(report: Report, source: str, target: Path | None) -> None:
    if target is not None:
        raise click.UsageError(f"--verify takes one folder: not {target} too")
    with _bar(report) as progress:
        manifest = verify(find(source)[0], progress)
    arrays = sum(len(network) for network in manifest["networks"].values())
    report.note(f"{source} is as it was written: {arrays} arrays, {len(manifest['files'])} files beside them")


def _dtypes(given: Sequence[str], source: Source) -> dict[str, str]:
    """The dtype of each component that has another than its own: a bare one is for all but those kept in float32."""
    chosen = {}
    for text in given:
        name, _, dtype = text.rpartition("=")
        if dtype not in ("bfloat16", "float32"):
            raise WanjaxError(f"--dtype {text} is no dtype to store weights in: bfloat16 or float32 is")
        listed = [known for known, kind in components(source.index).items() if kind in NETWORKS]
        names = [name] if name else [known for known in listed if not network(source, known).float32]
        chosen |= dict.fromkeys(names, dtype)
    return chosen


def _announce(report: Report, conversion: Conversion) -> None:
    """Tells what is read, and what is written where."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("network", "parameters", "read", "written", "as"):
        table.add_column(heading, justify="left" if heading in ("network", "as") else "right")
    for part in conversion.parts:
        table.add_row(part.name, f"{part.parameters:,}", _size(part.bytes_read), _size(part.bytes_written), part.dtype)
    read, written = (sum(sizes) for sizes in zip(*((p.bytes_read, p.bytes_written) for p in conversion.parts)))  # noqa: B905
    table.add_row("together", "", _size(read), _size(written), "")
    report.console.print(table)
    if there := conversion.bytes_there:
        report.note(f"{_size(there)} of it are already there")


@contextmanager
def _bar(report: Report) -> Iterator[Progress]:
    """A bar for each thing that is done, with its rate."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:10}"), BarColumn(24), DownloadColumn(), TransferSpeedColumn())
    tasks, progress = {}, Progress(*columns, TimeRemainingColumn(), console=report.console)

    def tell(at: str, done: int, total: int) -> None:
        progress.start()
        if at not in tasks:
            tasks[at] = progress.add_task(at, total=total)
        progress.update(tasks[at], completed=done)

    try:
        yield tell
    finally:
        if tasks:
            progress.stop()


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
