# SPDX-License-Identifier: Apache-2.0
"""List the files of the library that loading a model runs, as a measure of how much code a newcomer has to read.

    python -m benchmarks.load_path --model nano

Files that find and read a checkpoint, from its name to its tensors, are counted separately. The other files create
settings, schedulers and the networks' shapes.
"""

import argparse
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import Any

from wanjax import loading

ROOT = Path(loading.__file__).parent
CHECKPOINT_CODE = (
    "checkpoints/*",
    "stores/*",
    "loading.py",
    "registry.py",
    "pipelines/family.py",
    "pipelines/*/layouts.py",
    "pipelines/*/recognise.py",
)


def executed_files(call: Callable[[], object]) -> list[str]:
    """Return the library's files whose functions a call runs, in the order of first use."""
    files: dict[str, None] = {}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            files.setdefault(path.relative_to(ROOT).as_posix())

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(files)


def reads_checkpoint(file: str) -> bool:
    """Return whether a file helps to find or read a checkpoint."""
    return any(fnmatch(file, pattern) for pattern in CHECKPOINT_CODE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    model = parser.parse_args().model
    files = executed_files(lambda: loading.load(model))
    for file in files:
        print("*" if reads_checkpoint(file) else " ", file)
    print(f"{len(files)} files, of which {sum(map(reads_checkpoint, files))} (*) find or read the checkpoint")


if __name__ == "__main__":
    main()
