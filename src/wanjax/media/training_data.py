# SPDX-License-Identifier: Apache-2.0
"""Check the path of a data set, and name a training's results, without JAX. A command can then refuse a wrong path at
once."""

import mimetypes
import os
from pathlib import Path

from wanjax.errors import WanjaxError

RUN_IDENTITY_FILE = "training.json"  # in the folder of a training, with its settings
LORA_FILE, CHECKPOINT_FOLDER = "lora.safetensors", "checkpoint"  # the result of a training, in its folder
FILE_KINDS = {"video": "clip", "image": "picture"}  # the words for the first part of a MIME type


def check_data(data: Path) -> None:
    """Raise WanjaxError unless data is a folder, or a file that may be a table."""
    if not os.path.exists(data):
        raise WanjaxError(f"the folder or table {data} does not exist: give a folder of clips with captions")
    kind = FILE_KINDS.get(str(mimetypes.guess_type(data.name)[0]).partition("/")[0])
    if data.is_file() and kind is not None:
        caption = data.with_suffix(".txt").name
        raise WanjaxError(
            f"{data} is one {kind}, and a training reads a folder or a table: write its caption into {caption} next to "
            f"it, and give the folder {data.absolute().parent}"
        )
