# SPDX-License-Identifier: Apache-2.0
"""The command `convert`: prints a table of what will be read and written, then shows the progress."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from wanjax.checkpoints.convert import Conversion, ToDiffusers, ToWanjax
from wanjax.checkpoints.lora_source import Lora
from wanjax.checkpoints.manifest import Progress, verify
from wanjax.checkpoints.network_kinds import network
from wanjax.checkpoints.sources import Source
from wanjax.cli.report import Report
from wanjax.cli.tables import print_table
from wanjax.errors import WanjaxError
from wanjax.figures import in_bytes, quantity
from wanjax.pipelines.progress import LINE_INTERVAL
from wanjax.registry import check_complete, find_checkpoint, kinds, read_configs, with_options
from wanjax.stores.paths import parse_path


def convert(
    report: Report,
    source: str,
    target: str | None,
    to: str,
    dtypes: Sequence[str],
    lora: Sequence[str],
    revision: str | None,
    check: bool,
) -> None:
    """Convert the source, with LoRAs merged in, to the target or, with `check`, verify the source's checksums."""
    if check:
        _verify(report, source)
        return
    assert target is not None
    checkpoint, preset = find_checkpoint(source, revision)
    if preset and preset.loras and source == preset.name:
        raise WanjaxError(f"{source} is {preset.source} with a LoRA, merged when it is loaded: convert the former")
    if (missing := checkpoint.missing_components) and checkpoint.origin != checkpoint.name:
        report.note(f"{source} holds no {', '.join(missing)}: taken from {checkpoint.fallback_repo}")
    checkpoint.storage.check_room()
    check_complete(checkpoint)
    where, outline = parse_path(target), read_configs(source, checkpoint, preset)
    if lora:
        outline = with_options(outline, tuple(Lora.parse(text).named() for text in lora), report.note)
        checkpoint = outline.source
    if to == "diffusers":
        conversion: Conversion = ToDiffusers(checkpoint, where, kinds())
    else:
        # one file of a repository of several models
        is_of_several = preset is not None and checkpoint.origin not in preset.sources
        shipped = preset is not None and Path(preset.source).exists()  # then its folder exists on this machine only
        conversion = ToWanjax(
            checkpoint,
            where,
            kinds(),
            dtypes=_dtypes(dtypes, checkpoint),
            origin=preset.name if preset and (shipped or is_of_several) else None,
            licence=preset.licence if preset else None,
            known_as=outline.distilled_name,
        )
    _announce(report, conversion)
    with _bar(report) as progress:
        new = conversion.run(progress, report.enable_resume)
    report.resume_command = None
    report.note(f"{where} is complete and verified" if new else f"{where} was already there, complete")


def _verify(report: Report, source: str) -> None:
    with _bar(report) as progress:
        manifest = verify(find_checkpoint(source)[0], progress)
    arrays = sum(len(network) for network in manifest["networks"].values())
    report.note(
        f"{source} is as it was written: {quantity(arrays, 'array')}, and beside them "
        f"{quantity(len(manifest['files']), 'file')}"
    )


def _dtypes(texts: Sequence[str], source: Source) -> dict[str, str]:
    """Return the new dtypes by component. A dtype without a name is for all components not kept in float32."""
    chosen = {}
    for text in texts:
        name, _, dtype = text.rpartition("=")
        if dtype not in ("bfloat16", "float32"):
            raise WanjaxError(f"--dtype {text} is no dtype to store weights in: bfloat16 or float32 is")
        classes = {word for kind in kinds() for word in kind.classes}
        listed = [key for key, component in source.components.items() if component.kind in classes]
        names = [name] if name else [key for key in listed if not network(source, key, kinds()).float32]
        chosen |= dict.fromkeys(names, dtype)
    return chosen


def _announce(report: Report, conversion: Conversion) -> None:
    """Print the size of each network as it is read and as it is written."""
    rows = []
    for each in conversion.networks:
        sizes = in_bytes(each.bytes_read), in_bytes(each.bytes_written)
        rows.append((each.name, f"{each.parameters:,}", *sizes, each.dtype or ""))
    read = sum(each.bytes_read for each in conversion.networks)
    written = sum(each.bytes_written for each in conversion.networks)
    rows.append(("together", "", in_bytes(read), in_bytes(written), ""))
    print_table(report.console, ("network", "parameters", "read", "written", "as"), rows)
    if there := conversion.bytes_there:
        report.note(f"{in_bytes(there)} of it are already there")


@contextmanager
def _bar(report: Report) -> Iterator[Progress]:
    """Show a progress bar, with its rate, for each part of the work; in a pipe a line from time to time."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:10}"), BarColumn(24), DownloadColumn(), TransferSpeedColumn())
    tasks, progress = {}, Progress(*columns, TimeRemainingColumn(), console=report.console)
    last = perf_counter()

    def note(at: str, done: int, total: int) -> None:
        nonlocal last
        if done == total or perf_counter() - last > LINE_INTERVAL:
            last = perf_counter()
            report.note(f"{at}: {in_bytes(done)} of {in_bytes(total)}")

    def tell(at: str, done: int, total: int) -> None:
        progress.start()
        if at not in tasks:
            tasks[at] = progress.add_task(at, total=total)
        progress.update(tasks[at], completed=done)

    try:
        yield tell if report.console.is_terminal else note
    finally:
        if tasks:
            progress.stop()
