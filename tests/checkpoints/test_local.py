# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on this machine are loaded without the hub's client, and have a main dtype."""

import subprocess
import sys

import numpy as np

from wanjax.checkpoints.files import Spec, main_dtype


def test_a_local_checkpoint_is_loaded_without_the_hubs_client():
    code = "import sys, wanjax; wanjax.load('nano'); print('huggingface_hub' in sys.modules)"
    message = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert message.stdout.strip() == "False"


def test_the_main_dtype_has_the_most_bytes():
    few, many = Spec((2,), np.dtype(np.float32)), Spec((16,), np.dtype(np.float16))
    assert main_dtype([few, few, many]) == "float16"
    assert main_dtype([]) is None
