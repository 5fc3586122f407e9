# SPDX-License-Identifier: Apache-2.0
"""The command `convert`: print the files that will be read and written, then show the progress."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from wanjax.checkpoints.convert import Conversion, ConversionToDiffusers, ConversionToWanjax
from wanjax.checkpoints.lora_source import Lora
from wanjax.checkpoints.manifest import Progress, verify
from wanjax.checkpoints.network_kinds import network
from wanjax.checkpoints.sources import Source
from wanjax.checkpoints.unsupported import LoraAsModelError
from wanjax.cli.report import Report
from wanjax.cli.tables import print_table
from wanjax.errors import WanjaxError, may_succeed_later
from wanjax.figures import format_bytes, pluralize
from wanjax.layers.precision import Precision
from wanjax.loading import with_precision
from wanjax.pipelines.progress import LINE_INTERVAL
from wanjax.registry import apply_options, check_complete, find_checkpoint, kinds, read_configs
from wanjax.stores.paths import parse_path


def convert(
    report: Report,
    source: str,
    target: str | None,
    to: str,
    dtypes: Sequence[str],
    precision: str | None,
    lora: Sequence[str],
    revision: str | None,
    check: bool,
) -> None:
    """Convert the source to the target and merge LoRAs. With `check`, only verify the source's checksums."""
    if check:
        _verify_checksums(report, source)
        return
    assert target is not None
    try:
        checkpoint, preset = find_checkpoint(source, revision)
    except LoraAsModelError as error:
        command = f"`wanjax convert MODEL {shlex.quote(target)} --lora {shlex.quote(source)}`"
        raise WanjaxError(f"{source} is a LoRA, not a model: give {command} with the model that it changes") from error
    if preset and preset.loras and source == preset.name:
        raise WanjaxError(f"{source} is {preset.source} with a LoRA: convert {preset.source}, with --lora to merge one")
    if (missing := checkpoint.missing_components) and checkpoint.published_name != checkpoint.name:
        report.note(f"{source} contains no {', '.join(missing)}: reading it from {checkpoint.fallback_repo}")
    checkpoint.storage.check_room()
    check_complete(checkpoint)
    folder, description = parse_path(target), read_configs(source, checkpoint, preset)
    if lora:
        description = apply_options(description, tuple(Lora.parse(text).resolve_folder() for text in lora), report.note)
        checkpoint = description.source
    description = with_precision(description, precision)
    if to == "diffusers":
        conversion: Conversion = ConversionToDiffusers(checkpoint, folder, kinds())
    else:
        # the repository has several models, each in a file of its own
        shares_repository = preset is not None and checkpoint.published_name not in preset.sources
        is_bundled = preset is not None and Path(preset.source).exists()  # the folder exists only on this machine
        conversion = ConversionToWanjax(
            checkpoint,
            folder,
            kinds(),
            dtypes=_dtypes(dtypes, checkpoint),
            published_name=preset.name if preset and (is_bundled or shares_repository) else None,
            licence=preset.licence if preset else None,
            name_hint=description.distilled_name,
            precision=Precision.of(description.settings.precision),
        )

    def on_begin() -> None:
        _print_sizes(report, conversion)
        report.enable_resume(conversion.has_saved_work)

    with _progress_bars(report) as progress:
        try:
            is_new = conversion.run(progress, on_begin)
        except WanjaxError as error:
            if not may_succeed_later(error):
                report.resume_command = None
            raise
    report.resume_command = None
    report.note(f"{folder} is complete and verified" if is_new else f"{folder} already exists and is complete")


def _verify_checksums(report: Report, source: str) -> None:
    with _progress_bars(report) as progress:
        manifest = verify(find_checkpoint(source)[0], progress)
    arrays = sum(len(network) for network in manifest["networks"].values())
    report.note(
        f"all checksums of {source} match: {pluralize(arrays, 'array')} and "
        f"{pluralize(len(manifest['files']), 'other file')}"
    )


def _dtypes(options: Sequence[str], source: Source) -> dict[str, str]:
    """Map components to their new dtypes. A dtype without a component applies to all components that do not stay
    float32."""
    dtype_by_component = {}
    for option in options:
        name, _, dtype = option.rpartition("=")
        if dtype not in ("bfloat16", "float32"):
            raise WanjaxError(f"--dtype {option} cannot store weights: give bfloat16 or float32")
        classes = {word for kind in kinds() for word in kind.classes}
        network_names = [key for key, component in source.components.items() if component.kind in classes]
        names = [name] if name else [key for key in network_names if not network(source, key, kinds()).float32]
        dtype_by_component |= dict.fromkeys(names, dtype)
    return dtype_by_component


def _print_sizes(report: Report, conversion: Conversion) -> None:
    """Print the size of each network in the source and in the target."""
    rows = []
    for converted in conversion.networks:
        sizes = format_bytes(converted.bytes_read), format_bytes(converted.bytes_written)
        rows.append((converted.name, f"{converted.parameters:,}", *sizes, converted.dtype or ""))
    bytes_read = sum(converted.bytes_read for converted in conversion.networks)
    bytes_written = sum(converted.bytes_written for converted in conversion.networks)
    rows.append(("total", "", format_bytes(bytes_read), format_bytes(bytes_written), ""))
    print_table(report.console, ("network", "parameters", "read", "written", "as"), rows)
    if bytes_present := conversion.bytes_done:
        report.note(f"{format_bytes(bytes_present)} are already converted")


@contextmanager
def _progress_bars(report: Report) -> Iterator[Progress]:
    """Show a progress bar with a rate for each part of the work. If the output is a pipe, print a line from time to
    time."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:10}"), BarColumn(24), DownloadColumn(), TransferSpeedColumn())
    tasks, progress = {}, Progress(*columns, TimeRemainingColumn(), console=report.console)
    last_print = perf_counter()

    def print_line(name: str, done: int, total: int) -> None:
        nonlocal last_print
        if done == total or perf_counter() - last_print > LINE_INTERVAL:
            last_print = perf_counter()
            report.note(f"{name}: {format_bytes(done)} of {format_bytes(total)}")

    def update_bar(name: str, done: int, total: int) -> None:
        progress.start()
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=total)
        progress.update(tasks[name], completed=done)

    try:
        yield update_bar if report.console.is_terminal else print_line
    finally:
        if tasks:
            progress.stop()
