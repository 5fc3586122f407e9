# SPDX-License-Identifier: Apache-2.0
"""Run `wanjax generate` with a model that has real names, shapes and dtypes, and random weights.

The tokenizer is small. The run shows that the text encoder, the transformer and the autoencoder can be loaded, run and
freed within this machine's memory, and how much each needs. The benchmark writes the checkpoint
(benchmarks/synthetic.py) and deletes it at the end.

    python -m benchmarks.real_shapes [--model NAME] [--folder FOLDER] [-- OPTIONS OF wanjax generate ...]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.synthetic import MODELS, write_checkpoint
from wanjax.registry import presets

GENERATE = ["a cat playing the piano", "--size", "256x256", "--frames", "17", "--steps", "2"]
MAX_MEMORY = 20e9  # bytes


def write_hub_cache(model: str, work_folder: Path) -> None:
    """Write the checkpoint into a cache of huggingface-hub, so that the model is found by its name."""
    repository = work_folder / "hub" / f"models--{presets()[model].source.replace('/', '--')}"
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    write_checkpoint(model, repository / "snapshots" / revision)


def run(command: list[str], environment: Mapping[str, str]) -> tuple[float, int]:
    """Run a command with its output shown, and return the wall time in seconds and the peak memory in bytes.

    The command resets its own peak at the start of each stage, so the peak is polled during the run.
    """
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, env=environment)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        peak = max(peak, *(1024 * int(kilobytes) for kilobytes in peaks), 0)
        time.sleep(0.05)
    if process.returncode:
        sys.exit(process.returncode)
    return time.perf_counter() - start, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wan2.1-t2v-1.3b", choices=MODELS)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="a folder with enough room")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("generate", nargs="*", help=f"arguments after --, in place of {' '.join(GENERATE)}")
    options = parser.parse_args()
    work_folder = Path(tempfile.mkdtemp(prefix="wanjax-synthetic-", dir=options.folder))
    try:
        start = time.perf_counter()
        write_hub_cache(options.model, work_folder)
        size = sum(file.stat().st_size for file in work_folder.rglob("*") if file.is_file())
        print(f"wrote {size / 1e9:.1f} GB in {time.perf_counter() - start:.0f} s", flush=True)
        arguments = [*(options.generate or GENERATE), "--model", options.model, "--dir", str(work_folder / "outputs")]
        command = [sys.executable, "-m", "wanjax", "generate", *arguments]
        print("wanjax", *command[3:], flush=True)
        caches = {"HF_HOME": str(work_folder), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(work_folder / "cache")}
        seconds, peak = run(command, os.environ | caches)
    finally:
        shutil.rmtree(work_folder)
    verdict = "within" if peak <= MAX_MEMORY else "beyond"
    print(f"{seconds:.0f} s, at most {peak / 1e9:.2f} GB of memory, {verdict} {MAX_MEMORY / 1e9:.0f}")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "peak": peak, "checkpoint": size}, indent=2) + "\n")


if __name__ == "__main__":
    main()
