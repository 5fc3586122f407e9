# SPDX-License-Identifier: Apache-2.0
"""Register families and presets for one test."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

import wanjax
from wanjax import registry
from wanjax.pipelines.family import Family, Preset
from wanjax.pipelines.wan import FAMILY


@contextmanager
def registered(*families: Family, presets: tuple[Preset, ...] = ()) -> Iterator[None]:
    """Register families, and more presets of Wan."""
    registered_families = [
        replace(each, presets=(*each.presets, *presets)) if each is FAMILY else each for each in registry.FAMILIES
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "FAMILIES", registered_families)
        for family in families:
            wanjax.register(family)
        yield
