# SPDX-License-Identifier: Apache-2.0
"""Writes the listing of the published models: `python -m tests.support.listing`."""

import json
from pathlib import Path

from wanjax.cli import listing
from wanjax.registry import describe, presets

FILE = Path(listing.__file__).with_name(listing.MODELS_FILE)


def source() -> str:
    """Return the text of the listing, a line for each model."""
    models = [describe(name) for name in presets()]
    for model in models:
        if presets()[model["name"]].bundled:
            model["source"] = "wanjax"  # not the folder of this installation
    return "[\n" + ",\n".join(json.dumps(model, ensure_ascii=False) for model in models) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(source(), encoding="utf-8")
