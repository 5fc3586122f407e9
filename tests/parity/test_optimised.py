# SPDX-License-Identifier: Apache-2.0
"""One pipeline of each family, compiled as users compile it: the other tests let XLA optimise nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = [
    "test_pipeline.py::test_every_step_and_every_frame[UniPCMultistepScheduler-diffusers]",
    "test_cogvideox_pipeline.py::test_dynamic_guidance",
    "test_hunyuan_pipeline.py::test_text_to_video",
]


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS)
def test_within_the_same_bounds(test):
    """In a process of its own, because XLA reads its flags once; without any it optimises as by default."""
    folder = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", folder / test],
        env=os.environ | {"XLA_FLAGS": ""},
        cwd=folder.parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
    assert "deselected" not in run.stdout
