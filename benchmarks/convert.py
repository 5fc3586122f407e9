# SPDX-License-Identifier: Apache-2.0
"""Measure converting, verifying and loading a checkpoint of real size, compared with a plain copy.

Each part runs in its own process, reports its peak memory, and starts with a cold page cache. Copy and conversion
alternate twice, and each ends when all data is on the disk; the faster run counts. The benchmark needs disk space for
two checkpoints (benchmarks/synthetic.py), and deletes them at the end.

    python -m benchmarks.convert [--model NAME] [--folder FOLDER] [--source FOLDER] [--json FILE]

`--source` converts another checkpoint in place of the synthetic one.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.real_shapes import run
from benchmarks.synthetic import MODELS, write_checkpoint

MAX_MEMORY = 4e9  # target: bytes while converting
MIN_RELATIVE_RATE = 0.6  # target: the rate of a conversion, as a fraction of the rate of a copy
RESTORE = "restore the "  # followed by a network's name


def networks(source: Path) -> list[str]:
    """Return the names of a checkpoint's networks."""
    return sorted({file.parent.name for file in source.rglob("*.safetensors")})


def copy(source: Path, target: Path) -> dict:
    start = time.perf_counter()
    shutil.copytree(source, target)
    synchronise(target)
    return {"seconds": time.perf_counter() - start}


def convert(source: Path, target: Path) -> dict:
    from wanjax.checkpoints.convert import ConversionToWanjax
    from wanjax.registry import kinds, open_source

    start, end_seconds = time.perf_counter(), {}

    def progress(stage: str, num_done: int, total: int) -> None:
        end_seconds[stage] = time.perf_counter() - start

    assert ConversionToWanjax(open_source(source), target, kinds()).run(progress)
    return {"seconds": time.perf_counter() - start, "written after": end_seconds["converting"]}


def verify(source: Path, target: Path) -> dict:
    from wanjax.checkpoints.manifest import verify
    from wanjax.registry import open_source

    start = time.perf_counter()
    verify(open_source(target))
    return {"seconds": time.perf_counter() - start}


def compare(source: Path, target: Path) -> dict:
    """Compare every tensor of the source with its conversion there and back, bit for bit."""
    from wanjax.checkpoints.files import SafetensorsFolder
    from wanjax.checkpoints.network_kinds import network
    from wanjax.registry import kinds, open_source

    start, count = time.perf_counter(), 0
    converted: Any = open_source(target)
    for name in networks(source):
        source_reader = SafetensorsFolder(source / name)
        restored_reader = converted[name].original(converted[name].tensors(network(converted, name, kinds()).rules))
        assert source_reader.specs.keys() == restored_reader.specs.keys()
        for key in source_reader.specs:
            x, y = source_reader.read(key), restored_reader.read(key)
            bits = f"u{x.dtype.itemsize}"
            assert x.dtype == y.dtype, key
            assert (x.view(bits) == y.view(bits)).all(), key
            count += 1
    return {"seconds": time.perf_counter() - start, "tensors": count}


def load(name: str, source: Path, target: Path) -> dict:
    import jax

    import wanjax
    from wanjax.checkpoints.modules import parameters

    start = time.perf_counter()
    network = getattr(wanjax.load(target), name)
    jax.block_until_ready(list(parameters(network).values()))
    return {"seconds": time.perf_counter() - start, "bytes": sum(x.nbytes for x in parameters(network).values())}


PARTS: dict[str, Callable[[Path, Path], dict]] = {
    "copy": copy,
    "convert": convert,
    "verify": verify,
    "compare": compare,
}


def function_of(part: str) -> Callable[[Path, Path], dict]:
    """Return the function of a part, such as `restore the NAME`, which loads a network."""
    return PARTS[part] if part in PARTS else partial(load, part.removeprefix(RESTORE))


def synchronise(folder: Path) -> None:
    """Wait until the files are on the disk, and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure_part(part: str, source: Path, target: Path) -> dict:
    """Run a part in its own process and return its figures."""
    for folder in (source, target):
        synchronise(folder)
    with tempfile.NamedTemporaryFile() as result:
        command = [sys.executable, "-m", "benchmarks.convert", "--part", part, str(source), str(target), result.name]
        _, peak = run(command, os.environ)
        figures = json.loads(Path(result.name).read_text()) | {"peak": peak}
    figures_text = ", ".join(f"{name} {value:,.1f}" for name, value in figures.items() if name != "peak")
    print(f"{part}: {figures_text}, peak {peak / 1e9:.2f} GB", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wan2.1-t2v-1.3b", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=2, help="of a copy and a conversion")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="a folder with enough room")
    parser.add_argument("--source", type=Path)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part, source, target, result = options.part
        Path(result).write_text(json.dumps(function_of(part)(Path(source), Path(target))))
        return
    work_folder = Path(tempfile.mkdtemp(prefix="wanjax-convert-", dir=options.folder))
    try:
        source = options.source or work_folder / "source"
        if not options.source:
            write_checkpoint(options.model, source)
        size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        print(f"{size / 1e9:.2f} GB", flush=True)
        figures: dict = {"bytes": size, "copy": [], "convert": []}
        for _ in range(options.rounds):
            for part in ("copy", "convert"):
                shutil.rmtree(work_folder / "target", ignore_errors=True)
                figures[part].append(measure_part(part, source, work_folder / "target"))
        for part in (*list(PARTS)[2:], *(f"{RESTORE}{name}" for name in networks(source))):
            figures[part] = measure_part(part, source, work_folder / "target")
    finally:
        shutil.rmtree(work_folder)
    peak = max(run["peak"] for run in figures["convert"])
    for key in ("written after", "seconds"):
        seconds = min(run[key] for run in figures["convert"])
        ratio = min(run["seconds"] for run in figures["copy"]) / seconds
        label = "converted" if key == "written after" else "converted, verified and on the disk"
        print(f"{label}: {size / seconds / 1e6:.0f} MB/s, {ratio:.2f} of the rate of a copy ({MIN_RELATIVE_RATE})")
    print(
        f"at most {peak / 1e9:.2f} GB of memory, {'within' if peak <= MAX_MEMORY else 'beyond'} {MAX_MEMORY / 1e9:.0f}"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
