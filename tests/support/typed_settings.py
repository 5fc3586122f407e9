# SPDX-License-Identifier: Apache-2.0
"""Writes the typed keywords of a pipeline call, for editors: `python -m tests.support.typed_settings`."""

from pathlib import Path

from wanjax.pipelines import settings
from wanjax.pipelines.settings import LOAD_SETTINGS, Settings, schema

FILE = Path(settings.__file__).with_name("typed_settings.py")
NOT_KEYWORDS = (
    *LOAD_SETTINGS,
    "prompt",
    "original_prompt",
    "negative_prompt",
    "resize",
    "outpaint",
)  # arguments of `load`, or separate parameters of a call
HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""The settings of a call as typed keywords. `python -m tests.support.typed_settings` writes this file."""

from collections.abc import Sequence
from typing import TypedDict

from wanjax.pipelines.caching.rules import CacheRule
from wanjax.pipelines.guidance import GuidanceRule


class SettingsKeywords(TypedDict, total=False):
    """The settings of a call. None is the model's default. `size` is (height, width), a text or a name."""

    size: tuple[int, int] | str | None
'''


def source() -> str:
    """Return the text of the module."""
    settings = schema(Settings).items()
    lines = [f"    {name}: {_type(name)} | None" for name, _ in settings if name not in NOT_KEYWORDS]
    return HEAD + "\n".join(lines) + "\n"


def _type(name: str) -> str:
    types = {
        "cache": "CacheRule | str",
        "guidance_rule": "GuidanceRule | str",
        "seed": "int | str",
        "then": "str | Sequence[str]",
    }
    return types.get(name, schema(Settings)[name].kind.__name__)


if __name__ == "__main__":
    FILE.write_text(source())
