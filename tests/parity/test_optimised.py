# SPDX-License-Identifier: Apache-2.0
"""One pipeline of each family, optimised by XLA as for users; the other tests disable its optimisations."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = [
    "test_pipeline.py::test_every_step_and_every_frame_equal_those_of_diffusers[UniPCMultistepScheduler-diffusers]",
    "test_cogvideox_pipeline.py::test_dynamic_guidance_equals_diffusers",
    "test_hunyuan_pipeline.py::test_text_to_video_equals_diffusers",
]


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS)
def test_an_optimised_pipeline_stays_within_the_same_bounds(test):
    """Run the test in another process without XLA flags, because XLA reads its flags once."""
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
